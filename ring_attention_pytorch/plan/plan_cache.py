"""A cache of plans, keyed by all that a plan depends on.

Each owner of plans has a `PlanCache`:

    whose                                        plans of                     how many
    this process (`find`)                        calls without a plan         8 kinds
    a plan                                       its layers                   256
    a batch's block (`find`, too)                calls in it without a plan   all, until it ends
    a cache, a batch's block, a routing plan,    all that use it              all, while it exists
    a chunk of a prompt, a group that decodes

Layers without a plan share one of this process, and so do batches with equal cache keys. Ranks
exchange notes for each of these nonetheless: another rank may want something different. They use a
cached plan only if all of them have found the one that they made together. In a batch's block they
do so for the first layer of a kind; the others use its plan as one that was given.
"""

import atexit
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ring_attention_pytorch.plan.known_shards import check_known_shards, depends_on_places
from ring_attention_pytorch.plan.options import Call
from ring_attention_pytorch.plan.placement import Placement, current, placed
from ring_attention_pytorch.plan.proposal import Proposal, memory_left
from ring_attention_pytorch.ranks.agreement import with_type_name
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.codec import Codec

_KINDS = 8
_SETTINGS = ("RING_ATTENTION_CHECK", "TRITON_INTERPRET")  # of the environment


_Plan = TypeVar("_Plan")


class PlanCache(OrderedDict[Hashable, _Plan]):
    """Plans by cache key, least recently used first.

    >>> cache = PlanCache()
    >>> [cache.of(key, key.upper, most=2) for key in ("a", "b", "a", "c")], [*cache]
    (['A', 'B', 'A', 'C'], ['a', 'c'])
    """

    def of(self, key: Hashable, make: Callable[[], _Plan], most: int | None = None) -> _Plan:
        """Return the plan of this key, made on first use, and cache it as `keep` does."""
        plan = self.get(key)
        return self.keep(key, make() if plan is None else plan, most)

    def keep(self, key: Hashable, plan: _Plan, most: int | None = None) -> _Plan:
        """Cache a plan, and drop all but the `most` recently used ones; return it."""
        self[key] = plan
        self.move_to_end(key)
        if most is not None and len(self) > most:
            self.popitem(last=False)
        return plan

    def __reduce__(self) -> tuple[type["PlanCache[_Plan]"], tuple[()]]:
        """Copy and pickle as an empty cache: plans refer to the memory of their owner."""
        return type(self), ()


# proposals, without tensors, and their plans
_plans: PlanCache[tuple[Proposal, Any]] = PlanCache()
atexit.register(_plans.clear)  # before process groups go


def cache_key(
    ring: Ring,
    given: tuple[Tensor, ...],
    options: Mapping[str, Any],
    also: Mapping[str, Any],
) -> Hashable:
    """Return all that a plan depends on, except how much memory is free.

    None if it may depend on more, as on tensors' values.

    >>> q = torch.empty(1, 6, 2, 4)
    >>> alike = [cache_key(Ring(), (q, q, q), dict(causal=on), {}) for on in (True, True, False)]
    >>> alike[0] == alike[1], alike[0] == alike[2]
    (True, False)
    >>> cache_key(Ring(), (q, q, q), dict(dropout=0.5), {}) is None
    True
    """
    sinks, shared = options.get("sinks"), options.get("shared_keys")
    if isinstance(sinks, Tensor):
        options = {**options, "sinks": _traits(sinks)}
    if isinstance(shared, tuple) and all(isinstance(t, Tensor) for t in shared):
        options = {**options, "shared_keys": tuple(map(_traits, shared))}
    values = tuple(options.values())
    types = tuple(map(type, values))
    if any(map(is_functorch_wrapped_tensor, given)) or _has_tensors(types):
        return None
    drawn = options.get("dropout") or options.get("mask_mod") is not None
    if type(ring) is not Ring or ring.several or drawn:
        return None
    key = (
        (ring.group, ring.first, ring.size, ring.rank),
        tuple([(t.shape, t.dtype, t.device, t.layout, t.requires_grad) for t in given]),
        tuple(options), values, types, tuple(also.items()), *settings(given[0].device.type),
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:  # a list of borders, say
        return None
    return key


class Found(NamedTuple):
    """A rank's part in the agreement on a plan.

    If ranks agreed on the plan earlier in the batch's block, it has only that plan, `agreed`.
    """

    key: Hashable = None
    proposal: Proposal = Proposal()
    plan: Any = None  # the cached one, if there is one
    error: ValueError | None = None  # instead of a proposal
    agreed: Any = None
    block: Placement | None = None  # where a new plan is cached, too
    key_in_block: Hashable = None


def find(
    ring: Ring,
    qkv: tuple[Tensor, Tensor, Tensor],
    options: Mapping[str, Any],
    also: Mapping[str, Any],
    codec: Codec | None = None,
) -> Found:
    """Find such a call's plan in the batch's block; else its proposal, and its cached plan.

    The batch's own mask is no part of the key in the block: all calls there have that one. Nor is
    the free memory, which differs between ranks and layers.
    """
    try:
        options, block = placed(ring, qkv[0], options), current()
        layout = options.get("layout", "contiguous") if depends_on_places(options) else None
        check_known_shards(ring, dict(zip("qkv", qkv)), layout)
        mask = options.get("key_mask")
        of_batch = block is not None and mask is not None and mask is block.key_mask
        key = cache_key(ring, qkv, {**options, "key_mask": None} if of_batch else options, also)
        if key is None:
            block = None
        elif block is not None and (agreed := block.plans.get(key)) is not None:
            return Found(agreed=agreed)
        key_in_block, key = key, None if of_batch else key
        if key and options.get("transport") is None and options.get("memory") is None:
            key = key, memory_left(qkv[0], ring.size)
        cached = None if key is None else _plans.get(key)
        if cached is None:
            proposal, plan = Proposal.of(Call(*qkv, ring.size, codec), options, also), None
        else:
            _plans.move_to_end(key)
            proposal, plan = cached
        return Found(key, proposal, plan, block=block, key_in_block=key_in_block)
    except Exception as error:  # any exception: all ranks must raise
        return Found(error=with_type_name(error))


def keep(key: Hashable, proposal: Proposal, plan: Any) -> None:
    """Cache a plan of this key; drop plans of destroyed groups, and the oldest one."""
    for old, (_, known) in list(_plans.items()):
        if not known.ring.exists:
            del _plans[old]
    _plans.keep(key, (proposal._replace(shaped=()), plan), _KINDS)


def forget() -> None:
    """Forget all plans, after a change to something they depend on, as with `kernels.forget`."""
    _plans.clear()


def _traits(sinks: Tensor) -> Hashable:
    """Return the traits of sinks, or shared keys, that a plan depends on: all but values."""
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
