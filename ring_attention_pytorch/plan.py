"""What a ring attention does, decided before it starts and agreed by all ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from beartype import beartype
from torch import Tensor

from ring_attention_pytorch.agreement import agree
from ring_attention_pytorch.contract import Case, Keys, Terms, Transport
from ring_attention_pytorch.cost import choose_transport
from ring_attention_pytorch.kernels import Chosen, choose
from ring_attention_pytorch.layouts import (
    Segment,
    Segments,
    Tile,
    Visible,
    all_segments,
    count,
    layout_problem,
    segment_positions,
    tiles,
)
from ring_attention_pytorch.ring import Group, Ring, as_ring
from ring_attention_pytorch.transports import (
    make_transport,
    owners_at_once,
    transport_problem,
)
from ring_attention_pytorch.transports.pieces import Blocks, Job
from ring_attention_pytorch.ulysses import Ulysses, ulysses_problem

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AUTOCAST_FROM = DTYPES[1:]
ROOM = 8 << 30  # bytes for others' keys where neither transport nor memory is given


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
    layout: str
    terms: Terms
    kernel: Chosen
    transport: Transport
    transport_name: str
    memory: int | None
    at_once: int  # owners whose keys a gather brings together
    job: Job
    blocks: Blocks  # of the ranks that the transport connects
    ulysses: Ulysses | None
    key_mask: Tensor | None
    signature: Signature

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
        layout: str = "contiguous",
        group: Group = None,
        kernel: str | None = None,
        transport: str | None = None,
        ulysses: int = 1,
        memory: int | None = None,
        bucket_size: int = 1024,
        cross: bool | None = None,
        also: Mapping[str, Any] | None = None,
    ) -> "RingPlan":
        """The plan for tensors like these; of q, k and v only shape, dtype and device matter.

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
        problem = (
            qkv_problem(q, k, v, key_mask)
            or _option_problem(
                window, scale, softclamp, layout, bucket_size,
                cross and (causal or window is not None),
            )
            or transport_problem(transport, memory)
            or ulysses_problem(ulysses, ring.size, q.shape[2])
        )  # fmt: skip
        if problem is None:
            asked = dict(window=window, key_mask=key_mask, scale=scale, softclamp=softclamp)
            try:
                chosen = choose(kernel, Case.of(q, v, **asked))
            except ValueError as error:
                problem = str(error)
        lengths = agree(
            ring,
            "ring attention",
            same={} if problem else dict(
                _agreed_shapes(q, k, v) | dict(also or {}), causal=causal, window=window,
                scale=scale, softclamp=softclamp, layout=layout, kernel=kernel, cross=cross,
                transport=transport, ulysses=ulysses, memory=memory,
                key_mask="given" if key_mask is not None else None,
                **{"kernel chosen": chosen.name},
            ),
            own={} if problem else {"n": q.shape[1], "m": k.shape[1]},
            problem=problem,
        )  # fmt: skip
        queries = [own["n"] for own in lengths]
        keys = [own["m"] for own in lengths]
        if cross is None:
            cross = queries != keys
        if not cross and queries != keys:
            raise ValueError(
                f"ring attention: cross=False needs as many keys as queries on every rank, got "
                f"query lengths {queries} and key lengths {keys}"
            )
        visible = Visible(causal, window)
        if cross:
            _check_cross(queries, keys, visible)
            # without a mask positions decide nothing, so any will do
            query_segments, key_segments = (_one_after_another(n) for n in (queries, keys))
        else:
            query_segments = key_segments = segments_by_layout("ring attention", layout, queries)
        blocks, swap, over = Blocks(query_segments, key_segments, visible), None, ring
        # a copy: whoever reuses the mask's memory would change gradients without a word
        key_mask = None if key_mask is None else key_mask.clone()
        if 1 < ulysses <= ring.size:
            swap, *landed = Ulysses.make(ring, ulysses, blocks[:2], (q.shape[2], k.shape[2]))
            blocks, over = Blocks(*landed, visible), swap.ring
            key_mask = None if key_mask is None else swap.whole_mask(key_mask)
        job = _job(q, k, v, swap)
        if transport is None and memory is None:
            memory = ROOM
        at_once = owners_at_once(memory, blocks, job)
        transport = transport or choose_transport(q.device.type, blocks, job, at_once)
        return cls(
            ring=ring,
            query_segments=query_segments,
            visible=visible,
            layout=layout,
            terms=Terms(q.shape[-1] ** -0.5 if scale is None else scale, softclamp, bucket_size),
            kernel=chosen,
            transport=make_transport(transport, over, blocks, at_once, job, q.device),
            transport_name=transport,
            at_once=at_once,
            job=job,
            memory=memory,
            blocks=blocks,
            ulysses=swap,
            key_mask=key_mask,
            signature=Signature.of(q, k, v),
        )

    def positions(self, device: torch.device | None = None) -> Tensor:
        """The global positions of this rank's queries, int64 `[n]`."""
        return segment_positions(self.query_segments[self.ring.rank], device)

    def keys(self, k: Tensor, v: Tensor) -> Keys:
        """This rank's keys, heads swapped if they are, as the transport wants them."""
        return Keys(k, v, self.key_mask, self.blocks.keys[self.place])

    def tiles(self, keys: Keys) -> Sequence[Tile]:
        """The tiles that this rank's queries see of these keys."""
        return tiles(self.blocks.queries[self.place], keys.segments, self.visible)

    @property
    def alone(self) -> bool:
        """Whether one call of the kernel is all there is to do."""
        return len(self.blocks.queries) == 1

    @property
    def degree(self) -> int:
        """How many neighbours swap heads for sequence."""
        return 1 if self.ulysses is None else self.ulysses.together.size

    @property
    def place(self) -> int:
        """This rank's among those that the transport connects, the rows of `blocks`."""
        return (self.ring if self.ulysses is None else self.ulysses.ring).rank

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError where the plan was made for other tensors than these."""
        problem = qkv_problem(q, k, v, None)
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
    layout: str,
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


def _job(q: Tensor, k: Tensor, v: Tensor, swap: Ulysses | None) -> Job:
    """What a transport works for, once heads are swapped."""
    (b, _, heads, d), key_heads = q.shape, k.shape[2]
    if swap is not None:
        heads, key_heads = (len(spread.heads[0]) for spread in (swap.queries, swap.keys))
    return Job(b, heads, key_heads, d, v.shape[3], q.dtype.itemsize)


def _check_cross(queries: list[int], keys: list[int], visible: Visible) -> None:
    if visible != Visible():
        raise ValueError(
            f"ring attention: causal and window need as many keys as queries on every rank, got "
            f"query lengths {queries} and key lengths {keys}; cross attention has neither"
        )


def _one_after_another(lengths: list[int]) -> tuple[Segments, ...]:
    return tuple((Segment(0, 1, n),) if n else () for n in lengths)


def segments_by_layout(caller: str, layout: str, lengths: list[int]) -> tuple[Segments, ...]:
    """Every rank's segments, if these are the lengths that the layout gives; else ValueError."""
    segments = all_segments(layout, len(lengths), sum(lengths))
    expected = [count(s) for s in segments]
    if lengths != expected:
        raise ValueError(
            f"{caller}: layout={layout!r} puts {expected} of {sum(lengths)} tokens on the "
            f"ranks, got {lengths}; shard with shard_sequence(x, layout={layout!r}), or say "
            "cross=True if the keys are of another sequence"
        )
    return segments
