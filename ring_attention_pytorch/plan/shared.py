"""Keys that all ranks hold: their checks, and the note by which ranks compare them."""

from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.plan.checks import like_autocast
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
