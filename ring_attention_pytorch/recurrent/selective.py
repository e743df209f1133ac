"""Mamba 1 over runs: a gate for each channel and each of its states."""

from torch import Tensor

from ring_attention_pytorch.recurrent.layers import Call, check_call, computed
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

_CALLER = "selective_scan"
_CHUNK = 4  # tokens; each takes memory for that many times all channels' states


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    plan: RunPlan,
    skip: Tensor | None = None,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the state space of Mamba 1 for sequences whose shards are runs of tokens.

    The state of a channel is s = exp(dt a) s + dt x b after each token, and the output the product
    of s and c (Gu and Dao 2023, "Mamba"). All ranks of the ring call this together, in plain
    PyTorch.

    Args:
        x, dt: `[b, n, channels]`, this rank's tokens; dt after softplus, at least 0.
        a: `[channels, d]`, negative.
        b, c: `[b, n, d]`.
        plan: from `RunPlan.make` or `RunPlan.of`.
        skip: `[channels]`, a factor of x that is added to the output (D); None is 0.
        final: also return the states after each sample.

    Returns:
        `[b, n, channels]` in the dtype of x; and float32 `[b, channels, d]` (float64 if x is), the
        same on all ranks, or None.

    Raises:
        ValueError: shapes don't fit, or ranks differ.

    >>> import torch
    >>> x, b = torch.randn(1, 6, 3), torch.randn(1, 6, 2)
    >>> selective_scan(x, x.abs(), -torch.ones(3, 2), b, b, plan=RunPlan.make(x))[0].shape
    torch.Size([1, 6, 3])
    """
    plan.check_tokens(_CALLER, x=x, dt=dt, b=b, c=c)
    _check(x, dt, a, b, c, plan, skip)
    wide = accumulation_dtype(x.dtype)
    values, dt, a = x.to(wide), dt.to(wide), a.to(wide)
    q, k, v = c[:, :, None], b[:, :, None], (values * dt)[..., None]
    g = dt[..., None] * a
    check_call(_CALLER, plan, q, k, v, None, g=(g, 4))
    call = Call(q, k, v, g, None, None, final, plan, "eager", chunk=_CHUNK)
    out, last = computed(_CALLER, call, skip)
    out = out.squeeze(-1)
    if skip is not None:
        out = out + values * skip.to(wide)
    return out.to(x.dtype), None if last is None else last.squeeze(-1)


def _check(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, plan: RunPlan, skip: Tensor | None
) -> None:
    """Raise ValueError if shapes or dtypes don't fit."""
    channels, d = [*x.shape[2:]], [*b.shape[2:]]
    fits = x.ndim == b.ndim == 3 and dt.shape == x.shape and c.shape == b.shape
    fits = fits and [*a.shape] == channels + d
    if not fits or (skip is not None and [*skip.shape] != channels):
        raise plan.error(
            f"{_CALLER}: x and dt must be [b, n, channels], b and c [b, n, d], a [channels, d] and "
            f"skip [channels]; got {[*x.shape]}, {[*dt.shape]}, {[*b.shape]}, {[*c.shape]}, "
            f"{[*a.shape]} and {None if skip is None else [*skip.shape]}"
        )
    plan.check_numbers(_CALLER, x, x=x, dt=dt, a=a, b=b, c=c, skip=skip)
