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

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from beartype import beartype
from einops import rearrange
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ring_attention_pytorch.comm.agreement import agree, problem_of
from ring_attention_pytorch.comm.placement import Placement, current, in_backward
from ring_attention_pytorch.comm.ring import Group, as_ring
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.integrations.cache import CachedLength, CachedMask
from ring_attention_pytorch.integrations.calls import SCORES, call_problem, names
from ring_attention_pytorch.integrations.layers import layers_problem, own_attention_problem
from ring_attention_pytorch.integrations.losses import own_losses, same_labels
from ring_attention_pytorch.integrations.masks import Visible, visible_by
from ring_attention_pytorch.integrations.outputs import Outermost, Tokens, name_of, output_problem
from ring_attention_pytorch.integrations.pooling import last_token_head, of_last_token
from ring_attention_pytorch.integrations.positions import (
    counted_by,
    given_to,
    places_of,
    positions_problem,
    with_positions,
)
from ring_attention_pytorch.plan.checks import autocast_dtype
from ring_attention_pytorch.plan.option_types import ForwardOptions
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import run_apart
from ring_attention_pytorch.training.batches import ShardedBatch
from ring_attention_pytorch.training.losses import ring_cross_entropy

_CALLER = "a model of transformers"
_OPTIONS = ("kernel", "transport", "ulysses", "memory", "bucket_size", "check", "dropout_seed")
_forwards: "WeakKeyDictionary[Placement, RingForward]" = WeakKeyDictionary()


@beartype
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
    _refuse_own_attention()
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)


def _refuse_own_attention() -> None:
    """Let models that compute attention by themselves say so, where they are made."""
    theirs = PreTrainedModel.get_correct_attn_implementation
    if hasattr(theirs, "of_ring"):
        return

    @wraps(theirs)
    def checked(model: Any, requested_attention: Any, *args: Any, **given: Any) -> Any:
        if requested_attention in names and (problem := own_attention_problem(model)):
            raise ValueError(f'attn_implementation="{requested_attention}": {problem}')
        return theirs(model, requested_attention, *args, **given)

    checked.of_ring = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked


