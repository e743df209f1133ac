"""Rings of GPUs over NCCL: every kernel, layout and dtype, against dense attention on one GPU.

Rings of more ranks than there are GPUs are of threads that share one, but for two ranks.
"""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.gpu.memory import poison
from tests.support.cases import NAMES, Attention, held, results, shard
from tests.support.gpu_rings import in_threads
from tests.support.ranks import gpu_ranks
from tests.support.reference import dense_attention, excess, relative_error

GPUS = torch.cuda.device_count()
SIZES = sorted({1, 2, 3, 4, gpu_ranks()})
pytestmark = pytest.mark.skipif(not GPUS, reason="there is no CUDA device")

BASE = Attention(701, heads=8, d=64, d_v=64, batch=1, bucket_size=1024)
LAYOUTS = ("contiguous", "striped", "zigzag")
GPU_KERNELS = [name for name in KERNELS if name not in ("sdpa", "flex")]
KINDS = [replace(BASE, layout=layout, causal=True) for layout in LAYOUTS]
KINDS += [
    replace(BASE, layout="zigzag"),
    replace(BASE, layout="zigzag", length=3, causal=True),
    replace(BASE, layout="zigzag", causal=True, d=128, d_v=128, batch=2),
    replace(BASE, layout="striped", causal=True, window=100),
    replace(BASE, layout="zigzag", window=37),
    replace(BASE, layout="zigzag", causal=True, softclamp=5.0),
    replace(BASE, layout="contiguous", masked=True, causal=True),
    replace(BASE, layout="zigzag", d=40, d_v=72),
]


def able(kernel: str, case: Attention) -> bool:
    asked = KernelRequest(
        "cuda", case.dtype, case.softclamp is not None, case.d, case.d_v,
        torch.cuda.get_device_capability(), window=case.window is not None, key_mask=case.masked,
    )  # fmt: skip
    return refusal(kernel, asked) is None


def plain(case: Attention, dtype: torch.dtype) -> list[Tensor]:
    """Dense attention on this GPU in a dtype."""
    tensors, mask, dout, dlse = case.data()
    leaves = [t.cuda().to(dtype).requires_grad_() for t in tensors]
    mask = None if mask is None else mask.cuda()
    with torch.device("cuda"):
        out, lse = dense_attention(*leaves, **case.options(), key_mask=mask)
    return results(leaves, out, lse, dout.cuda().to(dtype), dlse.cuda().to(lse.dtype))


def faults(cases: list[Attention], ring: Ring | None = None) -> list[dict[str, str]]:
    """List results worse than their dtype allows, of each case; None is all ranks' ring."""
    return [_faults(case, Ring() if ring is None else ring) for case in cases]


def _faults(case: Attention, ring: Ring) -> dict[str, str]:
    poison()
    got = shard(case, ring, "cuda")
    exact, rough = (
        held(case, ring.rank, ring.size, plain(case, dtype))
        for dtype in (torch.float64, case.dtype)
    )
    said = map(excess, got, exact, rough, (2, 2, 3, 3, 3))
    return {name: why for name, why in zip(NAMES, said) if why is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("size", SIZES)
def test_every_kernel_in_every_layout(nccl, taking_turns, size, kernel, dtype):
    ways = cycle(("ring", "gather"))
    cases = [replace(c, kernel=kernel, dtype=dtype, transport=w) for c, w in zip(KINDS, ways)]
    cases = [case for case in cases if able(kernel, case)]
    if not cases:
        pytest.skip("it has none of the cases in this dtype")
    if size <= max(2, GPUS):
        by_rank = nccl(size).run(faults, cases)
    else:
        by_rank = in_threads(size, lambda ring: faults(cases, ring))
    bad = [
        (rank, found, case)
        for rank, each in enumerate(by_rank)
        for case, found in zip(cases, each)
        if found
    ]
    assert not bad


def repeats(case: Attention, times: int) -> int:
    """For a pool: how many runs differ in any bit from the first."""
    ring = Ring()
    (q, k, v), _, dout, _ = case.data()
    at = case.places(ring.rank, ring.size)[0]
    leaves = [t[:, at].cuda().requires_grad_() for t in (q, k, v)]

    def run() -> list[Tensor]:
        out = ring_attn(*leaves, causal=True, layout=case.layout, kernel=case.kernel)
        return [out, *torch.autograd.grad(out, leaves, dout[:, at].cuda())]

    first = run()
    return sum(not all(map(torch.equal, first, run())) for _ in range(times - 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_hundred_rings_give_the_same_bits(nccl, layout):
    size = gpu_ranks()
    case = replace(BASE, layout=layout, kernel="triton", dtype=torch.bfloat16)
    assert nccl(size).run(repeats, case, 500) == [0] * size


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_errors_do_not_grow_with_the_ring(taking_turns, kernel, transport):
    case = replace(
        BASE, length=4096, layout="zigzag", causal=True, kernel=kernel, transport=transport,
        dtype=torch.bfloat16,
    )  # fmt: skip
    if not able(kernel, case):
        pytest.skip("it has no such case")
    exact, errors = plain(case, torch.float64), {}
    for size in (1, 2, 4, 8, 16):
        got = in_threads(size, lambda ring: shard(case, ring, "cuda"))
        want = [held(case, rank, size, exact) for rank in range(size)]
        all_ranks = (
            [torch.cat([t.flatten() for t in x]) for x in zip(*each)] for each in (got, want)
        )
        errors[size] = dict(zip(NAMES, map(relative_error, *all_ranks)))
    # a part that travels is rounded, and so is the sum: in all at most like two roundings
    for name in ("out", "dq", "dk", "dv"):  # lse is in float32
        assert max(each[name] for each in errors.values()) < 1.42 * errors[1][name], errors
