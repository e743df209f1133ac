"""Plans of the last few kinds, found again by all that they depend on.

So layers that are given no plan share one, and so do batches that are alike. Ranks compare notes
for each plan nonetheless: another rank may want something else. They keep theirs only if all of
them have found the one that they made together.
"""

import atexit
import os
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ring_attention_pytorch.plan.options import Call
from ring_attention_pytorch.plan.placement import placed
from ring_attention_pytorch.plan.proposal import Proposal, room_left
from ring_attention_pytorch.ranks.agreement import as_told
from ring_attention_pytorch.ranks.ring import Ring

_KINDS = 8
_SETTINGS = ("RING_ATTENTION_CHECK", "TRITON_INTERPRET")  # of the environment


class Kept(NamedTuple):
    """A plan, and what was proposed for it, without tensors."""

    ring: Ring
    proposal: Proposal
    plan: Any


_kept: dict[Hashable, Kept] = {}
atexit.register(_kept.clear)  # before process groups go


def kind_of(
    ring: Ring, given: tuple[Tensor, ...], options: Mapping[str, Any], also: Mapping[str, Any]
) -> Hashable:
    """Return all that a plan depends on; None if it may depend on more, as on tensors' values.

    >>> q = torch.empty(1, 6, 2, 4)
    >>> alike = [kind_of(Ring(), (q, q, q), dict(causal=on), {}) for on in (True, True, False)]
    >>> alike[0] == alike[1], alike[0] == alike[2]
    (True, False)
    >>> kind_of(Ring(), (q, q, q), dict(dropout=0.5), {}) is None
    True
    """
    values, sinks = tuple(options.values()), options.get("sinks")
    if isinstance(sinks, Tensor):
        values = tuple([_seen(value) if value is sinks else value for value in values])
    types = tuple(map(type, values))
    chooses = options.get("transport") is None and options.get("memory") is None
    if any(map(is_functorch_wrapped_tensor, given)) or _has_tensors(types):
        return None
    drawn = options.get("dropout") or options.get("mask_mod") is not None
    if type(ring) is not Ring or ring.several or drawn:
        return None
    kind = (
        (ring.group, ring.first, ring.size, ring.rank),
        tuple([(t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in given]),
        tuple(options), values, types, tuple(also.items()),
        room_left(given[0], ring.size) if chooses else 0, *settings(given[0].device.type),
    )  # fmt: skip
    try:
        hash(kind)
    except TypeError:  # a list of borders, say
        return None
    return kind


# what a rank brings to the agreement on a plan: the kind, the plan of it that is kept, if one is,
# and a proposal; or what is wrong
Found: TypeAlias = tuple[Hashable, Kept | None, Proposal, ValueError | None]


def find(
    ring: Ring,
    qkv: tuple[Tensor, Tensor, Tensor],
    options: Mapping[str, Any],
    also: Mapping[str, Any],
) -> Found:
    """Find what to propose for such a call, or what was, with the plan of it that is kept."""
    try:
        options = placed(ring, qkv[0], options)
        kind = kind_of(ring, qkv, options, also)
        kept = None if kind is None else _kept.pop(kind, None)
        if kept is None:
            return kind, None, Proposal.of(Call(*qkv, ring.size), options, also), None
        _kept[kind] = kept  # the last to go
        return kind, kept, kept.proposal, None
    except Exception as error:  # whatever it is: all ranks are told
        return None, None, Proposal(), as_told(error)


def keep(kind: Hashable, kept: Kept) -> None:
    """Keep a plan of this kind, instead of those whose group is gone and of the oldest one."""
    for old, (ring, *_) in list(_kept.items()):
        if not ring.exists:
            del _kept[old]
    if len(_kept) >= _KINDS:
        del _kept[next(iter(_kept))]
    _kept[kind] = kept


def forget() -> None:
    """Forget all plans: for those who change what plans depend on, as with `kernels.forget`."""
    _kept.clear()


def _seen(sinks: Tensor) -> Hashable:
    """Return what a plan sees of sinks: that there are some like these."""
    return sinks.shape, sinks.dtype, sinks.device, sinks.requires_grad


@lru_cache(maxsize=64)
def _has_tensors(types: tuple[type, ...]) -> bool:
    return any(issubclass(each, Tensor) for each in types)


def settings(device: str) -> tuple[Hashable, ...]:
    """List the settings of PyTorch and of the environment that decide on plans."""
    autocast = None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *[os.environ.get(name) for name in _SETTINGS],
    )
