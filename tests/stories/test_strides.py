"""Tensors may lie in memory as they like: the last dimension in steps of 2, of heads, or of none.

Such are everyday: `rearrange(x, "b n (h d three) -> three b n h d")` gives them, so does `expand`.
What a kernel reads as if it were dense shows in every result.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch import ring_attn, tree_attn_decode
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import (
    CPU_KERNELS,
    Attention,
    check_in_processes,
    check_in_threads,
    check_symmetric,
    errors,
    oracle,
    shard,
)
from tests.support.kernel_cases import STRIDED, faults
from tests.support.random_memory import KINDS, laid, uniform
from tests.support.reference import dense_attention, relative_error
from tests.support.sampling import grid

STRIDES = ["contiguous", "every other", "last two turned", "one of three", "one number"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASE = Attention(19, "zigzag", causal=True, heads=4, key_heads=2, masked=True, d_v=6)
WAYS: dict[str, Callable[[Attention], object]] = {
    "alone": lambda case: check_in_threads(case, 1),
    "ring": lambda case: check_in_threads(replace(case, transport="ring"), 3),
    "gather": lambda case: check_in_threads(replace(case, transport="gather"), 3),
    "shared memory": lambda case: check_symmetric(case, 3, 2),
    "together": lambda case: check_symmetric(case, 3, 9, together=True),
    "own keys apart, one stream": lambda case: check_symmetric(case, 3, 9, own_apart=True),
    "heads for sequence": lambda case: check_in_threads(replace(case, ulysses=2), 4),
    "heads out of shared memory": lambda case: check_symmetric(replace(case, ulysses=2), 4, 2),
}


@grid("memory, way, kernel", product(STRIDES, WAYS, CPU_KERNELS), always=30, drawn=10)
def test_results_do_not_depend_on_strides(memory, way, kernel):
    for dtype in (torch.float64, torch.float32):
        WAYS[way](replace(CASE, strides=memory, kernel=kernel, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("memory", STRIDES)
def test_neither_do_those_of_the_default_kernel_in_any_dtype(memory, dtype):
    case = replace(CASE, strides=memory, dtype=dtype, d_v=CASE.d)
    got, _ = threads.run(2, lambda ring: shard(case, ring))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for rank, mine in enumerate(got):
        found = errors(case, rank, 2, mine, oracle(case))
        assert max(found.values()) < bound, (rank, found)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("case", STRIDED, ids=lambda case: case.laid)
def test_kernels_by_themselves(case, kernel):
    for dtype in (torch.float64, torch.float32, torch.float16):
        assert not faults(replace(case, dtype=dtype), kernel, "cpu"), dtype


def test_over_processes(pools):
    check_in_processes([replace(CASE, strides=memory) for memory in STRIDES], pools(3))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("memory", [*KINDS])
def test_one_tensor_that_lies_otherwise_than_the_rest(memory, name):
    given = dict(zip(("q", "k", "v", "dout"), torch.randn(4, 2, 9, 3, 8)))
    given[name] = laid(uniform(given[name], memory), memory)
    leaves = [given[each].requires_grad_() for each in "qkv"]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out, want = (
        ring_attn(*leaves, causal=True, group=Ring.alone()),
        dense_attention(*exact, causal=True)[0],
    )
    grads = torch.autograd.grad(out, leaves, given["dout"])
    wanted = torch.autograd.grad(want, exact, given["dout"].double())
    for found, right in zip((out, *grads), (want, *wanted)):
        assert relative_error(found, right) < 1e-5


def test_heads_and_three_tensors_out_of_one_projection():
    """As they are split where weights have heads and q, k, v inside of the head size."""
    x = torch.randn(2, 11, 3 * 4 * 8, dtype=torch.float64, requires_grad=True)
    results: list[Tensor] = []
    for attend in (lambda *t: ring_attn(*t, causal=True), lambda *t: dense(*t)):
        out = attend(*rearrange(x, "b n (h d three) -> three b n h d", h=4, three=3))
        results += [out, *torch.autograd.grad(out.square().sum(), x)]
    assert relative_error(results[0], results[2]) < 1e-12
    assert relative_error(results[1], results[3]) < 1e-12


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense_attention(q, k, v, causal=True)[0]


@pytest.mark.parametrize("memory", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding(dtype, memory):
    q, k, v = (torch.randn(2, h, n, 8).to(dtype) for h, n in ((4, 1), (2, 13), (2, 13)))
    q, k, v = (laid(uniform(t, memory), memory) for t in (q, k, v))
    want = dense_attention(*(t.double().transpose(1, 2) for t in (q, k, v)))[0].transpose(1, 2)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2)
    assert relative_error(tree_attn_decode(q, k, v, group=Ring.alone()), want) < bound


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-46])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_scale_under_a_causal_mask(dtype, scale):
    """By the kernel that is chosen; the CPU's own takes what is hidden for -inf * scale."""
    case = Attention(12, causal=True, scale=scale, dtype=dtype)
    got, _ = threads.run(2, lambda ring: shard(case, ring))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for rank, mine in enumerate(got):
        found = errors(case, rank, 2, mine, oracle(case))
        assert all(t.isfinite().all() for t in mine)
        tiny = ("dq", "dk") if scale == 1e-46 else ()  # their gradients are beyond all digits
        assert all(error < bound for name, error in found.items() if name not in tiny), found


def test_the_cpu_s_own_kernel_by_name_refuses_scales_that_are_not_positive():
    q = torch.randn(1, 4, 2, 8)
    for scale in (0.0, -1.0, 1e-46):
        with pytest.raises(ValueError, match="has no scale that is zero or negative"):
            ring_attn(q, q, q, causal=True, scale=scale, kernel="sdpa")
