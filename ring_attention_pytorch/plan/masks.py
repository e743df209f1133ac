"""Masks in addition to causal and window: documents, a prefix, positions of two sequences.

All of them reduce to segments and pieces of positions, so that masks stay bands.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import BatchDocuments
from ring_attention_pytorch.geometry.segments import Segment, Segments, count, segment_positions
from ring_attention_pytorch.geometry.tiles import Mask, unseen
from ring_attention_pytorch.plan.packing import exchange_json
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import MaskMod
from ring_attention_pytorch.schedule.pieces import Workload

Prefix = int | Sequence[int] | Tensor | None


class Seen(NamedTuple):
    """Which keys the queries of a plan see, by their positions.

    Attributes:
        visible: the mask of causal and window alone.
        samples: consecutive samples with one mask, as slices of the batch, and their masks.
        packing: the documents of each sample; None if there are none.
        repeats: True if positions of keys were given, which may repeat.
        reached: bool `[1, m]`, own keys whose position some query sees; None if all are.
    """

    visible: Mask
    samples: list[tuple[slice, Mask]]
    packing: BatchDocuments | None
    repeats: bool
    reached: Tensor | None


def by_sample(
    visible: Mask, packing: BatchDocuments | None, prefix: Prefix, batch: int
) -> list[tuple[slice, Mask]]:
    """Group consecutive samples with one mask; return slices of the batch and masks."""
    if packing:
        masks = [visible._replace(documents=documents) for documents in packing]
    elif prefix is not None:
        masks = [visible._replace(prefix=tokens) for tokens in prefixes(prefix, batch)]
    else:
        return [(slice(None), visible)]
    groups = []
    start = 0
    for mask, samples in groupby(masks):
        stop = start + len(list(samples))
        groups.append((slice(start, stop), mask))
        start = stop
    if len(groups) > 1:
        return groups
    return [(slice(None), masks[0] if masks else visible)]


def seen_by_any(
    samples: list[tuple[slice, Mask]], visible: Mask, prefixed: bool
) -> tuple[Mask, tuple[Mask, ...]]:
    """Return a mask of all that any sample sees, and each sample's mask if they differ.

    The first then has no window: within a document, a window can span more tokens of the sequence.
    """
    masks = tuple(dict.fromkeys(mask for _, mask in samples))
    if len(masks) == 1:
        return masks[0], ()
    return Mask(visible.causal and not prefixed), masks


def reached(blocks: Workload, place: int, device: torch.device) -> Tensor | None:
    """Return which of a place's keys some query sees, by positions: bool `[1, m]`; None if all.

    Keys of the queries' own sequence are always seen: each token sees itself.
    """
    if blocks.queries == blocks.keys or blocks.visible == Mask():
        return None
    keys = blocks.keys[place]
    gaps = [*unseen(blocks.queries, keys, blocks.visible)]
    if not gaps:
        return None
    seen = torch.ones((1, count(keys)), dtype=torch.bool)
    for gap in gaps:
        seen[:, gap] = False
    return seen.to(device)


def positions_seen(segments: Segments, mask: Mask) -> Tensor:
    """Return the position of each of this rank's tokens: in its document, if any."""
    if mask.documents is not None:
        return mask.documents.positions(segments)
    return segment_positions(segments)


def gather_positions(ring: Ring, own: Sequence[Tensor | Any]) -> list[tuple[Segments, ...]]:
    """Exchange positions `[n]` of queries and of keys; return both as every rank's segments."""
    notes = exchange_json(ring, "positions", [_runs(t.cpu().long()) for t in own])
    by_sequence = []
    for runs_of_ranks in zip(*notes):
        by_sequence.append(tuple(map(_segments, runs_of_ranks)))
    return by_sequence


def _segments(runs: list[tuple[int, int, int]]) -> Segments:
    return tuple(Segment(*run) for run in runs)


def check_repeats(sequences: Sequence[tuple[Segments, ...]]) -> None:
    """Raise ValueError if two tokens of a sequence have one position; segments ascend by one."""
    for by_rank in sequences:
        for a, b in pairwise(sorted(chain.from_iterable(by_rank))):
            if a.start + a.length > b.start:
                raise ValueError(
                    "dropout draws by positions, so those of queries must all differ, and those of "
                    "keys; leave out what repeats, or dropout"
                )


def _runs(positions: Tensor) -> list[tuple[int, int, int]]:
    """Turn positions into segments that ascend by one."""
    offsets = positions - torch.arange(len(positions))
    offsets, counts = torch.unique_consecutive(offsets, return_counts=True)
    starts = offsets + counts.cumsum(0) - counts
    return [(start, 1, n) for start, n in zip(starts.tolist(), counts.tolist())]


def check_mask_mod(mask_mod: MaskMod, device: torch.device) -> None:
    """Raise ValueError if a predicate's result for one pair is invalid."""
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    try:
        answer = mask_mod(zero, zero, zero, zero)
    except Exception as error:  # any exception: the other ranks must raise, too
        kind = type(error).__name__
        raise ValueError(f"mask_mod fails, asked of one pair: {kind}: {error}") from error
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
        got = getattr(answer, "dtype", type(answer))
        raise ValueError(f"mask_mod must give a bool tensor, got {got}")


def prefixes(prefix: int | Sequence[int] | Tensor, batch: int) -> list[int]:
    """List the prefix of each sample."""
    if isinstance(prefix, Tensor):
        prefix = prefix.tolist()
    if isinstance(prefix, int):
        return [prefix] * batch
    return list(prefix)


def check_prefix(prefix: int | Sequence[int] | Tensor, batch: int) -> None:
    """Raise ValueError if a prefix is not one number of tokens, or one for each sample."""
    if isinstance(prefix, Tensor) and (prefix.is_floating_point() or prefix.ndim > 1):
        got = f"{prefix.dtype} {list(prefix.shape)}"
        raise ValueError(f"prefix must be ints, one or {batch}, got {got}")
    numbers = prefixes(prefix, batch)
    if len(numbers) != batch or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise ValueError(
            f"prefix must be one int of at least 0, or {batch} of them, got {numbers[:8]}"
        )


def prefix_digest(prefix: Any) -> str:
    """Shorten prefixes for the agreement: there may be many samples."""
    text = json.dumps(prefixes(prefix, 1))
    return f"{text[:40]}, {sha256(text.encode()).hexdigest()[:12]}"


def check_positions(queries: Tensor, keys: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise ValueError if these are not positions of the tokens of q and k."""
    for name, given, t in (("query", queries, q), ("key", keys, k)):
        if list(given.shape) != [t.shape[1]] or given.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{name}_positions must be int64 or int32 [{t.shape[1]}], "
                f"got {given.dtype} {list(given.shape)}"
            )
        # slopes, predicates and dropout read them in 32 bits; a difference must fit, too
        far = max(int(given.max()), -int(given.min())) if len(given) else 0
        if far >= 2**30:
            raise ValueError(
                f"{name}_positions must be less than 2 ** 30 from 0, got {far}; shift them"
            )
