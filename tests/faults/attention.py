"""Faults planted into attention, and a battery of cases that must find each of them.

`python -m tests.faults.attention` prints what was found, as JSON; how is told in `hunt`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.faults import hunt
from tests.faults.hunt import Case
from tests.faults.mutant import planted

MUTANTS = planted("ATTENTION")
ANSWERS_FOR = (
    "attention.py", "comm/", "geometry/", "kernels/", "plan/", "ranks/agreement.py", "runtime/",
    "schedule/", "summaries/attention.py", "summaries/pooling.py",
)  # fmt: skip


# --- the battery: what runs over a mutant ---


def battery() -> Iterator[Case]:
    """Cases that fail where something is wrong."""
    from tests.support.cases import Attention, check_in_threads, check_symmetric

    torch.set_num_threads(1)
    cases = [
        (Attention(12, "zigzag", causal=True, kernel="eager"), 3),
        (Attention(12, kernel="sdpa"), 4),
        (Attention(13, "striped", causal=True, window=3, kernel="eager"), 3),
        (Attention(31, "zigzag", causal=True, window=4, masked=True, kernel="eager"), 4),
        (Attention(31, "contiguous", window=9, masked=True, kernel="sdpa"), 3),
        (Attention(24, "zigzag", causal=True, window=1, softclamp=1.0), 3),
        (Attention(16, "zigzag", causal=True, masked=True, kernel="sdpa", heads=6), 2),
        (Attention(16, masked=True, heads=3, key_heads=1, kernel="eager"), 4),
        (Attention(24, "striped", window=3, kernel="sdpa", dtype=torch.float32), 3),
        (Attention(7, "zigzag", causal=True, masked=True), 8),
        (Attention(queries=(4, 4, 3), keys=(3, 0, 8)), 3),
        (Attention(13, batch=1, heads=1, key_heads=1, d=3, d_v=5, dtype=torch.float32), 3),
        (Attention(29, "zigzag", causal=True, d_v=5, transport="gather", kernel="eager"), 4),
        (Attention(31, "contiguous", window=7, masked=True, transport="gather", memory=0), 3),
        (Attention(23, "striped", causal=True, masked=True, transport="gather", batch=1), 4),
        (Attention(23, "zigzag", causal=True, ulysses=2, heads=4, key_heads=1, masked=True), 4),
        (Attention(23, "striped", causal=True, ulysses=3, heads=6, key_heads=2), 3),
        (Attention(23, "striped", causal=True, ulysses=2, transport="gather"), 4),
        (Attention(12, "striped", causal=True, window=2, ids=((0,) * 3 + (1,) * 9,)), 3),
        (Attention(12, ids=((0,) * 12, (3, 3, 0, 0) * 3), kernel="eager"), 4),
        (Attention(12, "zigzag", borders=((0, 6, 6, 12), (0, 5, 5, 12))), 2),
        (Attention(12, causal=True, window=2, batch=3, ids=(*[(1, 1, 0) * 4] * 2, (0,) * 12)), 2),
        (Attention(8, ids=((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 0, 1, 1, 1))), 4),
    ]
    for case, size in cases:
        yield lambda case=case, size=size: check_in_threads(case, size)
    shared = Attention(29, "zigzag", causal=True, masked=True, d_v=5, kernel="eager")
    yield lambda: check_symmetric(shared, 4, 2)
    yield lambda: check_symmetric(replace(shared, ulysses=4), 4, 2)
    yield lambda: check_symmetric(shared, 4, 9, late=True)
    yield lambda: check_symmetric(shared, 4, 9, together=True)
    yield lambda: check_symmetric(shared, 4, 9, own_apart=True)
    yield zigzag_is_balanced
    yield gathered_keys_are_few_large_tiles
    yield the_same_is_dropped_everywhere
    yield a_bias_keeps_its_digits
    yield dealt_layouts_are_even
    yield a_document_ends_where_another_begins
    yield blocks_know_their_tiles
    yield calls_are_counted
    yield from no_ring_is_left_alone()
    yield from streams_wait_for_one_another()
    yield from calls_go_side_by_side_where_they_may()
    yield from results_are_in_memory_that_is_given()
    yield mismatches_are_errors
    yield plans_are_checked
    yield from keys_come_in_stages_where_they_are_late()
    yield from keys_come_together_where_they_are_few()
    yield from prefixes_and_positions_hold()
    yield from predicates_are_fused()
    yield from other_kernels_calls_cover_the_tiles()
    yield sums_of_16_bits_are_kept_in_32
    yield from shared_memory_is_read_before_it_is_written()
    yield from machines_share_memory()
    yield from kernels_may_leave_dq_for_later()
    yield from memory_is_not_all()
    yield from parts_are_one_softmax()
    yield from steps_of_positions_are_in_the_tiles()


def parts_are_one_softmax() -> Iterator[Case]:
    from tests import test_shared_keys
    from tests.nn import test_shared_tokens
    from tests.runtime import test_merging

    for cuts, sunk in (((0, 4, 4, 9), "of all"), ((0, 4, 9), "of one part")):
        merged = test_merging.test_merged_parts_are_dense_attention_and_so_are_gradients
        yield partial(merged, cuts, sunk)
    for name in ("all see all", "both masked", "sinks"):
        softmax = test_shared_keys.test_ring_and_shared_keys_are_in_one_softmax
        yield partial(softmax, test_shared_keys.OPTIONS[name])
    left = test_shared_keys.test_a_kernel_can_leave_dq_where_another_has_shared_keys
    yield partial(left, False)
    of_layers = test_shared_tokens.test_they_are_in_the_softmax_and_gradients_add_up
    yield partial(of_layers, test_shared_tokens.OPTIONS["all see all"])


def memory_is_not_all() -> Iterator[Case]:
    from tests.stories import test_lazy, test_unseen

    for kind in test_lazy.LAZY:
        for name in test_lazy.KINDS:
            yield partial(test_lazy.test_what_memory_does_not_hold_is_resolved, name, kind)
    yield test_lazy.test_a_swap_of_heads_is_given_what_its_graph_may_read
    for name in ("masked", "decoding"):
        yield partial(test_unseen.test_what_no_query_sees_may_be_anything, name, "sdpa", "nan")
    yield test_unseen.test_what_is_out_of_reach_is_0_for_kernels
    yield partial(test_unseen.check_rows_of_nan, "sdpa")
    for function in (test_unseen.summaries, test_unseen.regular):
        yield partial(test_unseen.test_other_attention_looks_at_nothing_of_it, function)
    yield test_unseen.test_soft_topk_looks_at_no_score_that_is_masked


def patched(check: Callable[..., None], *given: Any, **named: Any) -> Case:
    """A case that is given a MonkeyPatch last of all."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(*given, patch, **named)

    return run


