"""Watch a model's call in a block: the positions it uses, its losses, its output.

    opened, needed      return the current block of `ring_forward`
    Outermost           finds the calls of an outermost module in it
    Watched             one such call

The losses and module hooks that models call are defined here. They are module-level functions,
since torch.compile guards on their identity.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ring_attention_pytorch.integrations.latents import prepare
from ring_attention_pytorch.integrations.layers import check_reading
from ring_attention_pytorch.integrations.losses import (
    check_entropy,
    check_items,
    check_labels,
    loss_of,
    nan_for_other_items,
    own_losses,
)
from ring_attention_pytorch.integrations.outputs import (
    check_kept,
    check_output,
    name_of,
    tensors_in,
)
from ring_attention_pytorch.integrations.pooling import last_token_head, of_last_token
from ring_attention_pytorch.integrations.positions import (
    check_positions,
    counted_by,
    given_at,
    places_of,
    with_positions,
)
from ring_attention_pytorch.integrations.recurrent import (
    blocks_by,
    check_calls,
    recurrent_layers,
)
from ring_attention_pytorch.integrations.routers import (
    balance,
    own_router_loss,
    with_router_loss,
)
from ring_attention_pytorch.nn.averaging import watch_averaging
from ring_attention_pytorch.plan.placement import Placement, current, in_backward
from ring_attention_pytorch.ranks.agreement import Check
from ring_attention_pytorch.ranks.ring import Group, Ring
from ring_attention_pytorch.runtime.torch_func import run_apart
from ring_attention_pytorch.training.batches import ShardedBatch
from ring_attention_pytorch.training.loss_inputs import check_ignored

_ROUTERS_OF_SEVERAL = (
    "the routers' loss is of a batch, and this one is a part of several that are accumulated; set "
    "output_router_logits=False"
)


class Block(Protocol):
    """The part of a block that its calls use."""

    batch: ShardedBatch
    ring: Ring
    inputs: dict[str, Any]
    call: "Watched"  # the model's call that runs now
    loss_group: Group
    num_items: Tensor | None
    check_positions: bool
    wholes: list[str]  # names of results over whole sequences
    same: list[Tensor | None]  # positions found equal to the batch's
    runs: dict[Any, Any]  # plans of recurrent layers

    def agree_in_block(self, check: Check | None, **same: Any) -> None:
        """Raise ValueError on all ranks of the ring if any rank's check does, or `same` differs."""

    def ensure(self, check: Check) -> None:
        """Raise a check's error on all ranks of the ring; without an error send nothing."""


# the block of each placement that `ring_forward` has opened
_blocks: "WeakKeyDictionary[Placement, Any]" = WeakKeyDictionary()
_averaging: "WeakSet[nn.Module]" = WeakSet()  # modules whose averaging has been watched


def begun(block: Any) -> Placement:
    """Record this block as the current placement's; return the placement."""
    placement = current()
    assert placement is not None  # this thread has just opened it
    _blocks[placement] = block
    return placement


def opened() -> Any:
    """Return the current block of `ring_forward`; None outside of one."""
    placement = current()
    return None if placement is None else _blocks.get(placement)


def needed() -> Any:
    """Return the current block of `ring_forward`.

    Raises:
        ValueError: there is none.
    """
    if (block := opened()) is None:
        raise ValueError(
            "this model has ring attention, which needs its batch: call it in the block "
            "`with ring_forward(batch) as inputs:`, or with past_key_values=RingHFCache(...)"
        )
    return block


class Parts(NamedTuple):
    """The parts of a module that depend on where its tokens are in the whole sequence.

    Attributes:
        models: the transformers models in it, the outermost first.
        places: modules that take positions, each with the number of that parameter.
        head: the head whose last token the first model picks, and that model's config.
        routed: Python modules of models with a routers' loss.
        recurrent: layers whose states are carried through runs.
        averaged: whether FSDP2 or DDP averages gradients.
    """

    models: Sequence[PreTrainedModel] = ()
    places: Mapping[nn.Module, int | None] = {}
    head: tuple[nn.Module, Any] | None = None
    routed: Sequence[Any] = ()
    recurrent: Sequence[nn.Module] = ()
    averaged: bool = False


def parts_of(module: nn.Module) -> Parts:
    """Find the parts of a module; once per call, since they can be replaced between calls."""
    named = dict(module.named_modules())
    models = [m for m in named.values() if isinstance(m, PreTrainedModel)]
    head = last_token_head(next(iter(models), None))
    recurrent = recurrent_layers(named)
    if with_latents := [m for m in named.values() if hasattr(type(m), "expand_kv")]:
        prepare(with_latents)
    averaged = any(isinstance(m, FSDPModule | DistributedDataParallel) for m in named.values())
    return Parts(models, places_of(named), head, with_router_loss(models), recurrent, averaged)


