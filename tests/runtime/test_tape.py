"""Tapes: what they replay is what was computed, to the bit; what can't be replayed is not."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.kernels import sdpa
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.runtime import tape
from ring_attention_pytorch.runtime.interfaces import Traits
from ring_attention_pytorch.runtime.tape import Tapes, opaque
from ring_attention_pytorch.runtime.uncopied import replaced
from tests.support import threads
from tests.support.cases import over_shared_memory
from tests.support.reference import dense_attention, relative_error
from tests.support.taped import replayed, results, untaped


@pytest.fixture(autouse=True)
def _new_plans() -> None:
    plan_cache.forget()


CASES = {
    "causal": dict(causal=True),
    "full": dict(),
    "window": dict(causal=True, window=5),
    "documents": dict(causal=True, cu_seqlens=[0, 3, 17, 20]),
    "two documents": dict(documents=torch.tensor([[0] * 20, [1] * 9 + [2] * 11])),
    "masked": dict(key_mask=torch.arange(40).view(2, 20) % 3 > 0),
    "softclamp": dict(softclamp=5.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1])),
    "dropout": dict(dropout=0.25, dropout_seed=3),
    "prefix": dict(causal=True, prefix=7),
    "narrow values": dict(causal=True),
}


def tensors(case: str, dtype: torch.dtype) -> list[Tensor]:
    d_v = 4 if case == "narrow values" else 8
    shapes = (2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, d_v)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kernel", ["sdpa", "eager", None])
@pytest.mark.parametrize("case", CASES)
def test_a_tape_does_what_was_recorded(case: str, kernel: str | None) -> None:
    if kernel == "sdpa" and case in ("softclamp", "alibi", "dropout"):
        pytest.skip("this kernel has none")
    for dtype in (torch.float64, torch.bfloat16):
        given = tensors(case, dtype)
        direct = untaped(given, **CASES[case], kernel=kernel)
        plan = RingPlan.make(*given, **CASES[case], kernel=kernel)
        for number in range(6):
            given = tensors(case, dtype)
            dout = torch.randn(2, 20, 4, given[2].shape[-1], dtype=dtype)
            if number == 4:  # other strides have a tape of their own
                given[0] = given[0].detach().transpose(1, 2).contiguous().transpose(1, 2)
                given[0].requires_grad_()
            pairs = zip(results(plan, given, dout), results(direct, given, dout))
            for taped, computed in pairs:
                assert torch.equal(taped, computed)
                assert taped.stride() == computed.stride()
        assert replayed(plan) == ["backward", "forward"]
        assert direct.tapes is None


def test_sinks_are_given_anew() -> None:
    given, sinks = tensors("causal", torch.float64), torch.randn(4, dtype=torch.float64)
    direct = untaped(given, causal=True, sinks=sinks)
    plan = RingPlan.make(*given, causal=True, sinks=sinks)
    for _ in range(5):
        sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
        dout = torch.randn_like(given[0])
        pairs = zip(
            results(plan, given, dout, sinks=sinks), results(direct, given, dout, sinks=sinks)
        )
        assert all(torch.equal(taped, computed) for taped, computed in pairs)
    assert replayed(plan) == ["backward", "forward"]


def taped(function: Callable, *given: Tensor, times: int = 5) -> tuple[list, list[str]]:
    """Call a function by one plan's tapes; return its results, and the lines of its tape."""
    tapes, plan = Tapes(), torch.empty(0)
    found = [tapes.run(lambda_of(function), plan, *given) for _ in range(times)]
    (known,) = tapes.by_kind.values()
    return found, getattr(known.replay, "source", "").splitlines()


_wrapped: dict[Callable, Callable] = {}


def lambda_of(function: Callable) -> Callable:
    """Return the same function of a plan each time."""
    return _wrapped.setdefault(function, lambda plan, *given: function(*given))


