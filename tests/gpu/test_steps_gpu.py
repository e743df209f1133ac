"""Ranks out of step on GPUs, where the host is far ahead: nobody goes on with wrong numbers.

What a rank gets that is not for it is NaN, and the next call or plan raises. Over NCCL, where a
message of another size came, PyTorch ends the process, after our report. Two processes share a GPU
where there is one.

`python -m tests.gpu.test_steps_gpu shared` prints what becomes of each, or `nccl`.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingError, RingPlan, fail_together, ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.ranks import Pool
from tests.support.reference import dense_attention, relative_error

SIZE, OTHER, TIMEOUT = 2, 1, 6.0
Layer = Callable[[], None]

WAYS = ["one by one", "one graph"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Run:
    """One rank's layers in one way, and all results that it got."""

    def __init__(self, ring: Ring, way: str, transport: str, ulysses: int) -> None:
        self.ring, self.way, self.rank = ring, way, ring.rank
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.options = dict(transport=transport, ulysses=ulysses, kernel="eager", group=ring)
        self.results: list[tuple[str, Tensor, Tensor]] = []
        self.plans = [self.plan(causal) for causal in (False, True)]
        self.graphs = [self.captured(i) for i in (0, 1)] if way == "one graph" else []

    def shard(self, seed: int) -> list[Tensor]:
        draw = torch.Generator(self.device).manual_seed(seed)
        whole = (torch.randn(1, 128, 2, 64, device=self.device, generator=draw) for _ in range(4))
        return [t.double() for t in whole]

    def mine(self, t: Tensor) -> Tensor:
        return t.chunk(SIZE, dim=1)[self.rank].detach().clone()

    def plan(self, causal: bool) -> RingPlan:
        q = self.mine(self.shard(0)[0])
        plan = RingPlan.make(q, q, q, causal=causal, layout="contiguous", **self.options)
        given = [self.mine(t).requires_grad_() for t in self.shard(0)[:3]]
        out = ring_attn(*given, plan=plan)
        torch.autograd.grad(out.sum(), given)
        return plan

    def wait(self) -> None:
        """Let the host wait for the device, and for the other ranks' hosts."""
        torch.cuda.synchronize()
        self.ring.gather_bytes(b"", 1)

    def captured(self, which: int) -> tuple[list[Tensor], Layer, list[Tensor], Layer]:
        """Memory of a layer's tensors and its results, and what replays it, forward and back."""
        given = [self.mine(t) for t in self.shard(0)]
        leaves = [t.requires_grad_() for t in given[:3]]
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.wait()
        with torch.cuda.graph(forward):
            out = ring_attn(*leaves, plan=self.plans[which])
        with torch.cuda.graph(backward, pool=forward.pool()):
            grads = torch.autograd.grad(out, leaves, given[3])
        self.wait()
        return given, forward.replay, [out.detach(), *grads], backward.replay

    def forward(self, which: int, seed: int) -> Layer:
        """A layer of that plan, forward; its backward is returned."""
        whole = self.shard(seed)
        leaves = [t.requires_grad_() for t in whole[:3]]
        with self.device:
            wants, _ = dense_attention(*leaves, causal=bool(which))
        exact = torch.autograd.grad(wants, leaves, whole[3], retain_graph=True)
        wants, exact = self.mine(wants), [self.mine(t) for t in exact]
        if self.way == "one graph":
            return self.replayed(which, whole, wants, exact)
        given = [self.mine(t).requires_grad_() for t in whole]
        out = ring_attn(*given[:3], plan=self.plans[which])
        self.results.append(("out", out.detach(), wants))

        def backward() -> None:
            grads = torch.autograd.grad(out, given[:3], given[3].detach())
            self.results += zip(("dq", "dk", "dv"), grads, exact)

        return backward

    def replayed(self, which: int, whole: list[Tensor], want: Tensor, exact: list[Tensor]) -> Layer:
        given, forward, results, back = self.graphs[which]
        with torch.no_grad():
            for place, t in zip(given, whole):
                place.copy_(self.mine(t))
        forward()
        self.results.append(("out", results[0].clone(), want))

        def backward() -> None:
            back()
            self.results += zip(("dq", "dk", "dv"), [t.clone() for t in results[1:]], exact)

        return backward

    def fail(self) -> None:
        """As where a kernel finds no memory, and the error is caught."""
        try:
            with self.plans[0].ring.call("ring attention, forward", self.plans[0].number, None):
                raise MemoryError
        except MemoryError:
            pass

    def wrong(self) -> list[str]:
        """Results that are neither right nor NaN where they are not."""
        found = []
        for name, got, want in self.results:
            number = ~got.isnan()
            if number.any() and relative_error(got[number], want[number]) > 1e-9:
                found.append(name)
        return found

    def spoiled(self) -> bool:
        return any(got.isnan().any().item() for _, got, _ in self.results)


def skips_backward(run: Run) -> None:
    backward = run.forward(0, 1)
    if run.rank != OTHER:
        backward()
    run.forward(0, 2)()


def fails_in_forward_and_goes_on(run: Run) -> None:
    if run.rank == OTHER:
        run.fail()
    else:
        run.forward(0, 1)
    run.forward(0, 2)()


def recomputes_alone(run: Run) -> None:
    backward = run.forward(0, 1)
    if run.rank == OTHER:
        run.forward(0, 1)
    backward()


