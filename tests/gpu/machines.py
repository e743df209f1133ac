"""The GPUs of this host as two machines: is attention right, how long does it take, what crosses?

    python -m tests.gpu.machines                             2k and 8k tokens, 8, 2 and 1 key heads
    python -m tests.gpu.machines --only right                each kernel against dense attention
    python -m tests.gpu.machines --device cpu --tokens 64    a trial of this script, without GPUs

Each half of the GPUs is a machine: torchrun is started twice, with names of machines for NCCL and
for us, and with sockets between. Inside one NCCL uses NVLink. Bytes and results are evidence, times
are of sockets over loopback (some 1.7 GB/s a rank). An option that fails is told, and others go on.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ring_attention_pytorch import RingPlan, explain_plan, ring_attn, shard_sequence
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.comm.symmetric_memory import shared_by
from ring_attention_pytorch.plan.over_machines import plan_crossing
from ring_attention_pytorch.ranks.ring import Ring

ROOT = Path(__file__).parents[2]
HEADS, D = 32, 128
KERNELS = ("sdpa-cudnn", "triton", "flash-attn-4")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": dict(),
    "ring": dict(transport="ring", ulysses=1),
    "gather, directly": dict(transport="gather", ulysses=1),
    "gather by relays": dict(transport="gather", ulysses=1),
    "ulysses in a machine": dict(transport="gather", ulysses=-1),
    "ulysses over all": dict(ulysses=0),
}


def start(machines: int, words: list[str]) -> int:
    """Start torchrun for each machine; return the worst exit status."""
    on_cpu = "cpu" in words
    gpus = 2 * machines if on_cpu else torch.cuda.device_count()
    each, running = gpus // machines, []
    for number in range(machines):
        env = os.environ | {
            "NCCL_HOSTID": f"machine{number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        if not on_cpu:
            mine = range(number * each, (number + 1) * each)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines),
            "--node-rank", str(number), "--nproc-per-node", str(each),
            "--master-addr", "127.0.0.1", "--master-port", "29517",
            "-m", "tests.gpu.machines", "--rank", *words,
        ]  # fmt: skip
        running.append(subprocess.Popen(command, env=env, cwd=ROOT))
    return max(process.wait() for process in running)


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

    def times(self, plan: RingPlan, steps: int = 3) -> tuple[float, float]:
        """Milliseconds of a step, and MiB that all ranks receive over loopback in it."""
        for _ in range(3):
            self.step(plan)
        self.wait()
        before, began = received(), time.perf_counter()
        for _ in range(steps):
            self.step(plan)
        self.wait()
        seconds = time.perf_counter() - began
        return 1e3 * seconds / steps, (received() - before) / steps / 2**20

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def received() -> int:
    """Bytes that came over loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def attempt(name: str, do: Callable[[], str]) -> None:
    try:
        told = do()
    except (ValueError, ImportError, torch.cuda.OutOfMemoryError) as error:  # all ranks alike
        told = f"{type(error).__name__}: {str(error)[:300]}"
    say(f"{name:28s} {told}")


def rank(asked: argparse.Namespace) -> None:
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(asked.device, local if asked.device == "cuda" else None)
    backend, more = "gloo", {}
    if asked.device == "cuda":
        torch.cuda.set_device(device)
        backend, more = "nccl", dict(device_id=device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60), **more)
    ring = Ring()
    say("machines of ranks:", ring.machines, torch.__version__)
    assert len({*ring.machines}) == 2, "not two machines"
    assert shared_by(ring, device) is None, "machines share memory"
    if "right" in asked.only:
        right(Bench(device, asked.tokens[0], 8))
    for key_heads in asked.key_heads if "times" in asked.only else ():
        for tokens in asked.tokens:
            say(f"{tokens} tokens a GPU, {HEADS} query and {key_heads} key heads of {D}")
            table(Bench(device, tokens, key_heads))
    dist.barrier()
    dist.destroy_process_group()


def right(bench: Bench) -> None:
    """Say the errors of each kernel, by relays and by default."""
    for kernel in KERNELS if bench.device.type == "cuda" else ("sdpa", "eager"):
        for name in ("gather by relays", "default"):

            def error(name: str = name, kernel: str = kernel) -> str:
                worst = torch.tensor(bench.error(bench.plan(name, **OPTIONS[name], kernel=kernel)))
                everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
                if bench.device.type == "cuda":
                    worst, everyone = worst.cuda(), [t.cuda() for t in everyone]
                dist.all_gather(everyone, worst)
                return f"worst relative error {max(t.item() for t in everyone):.1e}"

            attempt(f"{kernel}, {name}", error)


def table(bench: Bench) -> None:
    """Say milliseconds and bytes of each option; that of the planner is beside it."""
    for name, how in OPTIONS.items():

        def measured(name: str = name, how: dict[str, Any] = how) -> str:
            plan = bench.plan(name, **how)
            worst, (took, came) = bench.error(plan), bench.times(plan)
            planned = plan_crossing(plan).total / 2**20
            told = f"{took:8.2f} ms {came:8.1f} MiB, planned {planned:8.1f}, error {worst:.1e}"
            if name == "default":
                told += "\n" + explain_plan(plan)
            return told

        attempt(name, measured)


def main() -> int:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ask.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    ask.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    ask.add_argument("--key-heads", type=int, nargs="+", default=[8, 2, 1])
    ask.add_argument("--only", nargs="+", default=["right", "times"], choices=("right", "times"))
    ask.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = ask.parse_args()
    if asked.rank:
        rank(asked)
        return 0
    return start(2, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