def test_a_kernel_that_does_not_say_so_has_no_tape() -> None:
    """A kernel may write where no recorder sees it, as those do that Triton compiles."""
    given = [t.detach() for t in tensors("causal", torch.float64)]
    plan = RingPlan.make(*given, causal=True, kernel="eager")

    def unseen(q: Tensor, *given: Any) -> None:
        _, out, lse = given[-1].update_memory()  # of an `OutputAccumulator`
        with torch._C.DisableTorchFunction():
            out.copy_(q)
            lse.copy_(q[..., 0].transpose(1, 2))

    plan = replaced(plan, kernel=plan.kernel._replace(forward=unseen, traits=Traits()))
    for _ in range(6):
        given = [t.detach() for t in tensors("causal", torch.float64)]
        assert torch.equal(ring_attn(*given, plan=plan), given[0])


def told_while_memory_grows(
    plan: RingPlan, direct: RingPlan, told: Callable[[], Any], grow: Callable[[], None]
) -> list[Any]:
    """Compare ten calls; return what is told before and after memory grows, and at the end."""
    found = []
    for number in range(10):
        given = tensors("causal", torch.float64)
        dout = torch.randn_like(given[0])
        pairs = zip(results(plan, given, dout), results(direct, given, dout))
        assert all(torch.equal(taped, computed) for taped, computed in pairs), number
        found.append(told())
        if number == 4:
            grow()
    return found[4:6] + found[-1:]


def few_tokens_have_tapes(how: str) -> None:
    """Ranks read the same memory of one another each time, until that grows."""

    def main(ring: threads.ThreadRing) -> list[list[str]]:
        given = tensors("causal", torch.float64)
        made = RingPlan.make(*given, causal=True, layout="zigzag", group=ring)
        plan, direct = (over_shared_memory(made, given, ring, 9, **{how: True}) for _ in range(2))
        object.__setattr__(direct, "tapes", None)

        def grow() -> None:
            plan.transport.fabric.space.reserve(None, keys=1 << 16, grads=1 << 16)

        return told_while_memory_grows(plan, direct, partial(replayed, plan), grow)

    for found in threads.run(3, main)[0]:
        assert found == [["backward", "forward"], [], ["backward", "forward"]]


@pytest.mark.parametrize("how", ["together", "own_apart"])
def test_few_tokens_have_tapes(how: str) -> None:
    few_tokens_have_tapes(how)


def swaps_have_tapes(ulysses: int) -> None:
    """Forward and backward, and what is shared is the same memory each time, until that grows."""

    def main(ring: threads.ThreadRing) -> list[int]:
        given = tensors("causal", torch.float64)
        made = RingPlan.make(*given, causal=True, layout="zigzag", group=ring, ulysses=ulysses)
        plan, direct = (over_shared_memory(made, given, ring, 9) for _ in range(2))
        object.__setattr__(direct.ulysses, "tapes", None)

        def tapes() -> int:
            return sum(bool(known.replay) for known in plan.ulysses.tapes.by_kind.values())

        def grow() -> None:
            for each in (plan, direct):
                each.ulysses.by.space.reserve(None, swaps=1 << 16)

        return told_while_memory_grows(plan, direct, tapes, grow)

    for found in threads.run(4, main)[0]:
        assert found == [4, 0, 4]


@pytest.mark.parametrize("ulysses", [2, 4])
def test_swaps_of_heads_have_tapes(ulysses: int) -> None:
    """With four neighbours two of them have the same key heads, whose gradients are summed."""
    swaps_have_tapes(ulysses)


def test_a_plan_of_one_call_records_nothing() -> None:
    given = tensors("causal", torch.float32)
    plan = RingPlan.make(*given)
    ring_attn(*given, plan=plan)
    assert all(known._before is None for known in plan.tapes.by_kind.values())


def test_a_tape_is_a_line_for_each_operation_and_frees_what_it_needs_no_more() -> None:
    def function(x: Tensor) -> tuple[Tensor, None]:
        double = x[:] * 2  # the view is x
        return double.to(double.dtype).add_(3), None

    (*_, (last, nothing)), lines = taped(function, torch.arange(3.0))
    assert last.tolist() == [3, 5, 7]
    assert nothing is None
    doubled, freed, added, returned = [line.strip() for line in lines[1:]]
    assert re.fullmatch(r"(t\d) = c\d\(a0, 2\)", doubled)
    assert freed == "del a0"
    assert re.fullmatch(r"c\d\(t\d, 3\)", added)
    assert re.fullmatch(r"return \(t\d, None, \)", returned)


