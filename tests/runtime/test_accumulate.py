"""Results under way: whatever parts come in whatever order, as if all were merged in float64."""

import weakref
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.runtime.accumulate import (
    Deferred,
    GradAccumulator,
    OutputAccumulator,
    deepest,
    disjoint_spans,
    is_free,
)
from tests.support.late import Late
from tests.support.positions import quickly
from tests.support.reference import relative_error

N = 6
WHOLE = slice(0, N)


@st.composite
def plans(draw) -> list[tuple[slice, bool]]:
    """Which rows each part has, and whether somebody asks for the running tensors after it."""
    rows = st.tuples(st.integers(0, N), st.integers(0, N)).map(sorted)
    some = st.sampled_from([(0, N), (0, N), (3, N)]) | rows
    return [(slice(*draw(some)), draw(st.booleans())) for _ in range(draw(st.integers(0, 5)))]


def parts(plan, dtype: torch.dtype) -> list[tuple[slice, Tensor, Tensor]]:
    made = []
    for rows, _ in plan:
        n = rows.stop - rows.start
        out, lse = torch.randn(2, n, 3, 4, dtype=torch.float64), torch.randn(2, 3, n) * 3
        lse[torch.rand(lse.shape) < 0.2] = -torch.inf
        out = out.masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0.0)
        made.append((rows, out.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))))
    return made


