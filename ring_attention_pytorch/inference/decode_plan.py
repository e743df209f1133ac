"""A plan of attention to a cache: everything that is decided once for queries of a shape."""

from functools import cached_property
from typing import NamedTuple, Protocol
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.comm.exchange import all_gather_stacked
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.inference.held import HeldTokens
from ring_attention_pytorch.inference.pages import Pages
from ring_attention_pytorch.inference.partial import Scores, attend_in_blocks, merged
from ring_attention_pytorch.inference.programs import Cut, Processors, Tuning, power_of_2
from ring_attention_pytorch.inference.pushed_rows import PushedRows, pushed_rows
from ring_attention_pytorch.runtime.launches import Launch, can_begin_early

PUSH = True  # whether ranks that share memory merge in one kernel; tests compare both
_LOG2_E = 1.4426950408889634
_PURPOSES = 1 << 31  # that memory tells apart
_MERGERS = 1024  # programs of one warp, that wait for other ranks: all run at once on any GPU
_UNIT = 32  # columns of one program


Terms = tuple[Tensor | None, Tensor | None]  # sinks and slopes, `[h]` each


class Asked(NamedTuple):
    """What decides on a plan. `new`: the queries' own keys come beside the cache."""

    shape: tuple[int, ...]  # of q: [b, n, h, d]
    new: bool
    starts: bool  # sequences may be padded on the left
    scores: Scores
    sinks: bool
    slopes: bool
    kernel: str  # "triton" or "eager"
    causal: bool = True


class HeldKeys(Protocol):
    """What a plan reads of a cache, or of keys that were given."""

    ring: Ring
    device: torch.device
    dtype: torch.dtype
    sequences: int
    key_heads: int
    value_dim: int
    pages: Pages
    rows: tuple[int, int]  # between pages and between heads, in rows of keys or values
    step: int  # between tokens
    given: int  # keys of each sequence, where lengths don't count
    keys: list[Tensor]
    values: list[Tensor]
    key_scales: list[Tensor]
    value_scales: list[Tensor]
    scales: int  # of a key or value of a head
    tables: Tensor
    layer_lengths: list[Tensor]
    starts: Tensor
    rooms: Tensor
    overflown: Tensor
    lineage: Tensor  # [order, a weight for each sequence]: kernels make a call's number of it


