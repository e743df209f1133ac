"""The oracle: near exactly, far in summary, of whole sequences, without ranks.

A dozen lines of mathematics: `summaries` and `seen` say what is attended to, and one dense softmax
does the rest.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Rotate = Callable[[Tensor, Tensor], Tensor]  # of tokens [n, h, d] and their positions [n]


def documents_of(ids: Tensor) -> Iterator[Tensor]:
    """The indices of each document's tokens."""
    for document in ids.unique().tolist():
        yield (ids == document).nonzero().flatten()


def pooled(x: Tensor, weights: Tensor, query: Tensor | None, real: Tensor) -> Tensor:
    """One summary [h, d] of tokens x [s, h, d]: a softmax over the real ones of them."""
    logits = weights.T if query is None else weights.T + (x * query).sum(-1)
    logits = logits.masked_fill(~real[:, None], -torch.inf)
    return (logits.softmax(0)[..., None] * x).sum(0)


def summary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    stride: int,
    block: int,
    distance: int | None = None,
    select: int = 0,
    weights: tuple[Tensor, Tensor],
    queries: tuple[Tensor | None, Tensor | None] = (None, None),
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    documents: Tensor | None = None,
    key_mask: Tensor | None = None,
    rotate: Rotate = lambda x, at: x,
    restart: bool = False,
) -> Tensor:
    """out [b, n, h, d_v] of q [b, n, h, d], k and v [b, n, g, ...]; `weights` are [g, block]."""
    b, n, h, _ = q.shape
    shared = h // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for sample in range(b):
        real = torch.ones(n, dtype=torch.bool) if key_mask is None else key_mask[sample]
        ids = torch.zeros(n, dtype=torch.long) if documents is None else documents[sample]
        for at in documents_of(ids):
            length, where = len(at), torch.arange(len(at)) if restart else at
            mine, keys, values = q[sample, at], k[sample, at], v[sample, at]
            ends, far_k, far_v = [], [], []
            for end in range(stride, length + 1, stride):  # the summary of what ends here
                held = slice(max(0, end - block), end)
                kept = slice(held.start - end + block, block)
                if real[at[held]].any():
                    ends.append(end)
                    for x, far, w, u in zip((keys, values), (far_k, far_v), weights, queries):
                        far.append(pooled(x[held], w[:, kept], u, real[at[held]]))
            t = torch.arange(length)[:, None]
            start = (t - window).div(stride, rounding_mode="floor") * stride
            near = (t >= t.T) & (start <= t.T) & real[at]
            last = torch.tensor(ends, dtype=torch.long)
            far = last <= start
            if distance is not None:
                far &= last - stride >= (t - distance).div(stride, rounding_mode="floor") * stride
            every_k, every_v = rotate(keys, where), values
            if ends:
                every_k = torch.cat((every_k, rotate(torch.stack(far_k), where[last - 1])))
                every_v = torch.cat((values, torch.stack(far_v)))
            every_k, every_v = (x.repeat_interleave(shared, 1) for x in (every_k, every_v))
            scores = torch.einsum("ihd,jhd->hij", rotate(mine, where), every_k) * q.shape[3] ** -0.5
            near = near.expand(h, -1, -1).clone()
            for heads in torch.arange(h).view(-1, shared) if select and ends else ():
                seen = scores[heads, :, length:].masked_fill(~far, -torch.inf)
                liked = seen.softmax(-1).nan_to_num().sum(0).masked_fill(~far, -1.0)
                best = liked.sort(dim=-1, descending=True, stable=True).indices[:, :select]
                chosen = torch.zeros_like(far).scatter(1, best, True) & far
                cell = torch.arange(length) // stride * stride + stride
                near[heads] |= (chosen[:, :, None] & (last[:, None] == cell)).any(1) & real[at]
            far = far.expand(h, -1, -1)
            added = torch.zeros(h, dtype=q.dtype) if bias is None else bias
            scores = torch.cat(
                (scores[..., :length], scores[..., length:] + added[:, None, None]), -1
            )
            if gates is None:
                parts = [(torch.cat((near, far), -1), torch.ones(length, h, dtype=q.dtype))]
            else:
                nobody = torch.zeros_like(near), torch.zeros_like(far)
                parts = [
                    (torch.cat((near, nobody[1]), -1), gates[sample, at, :, 0]),
                    (torch.cat((nobody[0], far), -1), gates[sample, at, :, 1]),
                ]
            for seen, gate in parts:
                blind = ~seen.any(-1, keepdim=True)
                p = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0).softmax(-1)
                p = p.masked_fill(blind, 0.0)
                out[sample, at] += gate[..., None] * torch.einsum("hij,jhd->ihd", p, every_v)
    return out
