"""Every feature and every pair of features: right to 1e-12, or refused with a reason."""

from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from docs.what_works import COLUMNS, PAGE_AT, measured
from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.features import (
    EVERY,
    FEATURES,
    LAYOUTS,
    Problem,
    drawn,
    refusal,
    together,
)
from tests.support.reference import relative_error
from tests.support.sampling import grid

WAYS = ((1, {}), (2, dict(transport="gather")), (3, {}), (4, dict(ulysses=2)))  # pairs: each other
PAIRS = [*((name,) for name in EVERY), *combinations(EVERY, 2)]
# what can't be together, and what is said
REFUSED = {
    frozenset(("cu_seqlens", "documents")): "say the same thing",
    frozenset(("softclamp", "bias")): "exclude each other",
    frozenset(("softclamp", "bias of heads")): "exclude each other",
    frozenset(("cu_seqlens", "prefix")): "prefix needs causal=True, and no documents",
    frozenset(("documents", "prefix")): "prefix needs causal=True, and no documents",
    frozenset(("positions", "prefix")): "prefix needs causal=True, and no documents",
    frozenset(("cu_seqlens", "positions")): "documents have positions of their own",
    frozenset(("documents", "positions")): "documents have positions of their own",
    frozenset(("positions", "dropout")): "dropout draws by positions",
    frozenset(("alibi", "shared keys")): "have no positions",
    frozenset(("dropout", "shared keys")): "have no positions",
}


# None would choose the same kernel again
ONLY_EAGER = {"softclamp", "alibi", "mask_mod", "dropout"}


@pytest.mark.parametrize("name", EVERY)
def test_each_feature(name):
    check_together((name,))


@grid("names", [(pair,) for pair in PAIRS if len(pair) > 1], always=50, drawn=20, ids=" + ".join)
def test_any_two_features_together(names):
    check_together(names)


def check_together(names: tuple[str, ...]) -> None:
    number = PAIRS.index(names)
    if (why := REFUSED.get(frozenset(names))) is not None:
        problem = Problem(together(names))
        assert why in refusal(lambda: problem.shard(Ring.alone(), "contiguous", None))
        return
    problem = Problem(together(names))
    for i, (size, how) in enumerate(WAYS):
        if len(names) > 1 and (number + i) % 2:
            continue
        layout = LAYOUTS[(number // 2 + i) % len(LAYOUTS)]
        for kernel in ("eager",) if ONLY_EAGER.intersection(names) else ("eager", None):
            errors = problem.errors(size, layout, kernel, **how)
            bad = {name: e for name, e in errors.items() if not e < 1e-12}
            assert not bad, (size, how, layout, kernel, bad)


@pytest.mark.parametrize("name", sorted(ONLY_EAGER))
def test_what_is_checked_with_one_kernel_has_no_other_here(name):
    told = refusal(lambda: Problem(FEATURES[name]).shard(Ring.alone(), "contiguous", "sdpa"))
    assert "kernel='sdpa' has no" in told


def rows() -> dict[tuple[str, str], list[str]]:
    lines = PAGE_AT.read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    return {(feature, layout): found for feature, layout, *found in cells[2:]}


def test_the_page_of_what_works_has_every_feature_in_every_layout():
    assert list(rows()) == list(product(EVERY, LAYOUTS))


@grid("feature", EVERY, always=6, drawn=4)
def test_the_page_says_what_is_measured(feature):
    number = list(EVERY).index(feature)
    layout = LAYOUTS[number % len(LAYOUTS)]
    for (name, column), written in zip(COLUMNS.items(), rows()[feature, layout]):
        if " / " in written:
            bound = 1e-12 if column.dtype == torch.float64 else 1e-5
            assert max(map(float, written.split(" / "))) < bound
        else:
            assert written.startswith("has no")
        if column.kernel != "triton":  # an interpreter is slow
            assert (" / " in written) == (" / " in (now := measured(feature, layout, name)))
            assert " / " in written or written == now


def queries_of_two_sequences_stand_where_their_layout_has_them() -> None:
    """For whatever asks where they are."""
    q, k = drawn(1, 12, 2, 4, seed=1), drawn(1, 9, 2, 4, seed=2)
    slopes = torch.tensor([0.3, 0.7], dtype=torch.float64)
    asked = (
        dict(alibi_slopes=slopes),
        dict(mask_mod=lambda b, h, i, j: i >= j),
        dict(mask_mod=lambda b, h, i, j: i >= j, dropout=0.5, dropout_seed=1),
    )
    for layout, given in product(("contiguous", "zigzag", "striped"), asked):

        def main(ring: Ring, layout: str = layout, given: dict = given) -> tuple[Tensor, Tensor]:
            at = positions(layout, rank=ring.rank, ring_size=2, length=12)
            keys = k.tensor_split(2, 1)[ring.rank]
            how = dict(cross=True, layout=layout, group=ring, return_lse=True)
            _, lse = ring_attn(q[:, at], keys, keys, **how, **given)
            return lse, at

        want = ring_attn(q, k, k, cross=True, return_lse=True, group=Ring.alone(), **given)[1]
        for lse, at in threads.run(2, main)[0]:
            seen = want[..., at]
            blind = seen == -torch.inf
            assert torch.equal(blind, lse == -torch.inf)
            assert relative_error(lse[~blind], seen[~blind]) < 1e-12


def test_queries_of_two_sequences_stand_where_their_layout_has_them():
    queries_of_two_sequences_stand_where_their_layout_has_them()
