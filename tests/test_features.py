"""Every feature and every pair of features: right to 1e-12, or refused with a reason."""

from itertools import combinations, product

import pytest

from docs.what_works import KINDS, PAGE_AT, measured
from ring_attention_pytorch.ring import Ring
from tests.features import FEATURES, LAYOUTS, Problem, refusal, together

PAIRS = [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]
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
}


# None would choose the same kernel again
ONLY_EAGER = {"softclamp", "alibi", "mask_mod", "dropout"}


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_any_two_features_together(names):
    number = PAIRS.index(names)
    if (why := REFUSED.get(frozenset(names))) is not None:
        problem = Problem(FEATURES[names[0]])
        problem.feature = together(names)
        assert why in refusal(lambda: problem.shard(Ring.alone(), "contiguous", None))
        return
    problem = Problem(together(names))
    for i, size in enumerate((1, 2, 3, 4)):
        layout = LAYOUTS[(number + i) % len(LAYOUTS)]
        for kernel in ("eager",) if ONLY_EAGER.intersection(names) else ("eager", None):
            errors = problem.errors(size, layout, kernel)
            bad = {name: e for name, e in errors.items() if not e < 1e-12}
            assert not bad, (size, layout, kernel, bad)


@pytest.mark.parametrize("name", sorted(ONLY_EAGER))
def test_what_is_checked_with_one_kernel_has_no_other_here(name):
    told = refusal(lambda: Problem(FEATURES[name]).shard(Ring.alone(), "contiguous", "sdpa"))
    assert "kernel='sdpa' has no" in told


# --- the page ---


def rows() -> dict[tuple[str, str], list[str]]:
    lines = PAGE_AT.read_text().splitlines()
    cells = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    return {(feature, layout): found for feature, layout, *found in cells[2:]}


def test_the_page_of_what_works_has_every_feature_in_every_layout():
    assert list(rows()) == list(product(FEATURES, LAYOUTS))


@pytest.mark.parametrize("feature", FEATURES)
def test_the_page_says_what_is_measured(feature):
    number = list(FEATURES).index(feature)
    layout = LAYOUTS[number % len(LAYOUTS)]
    for kernel, bound, written in zip(KINDS, (1e-12, 1e-12, 1e-5), rows()[feature, layout]):
        if " / " in written:
            assert max(map(float, written.split(" / "))) < bound
            assert kernel == "triton" or " / " in measured(feature, layout, kernel)
        else:
            assert written.startswith(f"kernel='{kernel}' has no")
            assert kernel == "triton" or written == measured(feature, layout, kernel)
