"""Selected cells: the few whose summaries a query likes best are read exactly, too.

    1  every rank gets all summary keys, and scores them for its queries, some at a time
    2  each query group chooses its best cells; ties go to the earlier one
    3  ranks tell which cells they need, and get the keys and values of these
    4  attention of each query to the tokens of its cells

The choice has no gradient; what is read has. It is plain PyTorch, some queries at a time, which
backward computes again: so memory is that of the keys that are fetched.

Yuan et al. 2025, "Native Sparse Attention", section 3.3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.nn.sharding import all_to_all
from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.summaries.cells import Cells, chunks, rows_of
from ring_attention_pytorch.summaries.exchange import brought
from ring_attention_pytorch.summaries.plain import attended, scores_of

_NUMBERS = 2**24  # of scores, or of gathered keys, that are in memory at once


@dataclass(frozen=True, eq=False)
class Selection:
    """Who may choose what, and where each token is in its cell; tokens are `[b * n]`."""

    rule: Cells
    cells: int  # of all documents and samples
    ring: Ring
    queries: Tensor  # the tokens that see any summary
    seen: Tensor  # [2, queries]: the first cell that each sees, and the one after the last
    places: tuple[Tensor, ...]  # of each rank's tokens: cell * stride + place; or cells * stride
    key_mask: Tensor | None  # [b, n], which keys may be seen
    summaries: Tensor | None  # [1, m], which summaries kept here may be

    @classmethod
    def make(
        cls, rule: Cells, cells: int, held: Sequence[Tensor], ring: Ring, device: torch.device
    ) -> "Selection":
        """Work it out from every rank's tokens; nothing is exchanged."""
        last, queries = rows_of(rule, held[ring.rank])
        first = held[ring.rank][queries, 1]
        if rule.span is not None:
            first = torch.maximum(first, last + 1 - rule.span)
        places = []
        for theirs in held:
            t, before, own, _ = theirs.unbind(-1)
            at = before * rule.stride + t
            places.append(torch.where(t // rule.stride < own, at, cells * rule.stride).to(device))
        seen = torch.stack((first, last + 1)).to(device)
        return cls(rule, cells, ring, queries.to(device), seen, tuple(places), None, None)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, summary_k: Tensor, terms: ScoreMods
    ) -> tuple[Tensor, Tensor]:
        """Return out `[x, h, d_v]` and lse `[x, h]` of the queries, in wide numbers."""
        wide = accumulation_dtype(q.dtype)
        q = rearrange(q.flatten(0, 1)[self.queries].to(wide), "x (g h) d -> x g h d", g=k.shape[2])
        with torch.no_grad():
            chosen = self._chosen(q, self._everyones(summary_k[0]).to(wide), terms)
        kv, real, number = self._fetched(torch.cat((k, v), -1).flatten(0, 1), chosen)
        outs, lses = [], []
        a_query = chosen[:1].numel() * kv[:1].numel() + 1
        for part in _parts(len(q), a_query):
            given = q[part], kv.to(wide), real, number[chosen[part]], terms
            out, lse = checkpoint(_attention, *given, use_reentrant=False, preserve_rng_state=False)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs).flatten(1, 2), torch.cat(lses).flatten(1, 2)

    def _everyones(self, mine: Tensor) -> Tensor:
        """Return what all ranks keep of their summaries, `[cells, ...]`."""
        bounds = chunks(self.cells, self.ring.size)
        shapes = [(b - a, *mine.shape[1:]) for a, b in pairwise(bounds)]
        return torch.cat(all_to_all([mine.detach()] * self.ring.size, shapes, self.ring))

    def _chosen(self, q: Tensor, keys: Tensor, terms: ScoreMods) -> Tensor:
        """Return the cells that each query group chooses, `[x, g, select]`; `cells` is none."""
        cell = torch.arange(self.cells, device=q.device)
        visible = torch.ones_like(cell, dtype=torch.bool)
        if self.summaries is not None:
            visible = self._everyones(self.summaries[0].to(torch.uint8)).bool()
        found = [cell.new_empty(0, q.shape[1], min(self.rule.select, self.cells))]
        for part in _parts(len(q), self.cells * q.shape[1] * q.shape[2] + 1):
            first, stop = self.seen[:, part, None]
            seen = ((first <= cell) & (cell < stop) & visible)[:, None]
            scores = scores_of("xghd,cgd->xghc", q[part], keys, terms)
            scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
            shares = scores.softmax(-1).sum(2).masked_fill(~seen, -1.0)
            best, which = shares.sort(dim=-1, descending=True, stable=True)
            which = which.masked_fill(best < 0, self.cells)
            found.append(which[..., : self.rule.select])
        return torch.cat(found)

    def _fetched(self, kv: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bring the cells that are chosen here.

        Returns their keys beside values `[c + 1, stride, g, d + d_v]`, which of them may be seen
        `[c + 1, stride]`, and the number of each cell among these; the last one is nothing.
        """
        stride, mine = self.rule.stride, self.ring.rank
        needed = torch.zeros(self.cells + 1, dtype=torch.uint8, device=kv.device)
        needed[chosen.flatten()] = 1
        needed[-1] = 0
        everyone = [needed] * self.ring.size
        needs = all_to_all(everyone, [tuple(needed.shape)] * self.ring.size, self.ring)
        number = needed.long().cumsum(0) - 1
        count = int(number[-1]) + 1
        number[-1] = count
        sends = [theirs[self.places[mine] // stride].bool() for theirs in needs]
        lands = []
        for at in self.places:
            at = at[needed[at // stride].bool()]
            lands.append(number[at // stride] * stride + at % stride)

        def moved(x: Tensor) -> Tensor:
            rows = brought(x, sends, lands, (count + 1) * stride, self.ring)
            return rows.unflatten(0, (count + 1, stride))

        real = torch.ones(len(kv), dtype=torch.uint8, device=kv.device)
        if self.key_mask is not None:
            real = self.key_mask.flatten().to(torch.uint8)
        return moved(kv), moved(real).bool(), number


def _parts(queries: int, numbers: int) -> list[slice]:
    """Return slices of the queries, which have so many numbers each; at least one slice."""
    size = max(1, _NUMBERS // numbers)
    return [slice(i, i + size) for i in range(0, max(1, queries), size)]


def _attention(
    q: Tensor, kv: Tensor, real: Tensor, number: Tensor, terms: ScoreMods
) -> tuple[Tensor, Tensor]:
    """Compute out `[x, g, h, d_v]` and lse `[x, g, h]` of the tokens of cells `[x, g, select]`."""
    groups = torch.arange(kv.shape[2], device=kv.device)[:, None]
    kv = rearrange(kv, "c s g e -> c g s e")[number, groups].flatten(2, 3)
    k, v = kv.split((q.shape[-1], kv.shape[-1] - q.shape[-1]), -1)
    seen = real[number].flatten(2)[:, :, None]
    return attended("xghj,xgje->xghe", scores_of("xghd,xgjd->xghj", q, k, terms), seen, v)
