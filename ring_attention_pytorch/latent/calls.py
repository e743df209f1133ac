"""Calls of attention whose keys are encoded: from a caller's tensors and options to `attention`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checks_of
from ring_attention_pytorch.attention import attention
from ring_attention_pytorch.plan.checks import autocast
from ring_attention_pytorch.plan.option_types import PlanOptions
from ring_attention_pytorch.plan.options import DEFAULTS, Options, check_only_plan
from ring_attention_pytorch.plan.placement import attention_ring
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import report_to_group, reporting
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.runtime.codec import Codec, Pair, Tensors
from ring_attention_pytorch.tensor_kinds import has_values

report = report_to_group("ring attention", ring_of=attention_ring)


class CodedOptions(PlanOptions, total=False):
    """The options of a call whose keys are encoded, but return_lse."""

    group: Group
    plan: RingPlan | None


class CodedPlanOptions(PlanOptions, total=False):
    """The options of a plan of such calls."""

    group: Group


class Encoded(NamedTuple):
    """A call's queries, encoded keys, codec, and the codec's parameters by name."""

    q: Tensor
    keys: Pair
    codec: Codec
    params: dict[str, Tensor]


def attend(
    caller: str, encode: Callable[..., Encoded], tensors: Tensors, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Encode these tensors by `encode`, and compute their attention."""
    return_lse, plan = options.pop("return_lse"), options.get("plan")
    call = encoded(caller, encode, tensors, options)
    sinks = options.get("sinks")
    if plan is None:
        plan = make_plan(call, {name: value for name, value in options.items() if name != "plan"})
    else:
        _check_plan(caller, plan, call, options)
    (k, v), params = call.keys, call.params.values()
    out, lse = attention(
        plan, call.q, k, v, sinks, *params, codec=call.codec, return_lse=return_lse
    )
    return (out, lse) if return_lse else out


def make_plan(call: Encoded, options: dict[str, Any]) -> RingPlan:
    """Make the plan of such calls; all ranks call this together."""
    also = {
        f"requires_grad of {name}": t.requires_grad and torch.is_grad_enabled()
        for name, t in call.params.items()
    }
    return RingPlan.make(call.q, *call.keys, codec=call.codec, also=also, **options)


def _check_plan(caller: str, plan: RingPlan, call: Encoded, options: dict[str, Any]) -> None:
    """Raise ValueError if a plan is of another codec, or if options are given beside it."""
    of_a_call = ("plan", "group", "sinks")
    beside = {name: value for name, value in options.items() if name not in of_a_call}
    with checks_of(caller), reporting(plan.ring.report_failure):
        if beside:
            Options.read(beside)  # their names and types
        check_only_plan({**DEFAULTS, **beside}, options["group"])
        if plan.codec != call.codec:
            made = plan.codec or "keys as they are"
            raise ValueError(f"the plan was made for {made}, got {call.codec}; make one for these")


def encoded(
    caller: str, encode: Callable[..., Encoded], tensors: Tensors, options: dict[str, Any]
) -> Encoded:
    """Encode a call's tensors, cast as autocast says; an error is raised on all ranks."""
    with reporting(partial(report, options)), checks_of(caller):
        if not all(map(_is_plain, tensors)):
            raise ValueError("tensors must be dense and have values; of DTensors pass local ones")
        return encode(*map(autocast, tensors))


def _is_plain(t: Tensor) -> bool:
    """True if a tensor is dense, has values, and is no DTensor or nested tensor."""
    return (
        has_values(t) and t.layout == torch.strided and not (t.is_nested or hasattr(t, "to_local"))
    )