@beartype
def ring_forward(
    batch: ShardedBatch,
    *,
    group: Group = None,
    loss_group: Group = None,
    labels: bool = True,
    check_positions: bool = True,
    **options: Unpack[ForwardOptions],
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
        check_positions: raise if the model uses other positions than the batch's, or nobody can
            tell which. False is for models that have no positions at all.
        options: of `ring_attn`, how attention is computed: kernel, transport, ulysses, memory,
            bucket_size, check, dropout_seed. What attention is comes from model and batch.

    Raises:
        ValueError: on all ranks, now or when the model runs: there is another option; the model
            has masks, layers or positions that can't be spread, or labels or a mask that are not
            the batch's; it has computed a loss by itself, or returns what is not of this rank's
            tokens; or at the block's end, if no attention in it was ring attention.

    >>> from ring_attention_pytorch import shard_batch
    >>> batch = shard_batch({"input_ids": torch.tensor([[4, 5, 6]])})
    >>> sorted(ring_forward(batch).inputs)
    ['attention_mask', 'input_ids', 'position_ids', 'use_cache']
    """
    batch = batch if group is None else batch.over(group)
    return RingForward(batch, loss_group, labels, check_positions, {**options})


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
        self._counted: dict[nn.Module, Tensor | None] = {}
        self._attended = False
        self._call = _Call(None, 0)

    def __enter__(self) -> dict[str, Any]:
        with ExitStack() as opened:
            opened.enter_context(self.batch)
            placement = current()
            assert placement is not None  # this thread has just opened it
            _forwards[placement] = self
            self._wholes = placement.wholes
            if "labels" in self.inputs and self.batch.num_items is not None:
                items = self._items_for_others(self.batch.num_items.double())
                self.inputs["num_items_in_batch"] = items
            opened.enter_context(own_losses(_loss, _inline_loss, _is_pooled))
            opened.enter_context(Outermost(self._is_open, self._begins, self._ends))
            self._opened = opened.pop_all()
        return self.inputs

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._opened.close()
        if kind is None and not self._attended:
            raise ValueError(
                "ring_forward: no attention in the block was ring attention; call register() and "
                'give the model attn_implementation="ring"'
            )

    # ---- the outermost module of a call

    def _is_open(self) -> bool:
        return opened() is self

    def _begins(self, model: nn.Module) -> None:
        self._call = _Call(model, len(self._wholes))
        for place in places_of(model):
            hook = place.register_forward_pre_hook(_positions_hook, with_kwargs=True)
            self._call.hooks.append(hook)
        if head := last_token_head(model):
            self._call.hooks.append(head[0].register_forward_hook(_pooling_hook))

    def _ends(self, model: nn.Module, given: Any) -> None:
        call, self._call = self._call, _Call(None, 0)
        for hook in call.hooks:
            hook.remove()
        if not call.attended or call.pooled or self._is_aware(call):
            return
        b, n = self.inputs["position_ids"].shape[-2:]
        segments = all_segments(self.batch.layout, self.batch.ring_size, self.batch.length)
        tokens = Tokens(b, n, [count(each) for each in segments])
        if problem := output_problem(model, given, tokens, call.losses):
            self.told(problem)

    def _is_aware(self, call: "_Call") -> bool:
        """Tell whether the module gathers by itself, and so knows that tokens are spread."""
        return len(self._wholes) > call.wholes

    def _items_for_others(self, items: Tensor) -> Tensor:
        """Return by what losses that are not ours divide a rank's sum: real tokens per rank."""
        ring = as_ring(self.loss_group)
        if ring.size > 1:
            ring.total(items)  # each ring counts its batch on all its ranks
        return items / self.batch.ring_size / ring.size

    def told(self, problem: str | None, **same: Any) -> None:
        """Raise ValueError on all ranks of the ring if any has a problem, or they differ."""
        agree(self.batch.ring, _CALLER, same, problem=problem)

    def visible(
        self, mask_function: Any, config: Any, given: Tensor | None, **at: Any
    ) -> "_RingMask":
        """Return what a model's mask lets tokens see; layers are told what is wrong with it.

        Models may make masks in an order that differs between ranks. Layers come in one.
        """
        found: list[Visible] = []

        def problem() -> str | None:
            found.append(visible_by(mask_function))
            return (
                layers_problem(config, self.batch.length) or self._mask_problem(given)
                or _cache_problem(**at)
            )  # fmt: skip

        wrong = problem_of(problem)
        return _RingMask(self, found[0] if found else Visible(False, None), wrong)

    def attend(
        self,
        layer: nn.Module,
        qkv: tuple[Tensor, ...],
        mask: Visible,
        sinks: Tensor | None,
        scores: Mapping[str, Any],
    ) -> Tensor:
        """Return attention of this rank's tokens `[b, n, h, d]`, by the plan of such layers."""
        self._attended = self._call.attended = True
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
        return out.contiguous()  # some models take views of it

    def check(
        self, layer: nn.Module, mask: "_RingMask", problem: str | None, positions: Tensor | None
    ) -> None:
        """Raise ValueError on all ranks if a layer's call, mask or positions have a problem."""
        problem = mask.problem or problem
        told, mask.told = mask.told, True
        placed = self._call.placed or in_backward()  # what is recomputed has been seen
        if self.check_positions and not (positions is None and placed):
            if not any(positions is each for each in self._same):
                told = False
                problem = problem or problem_of(lambda: self._positions_of(layer, positions))
                self._same.append(positions)
            elif not (placed or _takes_positions(layer)):
                problem = problem or _NO_POSITIONS
        if problem is not None or not told:
            self.told(problem, mask=[*mask.visible])

    def _positions_of(self, layer: nn.Module, positions: Tensor | None) -> str | None:
        if positions is None:
            return _NO_POSITIONS
        return positions_problem(type(layer).__name__, positions, self.inputs["position_ids"])

    def place(
        self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a module that positions go into, with those of the batch.

        Raises:
            ValueError: it was given others; on all ranks.
        """
        positions, mine = given_to(module, args, given), self.inputs["position_ids"]
        if self.check_positions and not any(positions is each for each in self._same):
            problem = problem_of(lambda: positions_problem(type(module).__name__, positions, mine))
            self.told(problem)
            self._same.append(positions)
        self._call.placed = True
        if module not in self._counted:
            with self._unaware():
                self._counted[module] = counted_by(module, self.batch)
        counted = self._counted[module]
        return (args, given) if counted is None else with_positions(module, args, given, counted)

    @property
    def is_pooled(self) -> bool:
        """Whether a model has taken the last tokens of whole sequences."""
        return self._call.pooled

    def pool(self, scores: Tensor) -> Tensor:
        """Return scores `[b, n, k]`, each those of its whole sequence's last real token."""
        assert self._call.model is not None
        head = last_token_head(self._call.model)
        assert head is not None  # whose hook calls this
        self._call.pooled = True
        with self._unaware():
            return of_last_token(scores, self.batch, head[1])

    @contextmanager
    def _unaware(self) -> Iterator[None]:
        """Inside it what we gather ourselves is not gathered by a module."""
        before = len(self._wholes)
        yield
        del self._wholes[before:]

    def loss(
        self, logits: Tensor, labels: Any, shift_labels: Any, ignore_index: int, in_place: bool
    ) -> Tensor:
        """Return the loss of a model's logits `[b, n, classes]`."""
        batch = self.batch
        given, mine = labels if in_place else shift_labels, batch.get("shift_labels")
        if in_place and batch.in_place is not None:
            mine = batch.in_place
        right = same_labels(labels if given is None else given, mine)
        if given is None and not right:
            right = same_labels(labels, batch.in_place)
        problem = None
        if "labels" not in self.inputs or not right:
            problem = (
                "labels are not the batch's; a label is of the next token, which may be on another "
                "rank: give labels to shard_batch, and call model(**inputs)"
            )
        elif mine is batch.in_place and (self.num_items is not None or "loss_weights" in batch):
            problem = (
                "labels predict the tokens themselves in this model, and what they count was moved "
                "with them; give shard_batch shift_labels=False"
            )
        if problem:
            self.told(problem)
        with self._unaware():
            found = self._loss_of(logits, mine.to(logits.device), ignore_index)
        self._call.losses += 1
        return found

    def _loss_of(self, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
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

    def inline_loss(self, entropy: nn.CrossEntropyLoss, x: Tensor, labels: Tensor) -> Tensor | None:
        """Return the loss that a model computes by PyTorch's; None if that is not this rank's."""
        call = self._call
        aware = call.model is None or call.pooled or self._is_aware(call)
        if call.model is None or aware or entropy.reduction == "none":
            return None
        mine = self.inputs.get("labels")
        plain = entropy.weight is None and entropy.label_smoothing == 0
        if not plain or entropy.reduction != "mean" or not same_labels(labels, mine):
            self.told(
                f"{name_of(call.model)} computes a cross entropy by itself, of labels that are not "
                "the batch's in place, weighted or smoothed; leave labels out, with "
                "ring_forward(batch, labels=False), and compute ring_cross_entropy(logits, "
                "batch.labels)"
            )
        assert mine is not None
        return self.loss(
            x.reshape(*mine.shape, x.shape[-1]), mine, None, entropy.ignore_index, True
        )

    def _mask_problem(self, given: Tensor | None) -> str | None:
        mine = self.inputs["attention_mask"]
        if given is None or given is mine or (given.shape == mine.shape and _equal(given, mine)):
            return None
        return (
            f"attention_mask {list(given.shape)} is not the batch's, {list(mine.shape)} of this "
            "rank's tokens; give it to shard_batch, and call model(**inputs)"
        )


@dataclass
class _Call:
    """One call of an outermost module, and what has happened in it."""

    model: nn.Module | None
    wholes: int  # that there were before
    attended: bool = False
    placed: bool = False  # the batch's positions went into an embedding that is known
    pooled: bool = False  # a head has the last tokens of whole sequences
    losses: int = 0
    hooks: list[Any] = field(default_factory=list)


class _NoTensor(ValueError, AttributeError):
    """What is asked of a mask that is no tensor; `hasattr` takes it as a no."""


class _RingMask:
    """What attention gets as its mask: what is visible, in whose block."""

    def __init__(self, forward: RingForward, visible: Visible, problem: str | None):
        self.forward, self.visible, self.problem = forward, visible, problem
        self.told = False  # ranks have compared it

    def __getattr__(self, name: str) -> Any:
        raise _NoTensor(
            f"ring_forward: the model looks into its mask ({name}), and computes attention or a "
            "mask by itself; there is no whole mask anywhere, so it can't be spread"
        )

    def _look(self, *_: Any) -> Any:
        return self.__getattr__("as a tensor")

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __invert__ = _look

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        cls.__getattr__(cls, getattr(function, "__name__", "as a tensor"))  # type: ignore[arg-type]


def _inputs(batch: ShardedBatch, labels: bool) -> dict[str, Any]:
    given = {name: t for name, t in batch.items() if name not in ("shift_labels", "loss_weights")}
    positions, mask = given["position_ids"], batch.key_mask
    if mask is None:
        mask = torch.ones_like(positions, dtype=torch.bool)
    given |= {"attention_mask": mask, "use_cache": False}
    if labels and "shift_labels" in batch:
        in_place = batch.labels if batch.in_place is None else batch.in_place
        given |= {"labels": in_place, "shift_labels": batch.labels}
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
    return forward.visible(mask_function, config, attention_mask, **lengths)


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
    forward.check(module, attention_mask, call_problem(visible, given), positions)
    q, k, v = (rearrange(t, "b h n d -> b n h d") for t in (query, key, value))
    return forward.attend(module, (q, k, v), visible, sinks, scores), None


def _cache_problem(q_length: int, kv_length: int, offsets: tuple[Any, Any]) -> str | None:
    if q_length == kv_length and not any(offsets):
        return None
    return "there are keys of earlier tokens: ring_forward is for whole sequences, without a cache"


_NO_POSITIONS = (
    "the model gives position_ids to no embedding or layer that is known, so it may count its "
    "tokens by itself, from 0 on each rank; check_positions=False is for models without positions"
)


def _takes_positions(layer: nn.Module) -> bool:
    return "position_ids" in inspect.signature(layer.forward).parameters


def _positions_hook(module: nn.Module, args: Any, given: Any) -> Any:
    forward = opened()
    if forward is None:
        return None
    return (
        run_apart(forward.place, module, args, given)
        if is_compiling()
        else forward.place(module, args, given)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a.to(b.device, b.dtype), b))


def _pooling_hook(_: nn.Module, __: Any, scores: Tensor) -> Tensor:
    forward = opened()
    if forward is None:
        return scores
    return run_apart(forward.pool, scores) if is_compiling() else forward.pool(scores)


def _is_pooled() -> bool:
    return (forward := opened()) is not None and forward.is_pooled


def _loss(
    logits: Tensor,
    labels: Tensor | None,
    *_: Any,
    in_place: bool,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **__: Any,
) -> Tensor:
    """Compute the loss of tokens, where transformers would compute that of a shard."""
    return _current().loss(logits, labels, shift_labels, ignore_index, in_place)


def _inline_loss(entropy: nn.CrossEntropyLoss, x: Tensor, labels: Tensor) -> Tensor | None:
    forward = opened()
    return None if forward is None else forward.inline_loss(entropy, x, labels)
