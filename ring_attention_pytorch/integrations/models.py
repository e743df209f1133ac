"""Models of Hugging Face's transformers, over sequences that are spread over processes.

    register()                                  attn_implementation="ring"
    with ring_forward(shard_batch(batch)) as inputs:
        model(**inputs).loss.backward()         the mean loss of all ranks

transformers asks two functions for a model's attention: one for masks, one for attention itself.
Ours say what a mask is instead of making it, and attention takes the rest from the batch. The loss
of a model in this block is that of whole sequences. What does not fit the batch is an error on all
ranks: other positions, other labels, a mask or a layer that can't be spread.

Tested with transformers 5.17.0 and 5.24.0.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.loss.loss_utils import LOSS_MAPPING

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.comm.agreement import agree, problem_of
from ring_attention_pytorch.comm.placement import Placement, current
from ring_attention_pytorch.comm.ring import Group, as_ring
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.integrations.cache import CachedLength, CachedMask
from ring_attention_pytorch.integrations.calls import SCORES, call_problem, names
from ring_attention_pytorch.integrations.layers import layers_problem
from ring_attention_pytorch.integrations.masks import Visible, visible_by
from ring_attention_pytorch.plan.checks import autocast_dtype
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.training.batches import ShardedBatch
from ring_attention_pytorch.training.losses import ring_cross_entropy

_CALLER = "a model of transformers"
_OPTIONS = ("kernel", "transport", "ulysses", "memory", "bucket_size", "check", "dropout_seed")
_forwards: "WeakKeyDictionary[Placement, RingForward]" = WeakKeyDictionary()


@checked
def register(name: str = "ring") -> None:
    """Make ring attention known to transformers, as `attn_implementation=name`.

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
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)


@checked
def ring_forward(
    batch: ShardedBatch,
    *,
    group: Group = None,
    loss_group: Group = None,
    labels: bool = True,
    check_positions: bool = True,
    **options: Any,
) -> "RingForward":
    """Return the block in which a model computes on this rank's part of a batch.

    All ranks of the ring enter it together. It gives the model's inputs: what the batch has,
    positions and mask, and if there are labels those that the loss needs. `model(**inputs).loss` is
    then the mean over all real tokens of all ranks. Its gradients, averaged over ranks as DDP and
    FSDP do, are those of one process.

    Args:
        batch: what `shard_batch` made.
        group: the ring, if the batch was made without a group.
        loss_group: all ranks over which gradients are averaged; None is the default group.
        labels: give the model the batch's labels, for its loss. False is for losses of one's own,
            and for models without a head.
        check_positions: raise if the model was given other positions than the batch's. False for
            models that don't pass them on to their attention; then nobody can tell.
        options: of `ring_attn`, how attention is computed: kernel, transport, ulysses, memory,
            bucket_size, check, dropout_seed. What attention is comes from model and batch.

    Raises:
        ValueError: on all ranks, now or when the model runs: there is another option; the model
            has masks, layers or positions that can't be spread, or labels or a mask that are not
            the batch's; or at the block's end, if no attention in it was ring attention.

    >>> from ring_attention_pytorch import shard_batch
    >>> batch = shard_batch({"input_ids": torch.tensor([[4, 5, 6]])})
    >>> sorted(ring_forward(batch).inputs)
    ['attention_mask', 'input_ids', 'position_ids', 'use_cache']
    """
    batch = batch if group is None else batch.over(group)
    return RingForward(batch, loss_group, labels, check_positions, options)


