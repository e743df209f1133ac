"""The GPUs of this host as two machines: is attention right, how long does it take, what crosses?

    python -m tests.gpu.machines                             2k and 8k tokens, 8, 2 and 1 key heads
    python -m tests.gpu.machines --only right                each kernel against dense attention
    python -m tests.gpu.machines --only times --ranks 1      machines of one rank
    python -m tests.gpu.machines --only inside               memory that ranks of a machine share
    python -m tests.gpu.machines --only decode               a step with a cache
    python -m tests.gpu.machines --only graphs               can NCCL's messages be captured?
    python -m tests.gpu.machines --device cpu --tokens 64    a trial of this script, without GPUs

Each half of the GPUs is a machine: torchrun is started twice, with names of machines for NCCL and
for us, and with sockets between. Inside one NCCL uses NVLink. Bytes and results are evidence, times
are of sockets over loopback (some 1.7 GB/s a rank). An option that fails is told, and others go on.
After `--within` seconds nothing more is begun. A machine has two ranks at least, unless `--ranks`
says otherwise: two GPUs are those of both machines, and one GPU is that of all four ranks, for
which NCCL takes each for a host.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lib.machines import received, start, take_gpu
from ring_attention_pytorch import (
    RingCache,
    RingPlan,
    explain_plan,
    ring_attn,
    ring_attn_with_cache,
    shard_sequence,
)
from ring_attention_pytorch.comm import transports
from ring_attention_pytorch.comm.fabric_machines import MachineMemory
from ring_attention_pytorch.comm.fabric_relays import Relays
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.comm.symmetric_memory import near_by, shared_by
from ring_attention_pytorch.kernels import refusal
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.plan.over_machines import is_relayed, plan_crossing
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from ring_attention_pytorch.schedule import relays
from tests.support.late_streams import delays

HEADS, D = 32, 128
BOUND = 1.5e-2  # of bfloat16's errors
INSIDE = "sdpa-cudnn", "triton"
KERNELS = ("sdpa-cudnn", "triton", "flash-attn-4")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": dict(),
    "ring": dict(transport="ring", ulysses=1),
    "gather, directly": dict(transport="gather", ulysses=1),
    "gather by relays": dict(transport="gather", ulysses=1),
    "ulysses in a machine": dict(transport="gather", ulysses=-1),
    "ulysses over all": dict(ulysses=0),
}


class Bench:
    """Whole tensors, the same on each rank, and what dense attention makes of them."""

    def __init__(self, device: torch.device, tokens: int, key_heads: int) -> None:
        size = dist.get_world_size()
        draw = torch.Generator(device=device).manual_seed(1)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = (HEADS, key_heads, key_heads, HEADS)
        self.device = device
        self.whole = [
            torch.randn(1, tokens * size, h, D, device=device, dtype=dtype, generator=draw)
            for h in heads
        ]
        *qkv, dout = (t.transpose(1, 2) for t in self.whole)
        leaves = [t.detach().requires_grad_() for t in qkv]
        out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        out.backward(dout)
        self.want = [t.transpose(1, 2) for t in (out.detach(), *(t.grad for t in leaves))]
        self.mine = [
            shard_sequence(t, layout="zigzag").detach().requires_grad_() for t in self.whole[:3]
        ]
        self.dout = shard_sequence(dout.transpose(1, 2), layout="zigzag")

    def plan(self, name: str, **how: Any) -> RingPlan:
        size, here = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        if "ulysses" in how:
            how["ulysses"] = {0: size, -1: here}.get(how["ulysses"], how["ulysses"])
        plan = RingPlan.make(*self.mine, causal=True, layout="zigzag", **how)
        if name == "gather, directly":
            plan = plan.by(Gather.make(plan.ring, plan.blocks, size))
        return plan

    def step(self, plan: RingPlan) -> Tensor:
        for t in self.mine:
            t.grad = None
        out = ring_attn(*self.mine, plan=plan)
        out.backward(self.dout)
        return out.detach()

    def error(self, plan: RingPlan) -> float:
        """The worst relative error of any result of this rank."""
        found = [self.step(plan), *(t.grad for t in self.mine)]
        parts = [shard_sequence(t, layout="zigzag").float() for t in self.want]
        return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, parts))

    def times(self, plan: RingPlan, rounds: int) -> tuple[float, float]:
        """Milliseconds of a step, and MiB that all ranks receive over loopback in it."""
        return timed(partial(self.step, plan), self.device, steps=3, rounds=rounds)


def timed(
    call: Callable[[], object], device: torch.device, steps: int, rounds: int = 3
) -> tuple[float, float]:
    """Milliseconds of a call, the best of some rounds of `steps`; and MiB over loopback in it."""
    for _ in range(2):
        call()
    found, before = [], received()
    for _ in range(rounds):
        wait_for_all(device)
        began = time.perf_counter()
        for _ in range(steps):
            call()
        wait_for_all(device)
        found.append(1e3 * (time.perf_counter() - began) / steps)
    return min(found), (received() - before) / (rounds * steps) / 2**20


def wait_for_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def say(*words: object, sep: str = " ") -> None:
    if dist.get_rank() == 0:
        print(*words, sep=sep, flush=True)


class Attempts:
    """Attempts in their order: each is begun by all ranks, or by none once the time is up."""

    def __init__(self, device: torch.device, within: float) -> None:
        self.device, self.within, self.began = device, within, time.monotonic()
        self.wrong: list[str] = []

    def __call__(self, name: str, do: Callable[[], str], must: bool = False) -> None:
        """Say what one makes of it; one that `must` be possible is wrong if it is refused."""
        gone = torch.tensor([time.monotonic() - self.began], device=self.device)
        dist.broadcast(gone, 0)
        if gone.item() > self.within:
            say(f"{name:28s} left out: {gone.item():.0f} s are gone")
            return
        try:
            told = do()
        except (ValueError, ImportError, torch.cuda.OutOfMemoryError) as error:  # all ranks alike
            told = f"{type(error).__name__}: {str(error)[:300]}"
            self.wrong += [name] * must
        except AssertionError as error:  # all ranks alike
            told = f"WRONG: {error}"
            self.wrong.append(name)
        say(f"{name:28s} {told}   ({gone.item():.0f} s)")


def rank(asked: argparse.Namespace) -> None:
    backend, more, device = "gloo", {}, torch.device("cpu")
    if asked.device == "cuda":
        device = take_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        backend, more = "nccl", dict(device_id=device)
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **more)
    attempt, ring = Attempts(device, asked.within), Ring()
    say("machines of ranks:", ring.machines, torch.__version__)
    assert len({*ring.machines}) == 2, "not two machines"
    assert shared_by(ring, device) is None, "machines share memory"
    for part in asked.only:
        PARTS[part](asked, device, attempt)
    dist.barrier()
    dist.destroy_process_group()
    if attempt.wrong:
        sys.exit(f"wrong: {attempt.wrong}")


def right(asked: argparse.Namespace, device: torch.device, attempt: Attempts) -> None:
    """Say the errors of each kernel, by relays and by default, and which kernels can't run here."""
    bench = Bench(device, asked.tokens[0], 8)
    case = KernelRequest.of(bench.mine[0], bench.mine[2])
    for kernel in asked.kernels if device.type == "cuda" else ("sdpa", "eager", "triton"):
        if (why := refusal(kernel, case)) is not None:
            say(f"{kernel:28s} skipped: it {why}")
            continue
        for name in ("gather by relays", "default"):

            def error(name: str = name, kernel: str = kernel) -> str:
                worst = most(bench.error(bench.plan(name, **OPTIONS[name], kernel=kernel)), device)
                assert worst < BOUND, f"worst relative error of any rank {worst:.1e}"
                return f"worst relative error of any rank {worst:.1e}"

            attempt(f"{kernel}, {name}", error, must=True)


