"""The far edge of a window: the rest of the cell that it reaches into, seen exactly.

    cells     |  0  |  1  |  2  |  3  |  4  |             stride 6, window 9
    query 21                  |*********^                 its window begins with cell 2
    query 24                  ???|*********^              here 3 keys of cell 2 are before it
    query 26                  ?????|*********^            and here 5

The `stride` queries of a row see 0, 1, ... stride - 1 keys of one cell: a triangle for each row.
All rows are one batch of tiny attentions. Their scores take `stride` numbers a query and head,
less than the query itself, so plain PyTorch is as good as any kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.comm.exchange import scatter_rows
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.summaries.cells import Cells, Grouped, edge_keys, edge_queries
from ring_attention_pytorch.summaries.plain import attended, scores_of


@dataclass(frozen=True, eq=False)
class Edge:
    """The rows whose queries this rank has, and the keys of their cells; tokens `[b * n]`."""

    queries: Tensor  # the tokens whose windows end within a cell
    slots: Tensor  # and where they go in [rows * width]
    limits: Tensor  # [rows, width]: how many keys of its cell each sees, 0 where there is none
    sends: tuple[Tensor, ...]  # to each rank, the tokens whose keys it needs
    lands: tuple[Tensor, ...]  # from each rank, where keys go in [rows * (stride - 1)]
    stride: int
    real: Tensor | None = None  # bool [rows, stride - 1], which keys may be seen; None is all

    @property
    def width(self) -> int:
        """Keys of a cell that are at the far edge of any window."""
        return self.stride - 1

    @classmethod
    def make(
        cls,
        rule: Cells,
        held: Sequence[Tensor],
        ring: Ring,
        key_mask: Tensor | None,
        device: torch.device,
    ) -> "Edge | None":
        """Work it out from every rank's tokens; None where no window ends within a cell."""
        needs = [edge_queries(rule, theirs) for theirs in held]
        if not any(len(tokens) for _, tokens, _ in needs):
            return None
        rows = [numbers.unique() for numbers, *_ in needs]
        numbers, tokens, limits = needs[ring.rank]
        grouped, mine, wide = Grouped.by(numbers), rows[ring.rank], rule.stride - 1
        shape = len(mine), max(1, grouped.width)
        slots = grouped.rows * shape[1] + grouped.slots
        by_slot = torch.zeros(shape, dtype=torch.long)
        by_slot.view(-1)[slots] = limits[grouped.items]
        cells, keys, places = edge_keys(rule, held[ring.rank])
        sends = [keys[torch.isin(cells, its_rows)].to(device) for its_rows in rows]
        lands = []
        for theirs in held:
            cells, _, places = edge_keys(rule, theirs)
            needed = torch.isin(cells, mine)
            row = torch.searchsorted(mine, cells[needed])
            lands.append((row * wide + places[needed]).to(device))
        queries = tokens[grouped.items].to(device)
        edge = cls(
            queries, slots.to(device), by_slot.to(device), tuple(sends), tuple(lands), rule.stride
        )
        if key_mask is None:
            return edge
        return replace(edge, real=edge.fetch(ring, key_mask.to(torch.uint8)).bool())

    def fetch(self, ring: Ring, x: Tensor) -> Tensor:
        """Bring x `[b, n, ...]` of the keys needed here: `[rows, stride - 1, ...]`."""
        shape = len(self.limits), self.width
        room = x.new_zeros(shape[0] * shape[1], *x.shape[2:])
        x = x.flatten(0, 1)
        pieces = [x[sent] for sent in self.sends]
        return scatter_rows(pieces, self.lands, room, ring).unflatten(0, shape)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, terms: ScoreMods, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        """Return out `[x, h, d_v]` and lse `[x, h]` of the queries at a far edge, in wide numbers.

        q, k and v are this rank's, `[b, n, h, d]`.
        """
        wide = accumulation_dtype(q.dtype)
        kv = self.fetch(ring, torch.cat((k, v), -1)).to(wide)
        k, v = kv.split((k.shape[-1], v.shape[-1]), -1)
        rows, width = self.limits.shape
        room = q.new_zeros(rows * width, *q.shape[2:])
        q = room.index_copy(0, self.slots, q.flatten(0, 1)[self.queries]).to(wide)
        q = rearrange(q, "(r w) (g h) d -> r g h w d", w=width, g=k.shape[2])
        seen = torch.arange(k.shape[1], device=k.device) < self.limits[..., None]
        if self.real is not None:
            seen = seen & self.real[:, None]
        scores = scores_of("rghwd,rjgd->rghwj", q, k, terms)
        out, lse = attended("rghwj,rjgd->rghwd", scores, seen[:, None, None], v)
        out = rearrange(out, "r g h w d -> (r w) (g h) d")
        lse = rearrange(lse, "r g h w -> (r w) (g h)")
        return out[self.slots], lse[self.slots]
