# ruff: noqa: PLR0913 - stand-ins have the signatures of what they stand for
"""Adapters of kernels that need CUDA, on the CPU: over stand-ins that do what those kernels say.

A stand-in is dense attention with the kernel's own signature and its own way to count a diagonal,
so that what the adapters make of tiles, strides, parts and lse's gradient is checked everywhere.
The kernels themselves are checked by tests/gpu.
"""

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.geometry.tiles import Tile, band, trim
from ring_attention_pytorch.kernels import KERNELS, flash_attn_4
from ring_attention_pytorch.kernels._flash import aligned, from_bottom_right, windows
from ring_attention_pytorch.kernels._varlen import packs
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import Tiles
from ring_attention_pytorch.runtime.replay import Recordings
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.tape import Tape
from tests.support import threads
from tests.support.cases import TOLERANCES, Attention, check_symmetric, results
from tests.support.features import FEATURES, LAYOUTS, Problem, refusal, together
from tests.support.kernel_cases import CASES, STRIDED, KernelCase, faults, random_cases
from tests.support.reference import dense_attention, relative_error

CPU = torch.device("cpu")
SHORT = Attention(layout="zigzag", causal=True, batch=1)
WAYS = ((2, dict(ulysses=2)), (3, dict(transport="gather")), (4, {}))


def shown(n: int, m: int, left: int, right: int) -> Tensor:
    """A flash attention's window: counted from the bottom right, -1 is no bound."""
    assert min(left, right) >= -1
    offset = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    return ((left == -1) | (offset >= -left)) & ((right == -1) | (offset <= right))


def shown_2(n: int, m: int, left: int, right: int) -> Tensor:
    """That of flash-attn 2: a bound as wide as the keys is none, none beside another so wide."""
    left, right = (-1 if bound >= m else bound for bound in (left, right))
    if left >= 0 > right:
        right = m
    elif right >= 0 > left:
        left = m
    return shown(n, m, left, right)


def attend(q, k, v, seen, scale, softcap):
    """out, lse, and the derivative of each score by scale * q.k. Only out is rounded."""
    group, dtype = q.shape[2] // k.shape[2], q.dtype
    q, k, v = (t.to(accumulation_dtype(dtype)) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores, slope = torch.einsum("bihd,bjhd->bhij", q, k) * scale, 1.0
    if softcap:
        t = torch.tanh(scores / softcap)
        scores, slope = softcap * t, 1 - t.square()
    scores = scores.masked_fill(~seen, -torch.inf)
    assert seen.any(1).all(), "a row that sees nothing has no meaning to these kernels"
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    return out.to(dtype), scores.logsumexp(-1), slope


def differentiate(dout, q, k, v, out, lse, seen, scale, softcap, dlse=None):
    """dq, dk, dv from a global lse, as all flash attentions do it."""
    h_kv, dtype = k.shape[2], q.dtype
    dout, q, k, v, out = (t.to(accumulation_dtype(dtype)) for t in (dout, q, k, v, out))
    wide_k, wide_v = (t.repeat_interleave(q.shape[2] // h_kv, dim=2) for t in (k, v))
    scores, slope = torch.einsum("bihd,bjhd->bhij", q, wide_k) * scale, 1.0
    if softcap:
        t = torch.tanh(scores / softcap)
        scores, slope = softcap * t, 1 - t.square()
    p = (scores - lse[..., None]).exp().masked_fill(~seen, 0.0)
    delta = torch.einsum("bihd,bihd->bhi", dout, out) - (0.0 if dlse is None else dlse)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout, wide_v) - delta[..., None]) * slope * scale
    dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q), torch.einsum("bhij,bihd->bjhd", p, dout)
    folded = (rearrange(t, "b j (g r) d -> b j g r d", g=h_kv).sum(3) for t in (dk, dv))
    return [t.to(dtype) for t in (torch.einsum("bhij,bjhd->bihd", ds, wide_k), *folded)]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **functions) -> None:
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:i]))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    vars(made).update(functions)


