"""Checks of tensors and options, and what ranks must have the same of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.transports import transport_problem
from ring_attention_pytorch.geometry.layouts import Layout, all_segments, layout_problem
from ring_attention_pytorch.geometry.segments import Segment, Segments, count
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.runtime.scores import per_head_problem

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AUTOCAST_FROM = DTYPES[1:]
# asked once: torch.compile cannot ask in torch 2.11
AUTOCAST_DEVICES = frozenset(
    filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia"))
)


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


def qkv_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say what is wrong with this rank's tensors by themselves; None if nothing."""
    if (problem := shapes_problem(q, k, v)) is not None:
        return problem
    if not q.device == k.device == v.device:
        return f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}"
    if q.is_meta or not q.layout == k.layout == v.layout == torch.strided:
        return f"q, k, v must be dense and have values, got {q.layout} on {q.device}"
    return None


def shapes_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say what is wrong with the shapes and dtypes of this rank's tensors; None if nothing."""
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"q, k, v must be [batch, tokens, heads, head size], got {_shapes(q, k, v)}"
    b, _, h, d = q.shape
    b_v, m, h_kv, d_v = v.shape
    if k.shape != (b, m, h_kv, d) or b_v != b:
        return (
            "q [b, n, h, d], k [b, m, h_kv, d] and v [b, m, h_kv, d_v] must agree in b, m, h_kv "
            f"and d, got {_shapes(q, k, v)}"
        )
    if 0 in (h, h_kv, d, d_v) or h % h_kv != 0:
        return (
            "heads of q must be a multiple of those of k, and there must be heads and head sizes, "
            f"got {_shapes(q, k, v)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        return (
            "q, k, v must have one floating dtype of 16, 32 or 64 bits, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}; cast them, or use autocast"
        )
    return None


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def tensors_problem(
    wanted: Signature, with_sinks: bool, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None
) -> str | None:
    """Say what is wrong with a call's tensors for a plan of this signature; None if nothing is."""
    problem = qkv_problem(*qkv) or per_head_problem("sinks", qkv[0], sinks)
    if problem is not None:
        return problem
    if with_sinks != (sinks is not None):
        made, got = ("with", "none") if with_sinks else ("without", "some")
        return f"the plan was made {made} sinks, got {got}; make one for such calls"
    if (found := Signature.of(*qkv)) != wanted:
        return f"the plan was made for {wanted!r}; got {found!r}; make one for these"
    return None


def key_mask_problem(key_mask: Tensor | None, k: Tensor) -> str | None:
    """Say what is wrong with a mask of keys like these; None if nothing."""
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


def check_problem(check: str | None) -> str | None:
    """Say what is wrong with how often ranks shall compare notes; None if nothing."""
    if check in (None, "always"):
        return None
    return f"check, or RING_ATTENTION_CHECK, must be None or 'always', got {check!r}"


def lengths_problem(
    lengths: tuple[list[int], list[int]],
    layout: Layout,
    visible: Mask,
    cross: bool,
    *,
    packed: bool,
    placed: bool,
    counted: bool,
) -> str | None:
    """Say what is wrong with the lengths of all ranks' queries and keys; None if nothing."""
    queries, keys = lengths
    got = f"got query lengths {queries} and key lengths {keys}"
    if not cross and queries != keys:
        return f"cross=False needs as many keys as queries on every rank, {got}"
    if placed:
        return None
    if cross and packed:
        return (
            "documents and cu_seqlens need keys of the same tokens as the queries, "
            f"{got} of two sequences"
        )
    if cross and visible != Mask():
        return (
            f"causal and window need as many keys as queries on every rank, {got}; "
            "cross attention has neither"
        )
    if cross and not _dealt(layout, counted):
        return None
    return shards_problem(layout, queries)


def segments_of_two(
    layout: Layout, queries: list[int], keys: list[int], counted: bool
) -> tuple[tuple[Segments, ...], tuple[Segments, ...]]:
    """Return the segments of queries and of keys of another sequence, in the order of ranks.

    Positions decide nothing unless queries are `counted`, by dropout, ALiBi or a predicate: then
    queries stand where their layout has them, and keys in the order of ranks.
    """
    if _dealt(layout, counted):
        return all_segments(layout, len(queries), sum(queries)), one_after_another(keys)
    return one_after_another(queries), one_after_another(keys)


def _dealt(layout: Layout, counted: bool) -> bool:
    """Tell whether a cross attention's queries must lie by the layout, and not rank by rank."""
    return counted and layout != "contiguous"


def one_after_another(lengths: list[int]) -> tuple[Segments, ...]:
    by_rank: list[Segments] = []
    start = 0
    for n in lengths:
        by_rank.append((Segment(start, 1, n),) if n else ())
        start += n
    return tuple(by_rank)


def shards_problem(layout: Layout, lengths: list[int]) -> str | None:
    """Say what is wrong with these lengths if the layout gives ranks others; None if nothing."""
    if (problem := layout_problem(layout, len(lengths), sum(lengths))) is not None:
        return problem
    expected = [count(s) for s in all_segments(layout, len(lengths), sum(lengths))]
    if lengths == expected:
        return None
    return (
        f"layout={layout!r} puts {expected} of {sum(lengths)} tokens on the "
        f"ranks, got {lengths}; shard with shard_sequence(x, layout={layout!r}), or say "
        "cross=True if the keys are of another sequence"
    )


def over_ring_problem(
    ring: bool, heads: int, *, transport: str | None, ulysses: int, memory: int | None
) -> str | None:
    """Say what is wrong with options that are for a ring only; None if nothing."""
    if not ring and (transport, ulysses, memory) != (None, 1, None):
        return (
            "transport, ulysses and memory need ring_attn=True, without force_regular_attn; "
            f"got transport={transport!r}, ulysses={ulysses}, memory={memory}"
        )
    if ulysses < 1 or heads % ulysses:
        return f"ulysses must divide heads={heads}, got {ulysses}"
    return transport_problem(transport, memory)


def in_graphs_problem(regular: bool, dropout: float, transport: str | None) -> str | None:
    """Say what keeps a module's calls from ever being captured and replayed; None if nothing."""
    if not regular and dropout == 0 and transport != "ring":
        return None
    return (
        "in_graphs=True needs force_regular_attn=False, dropout=0 and another transport than "
        f'"ring"; got {regular}, {dropout} and {transport!r}'
    )


def other_way_problem(
    has: Mapping[str, Any], *, transport: str | None, ulysses: int, memory: int | None
) -> str | None:
    """Say where a plan, which has these, does otherwise than a module asks; None if nowhere."""
    wanted = dict(
        transport=transport or has["transport"], ulysses=ulysses, memory=memory or has["memory"]
    )
    if wanted == has:
        return None
    return (
        f"the plan has transport={has['transport']!r}, ulysses={has['ulysses']} and "
        f"memory={has['memory']}, the module {transport!r}, {ulysses} and {memory}"
    )
