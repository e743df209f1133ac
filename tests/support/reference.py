"""The oracle: dense attention over a whole sequence, which knows nothing of ranks or layouts."""

from collections.abc import Callable

import torch
from torch import Tensor

Number = int | Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    softclamp: float | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix: list[int] | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [b, n, h, d_v], lse [b, h, n]) of q [b, n, h, d], k [b, m, g, d], v [b, m, g, d_v].

    `weights` [b, h, n, m] are what dropout multiplies probabilities by.
    """
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if softclamp is not None:
        scores = softclamp * torch.tanh(scores / softclamp)
    q_at, k_at = torch.arange(q.shape[1])[None], torch.arange(k.shape[1])[None]
    seen = torch.ones((1, q.shape[1], k.shape[1]), dtype=torch.bool)
    if documents is not None:
        seen = documents[:, :, None] == documents[:, None]
        q_at = k_at = seen.tril(-1).sum(-1)  # how many of the same document come before
    if positions is not None:
        q_at, k_at = positions[0][None], positions[1][None]
    behind = q_at[:, :, None] - k_at[:, None]
    if causal:
        earlier = behind >= 0
        if prefix is not None:
            within = torch.arange(q.shape[1]) < torch.tensor(prefix)[:, None]
            earlier = earlier | (within[:, :, None] & within[:, None])
        seen = seen & earlier
    if window is not None:
        seen = seen & (behind.abs() <= window)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * behind.abs()[:, None]
    if key_bias is not None:
        scores = scores + (key_bias[:, None] if key_bias.ndim == 2 else key_bias.mT)[:, :, None]
    seen = seen[:, None]
    if mask_mod is not None:
        sample, head = torch.arange(q.shape[0]), torch.arange(q.shape[2])
        at = q_at[:, None, :, None], k_at[:, None, None]
        seen = seen & mask_mod(sample[:, None, None, None], head[:, None, None], *at)
    seen = seen if key_mask is None else seen & key_mask[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # a key of value 0
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
        seen = torch.cat((seen.expand(*scores.shape[:3], -1), torch.ones_like(column) > 0), -1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
    blind = ~seen.any(-1, keepdim=True)
    p = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if weights is not None:
        p = torch.cat((p[..., : k.shape[1]] * weights, p[..., k.shape[1] :]), -1)
    lse = scores.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def dropout_weights(rate: float, seed: int, *sizes: int) -> Tensor:
    """Return dropout's weights for b, h, n and m: 0 or 1 / (1 - rate), by the text of the spec."""
    numbers = (torch.arange(size) for size in sizes)
    kept = kept_by_spec(rate, seed, *torch.meshgrid(*numbers, indexing="ij"))
    return kept.double() / (1 - rate)


def kept_by_spec(
    rate: float, seed: int, sample: Number, head: Number, query: Number, key: Number
) -> bool | Tensor:
    """Return whether a probability stays, in Python's own numbers; or of many, in int64 tensors."""
    seed = (seed + 0x9E3779B97F4A7C15) % 2**64
    seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EB % 2**64
    seed = seed ^ (seed >> 31)
    keys = []
    for x in (seed % 2**32, seed >> 32):
        for number in (sample, head, query):
            x = x ^ (number % 2**32)
            for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
                x = (x ^ (x >> shift)) * factor % 2**32
            x = x ^ (x >> 14)
        keys.append(x)
    x = (keys[0] ^ (key % 2**32)) * 0xED5AD4BB % 2**32
    x = (x ^ (x >> 16) ^ keys[1]) * 0xAC4C1B51 % 2**32
    x = (x ^ (x >> 15)) * 0x31848BAB % 2**32
    return x >= int(rate * 2**32)


def relative_error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted; inf for NaN or a wrong shape.

    Where exactly nothing is wanted, as of a softmax over one key, it is the norm itself.
    """
    if got.shape != want.shape or not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    got, want = (t.detach().double().masked_fill(t.isinf(), 0.0) for t in (got, want))
    if want.numel() == 0:
        return 0.0
    error, size = (got - want).norm().item(), want.norm().item()
    if error != error:
        return float("inf")
    return error / size if size > 0 else error


def excess(got: Tensor, exact: Tensor, plain: Tensor, times: int) -> str | None:
    """Return what is wrong with a result by the rule of its dtype, that of `plain`, if anything.

    float64 by 1e-12 and float32 by 1e-5, relatively. 16 bits by `times` the error of `plain`, which
    is dense attention computed in them, or one rounding of the largest value: it may be lucky.
    """
    if (bound := {torch.float64: 1e-12, torch.float32: 1e-5}.get(plain.dtype)) is not None:
        error = relative_error(got, exact)
    elif got.shape != exact.shape or not torch.equal(got.isinf(), exact.isinf()):
        return "not of the same shape, or not infinite in the same places"
    else:
        seen = exact.isfinite()
        error, usual = (_largest((t.double() - exact)[seen]) for t in (got, plain))
        bound = max(times * usual, torch.finfo(plain.dtype).eps * _largest(exact[seen]))
    return None if error <= bound else f"{error:.1e} > {bound:.1e}"


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0
