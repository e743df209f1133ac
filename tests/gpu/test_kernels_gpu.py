"""The kernels on a GPU: the interpreter's cases and longer ones, in every dtype."""

from dataclasses import replace

import pytest
import torch

from ring_attention_pytorch.contract import Case
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.kernels.triton import Config, configured
from tests.kernel_cases import (
    CASES,
    NAMES,
    Data,
    KernelCase,
    disturbed,
    faults,
    random_cases,
    results,
    unrepeated,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LONG = [
    KernelCase(700, 700, ((0, 700, 0, 700, None, 0),), d=(128, 128)),
    KernelCase(1024, 640, d=(128, 128), heads=(8, 2), pieces=2),
    KernelCase(900, 900, ((0, 900, 0, 900, 200, 0),), d=(64, 64), masked=True, pieces=3),
    KernelCase(513, 777, d=(96, 40), softclamp=5.0, heads=(6, 2)),
    KernelCase(
        600, 600, ((0, 300, 0, 300, None, 0), (300, 600, 0, 600, None, 300)), d=(256, 256),
        heads=(2, 1), scale=-0.1,
    ),
    KernelCase(333, 459, ((0, 333, 0, 333, None, 0), (100, 333, 333, 459, None, None)), d=(80, 80)),
    KernelCase(512, 512, ((128, 512, 0, 512, None, None),), d=(128, 64), laid="sliced"),
]  # fmt: skip


def kernels(case: KernelCase) -> list[str]:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    asked = Case(
        "cuda", case.dtype, case.softclamp is not None, d=case.d[0], d_v=case.d[1],
        capability=capability,
    )  # fmt: skip
    return [name for name, kernel in KERNELS.items() if kernel.problem(asked) is None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("i", range(len(CASES + LONG)))
def test_every_kernel_is_right_by_the_dtypes_rule(i, dtype):
    case = replace((CASES + LONG)[i], dtype=dtype)
    found = {name: faults(case, name, "cuda") for name in kernels(case)}
    assert not any(found.values()), (found, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_cases(dtype):
    """With small blocks: several in each tile, and one compilation for many cases."""
    small = {name: Config(16, 16, 4, 1) for name in ("forward", "keys", "queries")}
    for case in random_cases(20, dtype):
        with configured(**(small if dtype == torch.float32 else {})):
            assert not (found := faults(case, "triton", "cuda")), (found, case)


@pytest.mark.parametrize("i", range(4, 7))
def test_what_sees_nothing_stays_to_the_bit(i):
    assert not disturbed(CASES[i], "triton", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_five_hundred_runs_give_the_same_bits(dtype):
    case = replace(LONG[0], dtype=dtype, masked=True)
    assert not unrepeated(case, "triton", "cuda", times=500)


@pytest.mark.parametrize("far", ["batches", "rows"])
def test_offsets_may_pass_32_bits(far):
    case = KernelCase(20, 20, ((0, 20, 0, 20, None, 0),), d=(32, 32), dtype=torch.float16)
    near = Data(case, "cuda")
    want = results(case, near, "triton")
    stretched = Data(case, "cuda")
    stretched.given = [_stretched(t, 0 if far == "batches" else 1) for t in near.given]
    got = results(case, stretched, "triton")
    assert not [name for name in NAMES if not torch.equal(got[name], want[name])]


def _stretched(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, the last along `dim` more than 2^31 elements behind the first."""
    stride = list(t.stride())
    stride[dim] = 2**31 // (t.shape[dim] - 1) + 16
    stride[dim] -= stride[dim] % 16
    memory = torch.empty(stride[dim] * (t.shape[dim] - 1) + 2**22, dtype=t.dtype, device="cuda")
    far = memory.as_strided(t.shape, stride)
    return far.copy_(t)
