"""A cache for decoding: the last tokens, and summaries of all earlier ones.

    all ranks    the tokens of the window, and tokens for the next summary
    each rank    its share of the summaries

A new token attends to everything in the cache. Tokens in the window have no summary yet, and
tokens that leave it are dropped once they are in a summary, so decoding needs no causal mask.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import all_gather_along
from ring_attention_pytorch.decoding import tree_attn_decode
from ring_attention_pytorch.geometry.layouts import count, segment_positions
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.summaries.cells import Cells
from ring_attention_pytorch.summaries.plan import SummaryPlan

Pool = Callable[[Tensor, Tensor, int, int, Tensor | None], tuple[Tensor, Tensor]]


class SummaryCache:
    """The keys and values of one layer for decoding. It grows by one key per `stride` tokens.

    Args:
        rule: the cells, and the window that is seen exactly.
        ring: the ranks that share the summaries.
        like: `[b, 0, h_kv, d]`, with the dtype and device of keys and values.
        starts: first token of each sample that is not padding; None is 0.
    """

    def __init__(
        self, rule: Cells, ring: Ring, like: Tensor, starts: Sequence[int] | None = None
    ) -> None:
        self.rule: Cells = rule
        self.ring: Ring = ring
        self.length: int = 0
        self.cells: int = 0  # number of cells with summaries
        self.start: int = 0  # position of the first cached token
        # head sizes of keys before rotary embedding, keys after it, values
        self.widths: tuple[int, ...] = (like.shape[-1],) * 3
        self.recent: Tensor = torch.cat((like,) * 3, -1)
        self.far: Tensor = torch.cat((like,) * 2, -1)
        # cell of each summary in `far`; -1 for an empty slot
        self.numbers: Tensor = like.new_empty(like.shape[:2], dtype=torch.long)
        self.starts: Tensor | None = None
        if starts is not None:
            self.starts = torch.tensor(starts, device=like.device)[:, None]

    def read(self, plan: SummaryPlan, raw: Tensor, k: Tensor, v: Tensor, far: list[Tensor]) -> None:
        """Fill the empty cache from a prompt.

        raw and k are this rank's keys before and after rotary embedding, v its values; `far` are
        the keys and values of its summaries.
        """
        if self.length:
            raise ValueError("a cache of summaries reads one prompt, before any other token")
        self.length = sum(map(count, plan.near.query_segments))
        self.cells = self.rule.count(self.length)
        self.start = self._oldest()
        self.recent = self._gathered(plan, torch.cat((raw, k, v), -1))
        if plan.deal is not None:
            self.far, self.numbers = self._by_sample(plan.deal.mine, torch.cat(far, -1)[0])

    def append(self, raw: Tensor, k: Tensor, v: Tensor, pool: Pool) -> None:
        """Add one token `[b, 1, h_kv, ...]`, the same on all ranks; summarise cells now complete.

        `pool(k, v, place, last, real)` returns the summary of s keys and values, the first at this
        place in its block, `last` the position of the cell's last token, `real` bool `[b, s]`.
        """
        self.recent = torch.cat((self.recent, torch.cat((raw, k, v), -1)), 1)
        self.length += 1
        while self.cells < self.rule.count(self.length):
            self._summarise(pool)
        oldest = self._oldest()
        self.recent = self.recent[:, oldest - self.start :]
        self.start = oldest

    def _summarise(self, pool: Pool) -> None:
        """Make the next summary, and drop summaries beyond `distance`."""
        end = (self.cells + 1) * self.rule.stride
        first = max(0, end - self.rule.block)
        raw, _, v = self.recent[:, first - self.start : end - self.start].split(self.widths, -1)
        summary = pool(raw, v, first - end + self.rule.block, end - 1, self._real(first, end))
        if self.cells % self.ring.size == self.ring.rank:
            number = self._unless_padding(self.numbers.new_full((len(raw), 1), self.cells))
            self.far = torch.cat((self.far, torch.cat(summary, -1)), 1)
            self.numbers = torch.cat((self.numbers, number), 1)
        self.cells += 1
        if self.rule.span is not None:
            stale = self.numbers < self.cells - self.rule.span
            self.numbers = self.numbers.masked_fill(stale, -1)
            kept = (self.numbers >= 0).any(0)
            self.far, self.numbers = self.far[:, kept], self.numbers[:, kept]

    def _real(self, first: int, end: int, step: int = 1) -> Tensor | None:
        """Return a mask of tokens that are not padding, bool `[b, tokens]`; None is all True."""
        if self.starts is None:
            return None
        return torch.arange(first, end, step, device=self.starts.device) >= self.starts

    def _unless_padding(self, cells: Tensor) -> Tensor:
        """Return numbers of cells `[b, cells]`, with -1 for cells of padding alone."""
        if self.starts is None:
            return cells
        return cells.masked_fill((cells + 1) * self.rule.stride <= self.starts, -1)

    def attend(self, q: Tensor, bias: Tensor | None, gates: Tensor | None) -> Tensor:
        """Compute attention of the newest token's q `[b, 1, h, d]`, the same on all ranks."""
        first = max(0, self.rule.row(self.length - 1)) * self.rule.stride + self.ring.rank
        mine = slice(first - self.start, None, self.ring.size)
        _, k, v = self.recent[:, mine].split(self.widths, -1)
        far_k, far_v = self.far.split(self.widths[1:], -1)
        far_seen = self.numbers >= 0
        near_seen = self._real(first, max(first, self.length), self.ring.size)
        if near_seen is None:
            near_seen = far_seen.new_ones(k.shape[:2])
        if gates is not None:
            near = self._attention(q, k, v, near_seen)
            if self.cells == 0:
                return gates[..., :1] * near
            return gates[..., :1] * near + gates[..., 1:] * self._attention(
                q, far_k, far_v, far_seen
            )
        q, k, far_k = _biased(q, k, far_k, bias)
        seen = torch.cat((near_seen, far_seen), 1)
        return self._attention(q, torch.cat((k, far_k), 1), torch.cat((v, far_v), 1), seen)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        ring = self.ring
        out = tree_attn_decode(q, k, v, shard_kv_seq=False, key_mask=seen, group=ring)
        return out.transpose(1, 2)

    def _oldest(self) -> int:
        """Return the position of the first token that later results need."""
        near = max(0, self.rule.row(self.length - 1)) * self.rule.stride
        if self.rule.span == 0:
            return near
        return max(0, min(near, (self.cells + 1) * self.rule.stride - self.rule.block))

    def _gathered(self, plan: SummaryPlan, x: Tensor) -> Tensor:
        """Return all ranks' tokens from `start` on, in the order of positions."""
        positions = [segment_positions(s, x.device) for s in plan.near.query_segments]
        late = [at >= self.start for at in positions]
        mine = x[:, late[self.ring.rank]]
        caller = Caller(self.ring, "cache of summaries", plan.near.number)
        by_rank = all_gather_along(1, mine, [int(each.sum()) for each in late], caller)
        order = torch.cat([at[each] for at, each in zip(positions, late)]).argsort()
        return by_rank[:, order]

    def _by_sample(self, mine: slice, far: Tensor) -> tuple[Tensor, Tensor]:
        """Return summaries `[m, ...]` of all samples as `[b, most, ...]`, and their cells or -1."""
        batch = len(self.recent)
        number = torch.arange(mine.start, mine.stop, device=far.device)
        sample, cell = number // self.cells, number % self.cells
        if self.rule.span is not None:
            kept = cell >= self.cells - self.rule.span
            far, sample, cell = far[kept], sample[kept], cell[kept]
        counts = torch.bincount(sample, minlength=batch)
        most = int(counts.max()) if len(sample) else 0
        slot = torch.arange(len(sample), device=far.device) - (counts.cumsum(0) - counts)[sample]
        numbers = torch.full((batch, most), -1, dtype=torch.long, device=far.device)
        room = far.new_zeros(batch, most, *far.shape[1:])
        numbers[sample, slot], room[sample, slot] = cell, far
        return room, self._unless_padding(numbers)


def _biased(
    q: Tensor, k: Tensor, far_k: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the bias of summaries as one more column of queries and keys, as `key_bias` does."""
    if bias is None:
        return q, k, far_k
    d = q.shape[-1]
    wider = ((d + 8) / d) ** 0.5  # attention divides by the root of the head size
    column = (bias.to(q.dtype) * (d + 8) ** 0.5).view(1, 1, -1, 1).expand(*q.shape[:3], 1)
    q = torch.cat((q * wider, column, q.new_zeros(*q.shape[:3], 7)), -1)
    k = torch.cat((k, k.new_zeros(*k.shape[:3], 8)), -1)
    ones, zeros = far_k.new_ones(*far_k.shape[:3], 1), far_k.new_zeros(*far_k.shape[:3], 7)
    return q, k, torch.cat((far_k, ones, zeros), -1)
