"""A plan of attention to a cache: all decisions for queries of one shape, made once."""

from functools import cached_property, partial
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.comm.collectives import gather_to_merge
from ring_attention_pytorch.inference.partial import (
    Scores,
    attend_in_blocks,
    merged,
    merged_messages,
)
from ring_attention_pytorch.inference.pools import Pools
from ring_attention_pytorch.inference.prefill import QKV, PromptChunk
from ring_attention_pytorch.inference.programs import Cut, Tuning
from ring_attention_pytorch.inference.pushed_rows import PushedRows, pushed_rows
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.launches import Launch, can_begin_early, power_of_2
from ring_attention_pytorch.runtime.processors import Processors
from ring_attention_pytorch.runtime.scaled import SCALED
from ring_attention_pytorch.schedule.passing import merging_machines
from ring_attention_pytorch.schedule.relays import Machines

PUSH = True  # whether ranks that share memory merge in one kernel; tests compare both
_LOG2_E = 1.4426950408889634
_PURPOSES = 1 << 31  # distinct numbers of calls
_MERGERS = 1024  # programs of one warp that wait for other ranks: any GPU runs all at once
_UNIT = 32  # columns of one program


Terms = tuple[Tensor | None, Tensor | None]  # sinks and slopes, `[h]` each


class Asked(NamedTuple):
    """All that a plan depends on. `new`: the queries' own keys are passed, to be appended."""

    shape: tuple[int, ...]  # of q: [b, n, h, d]
    new: bool
    starts: bool  # sequences may be padded on the left
    scores: Scores
    sinks: bool
    slopes: bool
    kernel: str  # "triton" or "eager"
    causal: bool = True


