"""Checks of tensors and options, and the values that must match on all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.transports import check_transport
from ring_attention_pytorch.geometry.layouts import Layout, all_segments
from ring_attention_pytorch.geometry.segments import Segment, Segments, count
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import check_name
from ring_attention_pytorch.runtime.codec import Codec
from ring_attention_pytorch.runtime.scores import check_per_head

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AUTOCAST_FROM = DTYPES[1:]
# asked once: torch.compile cannot ask in torch 2.11
AUTOCAST_DEVICES = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia"))
)


class Signature(tuple):
    """Batch, query and key length, heads, key heads, head sizes, dtype and device of one call."""

    NAMES = ("batch", "n", "m", "heads", "key heads", "d", "d_v", "dtype", "device", "codec")

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, *, codec: Codec | None = None) -> "Signature":
        b, n, h, d = q.shape
        _, m, h_kv, d_v = v.shape
        values = b, n, m, h, h_kv, d, d_v, str(q.dtype), q.device.type
        if codec is None:
            return cls(values)
        return cls((*values[:6], codec.d_v, *values[7:], str(codec)))

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(self.NAMES, self))


class Expected(NamedTuple):
    """The tensors that a plan is for."""

    signature: Signature
    sinks: bool  # whether calls have some
    device: torch.device


def autocast_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype that an input of attention gets: autocast's, unless it is float64."""
    device = t.device.type
    if (
        device not in AUTOCAST_DEVICES
        or not torch.is_autocast_enabled(device)
        or t.dtype not in AUTOCAST_FROM
    ):
        return t.dtype
    return torch.get_autocast_dtype(device)


def autocast(t: Tensor) -> Tensor:
    """Return an input of attention in the dtype that it gets."""
    return t.to(autocast_dtype(t))


def like_autocast(t: Tensor) -> Tensor:
    """Return the tensor, or one without memory that looks as autocast will make it."""
    if not torch._C._is_any_autocast_enabled() or (dtype := autocast_dtype(t)) == t.dtype:
        return t
    one = torch.empty((), dtype=dtype, device=t.device, requires_grad=t.requires_grad)
    return one.expand(t.shape)


def agreed_shapes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, object]:
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


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if this rank's tensors are invalid by themselves."""
    check_shapes(q, k, v)
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.is_meta or not q.layout == k.layout == v.layout == torch.strided:
        raise ValueError(f"q, k, v must be dense and have values, got {q.layout} on {q.device}")


def check_encoded(q: Tensor, k: Tensor, v: Tensor, codec: Codec) -> None:
    """Raise ValueError if this rank's tensors, k and v encoded, are invalid by themselves."""
    shapes = _shapes(q, k, v)
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q and encoded keys must be [b, tokens, heads, size], got {shapes}")
    if k.shape[1:3] != v.shape[1:3] or (k.shape[3], v.shape[3]) != codec.widths:
        raise ValueError(
            f"encoded keys must be two [b, m, g, w], w of {codec.widths}, for {codec}, got {shapes}"
        )
    codec.check(q, (k, v))
    for each in (k, v):
        wide = each.new_empty(()).expand(*each.shape[:2], q.shape[2], q.shape[3])
        check_qkv(q, wide, wide)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if shapes or dtypes of this rank's tensors don't go together."""
    if not q.ndim == k.ndim == v.ndim == 4:
        shapes = _shapes(q, k, v)
        raise ValueError(f"q, k, v must be [batch, tokens, heads, head size], got {shapes}")
    b, _, h, d = q.shape
    b_v, m, h_kv, d_v = v.shape
    if k.shape != (b, m, h_kv, d) or b_v != b:
        raise ValueError(
            "q [b, n, h, d], k [b, m, h_kv, d] and v [b, m, h_kv, d_v] must agree in b, m, h_kv "
            f"and d, got {_shapes(q, k, v)}"
        )
    if 0 in (h, h_kv, d, d_v) or h % h_kv != 0:
        raise ValueError(
            "heads of q must be a multiple of those of k, and there must be heads and head sizes, "
            f"got {_shapes(q, k, v)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            "q, k, v must have one floating dtype of 16, 32 or 64 bits, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}; cast them, or use autocast"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def check_tensors(
    wanted: Expected,
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    codec: Codec | None = None,
) -> None:
    """Raise ValueError if a call's tensors, and its codec, are not such as a plan is for."""
    if codec is None:
        check_qkv(*qkv)
    else:
        check_encoded(*qkv, codec)
    check_per_head("sinks", qkv[0], sinks)
    if wanted.sinks != (sinks is not None):
        made, got = ("with", "none") if wanted.sinks else ("without", "some")
        raise ValueError(f"the plan was made {made} sinks, got {got}; make one for such calls")
    if (signature := Signature.of(*qkv, codec=codec)) != wanted.signature:
        raise ValueError(
            f"the plan was made for {wanted.signature!r}; got {signature!r}; make one for these"
        )


