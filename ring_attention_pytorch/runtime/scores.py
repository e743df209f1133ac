"""Further terms of scores: sinks and slopes of heads, a bias of keys.

A bias is stored in extra columns of queries and keys, whose product adds it to `scale * q.k`. It
therefore travels with the keys, and its gradient with theirs; transports and kernels need no code
for it. The queries' extra columns have a power of two that undoes the scale, so that the keys' have
at most the bias itself, which their dtype can represent.
"""

import math

import torch
from einops import rearrange
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.nn import Parameter


def check_bias(
    bias: Tensor | None, q: Tensor, k: Tensor, scale: float | None, softclamp: float | None
) -> None:
    """Raise ValueError if a bias does not fit keys like these, or these terms."""
    if bias is None:
        return
    b, m = k.shape[:2]
    h = q.shape[2]
    alike = bias.dtype == k.dtype and bias.device == k.device
    if not alike or list(bias.shape) not in ([b, m], [b, m, h]):
        raise ValueError(
            f"key_bias must be [{b}, {m}] or [{b}, {m}, {h}] in the keys' {k.dtype} on {k.device}, "
            f"got {list(bias.shape)} in {bias.dtype} on {bias.device}"
        )
    if _is_seen(bias) and not bool(bias.isfinite().all()):
        raise ValueError("key_bias must be finite, got inf or NaN; key_mask hides keys")
    if softclamp is not None:
        raise ValueError(
            "key_bias and softclamp exclude each other: the clamp would bend the bias too"
        )
    held = torch.finfo(k.dtype)
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    if scale == 0:
        raise ValueError("key_bias needs a scale that is not 0")
    if not held.tiny <= _undoing(scale) <= held.max:
        least, most = 2 / held.max, 1 / held.tiny
        raise ValueError(
            f"key_bias in {k.dtype} needs a scale of {least:.2g} to {most:.2g}, or as much below "
            f"0, got {scale}; scale q instead, or take another dtype"
        )


def _is_seen(t: Tensor) -> bool:
    """True if the tensor has values that can be read without a device sync: a plain CPU tensor."""
    if is_compiling():
        return False
    plain = type(t) in (Tensor, Parameter) and not is_functorch_wrapped_tensor(t)
    return plain and t.device.type == "cpu"


def columns(q: Tensor, k: Tensor, bias: Tensor) -> int:
    """Count the columns of a bias: two for each value in 16 bits, where one has too few digits."""
    if bias.ndim == 2:
        return _parts(k.dtype)
    heads = q.shape[2] // k.shape[2]
    return heads * _parts(k.dtype)


def with_bias(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose `scale * q.k` includes the bias, [b, m] or [b, m, h].

    >>> q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 3, 2, 8)
    >>> q, k = with_bias(q, k, torch.arange(3.0)[None], scale=0.5)
    >>> (0.5 * q[0, 1, 0] @ k[0, :, 0].T).tolist()
    [0.0, 1.0, 2.0]
    """
    h, h_kv = q.shape[2], k.shape[2]
    shared = bias.ndim == 2
    if shared:
        bias = bias.unsqueeze(-1).expand(-1, -1, h_kv)
    own = rearrange(bias, "b m (g r) -> b m g r", g=h_kv)
    pick = _undoing(scale)
    exact = own.to(torch.promote_types(own.dtype, torch.float32)) / (scale * pick)
    parts = [exact.to(k.dtype)]
    if _parts(k.dtype) == 2:
        parts.append((exact - parts[0].to(exact.dtype)).to(k.dtype))
    # each query head reads its own column of its key head
    picks = pick * torch.eye(own.shape[-1], dtype=q.dtype, device=q.device)
    picks = picks.repeat(h // h_kv if shared else 1, len(parts))
    picks = picks.repeat(h_kv, 1).expand(*q.shape[:2], -1, -1)
    return torch.cat((q, picks), -1), torch.cat((k, *parts), -1)


def _undoing(scale: float) -> float:
    """Return the power of two that scales `scale` to an absolute value in [1, 2).

    >>> [_undoing(scale) for scale in (1.0, 0.125, -0.2, 3.0)]
    [1.0, 8.0, 8.0, 0.5]
    """
    return 2.0 ** min(1023, 1 - math.frexp(scale)[1])


def widened(t: Tensor, more: int) -> Tensor:
    """Return a one-element tensor, expanded to the shape of t with `more` extra columns."""
    one = torch.empty((), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)
    return one.expand(*t.shape[:-1], t.shape[-1] + more)


def _parts(dtype: torch.dtype) -> int:
    return 2 if dtype.itemsize == 2 else 1


def check_per_head(name: str, q: Tensor, t: Tensor | None) -> None:
    """Raise ValueError unless t is None or has one floating number for each head of q."""
    if t is None:
        return
    h = q.shape[2]
    if list(t.shape) != [h] or not t.is_floating_point() or t.device != q.device:
        raise ValueError(
            f"{name} must be floating [{h}], one for each head of q, on {q.device}; "
            f"got {t.dtype} {list(t.shape)} on {t.device}"
        )


def sinks_note(sinks: Tensor | None) -> str | None:
    """Return a note for ranks to compare: all must have sinks, with a gradient, or none."""
    if sinks is None:
        return None
    if sinks.requires_grad and torch.is_grad_enabled():
        return "with a gradient"
    return "without a gradient"
