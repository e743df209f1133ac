"""cuDNN's flash attention as PyTorch ships it: the fastest on Hopper that needs nothing installed.

Forward and backward with lse, grouped heads as they are. It knows full and causal squares; what
else there is (windows, key masks, softclamp) others do.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.contract import Case, Grads, Keys, Saved, Terms, merge_
from ring_attention_pytorch.layouts import Tile

_WIDEST = 256


class _Call(NamedTuple):
    rows: slice
    cols: slice
    causal: bool


def problem(case: Case) -> str | None:
    if case.device != "cuda":
        return f"runs on CUDA, the tensors are on {case.device}"
    if case.capability is None or case.capability < (9, 0):
        return f"needs compute capability 9.0 or later, got {case.capability}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"has no {case.dtype}"
    if case.d != case.d_v or case.d % 8 != 0 or case.d > _WIDEST:
        return f"needs one head size, a multiple of 8 up to {_WIDEST}, got {case.d} and {case.d_v}"
    for name in ("softclamp", "window", "key_mask", "deterministic"):
        if getattr(case, name):
            return f"has no {name}"
    return None


def forward(
    q: Tensor, keys: Keys, tiles: Sequence[Tile], terms: Terms, out: Tensor, lse: Tensor
) -> None:
    for rows, cols, causal in _calls(tiles):
        n = rows.stop - rows.start
        q_, k, v = _heads_first(q[:, rows], keys.k[:, cols], keys.v[:, cols])
        part, part_lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            _not_alone(q_, k), k, v, None, True, 0.0, causal, False, scale=terms.scale
        )
        part = rearrange(part[:, :, :n], "b h n d -> b n h d")
        merge_(out[:, rows], lse[..., rows], part, part_lse.flatten(2)[..., :n])


def backward(saved: Saved, keys: Keys, tiles: Sequence[Tile], terms: Terms, grads: Grads) -> None:
    _backward(saved, keys, tiles, terms, grads)
    if saved.dlse is not None:
        # a score's share of dlse is p * dlse: what it gets where v is 0 and out * dout is -dlse,
        # which is brought to at most 1 for 16 bits to hold it
        size = saved.dlse.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        out = torch.zeros_like(saved.out)
        out[..., 0] = 1
        dout = -out * rearrange(saved.dlse / size, "b h n -> b n h 1").to(out.dtype)
        nothing = keys._replace(v=torch.zeros_like(keys.v))
        share = Grads(*(torch.zeros_like(grad) for grad in grads))
        _backward(saved._replace(out=out, dout=dout), nothing, tiles, terms, share)
        grads.dq.addcmul_(share.dq, size)
        grads.dk.addcmul_(share.dk, size)


def _backward(saved: Saved, keys: Keys, tiles: Sequence[Tile], terms: Terms, grads: Grads) -> None:
    unused = torch.zeros((), dtype=torch.int64, device=saved.q.device)  # dropout's seed and offset
    # the op takes both to lie alike, and is silently wrong where they don't
    dout = saved.dout
    if dout.stride() != saved.out.stride():
        dout = torch.empty_like(saved.out).copy_(dout)
    for rows, cols, causal in _calls(tiles):
        q, k, v = _heads_first(saved.q[:, rows], keys.k[:, cols], keys.v[:, cols])
        out, dout_ = _heads_first(saved.out[:, rows], dout[:, rows])
        lse = saved.lse[..., rows].unsqueeze(-1).contiguous()
        q, out, dout_, lse = (_not_alone(t, k) for t in (q, out, dout_, lse))
        parts = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout_, q, k, v, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2],
            0.0, causal, scale=terms.scale,
        )  # fmt: skip
        places = (grads.dq[:, rows], grads.dk[:, cols], grads.dv[:, cols])
        for total, part in zip(places, parts):
            total += rearrange(part, "b h n d -> b n h d")[:, : total.shape[1]]


def _calls(tiles: Sequence[Tile]) -> Iterator[_Call]:
    """Causal tiles as squares, whatever rows are left seeing all: where a diagonal starts in a
    rectangle is a question that kernels answer differently."""
    for rows, cols, left, right in tiles:
        assert (left, right) in ((None, None), (None, 0)), "a band, which `problem` refuses"
        square = min(rows.stop, rows.start + cols.stop - cols.start)
        if right is None:
            yield _Call(rows, cols, False)
            continue
        yield _Call(slice(rows.start, square), cols, square - rows.start > 1)
        if square < rows.stop:
            yield _Call(slice(square, rows.stop), cols, False)


def _not_alone(t: Tensor, k: Tensor) -> Tensor:
    """A row of zeros more where one query meets one key, which the op refuses."""
    return F.pad(t, (0, 0, 0, 1)) if t.shape[2] == k.shape[2] == 1 else t


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """As the op wants them. What is expanded is laid out first, and so is a single row, whose
    stride says nothing: the op took it for that of heads, and gave wrong gradients."""
    return [
        rearrange(
            t.clone(memory_format=torch.contiguous_format)
            if t.shape[1] == 1 or t.stride(3) != 1 or 0 in t.stride()
            else t,
            "b n h d -> b h n d",
        )
        for t in tensors
    ]