def inside(asked: argparse.Namespace, device: torch.device, attempt: Attempts) -> None:
    """Say whether ranks of a machine share memory, and compare it with messages."""
    near = near_by(Ring(), device)
    say("each machine's memory:", "none" if near is None else f"ranks {near.ranks}")
    if near is None:
        return
    few = Bench(device, 256, 2)
    for memory in (None, 0):
        attempt(f"eager, memory={memory}", partial(repeated, few, memory))
    bench = Bench(device, asked.tokens[0], 2)
    for kernel, memory in product(INSIDE, (None, 0)):
        attempt(f"{kernel}, memory={memory}", partial(compared, bench, kernel, memory))


def in_memory(bench: "Bench", **how: Any) -> RingPlan:
    """A plan whose keys are copied inside machines; a ValueError if they are not."""
    plan = bench.plan("", transport="gather", ulysses=1, **how)
    if type(plan.transport.fabric) is not MachineMemory:
        raise ValueError(f"its fabric is {type(plan.transport.fabric).__name__}")
    return plan


def repeated(bench: "Bench", memory: int | None) -> str:
    """Steps give the same bits, also if streams are late and slots full of NaN."""
    plan = in_memory(bench, kernel="eager", memory=memory)
    worst, differ = bench.error(plan), 0
    want = [t.clone() for t in (bench.step(plan), *(t.grad for t in bench.mine))]
    for late in (False, True, True, False):
        with delays() if late else nullcontext():
            for _ in range(3):
                got = bench.step(plan), *(t.grad for t in bench.mine)
                differ += not all(map(torch.equal, want, got))
    worst, differ = most(worst, bench.device), int(most(differ, bench.device))
    assert worst < BOUND, f"error {worst:.1e}"
    assert not differ, f"{differ} of 12 steps differ"
    return f"error {worst:.1e}, 12 steps of the same bits"