class DecodePlan:
    """Attention of queries like these to a cache. All ranks make it together."""

    asked: Asked
    ring: Ring
    tuning: Tuning
    purpose: int
    rows: int
    width: int
    ran: bool

    def __init__(self, cache: HeldKeys, asked: Asked, tuning: Tuning | None = None) -> None:
        self._cache, self.asked, self.ring = ref(cache), asked, cache.ring
        self.tuning = tuning or Tuning()
        self.purpose = crc32(repr((asked, cache.value_dim)).encode()) % _PURPOSES
        b, n, h, _ = asked.shape
        self.rows, self.width = b * n * h, cache.value_dim
        self.checks = False  # whether ranks compare values in each call
        self.ran = False  # so that all kernels are compiled, and graphs can hold them
        self._attends: dict[bool, Launch] = {}  # with a key mask, and without
        self.pushed: PushedRows | None = None
        if PUSH and asked.kernel == "triton":
            self.pushed = pushed_rows(self.ring, cache.device)
        if self.pushed is not None and self.units * (_UNIT + 1) > self.pushed.slot:
            self.pushed = None

    @property
    def cache(self) -> HeldKeys:
        """What it reads. That keeps its plans: if they kept it, too, memory would stay."""
        found = self._cache()
        assert found is not None
        return found

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold all that a call does: messages it can't."""
        return self.ring.size == 1 or self.pushed is not None

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

        `terms` are sinks and slopes. `key_mask` bool `[b, m]` is of keys that were given. Ranks
        that pass different numbers are out of step.
        """
        purpose = (self.purpose + number) % _PURPOSES
        with self.ring.call("attention to a cache", purpose):
            if self.asked.kernel == "triton":
                out, lse = self._by_triton(q, k, v, layer, terms, key_mask, purpose, return_lse)
            else:
                out, lse = self._by_pytorch(q, k, v, layer, terms)
        self.ran = True
        return out, lse.transpose(1, 2) if return_lse else None

    # ---- PyTorch's operators

    @torch.no_grad()
    def _by_pytorch(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        terms: Terms,
    ) -> tuple[Tensor, Tensor]:
        cache, n, (sinks, slopes) = self.cache, q.shape[1], terms
        assert isinstance(cache, HeldTokens)
        if k is not None and v is not None:
            cache.write(k, v, layer)
        new = 0 if k is None else n
        starts = cache.starts.tolist()
        parts = []
        for i, length in enumerate(cache.lengths_in(layer)):
            keys, values, tokens = cache.local(i, layer, length + new)
            held = tokens, cache.before(length + new)
            first = length + new - n
            of_scores = self.asked.scores, starts[i], slopes
            parts.append(attend_in_blocks(q[i], keys, values, first, held, *of_scores))
        out, lse = (torch.stack(each) for each in zip(*parts))
        message = torch.cat((out, lse.unsqueeze(-1)), dim=-1)
        every = all_gather_stacked(message, self.ring)
        out, lse = merged(every[..., :-1], every[..., -1], sinks)
        return out.to(q.dtype), lse

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
        cache, (sinks, slopes) = self.cache, terms
        lengths = cache.layer_lengths[layer]
        with torch.cuda.device_of(q):
            plain = _plain(q)
            self._attend(key_mask is not None)(
                plain,
                plain if k is None else _plain(k),
                plain if v is None else _plain(v),
                plain if slopes is None else _plain(slopes),
                plain if key_mask is None else _plain(key_mask.view(torch.uint8)),
                cache.keys[layer], cache.values[layer],
                cache.key_scales[layer], cache.value_scales[layer], cache.tables, lengths,
                cache.tables.shape[1], *cache.rows, cache.given,
            )  # fmt: skip
            *parts, spare = self.memory
            merge = self.merge
            if not self.capturable:
                message = q.new_empty(self.rows * (self.width + 1), dtype=torch.float32)
                mine = self._apart(message.unsqueeze(0))
                self.merge_splits(*mine, message, lengths, *parts, purpose)
                parts = [*self._apart(all_gather_stacked(message, self.ring))]
                merge = self.merge_ranks
            out = q.new_empty(self.out_shape)
            lse = q.new_empty(self.out_shape[:3], dtype=torch.float32) if return_lse else spare
            merge(out, lse, lse if sinks is None else _plain(sinks), lengths, *parts, purpose)
            return out, lse

    def _apart(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the out `[messages, rows, width]` and lse `[messages, rows]` of flat messages."""
        out, lse = messages.split((self.rows * self.width, self.rows), dim=1)
        return out.unflatten(1, (self.rows, self.width)), lse

    @cached_property
    def early(self) -> bool:
        return self.tuning.early and can_begin_early(self.cache.device)

    @property
    def units(self) -> int:
        """Pieces of rows that are merged by one program each."""
        return self.rows * -(-self.width // _UNIT)

    @cached_property
    def cut(self) -> Cut:
        """How the keys and queries are cut into programs."""
        keys = self.cache.key_heads, self.width, self.cache.dtype.itemsize
        processors = Processors.of(self.cache.device)
        return Cut.of(self.asked.shape, keys, self.asked.new, processors, self.tuning)

    @cached_property
    def memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for out and lse of splits, and for a result's lse that nobody asked for.

        It stays, because CUDA graphs point to it.
        """
        splits = self.cut.splits
        shapes = (splits, self.rows, self.width), (splits, self.rows), (self.rows,)
        with torch.inference_mode(False):
            acc, lse, spare = (
                torch.empty(shape, dtype=torch.float32, device=self.cache.device)
                for shape in shapes
            )
            return acc, lse, spare

    @cached_property
    def factors(self) -> tuple[float, float]:
        """What q.k is multiplied by, and what its softclamp is then: in base 2."""
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
            b = self.cache.sequences
            return torch.zeros(b, dtype=torch.int32, device=self.cache.device)

    @cached_property
    def state(self) -> Tensor:
        return self.next_lengths if self.pushed is None else self.pushed.state

    def _attend(self, masked: bool) -> Launch:
        if masked not in self._attends:
            self._attends[masked] = self._attender(masked)
        return self._attends[masked]

    def _attender(self, masked: bool) -> Launch:
        from ring_attention_pytorch.inference._triton_attend import attend_kernel

        cache, asked, cut, (b, n, h, d) = self.cache, self.asked, self.cut, self.asked.shape
        fixed = (
            cache.starts, cache.rooms, *self.memory[:2], self.next_lengths, self.state,
            *self.factors, asked.scores.window or 0,
        )  # fmt: skip
        return Launch(
            attend_kernel, cut.splits * cut.blocks * cache.key_heads * b, fixed,
            num_warps=self.tuning.warps, num_stages=cut.stages,
            launch_pdl=self.early,
            N=n, ROWS_IN_ALL=self.rows, SPLITS=cut.splits, BLOCKS=cut.blocks,
            KV=cache.key_heads, GROUP=h // cache.key_heads, D=d, D_V=self.width,
            WIDTH=power_of_2(d), WIDTH_V=power_of_2(self.width), ROWS=cut.rows,
            COLS=cut.cols, NEW_COLS=min(64, power_of_2(n)),
            STEP=cache.step, PAGE=cache.pages.page, RANKS=cache.pages.ranks,
            RANK=self.ring.rank % cache.pages.ranks, NEW=asked.new, CAUSAL=asked.causal,
            SCALED=cache.scales > 0, MASKED=masked,
            WINDOW=asked.scores.window is not None, STARTS=asked.starts,
            CLAMP=asked.scores.softclamp is not None, ALIBI=asked.slopes,
            SHARED=self.pushed is not None, PDL=self.early,
            PRECISION="tf32" if cache.dtype.itemsize == 2 else "ieee",
        )  # fmt: skip

    @cached_property
    def merge(self) -> Launch:
        """From splits to the result, with other ranks' where memory is shared."""
        shared = self.pushed is not None
        programs = min(self.units, _MERGERS) if shared else self.units
        ranks = self.ring.size if shared else 1
        return self._merger(programs, self.cut.splits, self._strides, ranks, True)

    @cached_property
    def merge_splits(self) -> Launch:
        """From splits to this rank's message."""
        return self._merger(self.units, self.cut.splits, self._strides, 1, True, sinks=False)

    @cached_property
    def merge_ranks(self) -> Launch:
        """From all ranks' messages to the result."""
        message = self.rows * (self.width + 1)
        return self._merger(self.units, self.ring.size, (message, message), 1, False)

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
        """Merge parts, whose out `[rows, width]` and lse `[rows]` are so far apart, each."""
        from ring_attention_pytorch.inference._triton_merge import merge_kernel

        _, n, h, _ = self.asked.shape
        fixed = (
            self.next_lengths, self.cache.overflown, self.cache.lineage, self.state,
            strides[0], self.width, strides[1], 1, parts, self.rows, self.cache.sequences,
            *((0, 0) if (to := self.pushed) is None else (to.patience, to.slot)),
        )  # fmt: skip
        return Launch(
            merge_kernel, programs, fixed, num_warps=1, launch_pdl=self.early,
            ROWS_EACH=n * h, HEADS=h, D=self.width, COLS=_UNIT,
            PARTS=min(64, power_of_2(parts)), SEQUENCES=power_of_2(self.cache.sequences),
            RANKS=ranks, RANK=self.ring.rank,
            ADVANCE=advance and self.asked.new, SINKS=sinks and self.asked.sinks,
            PDL=self.early,
        )  # fmt: skip


def _plain(t: Tensor) -> Tensor:
    """Return t, contiguous and at an address that kernels take."""
    if t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)