class RingForward:
    """The block of `ring_forward`.

    Attributes:
        inputs: what to call the model with.
        num_items: tokens whose loss is one mean, if that is of several batches: then a rank's loss
            is the sum of its own, divided by it, as transformers has it. None is this batch.
    """

    batch: ShardedBatch
    options: dict[str, Any]
    loss_group: Group
    check_positions: bool
    inputs: dict[str, Any]

    def __init__(
        self,
        batch: ShardedBatch,
        loss_group: Group,
        labels: bool,
        check_positions: bool,
        options: dict[str, Any],
    ):
        unknown = [name for name in options if name not in _OPTIONS]
        problem = None
        if unknown:
            problem = (
                f"there is no option {', '.join(unknown)}; model and batch say what attention is, "
                f"options how: {', '.join(_OPTIONS)}"
            )
        agree(batch.ring, "ring_forward", {"options": sorted(options)}, problem=problem)
        self.batch, self.options = batch, options
        self.loss_group, self.check_positions = loss_group, check_positions
        self.num_items: Tensor | None = None
        self.inputs = _inputs(batch, labels)
        self._plans: dict[Any, RingPlan] = {}
        self._same: list[Tensor | None] = [
            self.inputs["position_ids"]
        ]  # positions found to be right
        self._attended = False

    def __enter__(self) -> dict[str, Any]:
        with ExitStack() as opened:
            opened.enter_context(self.batch)
            placement = current()
            assert placement is not None  # this thread has just opened it
            _forwards[placement] = self
            if "labels" in self.inputs and self.batch.num_items is not None:
                items = self._items_for_others(self.batch.num_items.double())
                self.inputs["num_items_in_batch"] = items
            opened.callback(LOSS_MAPPING.update, dict(LOSS_MAPPING))
            for kind in LOSS_MAPPING:
                LOSS_MAPPING[kind] = _loss if kind in _OF_TOKENS else _no_loss
            self._opened = opened.pop_all()
        return self.inputs

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._opened.close()
        if kind is None and not self._attended:
            raise ValueError(
                "ring_forward: no attention in the block was ring attention; call register() and "
                'give the model attn_implementation="ring"'
            )

    def _items_for_others(self, items: Tensor) -> Tensor:
        """Return by what losses that are not ours divide a rank's sum: real tokens per rank."""
        ring = as_ring(self.loss_group)
        if ring.size > 1:
            ring.total(items)  # each ring counts its batch on all its ranks
        return items / self.batch.ring_size / ring.size

    def told(self, problem: str | None, **same: Any) -> None:
        """Raise ValueError on all ranks of the ring if any has a problem, or they differ."""
        agree(self.batch.ring, _CALLER, same, problem=problem)

    def visible(self, mask_function: Any, config: Any, given: Tensor | None, **at: Any) -> Visible:
        """Return what a model's mask lets tokens see."""
        found: list[Visible] = []

        def problem() -> str | None:
            found.append(visible_by(mask_function))
            return (
                layers_problem(config, self.batch.length) or self._mask_problem(given)
                or _cache_problem(**at)
            )  # fmt: skip

        wrong = problem_of(problem)
        self.told(wrong, mask=[*found[0]] if found else None)
        return found[0]

    def attend(
        self,
        layer: nn.Module,
        qkv: tuple[Tensor, ...],
        mask: Visible,
        sinks: Tensor | None,
        scores: Mapping[str, Any],
    ) -> Tensor:
        """Return attention of this rank's tokens `[b, n, h, d]`, by the plan of such layers."""
        self._attended = True
        q, k, v = [t.to(autocast_dtype(t)) for t in qkv]
        kind = (q.shape, k.shape, v.shape, q.dtype, q.device, mask, sinks is None, *scores.values())
        if kind not in self._plans:
            options = {**self.options, **mask._asdict(), **scores}
            self._plans[kind] = RingPlan.make(
                q, k, v, group=self.batch.ring, sinks=sinks, **options
            )  # fmt: skip
        plan = self._plans[kind].for_layer(getattr(layer, "layer_idx", None) or 0)
        out = ring_attn(q, k, v, sinks=sinks, plan=plan)
        assert isinstance(out, Tensor)  # lse was not asked for
        return out

    def check(self, problem: str | None, positions: Tensor | None) -> None:
        """Raise ValueError on all ranks if there is a problem, or positions are not the batch's."""
        if self.check_positions and not any(positions is each for each in self._same):
            mine = self.inputs["position_ids"]
            problem = problem or problem_of(lambda: _positions_problem(positions, mine))
            self.told(problem)
            self._same.append(positions)
        elif problem is not None:
            self.told(problem)

    def loss(self, logits: Tensor, labels: Tensor | None, ignore_index: int) -> Tensor:
        """Return the loss of a model's logits `[b, n, classes]`."""
        mine = self.inputs.get("labels")
        if mine is None or labels is None or not _equal(labels, mine):
            problem = (
                "labels are not the batch's; a label is of the next token, which may be on another "
                "rank: give labels to shard_batch, and call model(**inputs)"
            )
            self.told(problem)
        labels = self.batch.labels.to(logits.device)
        if self.num_items is None:
            weights = self.batch.get("loss_weights")
            return ring_cross_entropy(
                logits, labels, weights=weights, group=self.loss_group, ignore_index=ignore_index
            )
        wide = logits.flatten(0, 1).to(accumulation_dtype(logits.dtype))
        total = F.cross_entropy(
            wide, labels.flatten(), ignore_index=ignore_index, reduction="sum"
        )  # fmt: skip
        return total / self.num_items.to(total.device)

    def _mask_problem(self, given: Tensor | None) -> str | None:
        mine = self.inputs["attention_mask"]
        if given is None or given is mine or (given.shape == mine.shape and _equal(given, mine)):
            return None
        return (
            f"attention_mask {list(given.shape)} is not the batch's, {list(mine.shape)} of this "
            "rank's tokens; give it to shard_batch, and call model(**inputs)"
        )