def test_views_of_constants_are_made_once() -> None:
    table = torch.arange(8.0)

    def function(x: Tensor) -> tuple[Tensor]:
        return (x + table[2:5],)

    found, lines = taped(function, torch.zeros(3))
    assert len(lines) == 4  # def, one sum, del, return
    table.add_(1)
    assert found[-1][0].tolist() == [2, 3, 4]
    assert taped(function, torch.zeros(3))[0][-1][0].tolist() == [3, 4, 5]


def test_a_view_laid_out_otherwise_is_another_tensor() -> None:
    square = torch.arange(4.0).view(2, 2)
    found, lines = taped(lambda x: (x.t() - x,), square)
    assert lines
    assert all(out.tolist() == [[0, 1], [-1, 0]] for (out,) in found)


def test_tensors_laid_out_otherwise_have_a_tape_of_their_own() -> None:
    def function(_: object, x: Tensor) -> tuple[Tensor]:
        rows = x.view(-1) if x.is_contiguous() else x.flatten()
        return (rows + 1,)

    tapes, dense = Tapes(), torch.arange(4.0).view(2, 2)
    for x in [dense] * 4 + [dense.t()] * 4:
        assert torch.equal(tapes.run(function, dense, x)[0], x.flatten() + 1)
    assert len(tapes.by_kind) == 2


def test_views_that_nothing_needs_are_left_out_and_writes_through_them_are_not() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        out, _ = x * 2, x.narrow(0, 1, 1).unsqueeze(0)
        out[1:].add_(1)
        return (out,)

    found, lines = taped(function, torch.zeros(3))
    assert all(out.tolist() == [0, 1, 1] for (out,) in found)
    assert sum(" = " in line for line in lines) == 2  # the product, and the view that is written
    assert sum("add_" in line or line.endswith("1)") for line in lines) == 1


def test_one_tensor_given_twice_is_not_two() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
    plan = RingPlan.make(q, k, v, causal=True)
    want = ring_attn(q, k, v, plan=untaped([q, k, v], causal=True))
    for given in [(q, q, q)] * 4 + [(q, k, k)] * 4:
        ring_attn(*given, plan=plan)
    assert torch.equal(ring_attn(q, k, v, plan=plan), want)


def reads(x: Tensor) -> tuple[Tensor]:
    return (x + 1 if x.sum() > 0 else x,)


def picks(x: Tensor) -> tuple[Tensor]:
    return (x[x > 0],)


def from_python(x: Tensor) -> tuple[Tensor]:
    return (x + hidden(),)


def hidden() -> Tensor:
    """Make a tensor that no recorder sees."""
    with torch._C.DisableTorchFunction():
        return torch.ones(3)


calls = iter(range(100))


def alternates(x: Tensor) -> tuple[Tensor]:
    return (x + next(calls),)


@pytest.mark.parametrize("function", [reads, picks, from_python, alternates])
def test_what_may_be_another_thing_next_time_has_no_tape(function: Callable) -> None:
    found, lines = taped(function, torch.ones(3))
    assert not lines
    expected = [function(torch.ones(3))[0].shape for _ in found]
    assert [out.shape for (out,) in found] == expected


class Steps:
    """A stand-in for a plan: its calls add an operation's result for each of its numbers."""

    def __init__(self, by: Callable, *numbers: int, more: int = 0) -> None:
        self.by, self.numbers, self.more, self.calls = by, numbers, more, 0

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        self.calls += 1
        for number in self.numbers:
            x = x + self.by(x, number + self.more * self.calls)
        return (x,)

    def entered(self, called: Callable) -> int:
        """Call it six times by tapes of its own, check each result; return how often it ran."""
        tapes, again = Tapes(), Steps(self.by, *self.numbers, more=self.more)
        for _ in range(6):
            x = torch.randn(3, dtype=torch.float64)
            (wanted,) = again(x)
            assert torch.equal(tapes.run(called, self, x)[0], wanted)
        return self.calls