def compared(bench: "Bench", kernel: str, memory: int | None) -> str:
    """Errors, times and bytes over loopback of memory inside machines, and of messages there."""
    shared = in_memory(bench, kernel=kernel, memory=memory)
    plan_cache.forget()  # what is patched is no part of what a plan is found by
    with mock.patch.object(transports, "near_by", return_value=None):
        sent = bench.plan("", transport="gather", ulysses=1, kernel=kernel, memory=memory)
    if type(sent.transport.fabric) is not Relays:
        raise ValueError(f"its fabric is {type(sent.transport.fabric).__name__}")
    lines = []
    for name, plan in (("memory", shared), ("messages", sent)):
        worst = most(bench.error(plan), bench.device)
        assert worst < BOUND, f"{name}: error {worst:.1e}"
        took, came = bench.times(plan, rounds=2)
        lines.append(f"{name}: error {worst:.1e}, {took:.1f} ms, {came:.1f} MiB")
    return "; ".join(lines)


def most(number: float, device: torch.device) -> float:
    """The largest of all ranks' numbers."""
    found = torch.tensor([number], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def times(asked: argparse.Namespace, device: torch.device, attempt: Attempts) -> None:
    """Say errors, milliseconds and bytes of each option; those of the planner are beside them.

    Sockets are not steady: all options take turns, and the best turn counts. At the end, how long
    the default takes beside the fastest of the other options, which may go the same way.
    """
    columns: list[str] = []
    for key_heads, tokens in product(asked.key_heads, asked.tokens):
        say(f"{tokens} tokens a GPU, {HEADS} query and {key_heads} key heads of {D}")
        bench, plans = Bench(device, tokens, key_heads), dict[str, RingPlan]()
        for name, how in OPTIONS.items():

            def right(
                name: str = name,
                how: dict[str, Any] = how,
                bench: Bench = bench,
                plans: dict[str, RingPlan] = plans,
            ) -> str:
                plan = bench.plan(name, **how)
                told = f"worst relative error of any rank {most(bench.error(plan), device):.1e}"
                plans[name] = plan
                if name == "default":
                    lines = explain_plan(plan).splitlines()
                    about = [each for each in lines if "machines" in each or each.startswith("by ")]
                    told += "".join(f"\n    {each}" for each in about)
                return told

            attempt(name, right)

        def measured(
            column: str = f"{key_heads} key heads, {tokens} tokens a GPU",
            bench: Bench = bench,
            plans: dict[str, RingPlan] = plans,
        ) -> str:
            found = turns(bench, plans, asked.turns)
            if {"default"} < {*found}:
                columns.append(f"{column}: {beside_the_best(found, plans)}")
            return "".join(
                f"\n    {name:24s} {took:8.2f} ms {came:8.1f} MiB, planned "
                f"{plan_crossing(plans[name]).total / 2**20:8.1f}"
                for name, (took, came) in found.items()
            )

        attempt("milliseconds and MiB of both passes", measured)
    say("the default's time over the best option's, at most 1.05 is wanted", *columns, sep="\n    ")


def turns(bench: Bench, plans: dict[str, RingPlan], number: int) -> dict[str, tuple[float, float]]:
    """Milliseconds and MiB of each plan: the best of so many turns."""
    found = {name: (float("inf"), 0.0) for name in plans}
    for _ in range(number):
        for name, plan in plans.items():
            found[name] = min(found[name], bench.times(plan, rounds=2))
    return found


def beside_the_best(found: dict[str, tuple[float, float]], plans: dict[str, RingPlan]) -> str:
    """The default's time over the fastest other option's, and which that is."""
    best = min((name for name in found if name != "default"), key=lambda name: found[name])
    ways = [(p.chosen.name, p.degree, is_relayed(p)) for p in (plans["default"], plans[best])]
    same = ", which goes the same way" if ways[0] == ways[1] else ""
    return f"{found['default'][0] / found[best][0]:.3f} ({best}{same})"


def decode(asked: argparse.Namespace, device: torch.device, attempt: Attempts) -> None:
    """Say milliseconds and bytes of a step with a cache, merged by machine and directly."""
    say("a token each, with a cache of 4096 tokens a sequence, heads as above")
    for sequences in (1, 64):
        for name in ("by machine", "directly"):
            measured = partial(decoded, device, sequences, name == "directly")
            attempt(f"{sequences} sequences, {name}", measured)


def decoded(device: torch.device, sequences: int, directly: bool, held: int = 4096) -> str:
    draw = torch.Generator(device=device).manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    held = held if device.type == "cuda" else 64

    def normal(tokens: int, heads: int) -> Tensor:
        shape = sequences, tokens, heads, D
        return torch.randn(shape, device=device, dtype=dtype, generator=draw)

    cache = RingCache(sequences, 8, D, dtype=dtype, device=device)
    k, v, q = normal(held, 8), normal(held, 8), normal(1, HEADS)
    cache.append(k, v)
    with mock.patch.object(relays, "_EXCHANGE", 1 << 60 if directly else 0):
        out = ring_attn_with_cache(q, None, None, cache)
        step = partial(ring_attn_with_cache, q, None, None, cache)
        took, came = timed(step, device, 10)
    repeat = (t.float().repeat_interleave(HEADS // 8, dim=2).transpose(1, 2) for t in (k, v))
    want = scaled_dot_product_attention(q.float().transpose(1, 2), *repeat).transpose(1, 2)
    worst = most(((out.float() - want).norm() / want.norm()).item(), device)
    return f"{took:8.3f} ms {1024 * came:8.1f} KiB, error {worst:.1e}"


def graphs(asked: argparse.Namespace, device: torch.device, attempt: Attempts) -> None:
    """Say whether a CUDA graph holds messages between machines, and a whole step."""
    if device.type != "cuda":
        say("graphs need CUDA")
        return
    attempt("NCCL's messages in a graph", partial(messages_in_graph, device))
    bench = Bench(device, asked.tokens[0], 8)
    for name in ("gather by relays", "default"):
        attempt(f"{name}, in a graph", partial(step_in_graph, bench, name))


def messages_in_graph(device: torch.device) -> str:
    """Capture an exchange with the rank half a ring away, on the other machine; replay it twice."""
    me, size = dist.get_rank(), dist.get_world_size()
    peer = (me + size // 2) % size
    sent, came = torch.empty(2, 1 << 20, device=device).unbind()

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, came, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    run, wrong = captured(exchange), 0.0
    for turn in range(2):
        sent.fill_(10 * turn + me)
        came.zero_()
        run()
        torch.cuda.synchronize()
        wrong = max(wrong, (came - (10 * turn + peer)).abs().max().item())
    took, _ = timed(run, device, 3)
    plain, _ = timed(exchange, device, 3)
    return f"error {most(wrong, device):.0f}, {took:.2f} ms, without a graph {plain:.2f} ms"


def step_in_graph(bench: Bench, name: str) -> str:
    """Capture forward and backward of a plan; replay it with other values."""
    plan = bench.plan(name, **OPTIONS[name])
    want = [t.detach().clone() for t in (bench.step(plan), *(t.grad for t in bench.mine))]
    found: list[Tensor] = []

    def step() -> None:
        found[:] = [bench.step(plan), *(t.grad for t in bench.mine)]

    run = captured(step)
    with torch.no_grad():
        bench.mine[2].mul_(2)  # v: out is twice as large, and so are the gradients of q and k
    run()
    torch.cuda.synchronize()
    with torch.no_grad():
        bench.mine[2].mul_(0.5)
    factors = (2, 2, 2, 1)
    errors = [((a - f * b).norm() / b.norm()).item() for a, b, f in zip(found, want, factors)]
    took, _ = timed(run, bench.device, 3)
    plain, _ = timed(partial(bench.step, plan), bench.device, 3)
    worst = most(max(errors), bench.device)
    return f"error {worst:.1e}, {took:.2f} ms, without a graph {plain:.2f} ms"


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Run a call three times, and capture it; an error of the capture is a ValueError."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        raise ValueError(f"not captured: {error}") from error
    return graph.replay


PARTS: dict[str, Callable[[argparse.Namespace, torch.device, Attempts], None]] = {
    "right": right,
    "inside": inside,
    "times": times,
    "decode": decode,
    "graphs": graphs,
}


def main(argv: Sequence[str] | None = None) -> int:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ask.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    ask.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    ask.add_argument("--key-heads", type=int, nargs="+", default=[8, 2, 1])
    ask.add_argument("--only", nargs="+", default=[*PARTS], choices=[*PARTS])
    ask.add_argument("--kernels", nargs="+", default=KERNELS, help="that are right")
    ask.add_argument("--within", type=float, default=600.0, help="seconds")
    ask.add_argument("--ranks", type=int, help="of a machine")
    ask.add_argument("--turns", type=int, default=3, help="of each option that is timed")
    asked = ask.parse_args(argv)
    if dist.is_torchelastic_launched():
        rank(asked)
        return 0
    words = sys.argv[1:] if argv is None else argv
    return start(2, "tests.gpu.machines", words, asked.device, asked.ranks)


if __name__ == "__main__":
    sys.exit(main())