class Watched:
    """A call of an outermost module, with a record of its events.

    Attributes:
        model: the module; None outside of calls.
        attended: whether ring attention was called.
        losses: the number of losses computed over all ranks' tokens.
        hooks: the hooks on its modules, removed by `close()`.
    """

    def __init__(self, block: Block, model: nn.Module | None = None):
        self.block: Block = block
        self.model: nn.Module | None = model
        self.attended: bool = False
        self.losses: int = 0
        self.placed: bool = False  # a known embedding got the batch's positions
        self.pooled: bool = False  # a head has scores of whole sequences' last tokens
        self._before, self.hooks = len(block.wholes), ExitStack()
        self.parts = Parts() if model is None else parts_of(model)
        for place in self.parts.places:
            hook = place.register_forward_pre_hook(_given_positions, with_kwargs=True)
            self.hooks.callback(hook.remove)
        for each in self.parts.models:
            if each is not model:  # Outermost looks at its arguments
                hook = each.register_forward_hook(_kept, with_kwargs=True)
                self.hooks.callback(hook.remove)
        if self.parts.head is not None:
            self.hooks.callback(self.parts.head[0].register_forward_hook(_scored).remove)
        self.calls: list[str] = []  # functions that a recurrent layer has called
        for layer in self.parts.recurrent:
            self.hooks.callback(layer.register_forward_hook(_carried).remove)
        if self.parts.routed:
            self.hooks.enter_context(own_router_loss(self.parts.routed, _router_loss))

    def check_output(self, given: Any) -> None:
        """Raise ValueError if a tensor of the module's output is not of this rank's tokens."""
        if self.model is not None and self.attended and not self.knows:
            check_output(self.model, given, self.block.batch, self.losses)

    def watch_averaging(self, given: Any) -> None:
        """Warn after the first backward through the output if gradients are averaged elsewhere."""
        if self.model is None or self.model in _averaging:
            return
        for _, t in tensors_in("", given):
            if watch_averaging(self.model, t, self.block.ring, ()):
                _averaging.add(self.model)
                return

    @property
    def knows(self) -> bool:
        """Whether the module computed results over whole sequences, and so handles ranks itself."""
        return self.pooled or len(self.block.wholes) > self._before

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Don't record this block's results over whole sequences: the module did not make them."""
        before = len(self.block.wholes)
        yield
        del self.block.wholes[before:]

    # ---- positions

    def place(
        self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the positions given to a module; return its arguments with the right ones.

        Raises:
            ValueError: they are not the batch's; on all ranks.
        """
        block, at = self.block, self.parts.places.get(module)
        positions = given_at(at, args, given)
        if block.check_positions and not self._is_same(positions):
            self._compare(type(module).__name__, positions)
        self.placed = True
        with self._unnoticed():
            counted = counted_by(module, block.batch)
        return (
            (args, given) if counted is None else with_positions(module, at, args, given, counted)
        )

    def are_placed(self, layer: nn.Module, positions: Tensor | None) -> bool:
        """Return whether the batch's positions went into a known module or this layer.

        Raises:
            ValueError: the layer was given others; on all ranks.
        """
        placed = self.placed or in_backward()  # recomputation was checked in forward
        if positions is None:
            return placed
        if not self._is_same(positions):
            self._compare(type(layer).__name__, positions)
        return placed or "position_ids" in inspect.signature(layer.forward).parameters

    def _is_same(self, positions: Tensor | None) -> bool:
        return any(positions is each for each in self.block.same)

    def _compare(self, name: str, positions: Tensor | None) -> None:
        mine = self.block.inputs["position_ids"]
        self.block.agree_in_block(partial(check_positions, name, positions, mine))
        self.block.same.append(positions)

    # ---- results over whole sequences

    def pool(self, scores: Tensor) -> Tensor:
        """Replace scores `[b, n, k]` by the scores of each whole sequence's last real token."""
        if self.parts.head is None:
            return scores
        with self._unnoticed():
            found = of_last_token(scores, self.block.batch, self.parts.head[1])
        self.pooled = True
        return found

    def loss(
        self,
        logits: Tensor,
        labels: Any,
        moved: Any,
        ignore_index: int,
        in_place: bool,
        items: Any = None,
    ) -> Tensor:
        """Compute the loss of a model's logits `[b, n, classes]`."""
        block = self.block
        given = None if "labels" not in block.inputs else labels
        counted = block.num_items is not None
        known = block.num_items, block.inputs.get("num_items_in_batch")
        others = items is not None and id(items) not in map(id, known)

        def check() -> None:
            check_labels(block.batch, given, moved, in_place, counted)
            check_ignored(block.batch.ignore_index, ignore_index)
            if others:
                check_items(items, known)

        block.ensure(check)
        with self._unnoticed():
            found = loss_of(
                block.batch, logits, in_place, group=block.loss_group, num_items=block.num_items,
                ignore_index=ignore_index,
            )  # fmt: skip
        self.losses += 1
        return nan_for_other_items(found, items, known) if others else found

    def entropy(self, function: nn.CrossEntropyLoss, x: Tensor, labels: Tensor) -> Tensor | None:
        """Compute the loss for a model's own call of PyTorch's; None if that is not its loss."""
        if self.model is None or self.knows or function.reduction == "none":
            return None
        mine = self.block.inputs.get("labels")
        self.block.ensure(partial(check_entropy, name_of(self.model), function, labels, mine))
        assert mine is not None  # check_entropy compared labels with it
        x = x.reshape(*mine.shape, x.shape[-1])
        return self.loss(x, mine, None, function.ignore_index, in_place=True)

    def router_loss(self, gate_logits: Any, top_k: int, mask: Tensor | None) -> Any:
        """Compute the routers' loss over all tokens of the ring."""
        if not isinstance(gate_logits, tuple):
            return 0
        if self.block.num_items is not None:
            self.block.agree_in_block(ValueError(_ROUTERS_OF_SEVERAL))
        self.losses += 1
        return balance(gate_logits, top_k, mask, self.block.ring)