def kernels_may_leave_dq_for_later() -> Iterator[Case]:
    from tests.comm import test_fused_copies, test_scheduled_transport
    from tests.kernels import test_triton
    from tests.runtime import test_accumulate
    from tests.schedule import test_policy, test_timeline
    from tests.stories import test_deferred_dq

    yield test_accumulate.a_wide_sum_ends_with_its_parts
    yield patched(test_deferred_dq.what_is_left_is_in_the_gradients)
    yield test_scheduled_transport.what_is_left_is_done_in_time
    yield test_scheduled_transport.no_two_parts_leave_something_for_the_same_queries
    yield patched(test_deferred_dq.nothing_is_left_where_parts_have_their_times)
    yield test_policy.gradients_are_hidden_behind_dq
    yield test_timeline.the_model_knows_what_is_left
    yield patched(test_deferred_dq.plans_tell_transports)
    yield patched(test_fused_copies.few_programs_work_beside_a_kernel)
    yield patched(test_triton.dq_is_launched_early)


def shared_memory_is_read_before_it_is_written() -> Iterator[Case]:
    """Walked on ints, whatever the machine does; and by a rank that is late."""
    from tests.stories.test_shared_memory_order import (
        no_call_writes_what_another_reads,
        test_shared_memory_is_written_anew_when_all_have_read_it,
    )

    yield no_call_writes_what_another_reads

    for at_once, ulysses, how in (
        (3, 1, {}),
        (1, 2, {}),
        (3, 1, dict(together=True)),
        (3, 1, dict(own_apart=True)),
    ):
        yield partial(
            test_shared_memory_is_written_anew_when_all_have_read_it, at_once, ulysses, how
        )