class _RingMask:
    """What attention gets as its mask: what is visible, in whose block."""

    def __init__(self, forward: RingForward, visible: Visible):
        self.forward, self.visible = forward, visible


def _inputs(batch: ShardedBatch, labels: bool) -> dict[str, Any]:
    given = {name: t for name, t in batch.items() if name not in ("shift_labels", "loss_weights")}
    positions, mask = given["position_ids"], batch.key_mask
    if mask is None:
        mask = positions.new_ones(positions.shape[-2:], dtype=torch.bool)
    given |= {"attention_mask": mask, "use_cache": False}
    if labels and "shift_labels" in batch:
        given |= {"labels": batch.labels, "shift_labels": batch.labels}
    return given


def opened() -> RingForward | None:
    """Return the block of `ring_forward` in which this is; None if it is in none."""
    placement = current()
    return None if placement is None else _forwards.get(placement)


def _current() -> RingForward:
    if (forward := opened()) is None:
        raise ValueError(
            "this model has ring attention, which needs its batch: call it in the block "
            "`with ring_forward(batch) as inputs:`, or with past_key_values=RingHFCache(...)"
        )
    return forward


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
) -> "_RingMask | CachedMask":
    """Return what a model's mask lets tokens see, where transformers asks for the mask."""
    if isinstance(kv_length, CachedLength):
        return kv_length.cache.mask(mask_function, attention_mask, kv_length)
    forward = _current()
    lengths = dict(q_length=q_length, kv_length=kv_length, offsets=(q_offset, kv_offset))
    return _RingMask(forward, forward.visible(mask_function, config, attention_mask, **lengths))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **given: Any,
) -> tuple[Tensor, None]:
    """Return attention of q, k, v `[b, h, n, d]` as transformers wants it: `[b, n, h, d]`."""
    scores = {name: given.pop(theirs, default) for name, (theirs, default) in SCORES.items()}
    positions, sinks = given.pop("position_ids", None), given.pop("s_aux", None)
    if isinstance(attention_mask, CachedMask):
        problem, qkv = call_problem(attention_mask.visible, given), (query, key, value)
        return attention_mask.attend(module, qkv, sinks, scores, positions, problem), None
    if not isinstance(attention_mask, _RingMask):
        problem = (
            f"a layer got a mask of type {type(attention_mask).__name__}, not that of ring "
            "attention; the model makes a mask of its own, which can't be spread"
        )
        _current().told(problem)
    forward, visible = attention_mask.forward, attention_mask.visible
    forward.check(call_problem(visible, given), positions)
    q, k, v = (rearrange(t, "b h n d -> b n h d") for t in (query, key, value))
    return forward.attend(module, (q, k, v), visible, sinks, scores), None


def _cache_problem(q_length: int, kv_length: int, offsets: tuple[Any, Any]) -> str | None:
    if q_length == kv_length and not any(offsets):
        return None
    return "there are keys of earlier tokens: ring_forward is for whole sequences, without a cache"


def _positions_problem(given: Tensor | None, mine: Tensor) -> str | None:
    if given is None:
        return (
            "the model passes no position_ids to its attention, so nobody can tell whether they "
            "are the batch's; check_positions=False if they are: model(**inputs)"
        )
    if given.shape[-1] == mine.shape[-1] and _equal(given.expand_as(mine), mine):
        return None
    return (
        "position_ids are not the batch's: a rank's tokens are not the first ones of the sequence; "
        "call model(**inputs)"
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a.to(b.device, b.dtype), b))


_OF_TOKENS = ("ForCausalLM", "ForMaskedLM")


def _loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute the loss of tokens, where transformers would compute that of a shard."""
    return _current().loss(logits, labels if shift_labels is None else shift_labels, ignore_index)


def _no_loss(*_: Any, **__: Any) -> Tensor:
    raise ValueError(
        f"ring_forward: a model's loss is spread for {' and '.join(_OF_TOKENS)} only; leave labels "
        "out, and compute the loss of what batch.unshard gathers"
    )
