"""Every kernel on one block, against dense attention with the same pairs visible."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.tiles import Tile, trim
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.support import threads
from tests.support.blocks import Block
from tests.support.cases import Attention, shard
from tests.support.reference import dense_attention, relative_error


def each_kernel(**case) -> pytest.MarkDecorator:
    """Every kernel that can do the case here."""
    asked = KernelRequest("cpu", torch.float64, False)._replace(**case)
    return pytest.mark.parametrize(
        "kernel", [name for name in KERNELS if refusal(name, asked) is None]
    )


@st.composite
def tiles_in_blocks(draw) -> tuple[int, int, Tile]:
    """The lengths of a block, and somewhere in it a tile with any band."""
    n, m = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    row, col = draw(st.integers(0, n - 1)), draw(st.integers(0, m - 1))
    rows, cols = (
        slice(row, draw(st.integers(row + 1, n))),
        slice(col, draw(st.integers(col + 1, m))),
    )
    bound = st.none() | st.integers(-20, 20)
    tile = trim(rows, cols, draw(bound), draw(bound))
    return n, m, tile or Tile(rows, cols, None, None)


@each_kernel()
@settings(deadline=None, max_examples=150)
@given(
    tiles_in_blocks(),
    st.booleans(),
    st.integers(1, 25),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([(8, 8), (5, 3), (3, 7), (1, 1), (16, 8)]),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(0, 3),
)
def test_any_band_any_mask_any_heads_any_bucket(kernel, where, masked, bucket, heads, d, dtype, s):
    torch.manual_seed(s)
    n, m, tile = where
    Block((n, m, *heads, *d), tile, masked=masked, bucket_size=bucket, dtype=dtype).assert_right(
        kernel
    )


@each_kernel(softclamp=True)
@settings(deadline=None, max_examples=50)
@given(tiles_in_blocks(), st.booleans(), st.integers(1, 25), st.sampled_from([0.3, 1.0, 50]))
def test_softclamp_with_any_band(kernel, where, masked, bucket, softclamp):
    n, m, tile = where
    kinds = dict(masked=masked, bucket_size=bucket, softclamp=softclamp)
    Block((n, m, 4, 2, 8, 6), tile, **kinds).assert_right(kernel)


@each_kernel()
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.7, 3.0])
def test_scale_is_what_is_asked_for(kernel, scale):
    Block((9, 11, 2, 1, 8, 8), scale=scale).assert_right(kernel)


@each_kernel()
@pytest.mark.parametrize("lengths", [(70, 33), (33, 130), (129, 129)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks_longer_than_a_kernels_own_blocks(kernel, lengths, dtype):
    n, m = lengths
    whole = (slice(0, n), slice(0, m))
    for left, right in ((None, None), (None, 0), (40, 0), (7, 9)):
        tile = trim(*whole, left, right)
        Block((n, m, 2, 1, 16, 16), tile, dtype=dtype, masked=True).assert_right(kernel)


@each_kernel()
def test_without_tiles_nothing_changes(kernel):
    block = Block((4, 5, 2, 1, 8, 8))
    block.tiles = []
    got = block.run(kernel)
    assert (got["lse"] == -torch.inf).all()
    assert not any(got[name].any() for name in ("out", "dq", "dk", "dv"))


@each_kernel()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_see_no_key_are_zero_and_have_no_gradient(kernel, dtype):
    for tile in (
        None,
        Tile(slice(0, 9), slice(0, 9), None, 0),
        Tile(slice(2, 9), slice(1, 8), 2, 1),
    ):
        block = Block((9, 9, 4, 2, 8, 8), tile, dtype=dtype)
        block.mask = torch.ones(2, 9, dtype=torch.bool)
        block.mask[0] = False
        block.mask[1, :4] = False
        blind = ~block.seen().any(-1)
        unused = ~block.seen().any(1)
        got = block.run(kernel)
        assert not any(t.isnan().any() for t in got.values())
        assert torch.equal(got["lse"] == -torch.inf, blind[:, None].expand_as(got["lse"]))
        assert not got["out"][blind].any()
        assert not got["dq"][blind].any()
        assert not got["dk"][unused].any()
        assert not got["dv"][unused].any()


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Memory that was asked for and never written holds NaN, in PyTorch's own code too."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert torch.ones(2).new_empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@each_kernel()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_kernel_reads_memory_that_it_never_wrote(kernel, masked, dtype):
    for tile in (
        None,
        Tile(slice(0, 9), slice(0, 9), None, 0),
        Tile(slice(0, 9), slice(2, 11), 3, 1),
    ):
        block = Block((11, 13, 4, 2, 5, 3), tile, masked=masked, dtype=dtype, bucket_size=3)
        with poison():
            block.assert_right(kernel)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_no_ring_reads_memory_that_it_never_wrote(size, layout):
    case = Attention(21, layout, causal=True, masked=True)
    with poison():
        got, _ = threads.run(size, lambda ring: shard(case, ring))
    assert not any(t.isnan().any() for mine in got for t in mine)


# --- 16 bits: as good as plain PyTorch in the same precision, however large the ring ---


def worst(got: Tensor, want: Tensor) -> float:
    return (got.double() - want.double()).abs().max().item()


@each_kernel(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_16_bits_err_at_most_twice_as_much_as_plain_pytorch(kernel, dtype, causal):
    n = 256
    block = Block((n, n, 4, 2, 32, 32), dtype=dtype)
    if causal:
        block.tiles = [Tile(slice(0, n), slice(0, n), None, 0)]
    block.dlse.zero_()
    exact, plain, got = block.want(), block.want(dtype), block.run(kernel)
    for name, times in (("out", 2), ("dq", 3), ("dk", 3), ("dv", 3)):
        assert worst(got[name], exact[name]) <= times * worst(plain[name], exact[name])
    assert got["lse"].dtype == torch.float32


@each_kernel(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_16_bit_errors_do_not_grow_with_the_ring(kernel, dtype, layout):
    case = Attention(256, layout, causal=True, dtype=dtype, d=32, d_v=32, kernel=kernel)
    tensors, _, dout, _ = case.data()

    def plain(compute: torch.dtype) -> list[Tensor]:
        leaves = [t.to(compute, copy=True).requires_grad_() for t in tensors]
        out, _ = dense_attention(*leaves, causal=True)
        return [out, *torch.autograd.grad(out, leaves, dout.to(compute))]

    exact, same = plain(torch.float64), plain(dtype)
    allowed = [t * worst(s, e) for t, s, e in zip((2, 3, 3, 3), same, exact)]
    found = []
    for size in (1, 2, 4, 8):
        got = _whole_without_dlse(case, size)
        found.append([relative_error(g, e) for g, e in zip(got, exact)])
        for error, bound in zip((worst(g, e) for g, e in zip(got, exact)), allowed):
            assert error <= bound
    for alone, *more in zip(*found):
        assert max(more) <= 1.25 * alone


def _whole_without_dlse(case: Attention, size: int) -> list[Tensor]:
    """out, dq, dk, dv of a ring, put together."""
    tensors, _, dout, _ = case.data()

    def main(ring: threads.ThreadRing) -> list[Tensor]:
        at, _ = case.places(ring.rank, size)
        mine = [t[:, at].requires_grad_() for t in tensors]
        out = ring_attn(
            *mine, causal=True, layout=case.layout, kernel=case.kernel, group=ring, bucket_size=64
        )
        return [out, *torch.autograd.grad(out, mine, dout[:, at])]

    shards, _ = threads.run(size, main)
    order = torch.cat([case.places(r, size)[0] for r in range(size)]).argsort()
    return [torch.cat(parts, 1)[:, order] for parts in zip(*shards)]


@each_kernel(dtype=torch.float16)
@pytest.mark.parametrize("length", [1, 2, 5, 17])
@pytest.mark.parametrize("causal", [False, True])
def test_large_fp16_inputs_do_not_overflow(kernel, length, causal):
    right = 0 if causal and length > 1 else None
    tile = Tile(slice(0, length), slice(0, length), None, right)
    block = Block((length, length, 5, 5, 32, 32), tile, dtype=torch.float16)
    block.q, block.k, block.v = block.q * 5, block.k * 3, block.v * 3
    block.dlse.zero_()
    exact, plain, got = block.want(), block.want(torch.float16), block.run(kernel)
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].isfinite().all()
        assert worst(got[name], exact[name]) <= 5 * worst(plain[name], exact[name]) + 1e-3


@each_kernel()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("where", "at"), [("q", 3), ("k", 3), ("v", 3), ("k", slice(None))])
def test_a_nan_in_the_inputs_is_seen_in_the_result(kernel, where, at, masked, dtype):
    block = Block((6, 7, 2, 1, 8, 8), masked=masked, dtype=dtype)
    if masked:
        block.mask[:], block.mask[1] = True, False
    getattr(block, where)[0, at] = torch.nan
    out = block.run(kernel)["out"]
    assert out[0, 3 if where == "q" else slice(None)].isnan().all()
    assert not masked or out[1].eq(0).all()
