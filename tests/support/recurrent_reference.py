"""Recurrent layers token by token: no chunks, no runs, no ranks."""

import torch
from torch import Tensor


def sequential(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    begins: Tensor,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs `[b, n, h, d_v]` and last states, of q, k `[b, n, h_k, d_k]` and v `[b, n, h, d_v]`.

    `g` is the logarithm of the gate, `[b, n, h]` or `[b, n, h, d_k]`, `begins` bool
    `[b, n]`: where a new document begins.
    """
    share = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
    a = (g if g.ndim == 4 else g[..., None]).exp()
    state = v.new_zeros(v.shape[0], *v.shape[2:3], k.shape[3], v.shape[3])
    state = state if initial is None else initial
    outs = []
    for t in range(v.shape[1]):
        if t:
            state = torch.where(begins[:, t, None, None, None], 0.0, state)
        state = a[:, t, :, :, None] * state
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], value)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, document: Tensor) -> Tensor:
    """A causal convolution of x `[b, n, c]`, token by token; `document` `[b, n]` are ids."""
    outs, width = [], weight.shape[1]
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0]) if bias is None else bias.expand_as(x[:, 0])
        for back in range(min(width, t + 1)):
            same = (document[:, t] == document[:, t - back])[:, None]
            total = total + torch.where(same, x[:, t - back] * weight[:, width - 1 - back], 0.0)
        outs.append(total)
    return torch.stack(outs, 1)