def machines_share_memory() -> Iterator[Case]:
    """Inside; what crosses goes through relays. And calls one after another are walked."""
    from tests.comm import test_fabric_machines
    from tests.stories.test_shared_memory_order import (
        no_call_of_a_machine_writes_what_another_reads,
    )

    dense = test_fabric_machines.test_attention_over_machines_that_share_memory_is_dense_attention
    for name in ("no mask", "an owner at a time"):
        yield partial(dense, name)
    yield test_fabric_machines.test_a_message_has_each_key_once_wherever_sums_begin
    yield no_call_of_a_machine_writes_what_another_reads


def keys_come_in_stages_where_they_are_late() -> Iterator[Case]:
    """And calls wait for theirs, and what is shared for its readers."""
    from tests.comm import test_gather, test_symmetric_memory, test_transports, test_ulysses
    from tests.runtime import test_accumulate
    from tests.schedule import test_pieces, test_policy

    for tokens, late, otherwise in test_policy.LATE:
        yield partial(test_policy.test_few_tokens_of_many_ranks_come_late, tokens, late, otherwise)
    yield patched(test_gather.test_calls_wait_for_the_keys_of_their_own_stage, late=True)
    yield patched(test_gather.test_dq_waits_for_no_gradients_that_come_home, wide=True)
    yield patched(test_gather.test_a_turn_of_several_says_that_the_last_one_was_read)
    yield patched(test_transports.test_ranks_of_one_machine_gather_and_swap_out_of_shared_memory)
    yield patched(test_symmetric_memory.test_buffers_stay_whose_graphs_others_captured)
    yield patched(test_symmetric_memory.test_what_a_graph_reads_is_made_before_it_and_stays)
    yield test_pieces.test_what_comes_but_once_is_not_kept
    for by_copy_engine in test_policy.ASIDE:
        yield partial(test_policy.test_gradients_come_aside_where_that_is_hidden, *by_copy_engine)
    yield partial(
        test_accumulate.test_what_is_not_yet_to_be_read_is_not_read, wide=False, moved=True
    )
    for asks in (False, True):
        yield partial(test_accumulate.test_a_sum_is_made_where_it_has_to_be, asks)
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(test_accumulate.test_parts_that_fill_their_place_are_the_result, dtype)
        yield partial(test_accumulate.test_parts_that_do_not_are_put_together, dtype)
    yield test_accumulate.test_the_place_of_parts_goes_when_they_were_read
    yield test_ulysses.test_a_buffer_has_room_for_all_that_is_swapped


def steps_of_positions_are_in_the_tiles() -> Iterator[Case]:
    """Steps in the Triton kernels are right: even ones, and where one is cut short."""
    from tests.kernels import test_tile_table

    yield test_tile_table.test_only_even_stairs_are_joined
    for step, layout in ((3, "zigzag"), (7, "striped")):
        yield partial(
            test_tile_table.test_steps_of_positions_are_a_property_of_few_tiles, step, layout
        )


def keys_come_together_where_they_are_few() -> Iterator[Case]:
    """And from no rank to two others at a time."""
    from tests.comm import test_fabric_copies, test_transports
    from tests.plan import test_prepare, test_proposal
    from tests.runtime import test_accumulate
    from tests.stories import test_gathered_keys

    yield test_gathered_keys.unseen_keys_have_no_gradient
    yield test_transports.plans_know_their_own_transport
    yield test_accumulate.lent_parts_are_only_read
    yield patched(test_prepare.few_may_be_short)
    yield patched(test_proposal.few_tokens_get_the_kernel_that_is_launched_least)
    yield patched(test_proposal.short_documents_get_a_kernel_of_their_own)
    for few in test_transports.FEW:
        yield patched(test_transports.test_few_tokens_come_together, *few)
    yield patched(test_fabric_copies.test_keys_and_values_of_a_piece_come_by_one_copy, False, 18)
    for layout in ("zigzag", "contiguous"):
        yield partial(
            test_fabric_copies.test_no_two_ranks_pull_from_one_at_a_time, 4, layout, causal=True
        )


def no_ring_is_left_alone() -> Iterator[Case]:
    """With what one of them gets wrong."""
    from tests.ranks import test_agreement
    from tests.stories import test_every_rank_hears

    for kind in ("lengths", "positions"):
        yield partial(test_every_rank_hears.test_what_one_ring_gets_wrong_the_other_is_told, kind)
    yield test_every_rank_hears.test_a_predicate_that_fails_on_one_rank_is_told_to_all
    yield test_agreement.test_a_problem_of_one_rank_is_raised_on_all_and_names_it