@settings(deadline=None, max_examples=150)
@given(
    plans(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans()
)  # fmt: skip
def test_parts_merge_as_in_float64_and_are_rounded_once(plan, dtype, in_place):
    late = Late()
    with late.waits():
        parts_merge(plan, dtype, in_place, late)


def parts_merge(plan, dtype: torch.dtype, in_place: bool, late: Late) -> None:
    """In memory that the accumulator gives, or wherever they are."""
    q, v = torch.empty(2, N, 3, 5, dtype=dtype), torch.empty(2, 1, 1, 4, dtype=dtype)
    result, made = OutputAccumulator(q, v.shape[-1]), parts(plan, dtype)
    weights, total = torch.zeros(2, 3, N).double(), torch.zeros(2, N, 3, 4).double()
    for (_, asks), (rows, out, lse) in zip(plan, made):
        weight = lse.double().exp()
        weights[..., rows] += weight
        total[:, rows] += out.double() * weight.transpose(1, 2)[..., None]
        if in_place:
            out, lse = (to.copy_(t) for to, t in zip(result.alloc(rows), (out, lse)))
        result.add(rows, late(out), late(lse))
        if asks:
            result.begin_update()
    out, lse = result.finalize()
    want = total / weights.clamp(min=1e-300).transpose(1, 2)[..., None]
    eps = torch.finfo(dtype).eps
    assert out.dtype == dtype
    assert (out.double() - want).abs().max() <= 2 * max(eps, 1e-7 * (dtype != torch.float64)) * 4
    torch.testing.assert_close(lse.double(), weights.log(), rtol=1e-5, atol=1e-5)
    if dtype == torch.bfloat16 and len(made) <= 3:  # of the exact result no bit but the last
        torch.testing.assert_close(out.double(), want.to(dtype).double(), rtol=2 * eps, atol=1e-6)


@settings(deadline=None, max_examples=150)
@given(
    plans(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_sums_are_wide_and_rounded_once(plan, dtype, together, placed):
    late = Late()
    with late.waits():
        parts_are_summed(plan, dtype, together, placed, late)


def parts_are_summed(plan, dtype: torch.dtype, together: bool, placed: bool, late: Late) -> None:
    """Placed, in memory that was given, where a part of all tokens may have been made."""
    like = torch.empty(2, N, 3, dtype=dtype)
    place = torch.full_like(like, torch.nan) if placed else None
    total, want, waiting = GradAccumulator(like, place=place), torch.zeros(2, N, 3).double(), []
    for rows, asks in plan:
        part = total.alloc(rows).normal_()
        want[:, rows] += part.double()
        if together:
            waiting.append((rows, late(part)))
        else:
            total.add(rows, late(part))
        if asks:
            total.add_all(waiting)
            waiting.clear()
            total.begin_update()
    if together:
        total.add_all(waiting)
    exact = want.to(torch.promote_types(dtype, torch.float32)).to(dtype)
    for _ in range(2):
        got = total.finalize()
        assert got.dtype == dtype
        assert place is None or got.data_ptr() == place.data_ptr()
        assert relative_error(got, exact) < 1e-6


def test_parts_beside_one_another_wait_and_those_upon_one_another_are_few():
    total = GradAccumulator(torch.empty(1, N, 2, dtype=torch.bfloat16))
    part = torch.ones(1, N // 2, 2, dtype=torch.bfloat16)
    halves = (slice(0, N // 2), part), (slice(N // 2, N), part)
    total.add_all(halves * 4)
    assert total.finalize().dtype == torch.bfloat16
    assert (total.finalize() == 4).all()
    total.add_all(halves)
    assert (total.begin_update() == 5).all()


@pytest.mark.parametrize("asks", [False, True])
def test_a_sum_is_made_where_it_has_to_be(asks):
    """Where parts may be made, too, each beside the others."""
    place = torch.full((1, N, 2), torch.nan, dtype=torch.bfloat16)
    total, half, parts = GradAccumulator(torch.empty_like(place), place=place), slice(0, N // 2), []
    for at in (half, slice(N // 2, N), WHOLE):
        parts.append((at, total.alloc(at).fill_((1.0, 0.5, 4.5)[len(parts)])))
    there = [part.untyped_storage().data_ptr() == place.data_ptr() for _, part in parts]
    assert there == [True, True, False]
    total.add_all(parts)
    wide = total.begin_update() if asks else None
    assert wide is None or (wide[:, half] == 5.5).all()
    for _ in range(2):
        assert total.finalize() is place
        assert (place[:, half] == 5.5).all()
        assert (place[:, N // 2 :] == 5).all()
    assert wide is None or total.begin_update() is wide  # for it may still be read
    assert not GradAccumulator(place, place=place).finalize().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_that_is_all_there_is_is_the_result_itself(dtype):
    q = torch.empty(1, N, 2, 4, dtype=dtype)
    out, lse = torch.randn(1, N, 2, 4).to(dtype), torch.randn(1, 2, N)
    result, total, late = OutputAccumulator(q, q.shape[-1]), GradAccumulator(q), Late()
    with late.waits():
        made = late(out), late(lse)
        result.add(WHOLE, *made)
        found = result.finalize()
        assert found[0] is made[0]
        assert found[1].data_ptr() == made[1].data_ptr()
        assert torch.equal(found[0], out)
        total.add(WHOLE, made := late(out))
        assert total.finalize() is made
        assert torch.equal(made, out)


def made_in_blank_memory(
    dtype: torch.dtype, *tokens: slice
) -> tuple[OutputAccumulator, GradAccumulator, list]:
    """A result and a sum of parts of these tokens, and where each was made."""
    q = torch.empty(2, N, 2, 4, dtype=dtype)
    result, total, memory = OutputAccumulator(q, q.shape[-1]), GradAccumulator(q), []
    for number, at in enumerate(tokens, 1):
        out, lse = result.alloc(at)
        part = total.alloc(at)
        result.add(at, out.fill_(number), lse.zero_())
        total.add(at, part.fill_(number))
        memory.append([t.untyped_storage().data_ptr() for t in (out, lse, part)])
    return result, total, memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_fill_their_place_are_the_result(dtype):
    """In whatever order; what comes after is merged into it, or added, there."""
    for tokens in ((WHOLE,), (slice(2, N), slice(0, 2))):
        result, total, memory = made_in_blank_memory(dtype, *tokens)
        assert all(where == memory[0] for where in memory)
        (out, lse), sum_ = result.finalize(), total.finalize()
        assert [t.data_ptr() for t in (out, lse, sum_)] == memory[0]
        assert torch.equal(out, sum_)
        assert out[0, :, 0, 0].tolist() == ([1] * N if len(tokens) == 1 else [2, 2, *[1] * (N - 2)])
    result, total, _ = made_in_blank_memory(dtype, slice(2, N), slice(0, 2), WHOLE)
    assert result.finalize()[0][0, :, 0, 0].tolist() == [2.5, 2.5, *[2] * (N - 2)]
    assert total.finalize()[0, :, 0, 0].tolist() == [5, 5, *[4] * (N - 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_do_not_are_put_together(dtype):
    """Parts that leave tokens out, or lie upon others, or elsewhere, are put together."""
    result, total, _ = made_in_blank_memory(dtype, slice(0, 2), slice(3, N))
    out, lse = result.finalize()
    assert out[0, :, 0, 0].tolist() == total.finalize()[0, :, 0, 0].tolist() == [1, 1, 0, 2, 2, 2]
    assert (lse[0, 0] == -torch.inf).tolist() == [i == 2 for i in range(N)]
    result, total, memory = made_in_blank_memory(dtype, slice(0, 4), slice(2, N))
    assert not {*memory[0]} & {*memory[1]}
    assert result.finalize()[0][0, :, 0, 0].tolist() == [1, 1, 1.5, 1.5, 2, 2]
    assert total.finalize()[0, :, 0, 0].tolist() == [1, 1, 3, 3, 2, 2]
    result, total, _ = made_in_blank_memory(dtype)
    for at in (slice(0, 2), slice(2, N)):
        out, lse = (t.clone() for t in result.alloc(at))
        result.add(at, out.fill_(1), lse.zero_())
        total.add(at, total.alloc(at).clone().fill_(1))
    assert (result.finalize()[0] == 1).all()
    assert (total.finalize() == 1).all()


def test_the_place_of_parts_goes_when_they_were_read():
    """Into wide numbers: a ring has but few parts at a time."""
    result, total, _ = made_in_blank_memory(torch.bfloat16, WHOLE)
    places = [weakref.ref(result._place[0]), weakref.ref(total._place[0])]
    result.begin_update()
    total.begin_update()
    assert [place() for place in places] == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_parts_waits_for_them(dtype):
    part = torch.randn(1, N, 2).to(dtype)
    total, late = GradAccumulator(part), Late()
    with late.waits():
        for _ in range(2):
            total.add(WHOLE, late(part))
            assert not total.begin_update().isnan().any()
    assert relative_error(total.finalize(), 2 * part) < 1e-6


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_what_is_not_yet_to_be_read_is_not_read(wide, moved):
    """However many parts lie upon one another; then they are rounded once."""
    parts = [torch.full((1, N, 2), torch.nan, dtype=torch.bfloat16) for _ in range(9)]
    whole = total = GradAccumulator(parts[0])
    if wide:
        total.begin_update()
    total.after(lambda: [part.fill_(1 + i / 128) for i, part in enumerate(parts)])
    total.add_all((WHOLE, part) for part in parts)
    assert parts[0].isnan().all()
    if moved:
        whole = GradAccumulator(parts[0])
        total.move_to(whole)
        assert parts[0].isnan().all()
    assert torch.equal(whole.finalize(), torch.full((1, N, 2), 9 + 36 / 128).bfloat16())


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("calls", [None, 1, 3])
def test_a_kernel_that_merges_writes_wide_but_in_its_last_call(calls, placed):
    q = torch.empty(1, N, 2, 4, dtype=torch.bfloat16)
    sum_of = torch.full_like(q, torch.nan) if placed else None
    result, total, want = (
        OutputAccumulator(q, q.shape[-1], calls),
        GradAccumulator(q, calls, place=sum_of),
        torch.zeros(1, N, 2, 4),
    )
    for call in range(1, 1 + (calls or 3)):
        (before, out, lse), (so_far, summed) = result.update_memory(), total.update_memory()
        assert (before is None) == (so_far is None) == (call == 1)
        assert out.dtype == summed.dtype == (torch.bfloat16 if call == calls else torch.float32)
        if call not in (1, calls):
            assert before is out
            assert so_far is summed
        part = torch.full_like(want, 2.0**-8 if call > 1 else 1.0)
        want += part
        out.copy_(part if before is None else before + part)
        summed.copy_(part if before is None else so_far + part)
        lse.fill_(call)
    if placed:
        assert (summed is sum_of) == (call == calls)  # nothing to copy
        assert total.finalize().data_ptr() == sum_of.data_ptr()
    for found in (result.finalize()[0], total.finalize()):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, want.bfloat16())
    assert (result.finalize()[1] == call).all()


def test_running_tensors_are_wide_and_the_same_from_then_on():
    q = torch.empty(1, N, 2, 4, dtype=torch.bfloat16)
    result, total = OutputAccumulator(q, q.shape[-1]), GradAccumulator(q)
    out, lse = result.begin_update()
    assert out.dtype == lse.dtype == total.begin_update().dtype == torch.float32
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert result.begin_update()[0] is out
    assert total.begin_update() is total.begin_update()
    assert not total.finalize().any()


@pytest.mark.parametrize("placed", [False, True])
def test_what_is_made_after_a_sum_is_settled_is_elsewhere(placed):
    """It would be in the sum's place otherwise."""
    place = torch.full((1, N, 2), torch.nan) if placed else None
    total = GradAccumulator(torch.empty(1, N, 2), place=place)
    first = slice(0, 2)
    total.add(first, total.alloc(first).fill_(1))
    total.add_borrowed(WHOLE, torch.ones(1, N, 2))
    assert total.flush()[0, :, 0].tolist() == [2, 2, 1, 1, 1, 1]
    total.add(last := slice(2, N), total.alloc(last).fill_(3))
    assert total.finalize()[0, :, 0].tolist() == [2, 2, 4, 4, 4, 4]


def a_wide_sum_ends_with_its_parts(placed: bool = False) -> None:
    """A wide sum ends with parts that wait, in one pass, which only reads it."""
    like = torch.zeros(1, 2, 1, dtype=torch.bfloat16)
    place = torch.full_like(like, torch.nan) if placed else None
    total = GradAccumulator(like, place=place)
    wide = total.begin_update()
    wide.fill_(1 + 2**-8)  # half way to the next number of 16 bits
    total.after(lambda: None)
    total.add_all([(slice(0, 1), torch.full((1, 1, 1), 2**-8, dtype=torch.bfloat16))])
    for _ in range(2):  # whoever asks again gets the same
        assert (ended := total.finalize()).flatten().tolist() == [1 + 2**-7, 1.0]
        assert place is None or ended is place
    assert (wide == 1 + 2**-8).all()


@pytest.mark.parametrize("placed", [False, True])
def test_a_wide_sum_ends_with_its_parts(placed):
    a_wide_sum_ends_with_its_parts(placed)


def lent_parts_are_only_read() -> None:
    """They are summed wide and rounded once, and stay as they were, however many there are."""
    whole, like = slice(0, 4), torch.zeros(1, 4, 1, 2)
    for dtype, ownership, number in product((torch.bfloat16, torch.float32), (0, 1), (1, 4, 6)):
        total = GradAccumulator(like.to(dtype))
        for _ in range(ownership):
            total.add(whole, torch.full_like(like, 256, dtype=dtype))
        borrowed = torch.ones((number, *like.shape), dtype=dtype)
        for each in borrowed:
            total.add_borrowed(whole, each)
        found = total.flush()
        borrowed.mul_(7)  # as another rank may, from now on
        exact = torch.full_like(like, number + 256 * ownership)
        assert torch.equal(found, exact.to(dtype))
        assert total.finalize() is found
        assert torch.equal(found, exact.to(dtype))
        assert (borrowed == 7).all()


def test_lent_parts_are_only_read() -> None:
    lent_parts_are_only_read()


def test_some_samples_are_merged_in_the_memory_of_all():
    """And the others stay as they are; sinks are one more key of every query."""
    out, lse = torch.randn(2, 3, N, 2, 4).double(), torch.randn(2, 3, 2, N).double()
    total = OutputAccumulator(out[0], out[0].shape[-1])
    assert total.samples(slice(None)) is total
    total.add(WHOLE, out[0].clone(), lse[0].clone())
    total.samples(slice(1, 3)).add(slice(2, N), out[1, 1:, 2:].clone(), lse[1, 1:, :, 2:].clone())
    sinks = torch.randn(2).double()
    total.add_sinks(sinks)
    lse[1, 0] = lse[1, :, :, :2] = -torch.inf
    terms = torch.stack((*lse, sinks[:, None].expand_as(lse[0])))
    weights = terms.softmax(0)[:2].transpose(2, 3)[..., None]
    got, got_lse = total.finalize()
    assert relative_error(got, (weights * out).sum(0)) < 1e-12
    assert relative_error(got_lse, terms.logsumexp(0)) < 1e-12


def test_gradients_of_some_samples_are_in_the_sum_of_all():
    parts = torch.randn(2, 3, N, 2, 4).double()
    total = GradAccumulator(parts[0], deferred=Deferred())
    assert total.samples(slice(None)) is total
    total.add(WHOLE, parts[0].clone())
    some = total.samples(slice(1, 3))
    assert some.deferred is total.deferred
    some.add(slice(2, N), parts[1, 1:, 2:].clone())
    some.begin_update()
    parts[1, 0] = parts[1, :, :2] = 0.0
    assert relative_error(total.finalize(), parts.sum(0)) < 1e-12


def test_the_last_call_after_another_kernels_part_has_memory_of_its_own():
    """In 16 bits, so that the parts are read once, and rounded once more."""
    outs, lses = torch.randn(2, 3, N, 2, 4), torch.randn(2, 3, 2, N)
    given = outs.bfloat16()
    result, total = OutputAccumulator(given[0], given[0].shape[-1], 1), GradAccumulator(given[0], 1)
    result.add(WHOLE, given[0].clone(), lses[0].clone())
    total.add(WHOLE, given[0].clone())
    (before, out, lse), (so_far, summed) = result.update_memory(), total.update_memory()
    assert before is so_far is None
    assert out.dtype == summed.dtype == torch.bfloat16
    for memory, t in ((out, given[1]), (lse, lses[1]), (summed, given[1])):
        memory.copy_(t)
    weights = lses.softmax(0).transpose(2, 3)[..., None]
    want = (weights * given.float()).sum(0), lses.logsumexp(0), given.float().sum(0)
    for got, right in zip((*result.finalize(), total.finalize()), want):
        assert relative_error(got, right) < 4e-3


def test_moved_parts_are_in_the_sum_they_came_to():
    """Parts of any tokens, in 16 bits or summed already."""
    parts = [(slice(0, N), torch.randn(2, N, 1, 4)), (slice(3, N - 1), torch.randn(2, N - 4, 1, 4))]
    for wide in (False, True):
        total, other = (GradAccumulator(torch.zeros(2, N, 1, 4)) for _ in range(2))
        want = torch.zeros(2, N, 1, 4)
        for at, part in parts:
            total.add(at, part.clone())
            want[:, at] += part
        if wide:
            total.begin_update()
        total.move_to(other)
        assert relative_error(other.finalize(), want) < 1e-6
        assert total.is_empty


def test_who_takes_the_only_part_waits_for_what_is_not_yet_there():
    total, waited = GradAccumulator(torch.zeros(1, N, 1, 4)), []
    total.add(WHOLE, torch.zeros(1, N, 1, 4))
    total.after(lambda: waited.append(True))
    assert total.whole() is not None
    assert waited


spans = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda at: slice(at[0], sum(at))),
    max_size=5,
)


def tokens(at: slice) -> set[int]:
    return {*range(at.start, at.stop)}


@quickly
@given(spans)
def test_stretches_are_what_spans_cover_with_who_covers_it(some):
    covered: dict[int, list[int]] = {}
    for i, at in enumerate(some):
        for token in tokens(at):
            covered.setdefault(token, []).append(i)
    found = [(token, which) for at, which in disjoint_spans(some) for token in sorted(tokens(at))]
    assert found == sorted(covered.items())
    assert deepest(some) == max(map(len, covered.values()), default=0)


@quickly
@given(spans, spans.filter(bool))
def test_free_is_what_overlaps_nothing(taken, some):
    assert is_free(some[0], taken) == all(tokens(some[0]).isdisjoint(tokens(t)) for t in taken)


def test_deferred_work_runs_once_in_order_with_what_is_deferred_meanwhile():
    done: list[str] = []
    deferred = Deferred(
        [lambda: done.append("a"), lambda: deferred.append(lambda: done.append("c"))]
    )
    deferred.append(lambda: done.append("b"))
    deferred.do()
    deferred.do()
    assert done == ["a", "b", "c"]


def test_after_an_error_the_rest_of_deferred_work_is_still_to_do():
    done: list[str] = []
    deferred = Deferred([lambda: 1 / 0, lambda: done.append("rest")])
    with pytest.raises(ZeroDivisionError):
        deferred.do()
    assert done == []
    deferred.do()
    assert done == ["rest"]
