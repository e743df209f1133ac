"""Every kernel on one block, against dense attention with the same pairs visible."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Tile, band, trim
from ring_attention_pytorch.kernels import KERNELS, choose, refusal
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KernelRequest,
    KVBlock,
    Residuals,
    ScoreMods,
)
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, merge_
from tests.support import threads
from tests.support.cases import FIGURES, NAMES, TOLERANCES, Attention, shard
from tests.support.reference import dense_attention, relative_error

CPU = torch.device("cpu")


class Block:
    """Random tensors of one block, and what its tile and its key mask show."""

    def __init__(self, shape, tile=None, *, masked=False, softclamp=None, scale=None, **kinds):
        (self.n, self.m, h, h_kv, d, d_v), b = shape, 2
        dtype = kinds.get("dtype", torch.float64)
        self.q, self.dout = (torch.randn(b, self.n, h, x, dtype=dtype) for x in (d, d_v))
        self.k, self.v = (torch.randn(b, self.m, h_kv, x, dtype=dtype) for x in (d, d_v))
        self.dlse = torch.randn(b, h, self.n, dtype=accumulation_dtype(dtype))
        self.mask = torch.rand(b, self.m) < 0.5 if masked else None
        whole = Tile(slice(0, self.n), slice(0, self.m), None, None)
        self.tiles = [whole] if tile is None else [tile]
        self.terms = ScoreMods(
            d**-0.5 if scale is None else scale, softclamp, kinds.get("bucket_size", 1024)
        )

    def seen(self) -> Tensor:
        shown = torch.zeros(2, self.n, self.m, dtype=torch.bool)
        for tile in self.tiles:
            shown[:, tile.rows, tile.cols] = band(tile, CPU)
        return shown if self.mask is None else shown & self.mask[:, None]

    def run(self, kernel: str) -> dict[str, Tensor]:
        """What the kernel makes of it, with the gradients for the random cotangents."""
        impl, segments = KERNELS[kernel], (Segment(0, 1, self.m),)
        keys = KVBlock(self.k, self.v, self.mask, segments)
        result = OutputAccumulator(self.q, self.v)
        impl.forward(self.q, keys, self.tiles, self.terms, result)
        out, lse = result.finalize()
        dlse = self.dlse.masked_fill(lse == -torch.inf, 0.0)
        grads = Grads(GradAccumulator(self.q), GradAccumulator(self.k), GradAccumulator(self.v))
        saved = Residuals(self.q, out, lse, self.dout, dlse)
        impl.backward(saved, keys, self.tiles, self.terms, grads)
        return dict(zip(NAMES, (out, lse, *(total.finalize() for total in grads))))

    def want(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The same by plain PyTorch in a dtype, from autograd."""
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (self.q, self.k, self.v)]
        q, k, v = leaves
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.terms.scale
        if (c := self.terms.softclamp) is not None:
            scores = c * torch.tanh(scores / c)
        seen = self.seen()[:, None]
        blind = ~seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
        p = scores.softmax(-1).masked_fill(blind, 0.0)
        lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", p, v)
        cotangents = (self.dout.to(dtype), self.dlse.to(dtype).masked_fill(blind[..., 0], 0.0))
        grads = torch.autograd.grad((out, lse), leaves, cotangents)
        return dict(zip(NAMES, (out, lse, *grads)))

    def assert_right(self, kernel: str) -> None:
        got, want = self.run(kernel), self.want()
        errors = {name: relative_error(got[name], want[name]) for name in NAMES}
        FIGURES.note(self.q.dtype, errors)
        bad = {n: e for n, e in errors.items() if not e < TOLERANCES[self.q.dtype]}
        assert not bad, f"{kernel}: {bad} for {self.tiles}, {self.terms}"


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


# --- merging ---

LSES = [-torch.inf, -1e4, -50.0, 0.0, 50.0, 50.1, 1e4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("a", LSES)
@pytest.mark.parametrize("b", LSES)
def test_merging_survives_any_pair_of_lse(a, b, dtype):
    out, part = torch.randn(1, 1, 1, 4, dtype=dtype), torch.randn(1, 1, 1, 4, dtype=dtype)
    out, part = (t * float(x > -torch.inf) for t, x in ((out, a), (part, b)))
    lse, part_lse = (torch.full((1, 1, 1), x, dtype=dtype) for x in (a, b))
    exact_lse = torch.logaddexp(lse.double(), part_lse.double())
    # of the two lse's difference: far from 0 their logarithm of a sum is too coarse
    weight = 0.0 if b == -torch.inf else torch.sigmoid(part_lse.double() - lse.double()).item()
    want = out.double() * (1 - weight) + part.double() * weight
    before = part.clone(), part_lse.clone()
    merge_(out, lse, part, part_lse)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=60 * eps)
    assert torch.equal(part, before[0])
    assert torch.equal(part_lse, before[1])


def test_merging_in_any_order_gives_the_same():
    parts = [
        (torch.randn(2, 3, 4, 5).double(), torch.randn(2, 4, 3).double() * 30) for _ in range(6)
    ]
    results = []
    for order in (range(6), reversed(range(6)), (3, 0, 5, 1, 4, 2)):
        out, lse = torch.zeros(2, 3, 4, 5).double(), torch.full((2, 4, 3), -torch.inf).double()
        for i in order:
            merge_(out, lse, *parts[i])
        results.append((out, lse))
    for out, lse in results[1:]:
        assert relative_error(out, results[0][0]) < 1e-14
        assert relative_error(lse, results[0][1]) < 1e-14


@pytest.mark.parametrize("where", range(4))
def test_merging_does_not_hide_a_nan(where):
    given = [
        torch.zeros(1, 1, 1, 2),
        torch.zeros(1, 1, 1),
        torch.zeros(1, 1, 1, 2),
        torch.zeros(1, 1, 1),
    ]
    given[where].fill_(torch.nan)
    merge_(*given)
    assert given[0].isnan().all()
    assert given[1].isnan().all() == (where in (1, 3))


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


# --- the choice, and memory ---


def test_the_fastest_kernel_that_can_do_it_is_chosen():
    assert choose(None, KernelRequest("cpu", torch.float32, softclamp=False)).name == "sdpa"
    assert choose(None, KernelRequest("cpu", torch.float32, softclamp=True)).name == "eager"


def test_a_named_kernel_never_falls_back():
    with pytest.raises(ValueError, match=r"'sdpa' has no softclamp.*kernel=None"):
        choose("sdpa", KernelRequest("cpu", torch.float32, softclamp=True))
    with pytest.raises(ValueError, match=r"one of .*'eager', got 'fast'"):
        choose("fast", KernelRequest("cpu", torch.float32, softclamp=False))


class Largest(TorchDispatchMode):
    """The most elements that any one operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return result


@pytest.mark.parametrize("bucket", [1, 4, 16])
@pytest.mark.parametrize("softclamp", [None, 2.0])
def test_eager_never_holds_more_scores_than_its_bucket(bucket, softclamp):
    n, m, h = 64, 512, 4
    for tile in (None, Tile(slice(0, n), slice(0, m), None, 0)):
        block = Block(
            (n, m, h, h, 1, 1), tile, softclamp=softclamp, bucket_size=bucket, masked=True
        )
        with Largest() as largest:
            block.run("eager")
        assert largest.elements <= 2 * h * bucket * m