class Outermost:
    """A context manager that watches each call of an outermost module, as the block's `call`."""

    def __init__(self, block: Block):
        self.block: Block = block
        self._outside = block.call

    def __enter__(self) -> Self:
        self._handle = register_module_forward_pre_hook(self._begins)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        if is_compiling():
            run_apart(self._begins, module, args)
        elif opened() is self.block and not in_backward():  # recomputation was checked in forward
            self._handle.remove()  # inner modules are not slowed down
            self._handle = module.register_forward_hook(
                self._ends, with_kwargs=True, always_call=True
            )
            self.block.call = call = Watched(self.block, module)
            for first in call.parts.models[:1]:
                self.block.ensure(partial(check_reading, first))

    def _ends(self, module: nn.Module, args: Any, options: dict[str, Any], given: Any) -> None:
        """End a call with its output `given`; None if it raised."""
        if is_compiling():
            run_apart(self._ends, module, args, options, given)
            return
        self._handle.remove()
        self._handle = register_module_forward_pre_hook(self._begins)
        call, self.block.call = self.block.call, self._outside
        call.hooks.close()
        if given is not None:
            _kept(module, args, options, given)
        self.block.ensure(partial(call.check_output, given))
        if call.parts.averaged:
            call.watch_averaging(given)


def _loss(
    logits: Tensor,
    labels: Tensor | None,
    *_: Any,
    in_place: bool,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
    **__: Any,
) -> Tensor:
    """Compute the loss over all ranks, in place of transformers' loss of a shard."""
    call: Watched = needed().call
    return call.loss(logits, labels, shift_labels, ignore_index, in_place, num_items_in_batch)


def _entropy(function: nn.CrossEntropyLoss, x: Tensor, labels: Tensor) -> Tensor | None:
    block = opened()
    return None if block is None else block.call.entropy(function, x, labels)


def _is_of_wholes() -> bool:
    block = opened()
    return block is not None and block.call.pooled


def _router_loss(
    gate_logits: Any,
    num_experts: Any = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    return needed().call.router_loss(gate_logits, top_k, attention_mask)


def _given_positions(module: nn.Module, args: Any, given: Any) -> Any:
    block = opened()
    if block is None:
        return None
    if is_compiling():
        return run_apart(block.call.place, module, args, given)
    return block.call.place(module, args, given)


def _kept(module: nn.Module, _: Any, given: dict[str, Any], __: Any) -> None:
    """Raise ValueError on all ranks if a model was given `logits_to_keep`."""
    block, kept = opened(), given.get("logits_to_keep")
    if block is not None and (isinstance(kept, Tensor) or kept):
        block.agree_in_block(partial(check_kept, module))


def _scored(_: nn.Module, __: Any, scores: Tensor) -> Tensor:
    block = opened()
    if block is None:
        return scores
    return run_apart(block.call.pool, scores) if is_compiling() else block.call.pool(scores)


def _carried(layer: nn.Module, _: Any, __: Any) -> None:
    if (block := opened()) is not None:
        calls, block.call.calls = block.call.calls, []
        block.ensure(partial(check_calls, layer, calls))


blocks_by(opened)

# a context manager in which models' losses go to the watched call
spread_losses = partial(own_losses, _loss, _entropy, _is_of_wholes)
