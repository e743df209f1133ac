"""The adapter of FlexAttention on the CPU: over a stand-in, and over its dense mathematics."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask, band, tiles
from ring_attention_pytorch.kernels import flex
from ring_attention_pytorch.runtime.interfaces import KVBlock, ScoreMods, Tiles
from ring_attention_pytorch.runtime.uncopied import replaced
from tests.support import threads
from tests.support.features import Problem, together
from tests.support.flex_on_cpu import cells, in_dense_mathematics, stood_in
from tests.support.kernel_cases import CASES, faults, random_cases
from tests.support.reference import dense_attention, relative_error


@pytest.fixture
def dense() -> Iterator[None]:
    with stood_in():
        yield


def test_tiles_parts_and_the_gradient_of_lse(dense):
    cases = [replace(case, dtype=torch.float64) for case in random_cases(12, torch.float64)]
    cases += [replace(CASES[i], dtype=torch.float64) for i in (2, 4, 5, 6)]
    cases += [replace(CASES[i], dtype=torch.bfloat16) for i in (1, 3, 11)]
    cases = [case for case in cases if case.scale is None or case.scale > 0]
    bad = {case: found for case in cases if (found := faults(case, "flex", "cpu"))}
    assert not bad


@pytest.mark.parametrize(
    ("names", "size", "layout"),
    [
        (("causal", "gradient of lse"), 3, "zigzag"),
        (("documents", "one key head", "key mask"), 2, "striped"),
        (("window", "d_v != d", "softclamp"), 3, "contiguous"),
        (("alibi", "cu_seqlens", "sinks"), 2, "balanced"),
        (("prefix", "bias of heads"), 2, "zigzag"),
        (("positions",), 2, "contiguous"),
    ],
)
def test_a_predicate_with_other_features_on_a_ring(dense, names, size, layout):
    errors = Problem(together(("mask_mod", *names))).errors(size, layout, "flex")
    assert max(errors.values()) < 1e-12, errors


def test_flex_attention_itself_is_right_and_compiled_once():
    """Where shapes are the same, other predicates of one code and other tiles compile no more."""
    names = ("alibi", "softclamp", "key mask", "one key head", "gradient of lse")
    with in_dense_mathematics() as counter:
        for window, shift in ((3, torch.tensor(1)), (9, torch.tensor(2))):

            def predicate(b: Tensor, h: Tensor, i: Tensor, j: Tensor, by: Tensor = shift) -> Tensor:
                return (b + 2 * h + i + j * j + by) % 3 != 0

            asked = dict(mask_mod=predicate, window=window)
            errors = Problem(together(names) | asked).errors(1, "contiguous", "flex")
            assert max(errors.values()) < 1e-12, errors
    assert counter.frame_count == 3  # cells of the mask, forward, and forward to go back from


def block(visible: Mask, n: int, terms: ScoreMods, first_position: int = 0) -> list:
    """The masks of a whole sequence with itself."""
    (whole,) = all_segments("contiguous", 1, n)
    found = Tiles(tiles(whole, whole, visible))
    found.rows_at = found.cols_at = torch.arange(n, dtype=torch.int32) + first_position
    q = torch.zeros(2, n, 4, 16)
    return flex._block(q, KVBlock(q, q, None, whole), found, terms)[0]


def test_cells_that_show_nothing_are_skipped_and_full_ones_not_looked_at(dense):
    (mask,) = block(Mask(causal=True), 400, ScoreMods(1.0, None, 1024))
    assert mask.shape == (1, 1, 512, 512)  # one for all samples and heads
    some = cells(mask.kv_num_blocks, mask.kv_indices)[0, 0]
    whole = cells(mask.full_kv_num_blocks, mask.full_kv_indices)[0, 0]
    corner = torch.zeros(4, 4, dtype=torch.bool)
    corner[3, :3] = True  # its last rows are filled up
    assert torch.equal(some, torch.eye(4, dtype=torch.bool) | corner)
    assert torch.equal(whole, torch.ones(4, 4, dtype=torch.bool).tril(-1) & ~corner)


def test_masks_have_heads_only_where_a_predicate_asks_for_them(dense):
    for predicate, shape in [
        (lambda b, h, i, j: i != j, (1, 1)),
        (lambda b, h, i, j: i + h != j, (1, 4)),
        (lambda b, h, i, j: (i + h + b) % 2 == 0, (2, 4)),
    ]:
        (mask,) = block(Mask(), 9, ScoreMods(1.0, None, 1024, mask_mod=predicate))
        assert mask.shape[:2] == shape


def test_a_predicate_may_square_positions_of_long_sequences(dense):
    def odd(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert {t.dtype for t in (b, h, i, j)} == {torch.int64}
        return i * j > 2**32

    (mask,) = block(Mask(), 9, ScoreMods(1.0, None, 1024, mask_mod=odd), first_position=2**16)
    local = [torch.arange(9, dtype=torch.int32).view(shape) for shape in ((9, 1), (9,))]
    got = mask.mask_mod(torch.tensor(0), torch.tensor(0), *local)
    want = torch.ones(9, 9, dtype=torch.bool)
    want[0, 0] = False
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("window", [None, 5])
def test_stretches_show_what_tiles_show(layout, window):
    everyone = all_segments(layout, 3, 50)
    for theirs in everyone:
        found = tiles(everyone[1], theirs, Mask(True, window))
        n, m = (sum(s.length for s in held) for held in (everyone[1], theirs))
        want = torch.zeros(n, m, dtype=torch.bool)
        for tile in found:
            want[tile.rows, tile.cols] |= band(tile, want.device)
        stretches = flex._stretches(found, n)
        assert len(stretches) <= (1 if layout != "zigzag" or window is None else 2)
        column, got = torch.arange(m), torch.zeros(n, m, dtype=torch.int64)
        for starts, stops in stretches:
            got += (starts.unsqueeze(1) <= column) & (column < stops.unsqueeze(1))
        assert torch.equal(got, want.long())


def masks_of_plans_are_their_own() -> None:
    """Plans that share their tiles, as layers of routed tokens do, have masks of their own."""
    q, k, v = torch.randn(3, 2, 20, 2, 8, dtype=torch.float64)
    masks = [torch.rand(2, 20) < share for share in (0.3, 0.5, 0.8)]
    first = RingPlan.make(q, k, v, causal=True, key_mask=masks[0], kernel="flex")
    plans = [first, *(replaced(first, key_mask=mask) for mask in masks[1:])]
    for plan, mask in [*zip(plans, masks), *zip(plans, masks)]:
        want = dense_attention(q, k, v, causal=True, key_mask=mask)[0]
        assert relative_error(ring_attn(q, k, v, plan=plan), want) < 1e-12
    (at,) = {tuple(map(id, plan._shared.tiles)) for plan in plans}  # what is in ints is made once
    assert len(at) == 1


def test_masks_of_plans_are_their_own(dense):
    masks_of_plans_are_their_own()


def masks_of_owners_are_their_own() -> None:
    """Where keys of two owners stand at the same positions."""
    q, k, v = torch.randn(3, 2, 8, 2, 8, dtype=torch.float64)
    at, mask = torch.arange(4).repeat(2), torch.rand(2, 8) < 0.5

    def main(ring: threads.ThreadRing, kernel: str) -> Tensor:
        mine, here, theirs = ([*t.split(4, d)][ring.rank] for t, d in ((q, 1), (at, 0), (mask, 1)))
        keys = (t.split(4, 1)[ring.rank] for t in (k, v))
        return ring_attn(
            mine, *keys, causal=True, query_positions=here, key_positions=here, key_mask=theirs,
            kernel=kernel, group=ring,
        )  # fmt: skip

    got, want = (
        torch.cat(threads.run(2, lambda ring, kernel=kernel: main(ring, kernel))[0], 1)
        for kernel in ("flex", "eager")
    )
    assert relative_error(got, want) < 1e-12


def test_masks_of_owners_are_their_own(dense):
    masks_of_owners_are_their_own()
