"""Keys that all ranks hold: their checks, the note by which ranks compare them, their calls."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import Segments, count
from ring_attention_pytorch.geometry.tiles import with_shared
from ring_attention_pytorch.plan.checks import like_autocast
from ring_attention_pytorch.runtime.interfaces import Tiles
from ring_attention_pytorch.runtime.scores import sinks_note

Shared = tuple[Tensor, Tensor]


def check_shared(shared: Shared, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless these are keys and values beside k and v, of any number of tokens."""
    shapes = [list(t.shape) for t in shared]
    tokens = shapes[0][1] if len(shapes[0]) > 1 else 0
    wanted = [[t.shape[0], tokens, *t.shape[2:]] for t in (k, v)]
    if shapes != wanted:
        raise ValueError(
            "shared_keys must be (k [b, s, h_kv, d], v [b, s, h_kv, d_v]), as k and v but for the "
            f"number of tokens, for k {list(k.shape)} and v {list(v.shape)}; got {shapes}"
        )
    for t in map(like_autocast, shared):
        if t.dtype != q.dtype or t.device != q.device or t.layout != torch.strided:
            raise ValueError(
                f"shared_keys must be dense, in {q.dtype} on {q.device} as q, got {t.layout}, "
                f"{t.dtype} on {t.device}"
            )


def check_with_shared(options: Any) -> None:
    """Raise ValueError if options are given that need positions, which shared keys do not have."""
    if options.alibi_slopes is not None or options.dropout:
        raise ValueError(
            "shared_keys have no positions, which alibi_slopes and dropout need; leave one out"
        )


def check_shared_mask(mask: Tensor, shared: Shared | None) -> None:
    """Raise ValueError unless there are shared keys, and the mask fits them."""
    if shared is None:
        raise ValueError("shared_key_mask needs shared_keys; leave it out")
    k = shared[0]
    if mask.dtype != torch.bool or mask.shape != k.shape[:2] or mask.device != k.device:
        raise ValueError(
            f"shared_key_mask must be bool {list(k.shape[:2])} on {k.device}, True where a key may "
            f"be seen, got {mask.dtype} {list(mask.shape)} on {mask.device}"
        )


def shared_note(shared: Shared) -> list[Any]:
    """Return a note of shared keys for ranks to compare: how many, and which have gradients.

    >>> shared_note((torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 4)))
    [3, 'without a gradient', 'without a gradient']
    """
    return [shared[0].shape[1], *map(sinks_note, shared)]


class WithShared(NamedTuple):
    """How a plan's calls compute shared keys: in one kernel call with own keys, or in another one.

    In one call `joined` has the tiles of own keys followed by shared ones, by own keys' segments;
    otherwise it is empty. `calls` counts kernel calls forward and backward.
    """

    joined: dict[Segments, list[tuple[slice, Tiles]]]
    calls: tuple[int | None, int | None]

    @classmethod
    def of(cls, plan: Any) -> "WithShared":
        tiles = _joined(plan)
        joined = {} if tiles is None else {plan.blocks.keys[plan.place]: tiles}
        return cls(joined, (_calls(plan, joined, back=False), _calls(plan, joined, back=True)))


def _joined(plan: Any) -> list[tuple[slice, Tiles]] | None:
    """Return the tiles of own keys followed by shared ones; None if these are in another call.

    One call has both if they have the same kernel and no masks of keys, and the kernel takes many
    tiles at once or there is but one. Then queries are read once, and nothing is merged.
    """
    shared, own_keys = plan.shared, plan.blocks.keys[plan.place]
    if shared is None or shared.kernel.name != plan.kernel.name or len(plan.seen.samples) > 1:
        return None
    masks = plan.key_mask, shared.key_mask, plan.terms.mask_mod
    if any(mask is not None for mask in masks):
        return None
    queries, shared_keys = count(plan.blocks.queries[plan.place]), count(shared.blocks.keys[0])
    if queries == 0 or shared_keys == 0:
        return None
    tiles = with_shared(plan.tiles(own_keys)[0][1], queries, count(own_keys), shared_keys)
    if len(tiles) > 1 and not plan.kernel.traits.fuses_merge:
        return None
    return [(slice(None), Tiles(tiles))]


def _calls(plan: Any, joined: Mapping[Segments, Any], back: bool) -> int | None:
    """Count kernel calls, with calls for shared keys; None where samples differ.

    Of two kernels only calls of the one that merges by itself count: the other returns parts.
    """
    calls, shared = plan.calls(back), plan.shared
    if calls is None or shared is None:
        return calls
    for keys in plan.schedule.positions(back, plan.place):
        if keys in joined:
            own_are_hidden = not plan.tiles(keys)[0][1]
            return calls + own_are_hidden
    more, merges = shared.calls(back) or 0, plan.kernel.traits.fuses_merge
    if merges == shared.kernel.traits.fuses_merge:
        return calls + more
    return calls if merges else more
