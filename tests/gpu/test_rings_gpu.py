"""Rings of GPUs over NCCL: every kernel, layout and dtype, against dense attention on one GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.contract import Case
from ring_attention_pytorch.kernels import KERNELS, problem
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.ring_flash_attention import ring_attn
from tests.cases import NAMES, Attention, results
from tests.gpu.memory import poison
from tests.reference import dense_attention, excess, relative_error

GPUS = torch.cuda.device_count()
SIZES = [size for size in (1, 2, 3, 4) if size <= GPUS]
pytestmark = pytest.mark.skipif(not GPUS, reason="there is no CUDA device")

BASE = Attention(701, heads=8, d=64, d_v=64, batch=1, bucket_size=1024)
LAYOUTS = ("contiguous", "striped", "zigzag")
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
    asked = Case(
        "cuda", case.dtype, case.softclamp is not None, case.d, case.d_v,
        torch.cuda.get_device_capability(), window=case.window is not None, key_mask=case.masked,
    )  # fmt: skip
    return problem(kernel, asked) is None


def plain(case: Attention, dtype: torch.dtype) -> list[Tensor]:
    """Dense attention on this GPU in a dtype."""
    tensors, mask, dout, dlse = case.data()
    leaves = [t.cuda().to(dtype).requires_grad_() for t in tensors]
    mask = None if mask is None else mask.cuda()
    with torch.device("cuda"):
        out, lse = dense_attention(*leaves, **case.options(), key_mask=mask)
    return results(leaves, out, lse, dout.cuda().to(dtype), dlse.cuda().to(lse.dtype))


def faults(cases: list[tuple[Attention, dict]]) -> list[dict[str, str]]:
    """For a pool: what is worse than its dtype allows, of each case on this rank."""
    return [_faults(case, options) for case, options in cases]


def _faults(case: Attention, options: dict) -> dict[str, str]:
    ring = Ring()
    poison()
    (q, k, v), mask, dout, dlse = case.data()
    at = case.places(ring.rank, ring.size)[0]
    leaves = [t[:, at].cuda().requires_grad_() for t in (q, k, v)]
    out, lse = ring_attn(
        *leaves, **case.options(), key_mask=None if mask is None else mask[:, at].cuda(),
        layout=case.layout, kernel=case.kernel, return_lse=True, **options,
    )  # fmt: skip
    got = results(leaves, out, lse, dout[:, at].cuda(), dlse[..., at].cuda())
    at = at.cuda()
    exact = [t[..., at] if i == 1 else t[:, at] for i, t in enumerate(plain(case, torch.float64))]
    rough = [t[..., at] if i == 1 else t[:, at] for i, t in enumerate(plain(case, case.dtype))]
    said = map(excess, got, exact, rough, (2, 2, 3, 3, 3))
    return {name: why for name, why in zip(NAMES, said) if why is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", [n for n in KERNELS if n not in ("sdpa", "flex")])
@pytest.mark.parametrize("size", SIZES)
def test_every_kernel_in_every_layout(nccl, size, kernel, dtype):
    cases = [replace(case, kernel=kernel, dtype=dtype) for case in KINDS]
    cases = [(case, {}) for case in cases if able(kernel, case)]
    if not cases:
        pytest.skip("it has none of the cases in this dtype")
    by_rank = nccl(size).run(faults, cases)
    bad = [
        (rank, found, cases[i][0])
        for rank, each in enumerate(by_rank)
        for i, found in enumerate(each)
        if found
    ]
    assert not bad


def repeats(case: Attention, times: int, options: dict) -> int:
    """For a pool: how many runs differ in any bit from the first."""
    ring = Ring()
    (q, k, v), _, dout, _ = case.data()
    at = case.places(ring.rank, ring.size)[0]
    leaves = [t[:, at].cuda().requires_grad_() for t in (q, k, v)]

    def run() -> list[Tensor]:
        out = ring_attn(*leaves, causal=True, layout=case.layout, kernel=case.kernel, **options)
        return [out, *torch.autograd.grad(out, leaves, dout[:, at].cuda())]

    first = run()
    return sum(not all(torch.equal(a, b) for a, b in zip(first, run())) for _ in range(times - 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_hundred_rings_give_the_same_bits(nccl, layout):
    case = replace(BASE, layout=layout, kernel="triton", dtype=torch.bfloat16)
    assert nccl(SIZES[-1]).run(repeats, case, 500, {}) == [0] * SIZES[-1]


def lengths(kernel: str | None, layout: str) -> list[tuple[float, ...]]:
    """For a pool: relative errors of a longer sequence, to see them flat in the ring's size."""
    case = replace(
        BASE, length=4096, layout=layout, causal=True, kernel=kernel, dtype=torch.bfloat16
    )
    ring = Ring()
    (q, k, v), _, dout, _ = case.data()
    at = case.places(ring.rank, ring.size)[0]
    leaves = [t[:, at].cuda().requires_grad_() for t in (q, k, v)]
    out = ring_attn(*leaves, causal=True, layout=layout, kernel=kernel)
    got = [out, *torch.autograd.grad(out, leaves, dout[:, at].cuda())]
    exact = plain(case, torch.float32)
    want = [exact[0], *exact[2:]]
    return [tuple(relative_error(g, w[:, at.cuda()]) for g, w in zip(got, want))]


def test_errors_do_not_grow_with_the_ring(nccl):
    worst = {}
    for kernel, size in product(("triton", None), SIZES):
        found = nccl(size).run(lengths, kernel, "zigzag")
        worst[kernel, size] = [max(r[0][i] for r in found) for i in range(4)]
    for kernel in ("triton", None):
        for i in range(4):
            assert worst[kernel, SIZES[-1]][i] < 1.3 * worst[kernel, 1][i], worst