def calls_in_another_order(run: Run) -> None:
    for which in (0, 1) if run.rank == OTHER else (1, 0):
        run.forward(which, 1)


def holds_another_plan(run: Run) -> None:
    run.forward(int(run.rank == OTHER), 1)()


def swaps_backwards(run: Run) -> None:
    backwards = [run.forward(0, 1), run.forward(0, 2)]
    for backward in backwards if run.rank == OTHER else backwards[::-1]:
        backward()


def stays_in_step(run: Run) -> None:
    run.forward(0, 1)()
    run.forward(1, 2)()


EVENTS = {
    event.__name__: event
    for event in (
        skips_backward, fails_in_forward_and_goes_on, recomputes_alone, calls_in_another_order,
        holds_another_plan, swaps_backwards, stays_in_step,
    )
}  # fmt: skip


def outcome(ring: Ring, event: str, transport: str, way: str, ulysses: int = 1) -> dict:
    """Return this rank's result, and when it heard of it; then all is right again."""
    run = Run(ring, way, transport, ulysses)
    run.wait()
    begin, heard = time.monotonic(), None
    try:
        EVENTS[event](run)
    except RingError as error:
        heard = str(error)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    wrong, spoiled = run.wrong(), run.spoiled()
    try:
        run.plan(causal=False)  # tells all ranks, and mends the ring
    except RingError as error:
        heard = heard or str(error)
    run.results = []
    stays_in_step(run)
    torch.cuda.synchronize()
    right = not run.wrong() and not run.spoiled()
    return dict(wrong=wrong, spoiled=spoiled, heard=heard, seconds=seconds, right_again=right)


def in_shared_memory(*how: Any) -> dict:
    """For a pool: the same."""
    return outcome(Ring(), *how)


def over_nccl(said: Path, *how: Any) -> dict:
    """For a pool: the same, as if GPUs shared no memory. What is reported goes to a file."""
    report_to(said)
    with mock.patch.object(Ring, "shared", return_value=None):
        return outcome(Ring(), *how)


def report_to(file: Path) -> None:
    """Write there what this process, and any library in it, writes to its standard error."""
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())


def fails_alone(said: Path) -> None:
    """For a pool: the others hear of it in `fail_together`."""
    report_to(said)
    with fail_together(), mock.patch.object(Ring, "shared", return_value=None):
        run = Run(Ring(), "one by one", "ring", 1)
        run.wait()
        call = run.ring.call("ring attention, forward", run.plans[0].number, None)
        with call if run.rank == OTHER else nullcontext():
            if run.rank == OTHER:
                raise MemoryError
            run.forward(0, 1)
            run.wait()


def check(event: str, answers: list[tuple[str, dict]]) -> None:
    for _, found in answers:
        assert not found["wrong"], answers
        assert found["seconds"] < TIMEOUT + 3.0, answers
        assert found["right_again"], answers
    if event == "stays_in_step":
        assert all(f["heard"] is None and not f["spoiled"] for _, f in answers), answers
    else:
        assert all(f["heard"] is not None or not f["spoiled"] for _, f in answers), answers
        assert any(f["heard"] is not None for _, f in answers), answers


@pytest.fixture(scope="module")
def pool():
    pool = Pool(SIZE, timeout=100.0, group_timeout=TIMEOUT, backend="nccl")
    yield pool
    pool.stop()


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("event", EVENTS)
def test_in_shared_memory(event, way, ulysses, pool):
    if (event, way) == ("swaps_backwards", "one graph"):
        pytest.skip("a graph of the user's repeats the numbers that it was captured with")
    answers = pool.answers(in_shared_memory, event, "gather", way, ulysses)
    assert all(kind == "ok" for kind, _ in answers), answers
    check(event, answers)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("event", EVENTS)
def test_over_nccl(event, transport, tmp_path):
    pool, said = Pool(SIZE, 4 * TIMEOUT, TIMEOUT, "nccl"), tmp_path / "said"
    answers = pool.answers(over_nccl, said, event, transport, "one by one")
    pool.stop()
    alive = [(kind, found) for kind, found in answers if kind == "ok"]
    assert not any(found["wrong"] for _, found in alive), answers
    if len(alive) < SIZE:
        assert "waits for rank" in said.read_text(), answers
    else:
        check(event, answers)


def test_in_fail_together_the_others_hear_of_it_at_once_over_nccl(tmp_path):
    """PyTorch ends their process some time later."""
    pool, said = Pool(SIZE, timeout=60.0, group_timeout=100.0, backend="nccl"), tmp_path / "said"
    _, (_, raised) = pool.answers(fails_alone, said)
    pool.stop()
    assert raised.startswith("MemoryError")
    assert "ncclRemoteError" in said.read_text()


def main() -> None:
    """Print what becomes of each."""
    pool = Pool(SIZE, timeout=40.0, group_timeout=TIMEOUT, backend="nccl")
    cases = {
        "shared": product([in_shared_memory], EVENTS, ["gather"], WAYS, [1, 2]),
        "nccl": product([over_nccl], [Path(os.devnull)], EVENTS, ["ring", "gather"], WAYS[:1]),
    }
    for case in cases[sys.argv[1]]:
        answers = pool.answers(*case)
        print("\n", *case[1:], flush=True)
        for rank, (kind, found) in enumerate(answers):
            print("   rank", rank, kind, found, flush=True)
        if any(kind != "ok" for kind, _ in answers):
            pool.stop()


if __name__ == "__main__":
    main()
    sys.exit()
