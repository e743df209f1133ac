"""Random documents, windows, heads, strides and rings with one kernel on one GPU, for so long.

    python -m tests.gpu.random_kernel --kernel triton --seconds 60 --first 0

Rings are of one to four threads, on one machine or as if on two. They share the GPU, and take turns
in the kernel. Each result is compared with dense attention in float64 by the rule of its dtype.
Prints every case that is wrong, and how many were right.
"""

import argparse
import random
import time

import torch
from torch import Tensor

from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.gpu.memory import poison
from tests.gpu.turns import in_turn
from tests.support import threads
from tests.support.cases import NAMES, Attention, held, shard
from tests.support.cases import dense as by_dense
from tests.support.reference import excess

LAYOUTS = ("contiguous", "striped", "zigzag")
STRIDES = ("contiguous", "contiguous", "heads first", "last two turned", "part of more")
HEAD_DIMS = ((64, 64), (128, 128), (128, 128), (192, 128), (192, 128), (256, 256), (96, 96))


def drawn(seed: int, kernel: str) -> tuple[tuple[int, ...], Attention]:
    """Draw each rank's machine, and a case."""
    r = random.Random(seed)
    size, batch, key_heads = r.randint(1, 4), r.choice((1, 1, 2, 3)), r.choice((1, 2, 4))
    length = r.choice((3, r.randint(1, 60), r.randint(60, 900), r.randint(60, 900)))
    d, d_v = r.choice(HEAD_DIMS)
    case = Attention(
        length, r.choice(LAYOUTS), causal=r.random() < 0.8, batch=batch, kernel=kernel,
        window=r.choice((None, None, r.randint(0, 200))), key_heads=key_heads,
        heads=key_heads * r.choice((1, 2, 4)), d=d, d_v=d_v, seed=seed, bucket_size=1024,
        dtype=r.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        transport=r.choice((None, "ring", "gather")), strides=r.choice(STRIDES),
    )  # fmt: skip
    changes: dict[str, object] = {}
    by_borders = False
    if r.random() < 0.75:
        alike = r.random() < 0.6
        samples = [_documents(r, length) for _ in range(batch)]
        changes = dict(ids=tuple(samples[:1] * batch if alike else samples))
        by_borders = alike
    if key_heads % size == 0 and r.random() < 0.3:
        changes["ulysses"] = size
    case = Attention(**vars(case) | changes)
    machines = tuple(r.randrange(2) * r.randrange(2) for _ in range(size))
    return machines, case.by_borders() if by_borders else case


def _documents(r: random.Random, length: int) -> tuple[int, ...]:
    """Draw the document of each token: a few long ones, or many short ones."""
    longest, ids = r.choice((5, 60, length)), []
    while len(ids) < length:
        ids += [len(set(ids))] * r.randint(1, longest)
    return tuple(ids[:length])


def dense(case: Attention, dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """Compute a case by dense attention in a dtype."""
    found = by_dense(case, dtype, device)
    return [found[name] for name in NAMES]


def faults(case: Attention, ring: Ring, device: str = "cuda") -> dict[str, str]:
    """Say which results of a rank are worse than their dtype allows."""
    if device == "cuda":
        poison()
    got = shard(case, ring, device)
    exact, rough = (
        held(case, ring.rank, ring.size, dense(case, dtype, device))
        for dtype in (torch.float64, case.dtype)
    )
    lucky = 1 if case.length > 15 else 8  # of few numbers, dense attention's error may be small
    said = map(excess, got, exact, rough, (lucky * times for times in (2, 2, 3, 3, 3)))
    return {name: why for name, why in zip(NAMES, said) if why is not None}


def wrong_of(machines: tuple[int, ...], case: Attention) -> list[dict[str, str]]:
    """List the faults of all ranks that have any; a rank is on a machine."""

    def rank_main(ring: Ring) -> dict[str, str]:
        with torch.autograd.set_multithreading_enabled(False):  # ranks wait for one another
            return faults(case, ring)

    found, _ = threads.run(len(machines), rank_main, machines)
    return [each for each in found if each]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kernel", choices=[*KERNELS], default="triton")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--cases", type=int, default=1 << 30)
    asked = options.parse_args()
    right = wrong = 0
    begin = time.perf_counter()
    for seed in range(asked.first, asked.first + asked.cases):
        if time.perf_counter() - begin > asked.seconds:
            break
        machines, case = drawn(seed, asked.kernel)
        request = KernelRequest(
            "cuda", case.dtype, d=case.d, d_v=case.d_v, window=case.window is not None,
            capability=torch.cuda.get_device_capability(),
        )  # fmt: skip
        if refusal(asked.kernel, request) is not None:
            continue
        try:
            with in_turn():
                found = wrong_of(machines, case)
        except Exception as error:
            found = [{"raised": f"{type(error).__name__} {error}"[:300]}]
        right, wrong = right + (not found), wrong + bool(found)
        if found:
            print(f"seed {seed}, machines {machines}: {found[:1]}\n    {_said(case)}", flush=True)
    print(f"{asked.kernel}: {right} cases right, {wrong} wrong", flush=True)


def _said(case: Attention) -> str:
    """Describe a case in a line."""
    named = {name: value for name, value in vars(case).items() if name != "ids"}
    documents = None if case.ids is None else [len(set(each)) for each in case.ids]
    return f"{named}, documents {documents}"[:500]


if __name__ == "__main__":
    main()
