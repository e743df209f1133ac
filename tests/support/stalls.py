"""Training by FSDP2, torch.compile and plans over a ring, with random stalls and a busy machine.

    python -m tests.support.stalls --steps 200 --ranks 2 --busy 4

Each step's loss is compared with that of an eager twin. A rank that takes long over a step writes
where all its threads are; what it waits for is logged. Beside busy processes most of the time goes
to compiling, twice: for the first length, and for all others.
"""

import argparse
import faulthandler
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ring_attention_pytorch import RingTransformer, shard_sequence
from ring_attention_pytorch.launch import spawn

LENGTHS = (16, 24, 40)
STALLED, LONGEST = 0.2, 0.2  # how often a rank stalls, and for how many seconds at most
SLOW = 30.0  # seconds of a step after which a rank tells where it is
BUSY = "while True: sum(range(100_000))"


class Run(NamedTuple):
    """A rank's record of a run."""

    error: float  # the worst of a step's loss, relative to the twin's
    seconds: list[float]  # of each step


def model() -> RingTransformer:
    torch.manual_seed(0)
    return RingTransformer(
        num_tokens=256, dim=32, depth=1, dim_head=8, heads=4, num_grouped_query_heads=2,
        causal=True, ring_attn=True, auto_shard_seq=False, layout="zigzag",
    )  # fmt: skip


def sharded(made: RingTransformer, ranks: int) -> RingTransformer:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in made.layers:
        for part in layer:
            fully_shard(part, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def train(rank: int, ranks: int, steps: int, seed: int) -> Run:
    """Train the model and its twin for so many steps, on one rank."""
    torch.set_num_threads(1)
    twin, trained = model(), sharded(model(), ranks)
    compiled = torch.compile(trained, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (trained, twin)]
    together, own = random.Random(seed), random.Random(100 * seed + rank + 1)
    error, seconds = 0.0, []
    for step in range(steps):
        start = time.monotonic()
        faulthandler.dump_traceback_later(SLOW, repeat=True)
        ids, labels = batch(together.choice(LENGTHS), step)
        plans = trained.plans(ids)
        for each in optimizers:
            each.zero_grad()
        stall(own)
        loss = compiled(ids, labels=labels, plans=plans)
        loss.backward()
        stall(own)
        wanted = twin(ids, labels=labels, plans=twin.plans(ids))
        wanted.backward()
        for p in twin.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= ranks
        for each in optimizers:
            each.step()
        error = max(error, abs(loss.item() / wanted.item() - 1))
        seconds.append(time.monotonic() - start)
    faulthandler.cancel_dump_traceback_later()
    return Run(error, seconds)


def batch(length: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, 256, (1, length), generator=draw) for _ in range(2))
    return shard_sequence(ids, layout="zigzag"), shard_sequence(labels, layout="zigzag")


def stall(draw: random.Random) -> None:
    if draw.random() < STALLED:
        time.sleep(LONGEST * draw.random())


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """A block in which so many processes do nothing but work."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 200, "ranks": 2, "busy": 0, "seed": 7, "timeout": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with busy(given.busy):
        runs = spawn(
            train, given.ranks, given.ranks, given.steps, given.seed, timeout=given.timeout
        )
    slowest = sorted(runs[0].seconds)[-3:]
    print(f"{given.steps} steps, the slowest {', '.join(f'{s:.1f}' for s in slowest)} s")
    print(f"worst relative error of a loss {max(run.error for run in runs):.1e}")


if __name__ == "__main__":
    main()