def stand_in_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                softcap, alibi_slopes, return_softmax):  # fmt: skip
        assert not causal
        seen = shown_2(q.shape[1], k.shape[1], window_size_left, window_size_right)
        out, lse, _ = attend(q, k, v, seen, softmax_scale, softcap)
        return out, lse, None, None

    def backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                 window_size_left, window_size_right, softcap, alibi_slopes,
                 deterministic):  # fmt: skip
        assert lse.is_contiguous()
        seen = shown_2(q.shape[1], k.shape[1], window_size_left, window_size_right)
        parts = differentiate(dout, q, k, v, out, lse, seen, softmax_scale, softcap)
        for given, part in zip((dq, dk, dv), parts):
            given.copy_(part)

    module(monkeypatch, "flash_attn.flash_attn_interface", _flash_attn_forward=forward,
           _flash_attn_backward=backward)  # fmt: skip


def stand_in_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many sequences too; what none of them uses is not written."""

    def seen_by(q, k, causal, left, right):
        bounds = (-1, 0) if causal else (-1 if x is None else x for x in (left, right))
        return shown(q.shape[1], k.shape[1], *bounds)

    def places(cumulative, used, ascend=True):
        assert cumulative.dtype == used.dtype == torch.int32
        assert len(cumulative) == len(used) + 1
        for (start, stop), length in zip(pairwise(cumulative.tolist()), used.tolist()):
            assert length > 0
            assert start + length <= stop or not ascend
            yield slice(start, start + length)

    def forward(q, k, v, softmax_scale, softcap, return_lse, causal=False, window_size_left=None,
                window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
                seqused_k=None, out=None, lse=None):  # fmt: skip
        window = causal, window_size_left, window_size_right
        if cu_seqlens_q is None:
            seen = seen_by(q, k, *window)
            found = attend(q, k, v, seen, softmax_scale, softcap)
            return out.copy_(found[0]), lse.copy_(found[1]), None
        assert out is lse is None
        out = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan)
        lse = q.new_full((q.shape[1], len(q)), torch.nan, dtype=accumulation_dtype(q.dtype))
        # keys are only read, so those of several sequences may be the same
        keys = places(cu_seqlens_k, seqused_k, ascend=False)
        for rows, cols in zip(places(cu_seqlens_q, seqused_q), keys):
            one = [t[None] for t in (q[rows], k[cols], v[cols])]
            found = attend(*one, seen_by(*one[:2], *window), softmax_scale, softcap)
            out[rows], lse[:, rows] = found[0][0], found[1][0]
        return out, lse, None

    def backward(q, k, v, out, dout, lse, softmax_scale, softcap, deterministic, dlse, dq, dk, dv,
                 causal=False, window_size_left=None, window_size_right=None, cu_seqlens_q=None,
                 cu_seqlens_k=None, seqused_q=None, seqused_k=None):  # fmt: skip
        assert lse.is_contiguous()
        window, terms = (causal, window_size_left, window_size_right), (softmax_scale, softcap)
        for given, t in ((dq, q), (dk, k), (dv, v)):
            assert (given.shape, given.dtype) == (t.shape, t.dtype)
            assert given.stride(-1) == 1
            given.fill_(torch.nan)
        if cu_seqlens_q is None:
            seen = seen_by(q, k, *window)
            parts = differentiate(dout, q, k, v, out, lse, seen, *terms, dlse)
            return [given.copy_(part) for given, part in zip((dq, dk, dv), parts)]
        for rows, cols in zip(places(cu_seqlens_q, seqused_q), places(cu_seqlens_k, seqused_k)):
            one = [t[None] for t in (dout[rows], q[rows], k[cols], v[cols], out[rows])]
            by_head = [None if t is None else t[None, :, rows] for t in (lse, dlse)]
            seen = seen_by(*one[1:3], *window)
            found = differentiate(*one, by_head[0], seen, *terms, by_head[1])
            for whole, at, (part,) in zip((dq, dk, dv), (rows, cols, cols), found):
                whole[at] = part
        return dq, dk, dv

    module(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=forward,
           _flash_attn_bwd=backward)  # fmt: skip


def stand_in_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale,
                window_size_left, window_size_right):  # fmt: skip
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        seen = shown_2(q.shape[1], k.shape[1], window_size_left, window_size_right)
        return *attend(q, k, v, seen, scale, None)[:2], None, None, None

    def backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state,
                 unused, *, scale, window_size_left, window_size_right):  # fmt: skip
        assert lse.is_contiguous()
        seen = shown_2(q.shape[1], k.shape[1], window_size_left, window_size_right)
        return differentiate(dout, q, k, v, out, lse, seen, scale, None)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward, raising=False)


def stand_in_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the op refuses, or is wrong about, as assertions."""
    compiled: dict[tuple, tuple] = {}  # what is kept by q, k and v, and is not only of them

    def checked(causal, *tensors):
        n, m = tensors[0].shape[2], tensors[1].shape[2]
        assert m > 1
        assert not causal or n >= m
        assert all(t.shape[2] > 1 or t.transpose(1, 2).is_contiguous() for t in tensors)
        # its diagonal starts at the top left
        return [t.transpose(1, 2) for t in tensors], shown(n, m, -1, n - m if causal else -1)

    def forward(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
        assert with_lse
        laid, seen = checked(causal, q, k, v)
        out, lse, _ = attend(*laid, seen, scale, None)
        return out.transpose(1, 2), lse[..., None], *[None] * 7

    def backward(dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k,
                 dropout, causal, *, scale):  # fmt: skip
        kept = tuple((t.shape, t.stride()) for t in (q, k, v))
        assert compiled.setdefault(kept, out.stride()) == out.stride() == dout.stride()
        assert lse.is_contiguous()
        (q, k, v, out, dout), seen = checked(causal, q, k, v, out, dout)
        parts = differentiate(dout, q, k, v, out, lse[..., 0], seen, scale, None)
        return [part.transpose(1, 2) for part in parts]

    name = "_scaled_dot_product_cudnn_attention"
    monkeypatch.setattr(torch.ops.aten, name, forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, f"{name}_backward", backward, raising=False)


STAND_INS = {
    "flash-attn-2": stand_in_2,
    "flash-attn-4": stand_in_4,
    "sdpa-flash": stand_in_flash,
    "sdpa-cudnn": stand_in_cudnn,
}
ODD = [
    KernelCase(1, 1),
    KernelCase(3, 2, ((0, 1, 0, 1, None, None), (1, 3, 0, 2, None, 1)), heads=(6, 2)),
    KernelCase(30, 17, ((0, 30, 0, 17, None, 0),)),
    KernelCase(30, 12, ((0, 12, 0, 12, None, 0), (12, 30, 0, 12, None, None))),
    KernelCase(15, 9, ((0, 15, 1, 9, None, 3),)),
    KernelCase(7, 1, heads=(6, 2), batch=2),
    KernelCase(12, 12, ((0, 12, 0, 1, None, None), (1, 12, 1, 12, None, 0)), heads=(2, 2)),
    KernelCase(12, 12, ((0, 12, 0, 1, None, None), (1, 12, 1, 12, None, 0)), heads=(4, 1)),
    KernelCase(15, 21, ((0, 15, 0, 21, None, 6),), batch=2),
    KernelCase(20, 20, ((0, 10, 0, 10, None, 0), (10, 20, 0, 20, None, 10)), pieces=3),
    KernelCase(9, 9, ((0, 1, 0, 1, None, None), (1, 9, 0, 9, None, 1)), d=(8, 8)),
    # rows that see keys here and there
    KernelCase(20, 20, ((0, 20, 0, 5, None, None), (0, 20, 9, 15, None, None),
                        (4, 20, 16, 20, None, None)), d=(8, 8)),
    # runs of tiles with gaps on one side, on the other, and on both
    KernelCase(
        30, 30,
        ((2, 9, 1, 8, None, 0), (9, 14, 12, 17, None, 0), (16, 20, 17, 21, None, 0),
         (22, 30, 24, 30, None, -2), (22, 30, 1, 17, None, None)),
        heads=(6, 2), batch=2, pieces=2,
    ),
]  # fmt: skip


@pytest.fixture
def stood_in(monkeypatch):
    """`stood_in(kernel)`: it runs on the CPU, and in rings, by its stand-in."""

    def of(kernel: str) -> None:
        STAND_INS[kernel](monkeypatch)
        can = KERNELS[kernel].CAN._replace(
            devices=None, dtypes=None, head_dim_multiple=1, package=None
        )
        monkeypatch.setattr(KERNELS[kernel], "CAN", can)

    return of


ANY = [*CASES, *STRIDED, *random_cases(60, torch.float64), *ODD]


def can(kernel: str, case: KernelCase) -> bool:
    windowed = any(tile.left is not None for tile in case.whole())
    unusual = case.scale is not None and case.scale <= 0
    if case.masked or unusual or (windowed and kernel == "sdpa-cudnn"):
        return False
    return case.softclamp is None or kernel.startswith("flash-attn")


@pytest.mark.parametrize("kernel", STAND_INS)
def test_tiles_parts_and_the_gradient_of_lse(kernel, monkeypatch):
    STAND_INS[kernel](monkeypatch)
    cases = [replace(case, dtype=torch.float64) for case in ANY if can(kernel, case)]
    assert len(cases) > 20
    bad = {case: found for case in cases if (found := faults(case, kernel, "cpu"))}
    assert not bad


def test_the_widest_of_two_calls_goes_first():
    """Its gradients take the place of all keys, whatever comes second is added to them."""
    tiles = [Tile(slice(0, 2), slice(0, 4), None, 2), Tile(slice(2, 4), slice(0, 8), None, 6)]
    for given in (tiles, tiles[::-1]):
        found = packs(Tiles(given), torch.zeros(1, 4, 1, 1), disjoint_keys=True)
        assert [pack.cols.stop for pack in found] == [8, 4]


@pytest.mark.parametrize(("batch", "calls"), [(1, 2), (3, 4)])
def test_a_call_has_at_most_so_many_sequences(batch, calls):
    document = [slice(i, i + 1) for i in range(300)]
    tiles = Tiles(Tile(at, at, None, None) for at in document)
    found = packs(tiles, torch.zeros(batch, 300, 1, 1), disjoint_keys=True)
    assert len(found) == calls
    assert sum(len(pack.sequences["seqused_q"]) for pack in found) == 300 * batch
    assert packs(tiles, torch.zeros(batch, 300, 1, 1), disjoint_keys=True) is found


@pytest.mark.parametrize("kernel", STAND_INS)
def test_every_feature_in_rings(kernel, stood_in):
    stood_in(kernel)
    tried = [("causal", name, "gradient of lse") for name in FEATURES if name != "mask_mod"]
    tried += [("cu_seqlens",), ("documents",), ("window", "cu_seqlens"), ("window", "documents")]
    done = 0
    for i, names in enumerate(tried):
        problem, layout = Problem(together(names)), LAYOUTS[i % len(LAYOUTS)]
        why = refusal(lambda: problem.shard(Ring.alone(), layout, kernel))  # noqa: B023
        if why is not None:
            assert f"kernel={kernel!r} " in why
            continue
        for size, how in (WAYS[i % 3], WAYS[(i + 1) % 3]):
            errors = problem.errors(size, layout, kernel, **how)
            assert max(errors.values()) < 1e-12, (names, size, how, errors)
            done += 1
    assert done > 20


@pytest.mark.parametrize("kernel", STAND_INS)
@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_ranks_without_a_token(kernel, transport, length, stood_in):
    """One that fails where others have work to do would leave them waiting."""
    stood_in(kernel)
    case = replace(SHORT, length=length, kernel=kernel)
    tensors, _, dout, dlse = case.data()
    leaves = [t.clone().requires_grad_() for t in tensors]
    want = results(leaves, *dense_attention(*leaves, causal=True), dout, dlse)

    def rank(ring: Ring) -> float:
        at = case.places(ring.rank, ring.size)[0]
        mine = [t[:, at].requires_grad_() for t in tensors]
        found = ring_attn(
            *mine, causal=True, layout="zigzag", kernel=kernel, group=ring, return_lse=True,
            transport=transport,
        )  # fmt: skip
        got = results(mine, *found, dout[:, at], dlse[..., at])
        exact = [t[..., at] if i == 1 else t[:, at] for i, t in enumerate(want)]
        return max((relative_error(a, b) for a, b in zip(got, exact) if b.numel()), default=0.0)

    assert max(threads.run(4, rank)[0]) < 1e-12


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("m", range(1, 6))
def test_bands_from_the_bottom_right_show_the_same(n, m):
    for left in (None, *range(-6, 7)):
        for right in (None, *range(-6, 7)):
            tile = trim(slice(0, n), slice(0, m), left, right)
            if tile is not None:
                size = tile.rows.stop - tile.rows.start, tile.cols.stop - tile.cols.start
                assert torch.equal(shown(*size, *from_bottom_right(tile)), band(tile, CPU))
                parts = [
                    shown_2(part.rows.stop - part.rows.start, size[1], *bounds)
                    for part, bounds in windows([tile])
                ]
                assert torch.equal(torch.cat(parts), band(tile, CPU))


def test_what_lies_right_stays_where_it_is():
    t = torch.zeros(2, 6, 4, 8)
    same = [t, t[:, 2:], t[:, :, :1], t[..., :4]]
    moved = [t[..., 1:5], t[:, :, :1].expand(2, 6, 4, 8), t.transpose(2, 3)]
    assert all(a is b for a, b in zip(aligned(*same), same))
    for a, b in zip(aligned(*moved), moved):
        assert a is not b
        assert torch.equal(a, b)
        assert a.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["flash-attn-2", "flash-attn-4"])
