"""Stand-ins for kernels that need CUDA, on the CPU.

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

from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from tests.support.kernel_cases import CASES, STRIDED, KernelCase, faults, random_cases


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
    """Stand in for flash-attn 4, of many sequences too; unused memory is not written."""

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


ANY = [*CASES, *STRIDED, *random_cases(60, torch.float64), *ODD]


def can(kernel: str, case: KernelCase) -> bool:
    windowed = any(tile.left is not None for tile in case.whole())
    unusual = case.scale is not None and case.scale <= 0
    if case.masked or unusual or (windowed and kernel == "sdpa-cudnn"):
        return False
    return case.softclamp is None or kernel.startswith("flash-attn")


def wrong_over_stand_in(kernel: str, monkeypatch: pytest.MonkeyPatch) -> dict[KernelCase, object]:
    """Run all cases that a kernel can do; return what is wrong of each: tiles, parts, dlse."""
    STAND_INS[kernel](monkeypatch)
    cases = [replace(case, dtype=torch.float64) for case in ANY if can(kernel, case)]
    assert len(cases) > 20
    return {case: found for case in cases if (found := faults(case, kernel, "cpu"))}
