"""Tensors that lie as they like, far apart, and of large numbers: every kernel on one GPU, and
every way over two, under torchrun.

`torchrun --standalone --nproc-per-node 2 -m tests.gpu.test_strides_gpu` runs the latter by hand.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingPlan, positions, ring_attn, tree_attn_decode
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from ring_attention_pytorch.runtime.rowwise import add_, merge_, sum_of_products
from tests.support.gpu_rings import WAYS, plan_for, say
from tests.support.kernel_cases import FAR, FAR_CASES, KernelCase, asked, far, faults
from tests.support.random_memory import laid, uniform
from tests.support.reference import dense_attention, relative_error
from tests.support.torchrun import join_ranks, under_torchrun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

STRIDES = ["every other", "last two turned", "one of three", "one number", "heads first"]
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
FUSED = [name for name in KERNELS if name not in ("sdpa", "flex")]
BEYOND = ["eager", "triton"]  # kernels of which parts of float16 are kept in float32


def can(kernel: str, dtype: torch.dtype) -> bool:
    like = torch.empty(1, 0, 1, 64, device="cuda", dtype=dtype)
    return refusal(kernel, KernelRequest.of(like, like)) is None


# --- one GPU ---


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_tensor_that_lies_otherwise_than_the_rest(kernel, name, dtype):
    if not can(kernel, dtype) or (kernel == "flex" and dtype != torch.bfloat16):
        pytest.skip("it can't, or takes long to compile")
    for memory in STRIDES:
        given = dict(zip(("q", "k", "v", "dout"), torch.randn(4, 2, 130, 4, 64).to(dtype)))
        given[name] = uniform(given[name], memory)
        exact = [given[each].double().requires_grad_() for each in "qkv"]
        want = dense_attention(*exact, causal=True)[0]
        wanted = torch.autograd.grad(want, exact, given["dout"].double())
        here = {each: t.cuda() for each, t in given.items()} | {name: on_cuda(given[name], memory)}
        leaves = [here[each].requires_grad_() for each in "qkv"]
        out = ring_attn(*leaves, causal=True, group=Ring.alone(), kernel=kernel)
        got = torch.autograd.grad(out, leaves, here["dout"])
        for found, right in zip((out, *got), (want, *wanted)):
            assert relative_error(found.cpu(), right) < BOUNDS[dtype], memory


def on_cuda(t: Tensor, memory: str) -> Tensor:
    """Laid out there: what goes to another device keeps no strides with gaps."""
    return laid(t.cuda(), memory)


@pytest.mark.parametrize("how", FAR)
@pytest.mark.parametrize("kernel", FUSED)
def test_what_lies_beyond_32_bits_is_read(kernel, how):
    case = KernelCase(200, 260, d=(64, 64), heads=(4, 2), dtype=torch.bfloat16, laid=how)
    if (why := refusal(kernel, asked(case))) is not None:
        pytest.skip(why)
    assert not faults(case, kernel, "cuda")
    assert not faults(replace(case, tiles=((0, 200, 0, 260, None, 60),)), kernel, "cuda")


@pytest.mark.parametrize("case", FAR_CASES, ids=lambda case: case.laid)
def test_passes_over_rows_reach_it_too(case):
    x, y, z = (torch.randn(1, 37, 3, 6, device="cuda").half() for _ in range(3))
    lse, lse_x = (torch.randn(1, 3, 37, device="cuda") for _ in range(2))
    dim = FAR[case.laid]
    at, total, merged, new = far(x, dim), z.clone(), z.float(), lse.clone()
    add_(total, at, y)
    merge_(merged, new, at, far(lse_x, (0, 2, 1, 1)[dim]))
    weight = torch.sigmoid(lse_x - lse).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(total, z + x + y, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(merged, z.float().lerp(x.float(), weight))
    torch.testing.assert_close(new, torch.logaddexp(lse, lse_x))
    torch.testing.assert_close(
        sum_of_products(y, at), (x.float() * y.float()).sum(-1).transpose(1, 2)
    )


def test_any_number_of_samples_and_heads():
    """More than the second side of a grid has places."""
    x, y, z = (torch.randn(9000, 2, 8, 16, device="cuda") for _ in range(3))
    lse, lse_y = (torch.randn(9000, 8, 2, device="cuda") for _ in range(2))
    weight = torch.sigmoid(lse_y - lse).transpose(1, 2).unsqueeze(-1)
    want = x.lerp(y, weight)
    merge_(x, lse, y, lse_y)
    torch.testing.assert_close(x, want)
    torch.testing.assert_close(sum_of_products(y, z), (y * z).sum(-1).transpose(1, 2))
    total = x.transpose(1, 2).contiguous().transpose(1, 2)
    add_(total, y, z)
    torch.testing.assert_close(total, want + y + z)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("kernel", FUSED)
def test_any_scale_under_a_causal_mask(kernel, scale):
    for dtype in (torch.bfloat16, torch.float16):
        tiles = ((0, 200, 0, 200, None, 0),)
        case = KernelCase(200, 200, tiles, d=(64, 64), dtype=dtype, scale=scale)
        if refusal(kernel, asked(case)) is None:
            assert not faults(case, kernel, "cuda"), dtype


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", FUSED)
def test_a_bias_of_any_size_is_added_in_float16(kernel, d):
    like = torch.empty(1, 1, 1, d + 2, device="cuda", dtype=torch.half)
    if refusal(kernel, KernelRequest.of(like, like[..., :d])) is not None:
        pytest.skip("it can't")
    q, k, v, dout = torch.randn(4, 1, 100, 2, d).half()
    bias = torch.zeros(1, 100).half()
    bias[:, ::3] = -10000.0
    exact = [t.double().requires_grad_() for t in (q, k, v, bias)]
    want = dense_attention(*exact[:3], key_bias=exact[3])[0]
    wanted = torch.autograd.grad(want, exact, dout.double())
    mine = [t.cuda().requires_grad_() for t in (q, k, v, bias)]
    out = ring_attn(*mine[:3], key_bias=mine[3], group=Ring.alone(), kernel=kernel)
    got = torch.autograd.grad(out, mine, dout.cuda())
    for found, right in zip((out, *got), (want, *wanted)):
        assert relative_error(found.cpu(), right) < 5e-3


@pytest.mark.parametrize("memory", STRIDES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_decoding(dtype, memory):
    q, k, v = (torch.randn(2, h, n, 64).to(dtype) for h, n in ((4, 1), (2, 300), (2, 300)))
    q = q / 8  # else scores of what is one number are large
    q, k, v = (uniform(t, memory) for t in (q, k, v))
    want = dense_attention(*(t.double().transpose(1, 2) for t in (q, k, v)))[0].transpose(1, 2)
    got = tree_attn_decode(*(on_cuda(t, memory) for t in (q, k, v)), group=Ring.alone())
    assert relative_error(got.cpu(), want) < BOUNDS[dtype]


# --- several GPUs ---


def test_over_two_gpus() -> None:
    under_torchrun("tests.gpu.test_strides_gpu")


@lru_cache(maxsize=1)
def shards(kind: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """This rank's leaves and cotangent, what it has to get, and where its tokens are."""
    draw, rank, size = torch.Generator().manual_seed(0), dist.get_rank(), dist.get_world_size()
    whole = [torch.randn(2, 192 * size, h, 64, generator=draw).to(dtype) for h in (8, 2, 2, 8)]
    whole[0] /= 8  # else scores of what is one number are large
    whole = [uniform(t, kind) for t in whole]
    exact = [t.cuda().double().requires_grad_() for t in whole[:3]]
    with torch.device("cuda"):
        want = dense_attention(*exact, causal=True)[0]
    wants = [want, *torch.autograd.grad(want, exact, whole[3].cuda().double())]
    at = positions("zigzag", rank=rank, ring_size=size, length=192 * size)
    mine = [on_cuda(t[:, at], kind) for t in whole]
    leaves = [t.requires_grad_() for t in mine[:3]]
    return leaves, mine[3], [t[:, at.cuda()] for t in wants], at