def test_gradients_are_made_where_others_read_them(kernel, dtype, stood_in, monkeypatch):
    """Those of zigzag's two calls, which lie upon one another, and of documents, between which
    there are gaps."""
    stood_in(kernel)
    monkeypatch.setitem(TOLERANCES, torch.bfloat16, 2e-2)
    blank, there = GradAccumulator.alloc, []

    def noted(total: GradAccumulator, *asked: slice | bool, **how: bool) -> Tensor:
        made = blank(total, *asked, **how)
        there.append(total._place is not None and made is total._place[0])
        return made

    monkeypatch.setattr(GradAccumulator, "alloc", noted)
    ids = tuple(i // 7 for i in range(40))
    for case in (Attention(40, "zigzag", causal=True), Attention(40, ids=(ids,))):
        there.clear()
        check_symmetric(replace(case, kernel=kernel, dtype=dtype), 4, 9)
        assert any(there)


def test_tapes_repeat_what_flash_attn_4_launches_and_not_its_python(monkeypatch):
    """What it has compiled writes where no recorder sees it, and each function has a cache."""
    entered: list[str] = []

    def compiled(x: Tensor, y: Tensor, factor: float, nothing: None) -> None:
        with torch._C.DisableTorchFunction():
            y.copy_(x * factor)

    def before(q: Tensor, room: Tensor) -> None:
        before.compile_cache["kind"](q, room, 2.0, None)

    def attend(q: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor, None]:
        entered.append("forward")
        room = torch.empty(q.shape)
        before(q.detach(), room)
        attend.compile_cache["kind"](room, out, 3.0, None)
        return out, room, None

    before.compile_cache, attend.compile_cache = {"kind": compiled}, {"kind": compiled}
    module(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=attend, _before=before)
    caches = before.compile_cache, attend.compile_cache

    def function(_: object, q: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_4._attend(q, out=torch.empty(q.shape))

    tapes = Recordings(Tape)
    for _ in range(6):
        q = torch.randn(5)
        out, room = tapes.run(function, None, q)
        assert torch.equal(room, q * 2)
        assert torch.equal(out, q * 2 * 3)
    assert len(entered) == 3
    assert (before.compile_cache, attend.compile_cache) == caches
