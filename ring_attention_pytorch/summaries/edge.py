"""The far edge of a window: the rest of the cell in which it ends, seen exactly.

    cells     |  0  |  1  |  2  |  3  |  4  |             stride 6, window 9
    query 21                  |*********^                 its window begins with cell 2
    query 24                  ???|*********^              here 3 keys of cell 2 are before it
    query 26                  ?????|*********^            and here 5

The `stride` queries of a row see 0, 1, ... stride - 1 keys of one cell: a triangle per row. All
rows form one batch of tiny attentions. Scores take `stride` numbers per query and head, less than
the query itself, so plain PyTorch is as good as any kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.comm.collectives import fetch_rows
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.runtime.interfaces import ScoreMods
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.summaries.cells import Cells, Grouped, edge_keys, edge_queries
from ring_attention_pytorch.summaries.plain import attended, scores_of


@dataclass(frozen=True, eq=False)
class Edge:
    """The rows of this rank's queries, and the keys of their cells; token indices in `[b * n]`."""

    queries: Tensor  # tokens whose windows end within a cell
    slots: Tensor  # their places in [rows * width]
    limits: Tensor  # [rows, width]: keys of its cell that each sees, 0 for an empty slot
    sends: tuple[Tensor, ...]  # for each rank, the tokens whose keys it needs
    lands: tuple[Tensor, ...]  # for each rank, places of its keys in [rows * (stride - 1)]
    stride: int
    real: Tensor | None = None  # bool [rows, stride - 1], visible keys; None is all

    @property
    def width(self) -> int:
        """Keys per cell that can be at the far edge of a window."""
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
        """Make it from every rank's tokens; None if no window ends within a cell."""
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
        caller = Caller(ring, "masks of keys at the ends of windows", 0)
        return replace(edge, real=edge.fetch(caller, key_mask.to(torch.uint8)).bool())

    def fetch(self, caller: Caller, x: Tensor) -> Tensor:
        """Fetch x `[b, n, ...]` of the keys needed here, as `[rows, stride - 1, ...]`."""
        shape = len(self.limits), self.width
        found = fetch_rows(x, self.sends, self.lands, shape[0] * shape[1], caller)
        return found.unflatten(0, shape)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, terms: ScoreMods, caller: Caller
    ) -> tuple[Tensor, Tensor]:
        """Return out `[x, h, d_v]` and lse `[x, h]` of `queries`, in the accumulation dtype.

        q, k and v are this rank's, `[b, n, h, d]`.
        """
        wide = accumulation_dtype(q.dtype)
        kv = self.fetch(caller, torch.cat((k, v), -1)).to(wide)
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
