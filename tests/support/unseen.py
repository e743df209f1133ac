"""NaN and inf where a query sees them, and where none may."""

import torch
from torch import Tensor

from ring_attention_pytorch import RingCache, ring_attn, ring_attn_with_cache
from tests.support.reference import dense_attention


def rows_of_nan(
    kernel: str, name: str, options: dict, dtype: torch.dtype = torch.float32, d: int = 4
) -> tuple[Tensor, Tensor]:
    """Return which rows are NaN, of the head whose key or value 4 of 9 is, and of the other."""
    torch.manual_seed(0)
    given = dict(zip("qkv", torch.randn(3, 1, 9, 2, d, dtype=dtype)))
    given[name][:, 4, 1] = torch.nan
    out, lse = ring_attn(**given, **options, kernel=kernel, return_lse=True)
    bad = out.isnan().all(-1)
    assert torch.equal(bad, out.isnan().any(-1))
    told = lse.isnan() | lse.isinf()  # PyTorch's flash on GPUs says inf, flash-attn 4 -inf
    assert name == "v" or torch.equal(bad, told.transpose(1, 2))
    return bad[0, :, 1], bad[0, :, 0]


SEEN = [
    (dict(causal=True), range(4, 9)),
    (dict(causal=True, window=2), range(4, 7)),
    (dict(window=1), range(3, 6)),
    (dict(), range(9)),
]


def cached(kernel: str, window: int | None) -> float:
    """The error of decoding where tokens before a sequence's start, or window, are NaN."""
    torch.manual_seed(0)
    n, starts = 21, [6, 0]
    q, k, v = torch.randn(2, n, 4, 8), torch.randn(2, n, 2, 8), torch.randn(2, n, 2, 8)
    at = torch.arange(n)
    cache = RingCache(2, key_heads=2, head_dim=8, page=8, capacity=32, device=q.device)
    cache.hide_before(starts)
    unseen = (at < torch.tensor(starts)[:, None]) | (at < (0 if window is None else n - 3 - window))
    spoiled = [t.masked_fill(unseen[..., None, None], torch.nan) for t in (k, v)]
    options = dict(kernel=kernel, window=window)
    ring_attn_with_cache(q[:, :-3], *(t[:, :-3] for t in spoiled), cache, **options)
    out = ring_attn_with_cache(q[:, -3:], *(t[:, -3:] for t in spoiled), cache, **options)
    want = dense_attention(
        *(t.double() for t in (q, k, v)), causal=True, window=window,
        key_mask=at >= torch.tensor(starts)[:, None],
    )[0]  # fmt: skip
    error = (out - want[:, -3:]).abs().max().item()
    return error if error == error else torch.inf