def test_a_plan_like_another_but_for_numbers_is_recorded_once() -> None:
    """One whose operations differ is not like it, nor one that had no tape itself."""

    def called(steps: Steps, x: Tensor) -> tuple[Tensor]:
        return steps(x)

    assert Steps(torch.mul, 2, 3).entered(called) == 3  # two recordings that agree
    assert Steps(torch.mul, 5, 7).entered(called) == 2
    assert Steps(torch.mul, 5, 7, 2).entered(called) == 3
    assert Steps(torch.mul, 1, 2).entered(called) == 2
    assert Steps(torch.sub, 1, 2, more=1).entered(called) == 6  # other numbers in each call
    assert Steps(torch.sub, 5, 7).entered(called) == 3


def test_what_looks_at_values_may_be_one_operation() -> None:
    @opaque
    def doubled_if_positive(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x.clone()

    def function(_: object, x: Tensor) -> tuple[Tensor]:
        return (doubled_if_positive(x + 1),)

    tapes = Tapes()
    found = [
        tapes.run(function, torch.empty(0), torch.full((2,), v)) for v in (1.0, 1.0, 1.0, -3.0)
    ]
    assert [out.tolist() for (out,) in found] == [[4, 4]] * 3 + [[-2, -2]]


def test_rows_whose_scores_are_nan_are_nan_from_a_tape() -> None:
    """The kernel's repair looks at values, so it is part of one operation."""
    given = [t.detach() for t in tensors("causal", torch.float32)]
    plan = RingPlan.make(*given, causal=True, kernel="sdpa")
    for _ in range(4):
        out = ring_attn(*given, plan=plan)
    assert out.isfinite().all()
    given[0][0, 3] = torch.nan
    assert ring_attn(*given, plan=plan)[0, 3].isnan().all()
    assert sdpa._attention.__wrapped__ is not None


def doubled_where_deterministic(plan: None, t: Tensor) -> tuple[Tensor]:
    return (t * (2 if torch.are_deterministic_algorithms_enabled() else 1),)


def deterministic_algorithms_have_tapes_of_their_own() -> None:
    tapes, t = Tapes(), torch.randn(3)
    for _ in range(3):
        for deterministic in [False] * 3 + [True] * 5 + [False]:
            torch.use_deterministic_algorithms(deterministic)
            (found,) = tapes.run(doubled_where_deterministic, None, t)
            assert torch.equal(found, t * (1 + deterministic))
    assert len([known for known in tapes.by_kind.values() if known.replay]) == 2


def test_deterministic_algorithms_have_tapes_of_their_own(restore_determinism: None) -> None:
    deterministic_algorithms_have_tapes_of_their_own()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_tapes_under_deterministic_algorithms_are_dense_attention(
    restore_determinism: None, kernel: str
) -> None:
    """Recorded without, then called with and without in turn: right each time, alike to the bit."""
    given = [torch.randn(2, 20, h, 8, requires_grad=True) for h in (4, 2, 2)]
    plan = RingPlan.make(*given, causal=True, kernel=kernel)
    leaves = [t.detach().double().requires_grad_() for t in given]
    dense = dense_attention(*leaves, causal=True)
    dout = torch.randn(2, 20, 4, 8)
    want = [*dense, *torch.autograd.grad(dense[0], leaves, dout.double())]
    first = None
    for call in range(12):
        torch.use_deterministic_algorithms(call % 4 > 1)
        out, lse = ring_attn(*given, plan=plan, return_lse=True)
        found = [out, lse, *torch.autograd.grad(out, given, dout)]
        for a, b in zip(found, want):
            assert relative_error(a, b) < 1e-5
        first = first or found
        assert all(map(torch.equal, found, first))
    assert len(replayed(plan)) == 4


@pytest.fixture
def restore_determinism() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(was)


def test_autocast_is_no_matter_of_tapes() -> None:
    given = [t.detach() for t in tensors("causal", torch.float32)]
    plan = RingPlan.make(*[t.bfloat16() for t in given], causal=True, softclamp=3.0)
    found = [ring_attn(*[t.bfloat16() for t in given], plan=plan) for _ in range(4)]
    with torch.autocast("cpu", torch.bfloat16):
        found += [ring_attn(*given, plan=plan) for _ in range(4)]
    assert all(torch.equal(out, found[0]) for out in found)


def test_transforms_and_traces_have_no_tapes() -> None:
    given = [t.detach().double() for t in tensors("causal", torch.float32)]
    plan = RingPlan.make(*given, causal=True, kernel="eager")
    for _ in range(4):
        out = ring_attn(*given, plan=plan)
    assert replayed(plan) == ["forward"]
    along = [torch.randn_like(t) for t in given]
    primal, _ = torch.func.jvp(lambda *q: ring_attn(*q, plan=plan), tuple(given), tuple(along))
    torch.testing.assert_close(primal, out)
    grad = torch.func.grad(lambda q: ring_attn(q, *given[1:], plan=plan).sum())(given[0])
    assert grad.isfinite().all()
    with FlopCounterMode(display=False) as counter:
        ring_attn(*given, plan=plan)
    assert counter.get_total_flops() > 0


def test_second_order_is_that_of_no_tape() -> None:
    given = tensors("causal", torch.float64)
    plan = RingPlan.make(*given, causal=True, kernel="eager")
    for _ in range(5):
        grads = torch.autograd.grad(
            ring_attn(*given, plan=plan).square().sum(), given, create_graph=True
        )
        twice = torch.autograd.grad(grads[0].square().sum(), given)
    direct = untaped(given, causal=True, kernel="eager")
    grads = torch.autograd.grad(
        ring_attn(*given, plan=direct).square().sum(), given, create_graph=True
    )
    for taped_one, computed in zip(twice, torch.autograd.grad(grads[0].square().sum(), given)):
        assert torch.equal(taped_one, computed)


X = torch.zeros(2, 3)


class Counted:
    """A tape of calls of the same shapes, which counts how often it was run."""

    made: ClassVar[list["Counted"]] = []

    def __init__(self) -> None:
        self.runs = 0
        Counted.made.append(self)

    @staticmethod
    def key(given: tuple) -> tuple | None:
        return None if given[0].dtype == torch.int64 else tuple(t.shape for t in given)

    def run(self, function: Any, owner: Any, given: tuple) -> Any:
        self.runs += 1
        return self, function(owner, *given)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    Counted.made.clear()
    monkeypatch.setattr(tape, "Tape", Counted)
    return Tapes()


def double(owner: object, t: torch.Tensor) -> torch.Tensor:
    return 2 * t


def negate(owner: object, t: torch.Tensor) -> torch.Tensor:
    return -t


def test_calls_of_a_kind_share_a_tape_and_others_have_their_own(tapes):
    first, out = tapes.run(double, None, X + 1)
    assert torch.equal(out, X + 2)
    assert tapes.run(double, None, X)[0] is first
    assert tapes.run(negate, None, X)[0] is not first
    assert tapes.run(double, None, X[:1])[0] is not first
    assert first.runs == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [("_get_deterministic_algorithms", True), ("_get_float32_matmul_precision", "another")],
)
def test_global_settings_are_part_of_the_kind(tapes, setting, value):
    first, _ = tapes.run(double, None, X)
    with mock.patch.object(torch._C, setting, return_value=value):
        assert tapes.run(double, None, X)[0] is not first
    assert tapes.run(double, None, X)[0] is first


def test_what_is_of_no_kind_is_not_recorded(tapes):
    assert torch.equal(tapes.run(double, None, X.long()), X.long())
    assert Counted.made == []


def test_other_memory_drops_all_tapes(tapes):
    memory = ["one"]
    tapes.follow = lambda: memory[0]
    first, _ = tapes.run(double, None, X)
    memory[0] = "another"
    second, _ = tapes.run(double, None, X)
    assert second is not first
    memory[0] = "one"  # it was left by the other ranks, too
    assert tapes.run(double, None, X)[0] not in (first, second)


def test_no_more_than_so_many_kinds_are_kept(tapes):
    given = [torch.zeros(n) for n in range(tape._KINDS + 1)]
    first, _ = tapes.run(double, None, given[0])
    for t in given[1 : tape._KINDS]:
        tapes.run(double, None, t)
    assert tapes.run(double, None, given[0])[0] is first
    tapes.run(double, None, given[tape._KINDS])
    assert tapes.run(double, None, given[0])[0] is not first


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_a_copy_has_none(tapes, copied):
    first, _ = tapes.run(double, None, X)
    again = copied(tapes)
    assert again.run(double, None, X)[0] is not first