def check_key_mask(key_mask: Tensor | None, k: Tensor) -> None:
    """Raise ValueError if a mask is given that does not fit keys like these."""
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool or key_mask.shape != k.shape[:2]:
        raise ValueError(
            f"key_mask must be bool {list(k.shape[:2])}, True where a key may be seen, "
            f"got {key_mask.dtype} {list(key_mask.shape)}"
        )
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on the keys' device {k.device}, got {key_mask.device}")


def check_way(
    kernel: str | None, transport: str | None, memory: int | None, check: str | None
) -> None:
    """Raise ValueError if kernel, transport, memory or check has an invalid value."""
    check_name(kernel)
    check_transport(transport, memory)
    check_notes(check)


def check_notes(check: str | None) -> None:
    """Raise ValueError if this is no valid value of `check`."""
    if check not in (None, "always"):
        raise ValueError(f"check, or RING_ATTENTION_CHECK, must be None or 'always', got {check!r}")


def check_lengths(
    lengths: tuple[list[int], list[int]],
    layout: Layout,
    visible: Mask,
    cross: bool,
    *,
    packed: bool,
    placed: bool,
    counted: bool,
) -> None:
    """Raise ValueError if the lengths of all ranks' queries and keys don't go together."""
    queries, keys = lengths
    got = f"got query lengths {queries} and key lengths {keys}"
    if not cross and queries != keys:
        raise ValueError(f"cross=False needs as many keys as queries on every rank, {got}")
    if placed:
        return
    if cross and packed:
        raise ValueError(
            "documents and cu_seqlens need keys of the same tokens as the queries, "
            f"{got} of two sequences"
        )
    if cross and visible != Mask():
        raise ValueError(
            f"causal and window need as many keys as queries on every rank, {got}; "
            "cross attention has neither"
        )
    if not cross or _dealt(layout, counted):
        check_shards(layout, queries, ", or say cross=True if the keys are of another sequence")


def segments_of_two(
    layout: Layout, queries: list[int], keys: list[int], counted: bool
) -> tuple[tuple[Segments, ...], tuple[Segments, ...]]:
    """Return the segments of queries and of keys of another sequence, in the order of ranks.

    Positions matter only if queries are `counted`, by dropout, ALiBi or a predicate: then queries
    have their layout's positions, and keys are in the order of ranks.
    """
    if _dealt(layout, counted):
        return all_segments(layout, len(queries), sum(queries)), one_after_another(keys)
    return one_after_another(queries), one_after_another(keys)


def _dealt(layout: Layout, counted: bool) -> bool:
    """True if a cross attention's queries must follow the layout instead of the order of ranks."""
    return counted and layout != "contiguous"


def one_after_another(lengths: list[int]) -> tuple[Segments, ...]:
    by_rank: list[Segments] = []
    start = 0
    for n in lengths:
        by_rank.append((Segment(start, 1, n),) if n else ())
        start += n
    return tuple(by_rank)


def check_shards(
    layout: Layout, lengths: Sequence[int], otherwise: str = ""
) -> tuple[Segments, ...]:
    """Return every rank's segments; raise ValueError if ranks have other lengths than the layout's.

    `otherwise` ends the error with another way.
    """
    # which also raises if it was dealt for others
    segments = all_segments(layout, len(lengths), sum(lengths))
    if [*map(count, segments)] != [*lengths]:
        raise ValueError(
            f"layout={layout!r} puts {[*map(count, segments)]} of {sum(lengths)} tokens on the "
            f"ranks, got {[*lengths]}; shard with shard_sequence(x, layout={layout!r}){otherwise}"
        )
    return segments


def check_over_ring(
    ring: bool, heads: int, *, transport: str | None, ulysses: int | None, memory: int | None
) -> None:
    """Raise ValueError if a ring's options are given without a ring, or do not fit it."""
    if not ring and (transport, ulysses or 1, memory) != (None, 1, None):
        raise ValueError(
            "transport, ulysses and memory need ring_attn=True, without force_regular_attn; "
            f"got transport={transport!r}, ulysses={ulysses}, memory={memory}"
        )
    if ulysses is not None and (ulysses < 1 or heads % ulysses):
        raise ValueError(f"ulysses must divide heads={heads}, got {ulysses}")
    check_transport(transport, memory)


def check_same_way(
    has: Mapping[str, Any], *, transport: str | None, ulysses: int | None, memory: int | None
) -> None:
    """Raise ValueError if a plan does not match the options of a module."""
    wanted = dict(
        transport=transport or has["transport"],
        ulysses=has["ulysses"] if ulysses is None else ulysses,
        memory=memory or has["memory"],
    )
    if wanted != has:
        raise ValueError(
            f"the plan has transport={has['transport']!r}, ulysses={has['ulysses']} and "
            f"memory={has['memory']}, the module {transport!r}, {ulysses} and {memory}"
        )
