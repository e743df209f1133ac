"""Records of a model's run: tokens, positions, labels, and calls of attention.

Hooks and wrappers record arguments, in forward only. The model itself is not changed.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch.plan.placement import in_backward
from ring_attention_pytorch.plan.ring_plan import RingPlan

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass
class Evidence:
    """The records of one run.

    Attributes:
        inputs: the first tensors passed to submodules, by module and parameter: integer ones, and
            the very first one of any dtype.
        labels: the labels of each cross entropy; `ignored` is its `ignore_index`.
        entropy: the sum of all cross entropies, over `counted` labels.
        attention: plan, q, k and v of each call of attention; values of the first call only.
    """

    inputs: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    labels: list[Tensor] = field(default_factory=list)
    ignored: int = -100
    entropy: float = 0.0
    counted: int = 0
    attention: list[tuple[RingPlan, QKV]] = field(default_factory=list)

    @property
    def plans(self) -> list[RingPlan]:
        """The distinct plans of attention over several ranks."""
        found = {id(plan): plan for plan, _ in self.attention if plan.ring.size > 1}
        return list(found.values())


@contextmanager
def watched(model: nn.Module) -> Iterator[Evidence]:
    """Record the arguments of the model's submodules, attention and losses in this block."""
    seen = Evidence()
    with ExitStack() as block:
        for name, module in model.named_modules():
            if module is not model:
                hook = _inputs_of(name, module, seen)
                block.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        block.enter_context(_wrapped(F, "cross_entropy", lambda call: _note_loss(seen, call)))
        block.enter_context(_wrapped(RingPlan, "check", lambda call: _note_call(seen, call)))
        yield seen


def _inputs_of(name: str, module: nn.Module, seen: Evidence) -> Callable[..., None]:
    parameters = inspect.signature(module.forward)

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if in_backward():
            return
        for parameter, value in parameters.bind_partial(*args, **kwargs).arguments.items():
            if isinstance(value, Tensor) and value.ndim >= 2:
                whole_numbers = not (value.is_floating_point() or value.dtype == torch.bool)
                if whole_numbers or not seen.inputs:
                    seen.inputs.setdefault((name, parameter), value.detach())

    return note


def _note_loss(seen: Evidence, call: inspect.BoundArguments) -> None:
    given: dict[str, Any] = dict(call.arguments) | {"reduction": "sum"}
    logits, labels = given["input"].detach(), given["target"]
    if labels.is_floating_point():
        return  # class probabilities have no labels to compare
    seen.ignored = given.get("ignore_index", -100)
    with torch.no_grad():
        given["input"] = logits if logits.dtype == torch.float64 else logits.float()
        seen.entropy += float(_cross_entropy(**given))
    seen.counted += int((labels != seen.ignored).sum())
    seen.labels.append(labels.detach())


def _note_call(seen: Evidence, call: inspect.BoundArguments) -> None:
    plan, *qkv = (call.arguments[name] for name in ("self", "q", "k", "v"))
    q, k, v = map(_shaped if seen.attention else Tensor.detach, qkv)
    seen.attention.append((plan, (q, k, v)))


def _shaped(t: Tensor) -> Tensor:
    return t.detach().to("meta")  # the first layer's values are enough


_cross_entropy = F.cross_entropy


@contextmanager
def _wrapped(
    owner: Any, name: str, note: Callable[[inspect.BoundArguments], None]
) -> Iterator[None]:
    """Call `note` with the arguments of each call of a function in this block."""
    function = getattr(owner, name)
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not in_backward():
            note(signature.bind(*args, **kwargs))
        return function(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)