def streams_wait_for_one_another() -> Iterator[Case]:
    """And whoever reads what is made on other streams waits for them."""
    from tests.runtime import test_accumulate, test_streams
    from tests.support import streams

    for name in ("a_call_waits_for_what_was_before_and_nothing_waits_for_it_until_joined",
                 "calls_for_own_keys_give_way_to_the_others",
                 "what_is_behind_waits_for_all_others_whether_there_are_own_keys_or_not",
                 "what_is_behind_does_not_wait_for_own_keys",
                 "what_is_written_is_not_used_again_before_that",
                 "what_is_read_is_not_used_again_before_that"):  # fmt: skip
        check = getattr(test_streams, f"test_{name}")
        yield patched(lambda patch, check=check: check(streams.stood_in(patch)))
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(test_accumulate.test_a_part_that_is_all_there_is_is_the_result_itself, dtype)
        yield partial(test_accumulate.test_a_sum_of_parts_waits_for_them, dtype)


def results_are_in_memory_that_is_given() -> Iterator[Case]:
    """Swaps, gathers and accumulators write where they are told to."""
    from tests.comm import test_fabric_copies, test_fabric_kernels
    from tests.runtime import test_accumulate

    yield patched(test_fabric_kernels.swaps_in_shared_memory)
    yield test_fabric_copies.test_a_gathers_graphs_are_of_the_buffers_at_hand
    merges = test_accumulate.test_a_kernel_that_merges_writes_wide_but_in_its_last_call
    for calls in (None, 3):
        yield partial(merges, calls, placed=True)
    yield partial(test_accumulate.a_wide_sum_ends_with_its_parts, placed=True)
    settled = test_accumulate.test_what_is_made_after_a_sum_is_settled_is_elsewhere
    yield partial(settled, placed=True)


def zigzag_is_balanced() -> None:
    """Causal work is equal on all ranks: what it is for, though any layout gives right results."""
    from ring_attention_pytorch.geometry.layouts import all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

    everyone = all_segments("zigzag", 4, 32)
    work = {sum(visible_pairs(tiles(q, k, Mask(True))) for k in everyone) for q in everyone}
    assert len(work) == 1


def gathered_keys_are_few_large_tiles() -> None:
    """At most two calls for all other ranks' keys: what gathering is for."""
    from ring_attention_pytorch.comm.ulysses import land
    from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles
    from ring_attention_pytorch.schedule.pieces import Workload, joined, rounds_of

    for layout, visible in [
        ("zigzag", Mask(causal=True)),
        ("zigzag", Mask()),
        ("contiguous", Mask(causal=True, window=30)),
    ]:
        everyone = all_segments(layout, 5, 53)
        (group,) = rounds_of(Workload(everyone, everyone, visible), at_once=4)
        for rank, mine in enumerate(everyone):
            assert len(tiles(mine, joined(group.pieces[rank]), visible)) <= 2
    assert all(len(land(all_segments(layout, 5, 53))[0]) == 1 for layout in LAYOUTS)


def prefixes_and_positions_hold() -> Iterator[Case]:
    """The features whose masks are no arithmetic of a layout alone."""
    from tests.support.features import FEATURES, Problem, together

    def holds(feature: Any, *how: Any, **named: Any) -> None:
        errors = Problem(feature).errors(*how, **named)
        assert max(errors.values()) < 1e-12, errors

    for name in ("prefix", "positions", "sinks", "alibi", "bias of heads", "mask_mod"):
        wanted = FEATURES[name] | FEATURES["gradient of lse"]
        yield partial(holds, wanted, 3, "zigzag", "eager")
    yield partial(holds, together(("sinks", "alibi", "mask_mod")), 4, "zigzag", ulysses=2)
    yield partial(holds, FEATURES["mask_mod"] | FEATURES["documents"], 2, "striped", "eager")


def predicates_are_fused() -> Iterator[Case]:
    """FlexAttention's adapter, over a stand-in that goes by the cells of masks."""
    from tests.support.features import Problem, together
    from tests.support.flex_on_cpu import stood_in
    from tests.support.kernel_cases import CASES, faults

    def alone(number: int) -> None:
        with stood_in():
            assert not (found := faults(CASES[number], "flex", "cpu")), found

    def on_a_ring() -> None:
        names = ("mask_mod", "documents", "gradient of lse")
        with stood_in():
            errors = Problem(together(names)).errors(2, "striped", "flex")
        assert max(errors.values()) < 1e-12, errors

    yield from (partial(alone, number) for number in (2, 5))
    yield on_a_ring


