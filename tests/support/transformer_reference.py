"""The oracle of `RingTransformer`: its logits by its weights, of whole sequences, without ranks.

It takes weights by their names and computes in float64. Attention is that of the other oracles.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.reference import dense_attention
from tests.support.summary_reference import summary_attention

Weights = Mapping[str, Tensor]


def rotated(x: Tensor, at: Tensor, theta: float) -> Tensor:
    """Tokens x [..., n, h, d]: pairs (i, i + d / 2), as complex numbers, turned by their angles."""
    half = x.shape[-1] // 2
    rates = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(at), 1, half, dtype=torch.float64), at[:, None, None] * rates)
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def normed(x: Tensor, gamma: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt() * gamma


def transformer_logits(
    weights: Weights,
    ids: Tensor,
    *,
    heads: int,
    key_heads: int,
    windows: Sequence[int | None],
    theta: float = 10000.0,
    softclamp: float | None = None,
    summaries: Mapping[str, Any] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Logits [b, n, words] of a causal transformer; `summaries` are those of `summary_attention`.

    `mask` [b, n] is False where a token is padding.
    """
    weights = {name: t.double() for name, t in weights.items()}
    at = torch.arange(ids.shape[1], dtype=torch.float64)
    x = weights["token_emb.weight"][ids]
    for layer, window in enumerate(windows):
        attn, ff = ({
            name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)
        } for prefix in (f"layers.{layer}.0.", f"layers.{layer}.1."))  # fmt: skip
        y = normed(x, attn["to_qkv.0.gamma"])
        d = attn["to_out.weight"].shape[1] // heads
        q, k, v = (
            t.unflatten(-1, (-1, d))
            for t in (y @ attn["to_qkv.1.weight"].T).split(
                (heads * d, key_heads * d, key_heads * d), -1
            )
        )
        if summaries is None:
            q, k = rotated(q, at, theta), rotated(k, at, theta)
            options: dict[str, Any] = dict(causal=True, window=window, softclamp=softclamp)
            out, _ = dense_attention(q, k, v, key_mask=mask, **options)
        else:
            out = summary_attention(
                q, k, v, **summaries, **_of_summaries(attn, x), key_mask=mask,
                rotate=lambda t, at: rotated(t, at.double(), theta),
            )  # fmt: skip
        x = x + out.flatten(2) @ attn["to_out.weight"].T
        y = normed(x, ff["0.gamma"]) @ ff["1.weight"].T + ff["1.bias"]
        x = x + F.gelu(y) @ ff["3.weight"].T + ff["3.bias"]
    return normed(x, weights["to_logits.0.gamma"]) @ weights["to_logits.1.weight"].T


def _of_summaries(weights: Weights, x: Tensor) -> dict[str, Any]:
    """The learned options of a layer with tokens x [b, n, dim]."""
    mine = {name.removeprefix("summaries."): t for name, t in weights.items()}
    found: dict[str, Any] = {
        name: (mine.get(f"key_{one}"), mine.get(f"value_{one}"))
        for name, one in (("weights", "weights"), ("queries", "query"))
    }
    if "gates.weight" in mine:
        gates = (x @ mine["gates.weight"].T + mine["gates.bias"]).sigmoid()
        return found | {"gates": gates.unflatten(-1, (-1, 2))}
    return found | {"bias": mine["bias"]}