class DecodePlan:
    """Attention of queries of one shape to a cache. All ranks make the plan together.

    It refers to the pools, not to the cache: the cache stores its plans, and a reference cycle
    would keep the memory alive.
    """

    def __init__(self, pools: Pools, asked: Asked, tuning: Tuning | None = None) -> None:
        self.pools: Pools = pools
        self.asked: Asked = asked
        self.ring: Ring = pools.ring
        self.tuning: Tuning = tuning or Tuning()
        b, n, h, _ = asked.shape
        self.rows, self.width = b * n * h, pools.sizes.value_dim
        self.purpose = crc32(repr((asked, self.width)).encode()) % _PURPOSES
        self.checks = False  # whether ranks compare values in each call
        self.ran = False  # all kernels are compiled then, and graphs can capture them
        # by (has a key mask, step between tokens)
        self._attends: dict[tuple[bool, int], Launch] = {}
        self.pushed: PushedRows | None = None
        if PUSH and asked.kernel == "triton":
            self.pushed = pushed_rows(self.ring, pools.device)
        if self.pushed is not None and self.units * (_UNIT + 1) > self.pushed.slot:
            self.pushed = None
        # a CUDA graph can't capture messages
        self.capturable = self.ring.size == 1 or self.pushed is not None

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        terms: Terms = (None, None),
        key_mask: Tensor | None = None,
        *,
        return_lse: bool = True,
        number: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Return out `[b, n, h, d_v]`, and lse `[b, h, n]` if asked for, over all ranks' keys.

        `terms` are sinks and slopes. `key_mask` bool `[b, m]` masks given keys. `number` must be
        the same on all ranks: ranks that pass different numbers are out of step.
        """
        purpose = (self.purpose + number) % _PURPOSES
        with self.ring.call("attention to a cache", purpose, None):
            if self.asked.kernel == "triton":
                out, lse = self._by_triton(q, k, v, layer, terms, key_mask, purpose, return_lse)
            else:
                with torch.autocast(q.device.type, enabled=False):
                    out, lse = self._by_pytorch(q, k, v, layer, terms)
        self.ran = True
        return out, lse.transpose(1, 2) if return_lse else None

    @torch.no_grad()
    def run_chunk(
        self, qkv: QKV, layer: int, terms: Terms, chunk: PromptChunk, number: int
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse as `run`, but for own queries of a sharded chunk, given in its order.

        Over messages results are sent to the ranks of their queries alone, merged by machine.
        """
        q, (sinks, slopes) = qkv[0], terms
        rows = [chunk.positions(rank).to(q.device) for rank in range(self.ring.size)]
        mine = rows[self.ring.rank]
        if self.capturable:
            out, all_lse = self.run(*qkv, layer, terms, number=number)
            assert all_lse is not None
            return out[:, mine], all_lse[..., mine]
        own = self._own_by_triton if self.asked.kernel == "triton" else self._own_by_pytorch
        purpose = (self.purpose + number) % _PURPOSES
        with self.ring.call("attention to a cache", purpose, None):
            out, lse = own(*qkv, layer, slopes)

            def found(of_rank: Tensor) -> tuple[Tensor, Tensor]:
                return out[:, of_rank], lse[:, of_rank].transpose(1, 2)

            parts = [found(mine), *chunk.results(rows, found)()]
            outs, lses = (torch.stack(each) for each in zip(*parts))
            out, lse = merged(outs, lses.transpose(2, 3), sinks)
        self.ran = True
        return out.to(q.dtype), lse.transpose(1, 2)

    # ---- PyTorch's operators

    @torch.no_grad()
    def _by_pytorch(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._own_by_pytorch(q, k, v, layer, terms[1])
        message = torch.cat((out, lse.unsqueeze(-1)), dim=-1)
        every = gather_to_merge(message, self.ring, self.machines, merged_messages)
        out, lse = merged(every[..., :-1], every[..., -1], terms[0])
        return out.to(q.dtype), lse

    def _own_by_pytorch(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return out `[b, n, h, d_v]` and lse `[b, n, h]` of this rank's keys, not rounded."""
        pools, n = self.pools, q.shape[1]
        lengths, starts = pools.layer_lengths[layer].tolist(), pools.starts.tolist()
        if k is not None and v is not None:
            pools.write(k, v, layer, lengths)
        new = 0 if k is None else n
        parts = []
        for i, length in enumerate(lengths):
            keys, values, tokens = pools.local(i, layer, length + new)
            held = tokens, pools.before(length + new)
            first = length + new - n
            of_scores = self.asked.scores, starts[i], slopes
            parts.append(attend_in_blocks(q[i], keys, values, first, held, *of_scores))
        out, lse = (torch.stack(each) for each in zip(*parts))
        return out, lse

    # ---- our kernels

    def _by_triton(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        terms: Terms,
        key_mask: Tensor | None,
        purpose: int,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        lengths, sinks = self.pools.layer_lengths[layer], terms[0]
        with torch.cuda.device_of(q):
            self._launch_attend(q, k, v, layer, terms[1], key_mask)
            *parts, spare = self.memory
            merge = self.merge
            if not self.capturable:
                every = gather_to_merge(
                    self._message(q, self.merge_splits, layer, purpose, *parts),
                    self.ring,
                    self.machines,
                    lambda near: self._message(
                        q, self.merge_near, layer, purpose, *self._apart(near)
                    ),
                )
                parts, merge = [*self._apart(every)], self.merge_ranks
            out = q.new_empty(self.out_shape)
            lse = q.new_empty(self.out_shape[:3], dtype=torch.float32) if return_lse else spare
            merge(out, lse, lse if sinks is None else _plain(sinks), lengths, *parts, purpose)
            return out, lse

    def _own_by_triton(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, slopes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return out `[b, n, h, d_v]` and lse `[b, n, h]` of this rank's keys, not rounded."""
        with torch.cuda.device_of(q):
            self._launch_attend(q, k, v, layer, slopes, None)
            message = self._message(q, self.merge_splits, layer, 0, *self.memory[:2])
        out, lse = self._apart(message.unsqueeze(0))
        return out.view(self.out_shape), lse.view(self.out_shape[:3])

    def _launch_attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        slopes: Tensor | None,
        key_mask: Tensor | None,
    ) -> None:
        """Append k and v, and attend to own keys; results of splits are in `memory` then."""
        pools, plain = self.pools, _plain(q)
        v = k if pools.tied else v
        self._attend(key_mask is not None)(
            plain,
            plain if k is None else _plain(k),
            plain if v is None else _plain(v),
            plain if slopes is None else _plain(slopes),
            plain if key_mask is None else _plain(key_mask.view(torch.uint8)),
            *pools.of(layer), pools.tables, pools.layer_lengths[layer],
            pools.tables.shape[1], *pools.rows, pools.given,
        )  # fmt: skip

    def _message(
        self, q: Tensor, merge: Launch, layer: int, purpose: int, *parts: Tensor
    ) -> Tensor:
        """Return parts merged to one message, float32 `[rows * (width + 1)]`."""
        message = q.new_empty(self.rows * (self.width + 1), dtype=torch.float32)
        mine = self._apart(message.unsqueeze(0))
        merge(*mine, message, self.pools.layer_lengths[layer], *parts, purpose)
        return message

    def _apart(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the out `[messages, rows, width]` and lse `[messages, rows]` of flat messages."""
        out, lse = messages.split((self.rows * self.width, self.rows), dim=1)
        return out.unflatten(1, (self.rows, self.width)), lse

    @cached_property
    def early(self) -> bool:
        return self.tuning.early and can_begin_early(self.pools.device)

    @property
    def units(self) -> int:
        """The number of pieces of rows; one program merges each."""
        return self.rows * -(-self.width // _UNIT)

    @cached_property
    def cut(self) -> Cut:
        """How keys and queries are split over programs."""
        keys = self.pools.sizes.key_heads, self.width, self.pools.dtype.itemsize
        processors = Processors.of(self.pools.device)
        return Cut.of(self.asked.shape, keys, self.asked.new, processors, self.tuning)

    @cached_property
    def memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for out and lse of splits, and for the result's lse if it is not returned.

        It is never freed, because CUDA graphs hold its addresses.
        """
        splits, rows = self.cut.splits, self.rows
        empty = partial(torch.empty, dtype=torch.float32, device=self.pools.device)
        with torch.inference_mode(False):
            return empty(splits, rows, self.width), empty(splits, rows), empty(rows)

    @cached_property
    def factors(self) -> tuple[float, float]:
        """The factor of q.k, and the softclamp of the product (0: none), in base 2."""
        scale, clamp, _ = self.asked.scores
        if clamp is None:
            return scale * _LOG2_E, 0.0
        return scale / clamp, clamp * _LOG2_E

    @cached_property
    def out_shape(self) -> tuple[int, int, int, int]:
        b, n, h, _ = self.asked.shape
        return b, n, h, self.width

    @cached_property
    def next_lengths(self) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros_like(self.pools.starts)

    @cached_property
    def state(self) -> Tensor:
        return self.next_lengths if self.pushed is None else self.pushed.state

    def _attend(self, masked: bool) -> Launch:
        kind = masked, self.pools.step
        if kind not in self._attends:
            self._attends[kind] = self._attender(masked)
        return self._attends[kind]

    def _attender(self, masked: bool) -> Launch:
        from ring_attention_pytorch.inference._triton_attend import attend_kernel

        pools, asked, cut, (b, n, h, d) = self.pools, self.asked, self.cut, self.asked.shape
        key_heads = pools.sizes.key_heads
        fixed = (
            pools.starts, pools.capacities, *self.memory[:2], self.next_lengths, self.state,
            *self.factors, asked.scores.window or 0,
        )  # fmt: skip
        return Launch(
            attend_kernel, cut.splits * cut.blocks * key_heads * b, fixed,
            num_warps=self.tuning.warps, num_stages=cut.stages,
            launch_pdl=self.early,
            N=n, ROWS_IN_ALL=self.rows, SPLITS=cut.splits, BLOCKS=cut.blocks,
            KV=key_heads, GROUP=h // key_heads, D=d, D_V=self.width,
            ROW_V=d if pools.tied else self.width,
            WIDTH=power_of_2(d), WIDTH_V=power_of_2(self.width), ROWS=cut.rows,
            COLS=cut.cols, NEW_COLS=min(64, power_of_2(n)),
            STEP=pools.step, PAGE=pools.pages.page, RANKS=pools.pages.ranks,
            RANK=self.ring.rank % pools.pages.ranks, NEW=asked.new, CAUSAL=asked.causal,
            SCALED=pools.dtype in SCALED, MASKED=masked,
            WINDOW=asked.scores.window is not None, STARTS=asked.starts,
            CLAMP=asked.scores.softclamp is not None, ALIBI=asked.slopes,
            SHARED=self.pushed is not None, PDL=self.early,
            PRECISION="tf32" if pools.dtype.itemsize == 2 else "ieee",
        )  # fmt: skip

    @cached_property
    def merge(self) -> Launch:
        """Merge splits to the result; with shared memory also the other ranks' splits."""
        shared = self.pushed is not None
        programs = min(self.units, _MERGERS) if shared else self.units
        ranks = self.ring.size if shared else 1
        return self._merger(programs, self.cut.splits, self._strides, ranks, True)

    @cached_property
    def merge_splits(self) -> Launch:
        """Merge splits to this rank's message."""
        return self._merger(self.units, self.cut.splits, self._strides, 1, True, sinks=False)

    @cached_property
    def merge_near(self) -> Launch:
        """Merge the messages of a machine's ranks, where there are several, to one."""
        near = 0 if self.machines is None else self.machines.count(self.machines[self.ring.rank])
        return self._merger(self.units, near, self._between, 1, False, sinks=False)

    @cached_property
    def merge_ranks(self) -> Launch:
        """Merge the messages of all ranks, or of all machines, to the result."""
        parts = self.ring.size if self.machines is None else len({*self.machines})
        return self._merger(self.units, parts, self._between, 1, False)

    @cached_property
    def machines(self) -> Machines | None:
        """The machines whose ranks merge results before these cross; None if they do not."""
        itemsize = max(4, self.pools.dtype.itemsize)  # of float32, or float64 as the cache
        return merging_machines(self.ring.machines, itemsize * self._between[0])

    @property
    def _between(self) -> tuple[int, int]:
        """Return the numbers between messages, as strides of out and lse."""
        numbers = self.rows * (self.width + 1)
        return numbers, numbers

    @property
    def _strides(self) -> tuple[int, int]:
        return self.rows * self.width, self.rows

    def _merger(
        self,
        programs: int,
        parts: int,
        strides: tuple[int, int],
        ranks: int,
        advance: bool,
        sinks: bool = True,
    ) -> Launch:
        """Make a launch that merges parts; `strides` are between outs `[rows, width]` and lses."""
        from ring_attention_pytorch.inference._triton_merge import merge_kernel

        b, n, h, _ = self.asked.shape
        to = self.pushed
        patience, slot = (0, 0) if to is None else (to.patience, to.slot)
        fixed = (
            self.next_lengths, self.pools.overflown, self.pools.lineage, self.state,
            strides[0], self.width, strides[1], 1, parts, self.rows, b, patience, slot,
        )  # fmt: skip
        return Launch(
            merge_kernel, programs, fixed, num_warps=1, launch_pdl=self.early,
            ROWS_EACH=n * h, HEADS=h, D=self.width, COLS=_UNIT,
            PARTS=min(64, power_of_2(parts)), SEQUENCES=power_of_2(b),
            RANKS=ranks, RANK=self.ring.rank,
            ADVANCE=advance and self.asked.new, SINKS=sinks and self.asked.sinks,
            PDL=self.early,
        )  # fmt: skip


def _plain(t: Tensor) -> Tensor:
    """Return t, or a contiguous copy at an address that is a multiple of 16 bytes."""
    if t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)
