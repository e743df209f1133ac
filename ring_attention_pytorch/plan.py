"""What a ring attention does, decided before it starts and agreed by all ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from beartype import beartype
from torch import Tensor

from ring_attention_pytorch.agreement import agree
from ring_attention_pytorch.contract import Case, Keys, MaskMod, Terms, Tiles
from ring_attention_pytorch.documents import (
    Borders,
    Packing,
    digest,
    documents_problem,
    whole_packing,
)
from ring_attention_pytorch.kernels import Chosen, choose
from ring_attention_pytorch.layouts import (
    Layout,
    Segment,
    Segments,
    Visible,
    all_segments,
    count,
    layout_problem,
    needed_distances,
    segment_positions,
    tiles,
)
from ring_attention_pytorch.masks import (
    Prefix,
    by_sample,
    gather_positions,
    mask_mod_problem,
    positions_problem,
    positions_seen,
    prefix_digest,
    prefix_problem,
)
from ring_attention_pytorch.ring import Group, Ring, SendRecv, as_ring
from ring_attention_pytorch.running import accumulator
from ring_attention_pytorch.scores import (
    bias_problem,
    columns,
    per_head_problem,
    sinks_note,
    widened,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AUTOCAST_FROM = DTYPES[1:]


class Signature(tuple):
    """Batch, query and key length, heads, key heads, head sizes, dtype and device of one call."""

    NAMES = ("batch", "n", "m", "heads", "key heads", "d", "d_v", "dtype", "device")

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "Signature":
        b, n, h, d = q.shape
        _, m, h_kv, d_v = v.shape
        return cls((b, n, m, h, h_kv, d, d_v, str(q.dtype), q.device.type))

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(self.NAMES, self))


@dataclass(frozen=True)
class RingPlan:
    """All of a ring attention that depends on ranks, lengths and masks, and not on values.

    Make it once per batch with `RingPlan.make` and hand it to every layer: making it is where
    ranks compare notes; calls that are given a plan exchange nothing but keys and gradients.
    """

    ring: Ring
    query_segments: tuple[Segments, ...]
    visible: Visible
    layout: Layout
    terms: Terms
    kernel: Chosen
    transport: SendRecv
    key_mask: Tensor | None
    signature: Signature
    samples: list[tuple[slice, Visible]]  # that see alike
    packing: Packing | None = None  # the documents of each sample
    _tiles: dict[Segments, list[tuple[slice, Tiles]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    @beartype
    def make(  # noqa: PLR0913 - a public entry point
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: int | None = None,
        key_mask: Tensor | None = None,
        scale: float | int | None = None,
        softclamp: float | int | None = None,
        layout: Layout = "contiguous",
        group: Group = None,
        kernel: str | None = None,
        bucket_size: int = 1024,
        cross: bool | None = None,
        documents: Tensor | Packing | None = None,
        cu_seqlens: Borders | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_bias: Tensor | None = None,
        mask_mod: MaskMod | None = None,
        prefix: Prefix = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        also: Mapping[str, Any] | None = None,
    ) -> "RingPlan":
        """The plan for tensors like these; of q, k, v and sinks their values don't matter.

        Parameters are those of `ring_attn`, and `also`: what else all ranks must have the same,
        by name. All ranks of the ring must call this together.

        Returns:
            A plan for any number of calls with tensors of these shapes, dtype and device.

        Raises:
            ValueError: the same on all ranks, whichever rank gave what can't be.

        >>> q = torch.randn(1, 6, 2, 4)
        >>> plan = RingPlan.make(q, q, q, causal=True)
        >>> plan.positions().tolist()
        [0, 1, 2, 3, 4, 5]
        """
        ring = as_ring(group)
        q, k, v = (like_autocast(t) for t in (q, k, v))
        packed = documents is not None or cu_seqlens is not None
        placed = query_positions is not None or key_positions is not None
        problem = qkv_problem(q, k, v, key_mask) or _option_problem(
            window, scale, softclamp, layout, bucket_size,
            not placed and cross and (causal or window is not None),
        )  # fmt: skip
        problem = problem or documents_problem(documents, cu_seqlens, q.shape)
        problem = problem or per_head_problem("sinks", q, sinks)
        problem = problem or per_head_problem("alibi_slopes", q, alibi_slopes)
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            problem = problem or "alibi_slopes have no gradient; detach them"
        problem = problem or bias_problem(key_bias, q, k, scale, softclamp)
        problem = problem or mask_mod_problem(mask_mod, q.device)
        problem = problem or prefix_problem(prefix, len(q), causal and not packed and not placed)
        problem = problem or positions_problem(query_positions, key_positions, q, k, packed)
        d = q.shape[-1] if problem is None else 0
        if problem is None and key_bias is not None:
            more = columns(q, k, key_bias)
            q, k = widened(q, more), widened(k, more)
        if problem is None:
            asked = dict(window=window, key_mask=key_mask, scale=scale, softclamp=softclamp)
            asked |= dict(alibi_slopes=alibi_slopes, mask_mod=mask_mod)
            try:
                chosen = choose(kernel, Case.of(q, v, **asked))
            except ValueError as error:
                problem = str(error)
        lengths = agree(
            ring,
            "ring attention",
            same={} if problem else dict(
                _agreed_shapes(q, k, v) | dict(also or {}), causal=causal, window=window,
                scale=scale, softclamp=softclamp, layout=str(layout), kernel=kernel, cross=cross,
                key_mask="given" if key_mask is not None else None,
                cu_seqlens=digest(cu_seqlens), sinks=sinks_note(sinks),
                prefix=prefix_digest(prefix),
                key_bias=None if key_bias is None else list(key_bias.shape[2:]),
                mask_mod="given" if mask_mod is not None else None,
                alibi_slopes="given" if alibi_slopes is not None else None,
                **{"kernel chosen": chosen.name},
            ),
            own={} if problem else {"n": q.shape[1], "m": k.shape[1]},
            problem=problem,
            everywhere={
                "documents": "given" if documents is not None else None,
                "query_positions and key_positions": "given" if placed else None,
            },
        )  # fmt: skip
        queries = [own["n"] for own in lengths]
        keys = [own["m"] for own in lengths]
        if cross is None:
            cross = queries != keys or placed
        if not cross and queries != keys:
            raise ValueError(
                f"ring attention: cross=False needs as many keys as queries on every rank, got "
                f"query lengths {queries} and key lengths {keys}"
            )
        visible = Visible(causal, window)
        if placed:
            of_both = (query_positions, key_positions)
            query_segments, key_segments = gather_positions(ring, of_both)
        elif cross:
            _check_cross(queries, keys, visible, packed)
            # without a mask positions decide nothing, so any will do
            query_segments, key_segments = (_one_after_another(n) for n in (queries, keys))
        else:
            query_segments = key_segments = segments_by_layout("ring attention", layout, queries)
        packing = whole_packing(ring, documents, cu_seqlens, query_segments, q.shape[0])
        samples = by_sample(visible, packing, prefix, len(q))
        distances = {
            t for _, seen in samples for t in needed_distances(query_segments, key_segments, seen)
        }
        return cls(
            ring=ring,
            query_segments=query_segments,
            visible=visible,
            layout=layout,
            terms=Terms(
                d**-0.5 if scale is None else scale,
                softclamp,
                bucket_size,
                None if alibi_slopes is None else alibi_slopes.to(accumulator(q.dtype), copy=True),
                mask_mod,
            ),
            kernel=chosen,
            transport=SendRecv(ring, key_segments, tuple(sorted(distances))),
            # a copy: whoever reuses the mask's memory would change gradients without a word
            key_mask=None if key_mask is None else key_mask.clone(),
            signature=Signature.of(q, k, v),
            samples=samples,
            packing=packing,
        )

    def positions(
        self, device: torch.device | None = None, *, in_documents: bool = False
    ) -> Tensor:
        """The global positions of this rank's queries, int64 `[n]`.

        With in_documents they restart with each document: `[b, n]` where samples differ.
        """
        mine = self.query_segments[self.ring.rank]
        if not (in_documents and self.packing):
            return segment_positions(mine, device)
        found = [documents.positions(mine) for documents in self.packing]
        alike = len(set(self.packing)) == 1
        return (found[0] if alike else torch.stack(found)).to(device)

    def keys(self, k: Tensor, v: Tensor) -> Keys:
        """This rank's keys, as the transport wants them."""
        return Keys(k, v, self.key_mask, self.transport.segments[self.ring.rank])

    def tiles(self, keys: Keys) -> list[tuple[slice, Tiles]]:
        """Samples that see alike, and the tiles that their queries here see of these keys."""
        if keys.segments not in self._tiles:
            mine = self.query_segments[self.ring.rank]
            self._tiles[keys.segments] = [
                (samples, self._of_block(mine, keys, samples, seen))
                for samples, seen in self.samples
            ]
        return self._tiles[keys.segments]

    def _of_block(self, queries: Segments, keys: Keys, some: slice, seen: Visible) -> Tiles:
        found = Tiles(tiles(queries, keys.segments, seen))
        if self.terms.alibi is not None or self.terms.mask_mod is not None:
            found.first = some.start or 0
            found.rows_at, found.cols_at = (
                positions_seen(segments, seen).to(keys.k.device, torch.int32)
                for segments in (queries, keys.segments)
            )
        return found

    def check(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> None:
        """Raise ValueError where the plan was made for other tensors than these."""
        problem = qkv_problem(q, k, v, None) or per_head_problem("sinks", q, sinks)
        if problem is None and (given := Signature.of(q, k, v)) != self.signature:
            problem = f"the plan was made for {self.signature!r}; got {given!r}; make one for these"
        if problem is not None:
            raise ValueError(f"ring attention: {problem}")


def like_autocast(t: Tensor) -> Tensor:
    """The tensor, or one without memory that looks as autocast will make it."""
    device = t.device.type
    if not torch.is_autocast_enabled(device) or t.dtype not in AUTOCAST_FROM:
        return t
    dtype = torch.get_autocast_dtype(device)
    one = torch.empty((), dtype=dtype, device=t.device, requires_grad=t.requires_grad)
    return one.expand(t.shape)


def _agreed_shapes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
    grad = torch.is_grad_enabled()
    return {
        "batch size": q.shape[0],
        "heads of q": q.shape[2],
        "heads of k and v": k.shape[2],
        "head size of q and k": q.shape[3],
        "head size of v": v.shape[3],
        "dtype": q.dtype,
        "device": q.device.type,
        "grad mode": grad,
        "requires_grad of q, k, v": [grad and t.requires_grad for t in (q, k, v)],
    }


def qkv_problem(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str | None:
    """What is wrong with this rank's tensors by themselves."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(t.ndim != 4 for t in (q, k, v)):
        return f"q, k, v must be [batch, tokens, heads, head size], got {shapes}"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return (
            "q [b, n, h, d], k [b, m, h_kv, d] and v [b, m, h_kv, d_v] must agree in b, m, h_kv "
            f"and d, got {shapes}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0 or 0 in (q.shape[3], v.shape[3]):
        return f"heads of q must be a multiple of those of k, and head sizes positive, got {shapes}"
    if len({t.dtype for t in (q, k, v)}) > 1 or q.dtype not in DTYPES:
        return (
            "q, k, v must have one floating dtype of 16, 32 or 64 bits, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}; cast them, or use autocast"
        )
    if len({t.device for t in (q, k, v)}) > 1:
        return f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}"
    if key_mask is None:
        return None
    if key_mask.dtype != torch.bool or key_mask.shape != k.shape[:2]:
        return (
            f"key_mask must be bool {list(k.shape[:2])}, True where a key may be seen, "
            f"got {key_mask.dtype} {list(key_mask.shape)}"
        )
    if key_mask.device != k.device:
        return f"key_mask must be on the keys' device {k.device}, got {key_mask.device}"
    return None


def _option_problem(
    window: int | None,
    scale: float | None,
    softclamp: float | None,
    layout: Layout,
    bucket_size: int,
    masked_cross: bool | None,
) -> str | None:
    if window is not None and window < 0:
        return f"window must be None or at least 0, got {window}"
    if scale is not None and not math.isfinite(scale):
        return f"scale must be finite, got {scale}"
    if softclamp is not None and not (math.isfinite(softclamp) and softclamp > 0):
        return f"softclamp must be None or positive, got {softclamp}"
    if bucket_size < 1:
        return f"bucket_size must be at least 1, got {bucket_size}"
    if masked_cross:
        return "cross attention has no causal and no window: two sequences share no positions"
    return layout_problem(layout)


def _check_cross(queries: list[int], keys: list[int], visible: Visible, packed: bool) -> None:
    if packed:
        raise ValueError(
            "ring attention: documents and cu_seqlens need keys of the same tokens as the queries, "
            f"got query lengths {queries} and key lengths {keys} of two sequences"
        )
    if visible != Visible():
        raise ValueError(
            f"ring attention: causal and window need as many keys as queries on every rank, got "
            f"query lengths {queries} and key lengths {keys}; cross attention has neither"
        )


def _one_after_another(lengths: list[int]) -> tuple[Segments, ...]:
    return tuple((Segment(0, 1, n),) if n else () for n in lengths)


def segments_by_layout(caller: str, layout: Layout, lengths: list[int]) -> tuple[Segments, ...]:
    """Every rank's segments, if these are the lengths that the layout gives; else ValueError."""
    if (problem := layout_problem(layout, len(lengths), sum(lengths))) is not None:
        raise ValueError(f"{caller}: {problem}")
    segments = all_segments(layout, len(lengths), sum(lengths))
    expected = [count(s) for s in segments]
    if lengths != expected:
        raise ValueError(
            f"{caller}: layout={layout!r} puts {expected} of {sum(lengths)} tokens on the "
            f"ranks, got {lengths}; shard with shard_sequence(x, layout={layout!r}), or say "
            "cross=True if the keys are of another sequence"
        )
    return segments