def other_kernels_calls_cover_the_tiles() -> Iterator[Case]:
    """By stand-ins; and of a rank without queries, which has no tiles."""
    from tests.support.kernel_cases import KernelCase, faults
    from tests.support.stand_ins import ODD, STAND_INS, can

    def covers(kernel: str, case: KernelCase, patch: pytest.MonkeyPatch) -> None:
        STAND_INS[kernel](patch)
        assert not faults(replace(case, dtype=torch.float64), kernel, "cpu"), case

    for kernel in STAND_INS:
        for case in ODD:
            if can(kernel, case):
                yield patched(covers, kernel, case)
        yield patched(nothing_has_no_gradients, kernel)


def nothing_has_no_gradients(kernel: str, patch: pytest.MonkeyPatch) -> None:
    from ring_attention_pytorch.kernels import KERNELS
    from ring_attention_pytorch.runtime.accumulate import GradAccumulator
    from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods
    from tests.support.stand_ins import STAND_INS

    STAND_INS[kernel](patch)
    none, keys = torch.zeros(1, 0, 2, 8), torch.zeros(1, 3, 2, 8)
    saved = Residuals(none, none, torch.zeros(1, 2, 0), none, torch.zeros(1, 2, 0))
    grads = Grads(GradAccumulator(none), GradAccumulator(keys), GradAccumulator(keys))
    KERNELS[kernel].backward(
        saved, KVBlock(keys, keys, None, ()), (), ScoreMods(1.0, None, 8), grads
    )


def the_same_is_dropped_everywhere() -> None:
    """Over rings, heads swapped or not, by a seed that one rank drew; not in another layer."""
    from ring_attention_pytorch.functional import ring_attn
    from ring_attention_pytorch.plan.ring_plan import RingPlan
    from tests.support import threads
    from tests.support.features import FEATURES, Problem, drawn, refusal
    from tests.support.reference import relative_error

    problem = Problem(FEATURES["dropout"] | FEATURES["causal"])
    for size, way in ((3, {}), (2, dict(ulysses=2))):
        errors = problem.errors(size, "zigzag", "eager", **way)
        assert max(errors.values()) < 1e-12, errors
    q, k = drawn(1, 4, 2, 4, seed=1), drawn(1, 12, 2, 4, seed=2)
    whole = ring_attn(q, k, k, dropout=0.5, dropout_seed=1)

    def main(ring: threads.ThreadRing) -> tuple[float, int]:
        here, theirs = (t.tensor_split(2, dim=1)[ring.rank] for t in (q, k))
        got = ring_attn(here, theirs, theirs, dropout=0.5, dropout_seed=1, group=ring)
        plan = RingPlan.make(here, theirs, theirs, dropout=0.5, group=ring)
        return (
            relative_error(got, whole.tensor_split(2, dim=1)[ring.rank]),
            plan.terms.dropout.seed,
        )

    (error, seed), (other_error, other_seed) = threads.run(2, main)[0]
    assert max(error, other_error) < 1e-12
    assert seed == other_seed
    plan = RingPlan.make(q, q, q, dropout=0.5)
    assert len({plan.for_layer(i).terms.dropout.seed for i in range(3)}) == 3
    again = dict.fromkeys(("query_positions", "key_positions"), q[0, :, 0, 0].long() * 0)
    assert refusal(lambda: ring_attn(q, q, q, dropout=0.5, **again)) is not None


def a_bias_keeps_its_digits() -> None:
    """Large ones in 16 bits, too."""
    from ring_attention_pytorch.runtime.scores import with_bias

    bias = torch.tensor([[100.5, -3.14159, 17.0]]).bfloat16()
    q, k = with_bias(*[torch.zeros(1, n, 1, 8).bfloat16() for n in (1, 3)], bias, 128**-0.5)
    got = 128**-0.5 * q[0, :, 0].float() @ k[0, :, 0].float().T
    assert (got / bias.float() - 1).abs().max() < 1e-4


