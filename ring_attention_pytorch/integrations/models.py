"""Run models of Hugging Face's transformers on sequences that are spread over processes.

    register()                                  attn_implementation="ring"
    with ring_forward(shard_batch(batch)) as inputs:
        model(**inputs).loss.backward()         the mean loss of all ranks

transformers calls two registered functions: one makes masks, one computes attention. Our mask
function returns a description, not a tensor; attention takes the rest from the batch. A model's
loss in this block is the loss of whole sequences. A mismatch with the batch is an error on all
ranks: other positions, other labels, a mask or a layer that can't be spread.

Tested with transformers 5.17.0 and 5.24.0.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ring_attention_pytorch.arguments import check_least, checked
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.integrations import heads, latents
from ring_attention_pytorch.integrations.cache import CachedMask
from ring_attention_pytorch.integrations.cache_layers import CachedLength
from ring_attention_pytorch.integrations.calls import SCORES, check_call, names
from ring_attention_pytorch.integrations.layers import (
    check_layers,
    check_own_attention,
    is_tower_by_name,
)
from ring_attention_pytorch.integrations.losses import are_equal
from ring_attention_pytorch.integrations.masks import RingMask, Visible, visible_by
from ring_attention_pytorch.integrations.watched import (
    Outermost,
    Watched,
    begun,
    needed,
    spread_losses,
)
from ring_attention_pytorch.plan.checks import autocast, check_way
from ring_attention_pytorch.plan.option_types import CheckOption, KernelOption, TransportName
from ring_attention_pytorch.plan.options import DEFAULTS
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import Check, agree, error_of, typed
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring, as_ring
from ring_attention_pytorch.runtime.dropout import check_seed
from ring_attention_pytorch.training.batches import ShardedBatch, report_to_ring_of_batch
from ring_attention_pytorch.training.comparison import leave_to_block

_CALLER = "a model of transformers"
_NO_POSITIONS = (
    "the model gives position_ids to no embedding or layer that is known, so it may count its "
    "tokens by itself, from 0 on each rank; check_positions=False is for models without positions"
)


@checked
def register(name: str = "ring") -> None:
    """Register ring attention with transformers, as `attn_implementation=name`.

    Raises:
        ValueError: the name is one of transformers' own, or would be taken for one.

    >>> register()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    >>> heads = dict(num_attention_heads=2, num_key_value_heads=1)
    >>> config = LlamaConfig(**sizes, **heads, attn_implementation="ring")
    >>> LlamaForCausalLM(config).config._attn_implementation
    'ring'
    """
    interface = AttentionInterface()
    taken = name in interface and interface[name] is not _attention
    if taken or name == "eager" or any(own in name for own in ("sdpa", "flash", "flex", "paged")):
        raise ValueError(f"register: {name!r} is, or looks like, a name of transformers' own")
    names.add(name)
    _refuse_own_attention()
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)


def _refuse_own_attention() -> None:
    """Make models that compute attention by themselves raise when they are created."""
    theirs = PreTrainedModel.get_correct_attn_implementation
    if hasattr(theirs, "of_ring"):
        return

    @wraps(theirs)
    def asked(model: Any, requested_attention: Any, *args: Any, **given: Any) -> Any:
        if requested_attention in names:
            check_own_attention(model, requested_attention)
            heads.models.add(model)
            if is_tower_by_name(model):
                requested_attention = None  # images are whole: transformers' default attention
        return theirs(model, requested_attention, *args, **given)

    asked.of_ring = True  # type: ignore[attr-defined]
    models: Any = PreTrainedModel  # typed so that a method can be assigned
    models.get_correct_attn_implementation = asked


@typed(report_to_ring_of_batch("ring_forward"))
def ring_forward(
    batch: ShardedBatch,
    *,
    group: Group = None,
    loss_group: Group = None,
    labels: bool = True,
    check_positions: bool = True,
    kernel: KernelOption | None = None,
    transport: TransportName | None = None,
    ulysses: int | None = None,
    memory: int | None = None,
    bucket_size: int = DEFAULTS["bucket_size"],
    check: CheckOption | None = None,
    dropout_seed: int | None = None,
) -> "RingForward":
    """Return the block in which a model computes this rank's part of a batch.

    All ranks of the ring enter it together. It yields the model's inputs: the batch's tensors with
    positions, mask, and labels if there are some. `model(**inputs).loss` is the mean over all real
    tokens of all ranks. Its gradients, averaged over ranks as DDP and FSDP do, equal the gradients
    of one process.

    Args:
        batch: from `shard_batch`.
        group: the ring, if the batch was made without a group.
        loss_group: all ranks over which gradients are averaged; None is the default group.
        labels: pass the batch's labels to the model, for its loss. False is for a loss of your own,
            and for models without a head.
        check_positions: raise if the model uses other positions than the batch's, or hides which it
            uses. False is for models without positions.
        The rest: how attention is computed, as for `ring_attn`. Mask and scale are the model's.

    Raises:
        ValueError: on all ranks, now or when the model runs: an option is invalid; the model has
            masks, layers or positions that can't be spread, or other labels or another mask than
            the batch's; it computes a loss by itself, or returns a tensor that is not of this
            rank's tokens; or, at the block's end, nothing in it used ring attention.

    >>> from ring_attention_pytorch import shard_batch
    >>> batch = shard_batch({"input_ids": torch.tensor([[4, 5, 6]])})
    >>> sorted(ring_forward(batch).inputs)
    ['attention_mask', 'input_ids', 'position_ids', 'use_cache']
    """
    batch = batch if group is None else batch.over(group)
    options = dict(
        kernel=kernel, transport=transport, ulysses=ulysses, memory=memory, check=check,
        bucket_size=bucket_size, dropout_seed=dropout_seed,
    )  # fmt: skip
    return RingForward(batch, loss_group, labels, check_positions, options)


class RingForward:
    """The block of `ring_forward`.

    Attributes:
        inputs: the model's keyword arguments.
        num_items: the tokens of the mean, if it is over several batches: a rank's loss is then the
            sum over its tokens divided by this, as in transformers. None: the mean of this batch.
    """

    def __init__(
        self,
        batch: ShardedBatch,
        loss_group: Group,
        labels: bool,
        check_positions: bool,
        options: dict[str, Any],
    ):
        self.batch: ShardedBatch = batch
        self.ring: Ring = batch.ring
        self.options: dict[str, Any] = options
        leave_to_block(self.ring, batch.digest)
        agree(self.ring, "ring_forward", {}, check=partial(_check, batch, options))
        self.loss_group: Group = loss_group
        self.check_positions: bool = check_positions
        self.num_items: Tensor | None = None
        self.inputs: dict[str, Any] = _inputs(batch, labels)
        self._plans: PlanCache[RingPlan] = PlanCache()
        self.same: list[Tensor | None] = [self.inputs["position_ids"]]
        self.wholes: list[str] = []
        self.runs: dict[Any, Any] = {}
        self.call = Watched(self)
        self._attended = False

    def __enter__(self) -> dict[str, Any]:
        with ExitStack() as opened:
            opened.enter_context(self.batch)
            self.wholes = begun(self).wholes
            if "labels" in self.inputs and self.batch.num_items is not None:
                self.inputs["num_items_in_batch"] = self._items_for_others(self.batch.num_items)
            opened.enter_context(spread_losses())
            opened.enter_context(Outermost(self))
            self._opened = opened.pop_all()
        return self.inputs

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        value, trace = error or (kind and kind(), None)  # with an error, batches don't agree
        self._opened.__exit__(kind, value, trace)
        if kind is None and not self._attended:
            raise ValueError(
                "ring_forward: no attention in the block was ring attention; call register() and "
                'give the model attn_implementation="ring"'
            )

    # ---- called while a model runs

    def _items_for_others(self, items: Tensor) -> Tensor:
        """Return the real tokens per rank, by which losses not of ours divide a rank's sum.

        Several rings sum theirs, once for each batch; a ring alone knows its own.
        """
        ring, known = as_ring(self.loss_group), self.batch.items_of
        if (ranks := tuple(ring.ranks)) == tuple(self.ring.ranks):
            return items.double() / ring.size
        if ranks not in known:
            # counts a ring's batch once on each of its ranks
            total = Caller(ring, "real tokens", 0).total(items.double())
            known[ranks] = total / self.batch.ring_size / ring.size
        return known[ranks]

    def agree_in_block(self, check: Check | None, **same: Any) -> None:
        """Raise ValueError on all ranks of the ring if any rank's check does, or `same` differs."""
        agree(self.ring, _CALLER, same, check=check)

    def ensure(self, check: Check) -> None:
        """Raise a check's error on all ranks of the ring; without an error send nothing."""
        if (error := error_of(check)) is not None:
            self.agree_in_block(error)

    def attend(
        self,
        layer: nn.Module,
        given: tuple[Tensor, Tensor, Tensor],
        mask: Visible,
        sinks: Tensor | None,
        scores: Mapping[str, Any],
    ) -> Tensor:
        """Compute attention of this rank's tokens `[b, h, n, d]`, by a plan cached per shape.

        Returned are `[b, n, h, d_v]`. Layers can give latents in place of keys and values.
        """
        self._attended = self.call.attended = True
        qkv = given[0].transpose(1, 2), given[1].transpose(1, 2), given[2].transpose(1, 2)
        if latents.given and latents.taken(layer, *given[1:]):
            options = {"group": self.ring, **self.options, **mask._asdict(), **scores}
            return latents.attend(layer, qkv, self._plans, sinks, options)
        q, k, v = map(autocast, qkv)
        kind = (q.shape, k.shape, v.shape, q.dtype, q.device, mask, sinks is None, *scores.values())
        plan = self._plans.get(kind)
        if plan is None:
            options = {**self.options, **mask._asdict(), **scores}
            made = RingPlan.make(q, k, v, group=self.ring, sinks=sinks, **options)
            plan = self._plans.keep(kind, made)
        plan = plan.for_layer(getattr(layer, "layer_idx", None) or 0)
        out = ring_attn(q, k, v, sinks=sinks, plan=plan)
        assert isinstance(out, Tensor)  # lse was not asked for
        return out.contiguous()  # some models take views of it

    def check(
        self,
        layer: nn.Module,
        mask: RingMask,
        given: Mapping[str, Any],
        positions: Tensor | None,
    ) -> None:
        """Raise ValueError on all ranks if a layer's call, mask or positions are wrong.

        Args:
            given: the other options of the layer's call.
        """
        error = mask.error or error_of(partial(check_call, mask.visible, given))
        if error is None and self.check_positions and not self.call.are_placed(layer, positions):
            error = ValueError(_NO_POSITIONS)
        if error is not None:
            self.agree_in_block(error)  # the masks are compared with the plan

    def check_whole(
        self, given: Tensor | None, q_length: int, kv_length: int, offsets: tuple[Any, Any]
    ) -> None:
        """Raise ValueError if a mask is not the batch's, or also covers earlier keys."""
        mine = self.inputs["attention_mask"]
        if given is not None and not (given.shape == mine.shape and are_equal(given, mine)):
            raise ValueError(
                f"attention_mask {list(given.shape)} is not the batch's, {list(mine.shape)} of "
                "this rank's tokens; give it to shard_batch, and call model(**inputs)"
            )
        if q_length != kv_length or any(offsets):
            raise ValueError(
                "there are keys of earlier tokens: ring_forward is for whole sequences, without a "
                "cache"
            )