def strided(kernel: str, kind: str, dtype: torch.dtype, how: dict) -> float:
    """The worst relative error on this rank."""
    leaves, dout, wants, _ = shards(kind, dtype)
    plan = plan_for(*leaves, causal=True, layout="zigzag", kernel=kernel, **how)
    errors = []
    for _ in range(2):
        out = ring_attn(*leaves, plan=plan)
        got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        errors += [relative_error(g, w) for g, w in zip(got, wants)]
    return max(errors)


def cancelling(kernel: str, how: dict) -> float:
    """The worst error of gradients whose parts on each rank pass float16, over the largest part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 128 * size, h, 64, generator=draw).half() * 0.1 for h in (8, 2, 2))
    dout = torch.full((1, 128 * size, 8, 64), 60000.0).half()
    dout[:, 64 * size :] *= -1
    exact = [t.cuda().double().requires_grad_() for t in (q, k, v)]
    with torch.device("cuda"):
        out = dense_attention(*exact)[0]
    want, parts = (
        torch.autograd.grad(out, exact, along.cuda().double(), retain_graph=True)
        for along in (dout, dout.abs())
    )
    mine = [t.tensor_split(size, 1)[rank].cuda().requires_grad_() for t in (q, k, v)]
    plan, cotangent = plan_for(*mine, kernel=kernel, **how), dout.tensor_split(size, 1)[rank].cuda()
    got = torch.autograd.grad(ring_attn(*mine, plan=plan), mine, cotangent)
    errors = [
        (g - w.tensor_split(size, 1)[rank]).abs().max() / p.abs().max()
        for g, w, p in zip(got, want, parts)
    ]
    assert parts[2].abs().max() > 65504 > want[2].abs().max()
    return torch.stack(errors).nan_to_num(torch.inf).max().item()


def wrong_types_are_told() -> None:
    """Though NCCL carries no notes."""
    q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=torch.half)
    for wrong in (dict(window="four"), dict(causal=True, prefix=torch.tensor(1.5))):
        with pytest.raises(ValueError, match=r"on rank 1"):
            RingPlan.make(q, q, q, **(wrong if dist.get_rank() == 1 else {}))


def ways() -> Iterator[dict]:
    """Messages and shared memory, one owner at a time, heads swapped, few tokens together."""
    yield from (WAYS[i] for i in (0, 1, 3, 6, 7))
    yield dict(transport="gather", few=True)


def kinds_and_ways() -> Iterator[tuple[str, dict]]:
    """All kinds of strides in one way, and all ways, with another kind each."""
    for number, kind in enumerate(STRIDES):
        yield kind, WAYS[1]
        yield STRIDES[number - 1], (*ways(),)[number % 6]
    yield STRIDES[0], (*ways(),)[5]


def main() -> None:
    join_ranks()
    wrong_types_are_told()
    for kernel in (name for name in FUSED if can(name, torch.float16)):
        found = [cancelling(kernel, how) for how in ways()]
        say(kernel, "parts of float16 that cancel", [f"{error:.1e}" for error in found])
        assert max(found) < 1e-2 or kernel not in BEYOND, (kernel, found)
    for dtype in BOUNDS:
        worst: dict[str, float] = {}
        for (kind, how), kernel in product(kinds_and_ways(), FUSED):
            if can(kernel, dtype):
                worst[kernel] = max(worst.get(kernel, 0.0), strided(kernel, kind, dtype, how))
        say(dtype, "strided", {kernel: f"{error:.1e}" for kernel, error in worst.items()})
        assert max(worst.values()) < BOUNDS[dtype], (dtype, worst)
    say("all right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