def dealt_layouts_are_even() -> None:
    """As zigzag, but of documents: no rank has much more to do than another."""
    from ring_attention_pytorch.geometry.balance import balanced
    from ring_attention_pytorch.geometry.documents import of_borders
    from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

    borders = [0, 700, 720, 1500, 1600, 4096]
    everyone, visible = balanced(borders, 4).segments, Mask(True, None, of_borders(borders))
    work = [sum(visible_pairs(tiles(q, k, visible)) for k in everyone) for q in everyone]
    assert max(work) < 1.05 * sum(work) / 4
    assert max(map(len, balanced([0, 4096], 4).segments)) == 2  # two chunks each are enough


def a_document_ends_where_another_begins() -> None:
    """A document's last token predicts nothing."""
    from ring_attention_pytorch.geometry.documents import last_of_document, of_borders

    found = last_of_document((of_borders([0, 2, 2, 5]),), torch.arange(5))
    assert found.tolist() == [[False, True, False, False, True]]


def blocks_know_their_tiles() -> None:
    """The Triton kernels' tables: every tile that a block meets is in its range."""
    from ring_attention_pytorch.geometry.documents import of_borders
    from ring_attention_pytorch.geometry.layouts import all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles
    from ring_attention_pytorch.kernels._tile_table import tile_table

    (whole,) = all_segments("contiguous", 1, 40)
    found = tiles(whole, whole, Mask(True, None, of_borders(range(0, 41, 5))))
    table = tile_table(found, "rows", 8, torch.empty(1, 40), every=True)
    for number, first, last in table.blocks.tolist():
        here = range(8 * number, 8 * number + 8)
        meets = [i for i, t in enumerate(found) if {*range(t.rows.start, t.rows.stop)} & {*here}]
        assert meets == list(range(first, last))


def calls_are_counted() -> None:
    """Else a kernel would round before the end."""
    from ring_attention_pytorch.runtime.accumulate import GradAccumulator
    from tests.support.cases import Attention, miscounted

    total = GradAccumulator(torch.empty(1, 2, 1, dtype=torch.bfloat16), calls=2)
    assert [total.update_memory()[1].dtype for _ in range(2)] == [torch.float32, torch.bfloat16]

    assert not miscounted(Attention(29, "zigzag", causal=True, transport="gather"), 3)


def calls_go_side_by_side_where_they_may() -> Iterator[Case]:
    from tests.stories.test_gathered_keys import test_calls_go_side_by_side_where_keys_stay

    for how, at_once, by_copy_engine in ((dict(), 3, True), (dict(memory=0), 1, False)):
        yield partial(test_calls_go_side_by_side_where_keys_stay, how, at_once, by_copy_engine)


def sums_of_16_bits_are_kept_in_32() -> None:
    """One rounding at the end: 2 ** -9, however many blocks are summed."""
    from tests.support import threads
    from tests.support.cases import Attention, errors, oracle, shard

    case = Attention(256, kernel="eager", dtype=torch.bfloat16, batch=1, d=16, d_v=16)
    got, _ = threads.run(8, lambda ring: shard(case, ring))
    for rank, mine in enumerate(got):
        assert mine[1].dtype == torch.float32
        assert max(errors(case, rank, 8, mine, oracle(case)).values()) < 2**-8


def mismatches_are_errors() -> None:
    """A rank that differs, errs or holds another's tokens: ValueError on all ranks."""
    from ring_attention_pytorch.functional import ring_attn
    from tests.support import threads

    def said(n: Callable[[int], int], causal: Callable[[int], bool], window: int | None) -> list:
        def main(ring: threads.ThreadRing) -> bool:
            q = torch.randn(1, n(ring.rank), 2, 4)
            try:
                ring_attn(q, q, q, causal=causal(ring.rank), window=window, group=ring)
            except ValueError:
                return True
            return False

        return threads.run(3, main)[0]

    assert said(lambda r: 4, lambda r: r == 1, None) == [True] * 3
    assert said(lambda r: 4, lambda r: True, -1) == [True] * 3
    assert said(lambda r: 4 + r, lambda r: True, None) == [True] * 3


def plans_are_checked() -> None:
    """A plan is for tensors of one shape."""
    from ring_attention_pytorch.functional import ring_attn
    from ring_attention_pytorch.plan.ring_plan import RingPlan

    q = torch.randn(1, 5, 2, 4)
    try:
        ring_attn(q[:, :3], q, q, plan=RingPlan.make(q, q, q))
    except ValueError:
        return
    raise AssertionError("a plan for other tensors was used")


if __name__ == "__main__":
    hunt.main("tests.faults.attention")
