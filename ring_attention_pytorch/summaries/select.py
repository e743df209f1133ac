"""Selected cells: a query also reads exactly the few cells whose summaries score best.

    1  every rank gathers all summary keys, and scores them for its queries, some at a time
    2  each query group chooses its best cells; ties go to the earlier one
    3  ranks exchange which cells they need, then their keys and values
    4  attention of each query to the tokens of its cells

The choice has no gradient; the keys and values that are read have one. It runs in plain PyTorch,
some queries at a time, and backward computes it again, so the fetched keys are all the memory that
it needs. A part of the queries scores only summaries that one of them can see.

Yuan et al. 2025, "Native Sparse Attention", section 3.3.2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.comm.collectives import all_gather, all_gather_along, scatter_rows
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import refuse_second_order
from ring_attention_pytorch.summaries.cells import Cells, first_cells, rows_of
from ring_attention_pytorch.summaries.plain import attended, scores_of
from ring_attention_pytorch.top_keys import best_of

_NUMBERS = 2**24  # most scores, or numbers of gathered keys, in memory at once


@dataclass(frozen=True, eq=False)
class Selection:
    """The cells that each query can choose from, and each token's place; tokens `[b * n]`."""

    rule: Cells
    cells: int  # number of cells of all documents and samples
    ring: Ring
    queries: Tensor  # tokens that see a summary
    seen: Tensor  # [2, queries]: the first cell that each sees, and the end
    reach: Tensor  # `seen` on the host
    places: tuple[Tensor, ...]  # per rank and token: cell * stride + place, or cells * stride
    key_mask: Tensor | None  # [b, n], visible keys
    summaries: Tensor | None  # [1, m], visible summaries of this rank

    @classmethod
    def make(
        cls, rule: Cells, cells: int, held: Sequence[Tensor], ring: Ring, device: torch.device
    ) -> "Selection":
        """Make it from every rank's tokens, without communication."""
        last, queries = rows_of(rule, held[ring.rank])
        first = held[ring.rank][queries, 1]
        if rule.span is not None:
            first = torch.maximum(first, last + 1 - rule.span)
        places = []
        for theirs in held:
            t, before, own, _ = theirs.unbind(-1)
            at = before * rule.stride + t
            places.append(torch.where(t // rule.stride < own, at, cells * rule.stride).to(device))
        reach = torch.stack((first, last + 1))
        tokens = queries.to(device)
        return cls(rule, cells, ring, tokens, reach.to(device), reach, tuple(places), None, None)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        summary_k: Tensor,
        terms: ScoreMods,
        caller: Caller,
    ) -> tuple[Tensor, Tensor]:
        """Return out `[x, h, d_v]` and lse `[x, h]` of `queries`, in the accumulation dtype."""
        wide = accumulation_dtype(q.dtype)
        q = rearrange(q.flatten(0, 1)[self.queries].to(wide), "x (g h) d -> x g h d", g=k.shape[2])
        with torch.no_grad():
            chosen = self._chosen(q, self._everyones(summary_k[0], caller).to(wide), terms, caller)
        kv, real, number = self._fetched(torch.cat((k, v), -1).flatten(0, 1), chosen, caller)
        out, lse = _OfChosen.apply(q, kv, real, number[chosen], terms)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def _everyones(self, mine: Tensor, caller: Caller) -> Tensor:
        """Gather a tensor of summaries from all ranks, `[cells, ...]`; no gradient."""
        bounds = first_cells(self.cells, self.ring.size)
        cells = [b - a for a, b in pairwise(bounds)]
        return all_gather_along(0, mine.detach(), cells, caller)

    def _chosen(self, q: Tensor, keys: Tensor, terms: ScoreMods, caller: Caller) -> Tensor:
        """Return the cells that each query group chooses, `[x, g, select]`; `self.cells`: none."""
        visible = torch.ones(self.cells, dtype=torch.bool, device=q.device)
        if self.summaries is not None:
            visible = self._everyones(self.summaries[0].to(torch.uint8), caller).bool()
        every = torch.arange(self.cells, device=q.device)
        number = len(q), q.shape[1], min(self.rule.select, self.cells)
        found = torch.full(number, self.cells, device=q.device)
        for part, near in _within(self.reach, q.shape[1] * q.shape[2]):
            first, stop = self.seen[:, part, None]
            cell = every[near]
            unseen = ~((first <= cell) & (cell < stop) & visible[near])
            # [g, x, h, cells] is the matrix product's own order: no copy
            scores = scores_of("xghd,cgd->gxhc", q[part], keys[near], terms)
            shares = scores.masked_fill_(unseen[None, :, None], -torch.inf).softmax(-1).sum(2)
            shares = shares.masked_fill_(unseen, -1.0).transpose(0, 1)
            share, which = best_of(shares, found.shape[-1])
            found[part, :, : share.shape[-1]] = (which + near.start).masked_fill(
                share < 0, self.cells
            )
        return found

    def _fetched(self, kv: Tensor, chosen: Tensor, caller: Caller) -> tuple[Tensor, Tensor, Tensor]:
        """Fetch the cells that this rank's queries have chosen.

        Returns their keys and values `[c + 1, g, stride, d + d_v]`, the mask of visible keys
        `[c + 1, stride]`, and each cell's index among them. The last index is an empty cell.
        """
        stride, mine = self.rule.stride, self.ring.rank
        needed = torch.zeros(self.cells + 1, dtype=torch.uint8, device=kv.device)
        needed[chosen.flatten()] = 1
        needed[-1] = 0
        needs = all_gather(needed, [tuple(needed.shape)] * self.ring.size, caller)
        number = needed.long().cumsum(0) - 1
        count = int(number[-1]) + 1
        number[-1] = count
        sends = [theirs[self.places[mine] // stride].bool() for theirs in needs]
        lands = []
        for at in self.places:
            at = at[needed[at // stride].bool()]
            lands.append(number[at // stride] * stride + at % stride)

        def moved(x: Tensor) -> Tensor:
            room = x.new_zeros((count + 1) * stride, *x.shape[1:])
            rows = scatter_rows([x[sent] for sent in sends], lands, room, caller)
            return rows.unflatten(0, (count + 1, stride))

        real = torch.ones(len(kv), dtype=torch.uint8, device=kv.device)
        if self.key_mask is not None:
            real = self.key_mask.flatten().to(torch.uint8)
        return rearrange(moved(kv), "c s g e -> c g s e").contiguous(), moved(real).bool(), number


def _parts(queries: int, numbers: int) -> list[slice]:
    """Cut queries with `numbers` numbers each into slices of at most `_NUMBERS`."""
    size = max(1, _NUMBERS // numbers)
    return [slice(i, i + size) for i in range(0, queries, size)]


def _within(reach: Tensor, heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of queries, each with the range of cells that any of them sees.

    `reach` is `[2, queries]`: the first cell that each sees, and the end.
    """
    waiting = [slice(0, reach.shape[1])] if reach.numel() else []
    while waiting:
        part = waiting.pop()
        near = slice(int(reach[0, part].min()), int(reach[1, part].max()))
        size, half = part.stop - part.start, (part.start + part.stop) // 2
        if size > 1 and size * heads * (near.stop - near.start) > _NUMBERS:
            waiting += [slice(half, part.stop), slice(part.start, half)]
        else:
            yield part, near


class _OfChosen(torch.autograd.Function):
    """Attention of queries `[x, g, h, d]` to the tokens of their cells, some at a time.

    It saves its inputs only, and backward computes attention again. Backward adds gradients to the
    keys that were read: autograd would make gradients of all keys for each part of the queries.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, real: Tensor, number: Tensor, terms: ScoreMods
    ) -> tuple[Tensor, Tensor]:
        ctx.terms = terms
        ctx.save_for_backward(q, kv, real, number)
        out = q.new_empty(*q.shape[:3], kv.shape[-1] - q.shape[-1])
        lse = q.new_empty(q.shape[:3])
        for part, rows, seen in _gathered(kv, real, number):
            near = kv.flatten(0, 1)[rows].to(q.dtype)
            out[part], lse[part] = _attention(q[part], near, seen, terms)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("attention to selected cells")
        q, kv, real, number = ctx.saved_tensors
        dq, dkv = torch.empty_like(q), torch.zeros_like(kv.flatten(0, 1), dtype=q.dtype)
        for part, rows, seen in _gathered(kv, real, number):
            near = kv.flatten(0, 1)[rows].to(q.dtype).requires_grad_()
            queries = q[part].detach().requires_grad_()
            with torch.enable_grad():
                found = _attention(queries, near, seen, ctx.terms)
            grads = torch.autograd.grad(found, (queries, near), (dout[part], dlse[part]))
            dq[part] = grads[0]
            dkv.index_add_(0, rows.flatten(), grads[1].flatten(0, 2))
        return dq, dkv.view_as(kv).to(kv.dtype), None, None, None


def _gathered(kv: Tensor, real: Tensor, number: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of queries, the rows of kv `[cells * g]` that they read, and the key mask.

    kv is `[cells, g, stride, e]`, real `[cells, stride]`, numbers of cells `[x, g, select]`.
    """
    groups = torch.arange(kv.shape[1], device=kv.device)[:, None]
    for part in _parts(len(number), number[:1].numel() * kv[0, 0].numel() + 1):
        chosen = number[part]
        yield part, chosen * kv.shape[1] + groups, real[chosen].flatten(2)


def _attention(q: Tensor, kv: Tensor, seen: Tensor, terms: ScoreMods) -> tuple[Tensor, Tensor]:
    """Compute out `[x, g, h, d_v]` and lse `[x, g, h]` over kv `[x, g, select, stride, e]`."""
    k, v = kv.flatten(2, 3).split((q.shape[-1], kv.shape[-1] - q.shape[-1]), -1)
    scores = scores_of("xghd,xgjd->xghj", q, k, terms)
    return attended("xghj,xgje->xghe", scores, seen[:, :, None], v)