def _inputs(batch: ShardedBatch, labels: bool) -> dict[str, Any]:
    given = {name: t for name, t in batch.items() if name not in ("shift_labels", "loss_weights")}
    given |= {"attention_mask": mask_of(batch), "use_cache": False}
    if labels and "shift_labels" in batch:
        in_place = batch.labels if batch.in_place is None else batch.in_place
        given |= {"labels": in_place, "shift_labels": batch.labels}
    return given


def mask_of(batch: ShardedBatch) -> Tensor:
    """Return which of this rank's tokens are real, bool `[b, n]`."""
    if batch.key_mask is not None:
        return batch.key_mask
    positions = batch["position_ids"]
    return positions.new_ones(positions.shape[-2:], dtype=torch.bool)


def _check(batch: ShardedBatch, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a rank has no token, or an option is invalid."""
    if min(held := batch.counts) == 0:
        raise ValueError(
            f"each rank must have a token, for models can't do with none; {batch.length} tokens "
            f"put {held} on the ranks: pad the batch, or take fewer ranks"
        )
    _check_options(**options)


@lru_cache(typed=True)
def _check_options(
    ulysses: int | None, bucket_size: int, dropout_seed: int | None, **way: Any
) -> None:
    """Raise ValueError if an option is invalid. Valid combinations are cached."""
    check_least(1, ulysses=1 if ulysses is None else ulysses, bucket_size=bucket_size)
    check_seed(dropout_seed)
    check_way(**way)


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    **_: Any,
) -> RingMask | CachedMask:
    """Return a description of a model's mask, when transformers wants to make the mask.

    Models can make masks in an order that differs between ranks, while layers run in one order. An
    error is therefore stored in the mask, and raised by a layer.
    """
    if isinstance(kv_length, CachedLength):
        return kv_length.cache.mask(mask_function, attention_mask, kv_length)
    forward: RingForward = needed()
    found: list[Visible] = []

    def check() -> None:
        found.append(visible_by(mask_function))
        check_layers(config, forward.batch.length, len(forward.call.parts.recurrent))
        forward.check_whole(attention_mask, q_length, kv_length, (q_offset, kv_offset))

    error = error_of(check)
    return RingMask(forward, found[0] if found else None, error)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute attention of q, k, v `[b, h, n, d]` in transformers' output format `[b, n, h, d]`."""
    scores = {name: given.pop(theirs, default) for name, (theirs, default) in SCORES.items()}
    positions, sinks = given.pop("position_ids", None), given.pop("s_aux", None)
    if isinstance(attention_mask, CachedMask):
        qkv = query, key, value
        return attention_mask.attend(module, qkv, sinks, scores, positions, given), None
    if not isinstance(attention_mask, RingMask):
        error = ValueError(
            f"a layer got a mask of type {type(attention_mask).__name__}, not that of ring "
            "attention; the model makes a mask of its own, which can't be spread"
        )
        needed().agree_in_block(error)
    forward, visible = attention_mask.forward, attention_mask.visible
    forward.check(module, attention_mask, given, positions)
    return forward.attend(module, (query, key, value), visible, sinks, scores), None
