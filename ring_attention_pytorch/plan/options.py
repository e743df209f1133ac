"""The options of ring attention, a row each: all that the library must know of one.

A row is a field of `Options`: a name, a type, a default, and a `Row`. That says what is checked,
what ranks must have alike of it, and whether it takes a kernel that can do it. Checking, agreeing
and the choice of kernels are loops over the rows.

A new option is a row here, a parameter and some lines of docs in `ring_attn`, and the code that
computes it. If kernels differ in it, it is also a name in `interfaces.FEATURES`, and in the
capabilities of kernels that can do it (docs/design/adding-a-score-option.md).
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, get_type_hints

from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.comm.transports import transport_problem
from ring_attention_pytorch.comm.ulysses import ulysses_problem
from ring_attention_pytorch.geometry.documents import (
    BatchDocuments,
    Borders,
    digest,
    documents_problem,
)
from ring_attention_pytorch.geometry.layouts import Layout, layout_problem
from ring_attention_pytorch.plan.checks import check_problem, key_mask_problem
from ring_attention_pytorch.plan.masks import (
    Prefix,
    mask_mod_problem,
    positions_problem,
    prefix_digest,
    prefix_problem,
)
from ring_attention_pytorch.runtime.digests import digest_of_function
from ring_attention_pytorch.runtime.dropout import dropout_problem
from ring_attention_pytorch.runtime.interfaces import MaskMod
from ring_attention_pytorch.runtime.scores import bias_problem, per_head_problem, sinks_note


class Call(NamedTuple):
    """A call that options are for: tensors, whose values don't matter, and the ring's size."""

    q: Tensor
    k: Tensor
    v: Tensor
    ring_size: int


Check = Callable[["Options", Call], str | None]


class Row(NamedTuple):
    """All of an option but its name, type and default.

    Attributes:
        check: says what is wrong with it where it is given, None if nothing; it may look at other
            options, too, and serve several of them.
        agree: what ranks compare of its value, unless that is None; None if nothing, because it is
            each rank's own.
        everywhere: rings of one group compare it, too: it decides what the whole group exchanges.
        feature: True if not all kernels can do it (`KernelRequest.of` takes it).
    """

    check: Check | None = None
    agree: Callable[[Any], Any] | None = None
    everywhere: bool = False
    feature: bool = False


def itself(value: Any) -> Any:
    """Return the value: ranks compare all of it."""
    return value


def presence(value: object) -> str:
    """Return "given": ranks compare only that, as values are each rank's own."""
    return "given"


def _window_problem(o: Any, call: Call) -> str | None:
    if o.window >= 0:
        return None
    return f"window must be None or at least 0, got {o.window}"


def _scale_problem(o: Any, call: Call) -> str | None:
    if math.isfinite(o.scale):
        return None
    return f"scale must be finite, got {o.scale}"


def _softclamp_problem(o: Any, call: Call) -> str | None:
    if math.isfinite(o.softclamp) and o.softclamp > 0:
        return None
    return f"softclamp must be None or positive, got {o.softclamp}"


def _cross_problem(o: "Options", call: Call) -> str | None:
    if o.cross and not o.placed and (o.causal or o.window is not None):
        return "cross attention has no causal and no window: two sequences share no positions"
    return None


def _alibi_problem(o: Any, call: Call) -> str | None:
    problem = per_head_problem("alibi_slopes", call.q, o.alibi_slopes)
    if problem is None and o.alibi_slopes.requires_grad:
        return "alibi_slopes have no gradient; detach them"
    return problem


def _bucket_size_problem(o: "Options", call: Call) -> str | None:
    if o.bucket_size >= 1:
        return None
    return f"bucket_size must be at least 1, got {o.bucket_size}"


def _key_mask_problem(o: "Options", call: Call) -> str | None:
    return key_mask_problem(o.key_mask, call.k)


def _documents_problem(o: "Options", call: Call) -> str | None:
    return documents_problem(o.documents, o.cu_seqlens, call.q.shape)


def _prefix_problem(o: "Options", call: Call) -> str | None:
    fits = o.causal and not o.packed and not o.placed
    return prefix_problem(o.prefix, len(call.q), fits)


def _mask_mod_problem(o: "Options", call: Call) -> str | None:
    return mask_mod_problem(o.mask_mod, call.q.device)


def _positions_problem(o: "Options", call: Call) -> str | None:
    counted = o.packed and not isinstance(o.documents, tuple)  # a tuple says where positions are
    return positions_problem(o.query_positions, o.key_positions, call.q, call.k, counted)


def _sinks_problem(o: "Options", call: Call) -> str | None:
    return per_head_problem("sinks", call.q, o.sinks)


def _bias_problem(o: "Options", call: Call) -> str | None:
    return bias_problem(o.key_bias, call.q, call.k, o.scale, o.softclamp)


def _heads_of_bias(bias: Tensor) -> list[int]:
    return list(bias.shape[2:])


def _dropout_problem(o: "Options", call: Call) -> str | None:
    return dropout_problem(o.dropout, o.dropout_seed)


def _layout_problem(o: "Options", call: Call) -> str | None:
    return layout_problem(o.layout)


def _transport_problem(o: "Options", call: Call) -> str | None:
    return transport_problem(o.transport, o.memory)


def _ulysses_problem(o: "Options", call: Call) -> str | None:
    return ulysses_problem(o.ulysses, call.ring_size, call.q.shape[2])


def _notes_problem(o: "Options", call: Call) -> str | None:
    return check_problem(o.check)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one ring attention; `ring_attn` says what each option means."""

    # which keys a query sees
    causal: Annotated[bool, Row(agree=itself)] = False
    window: Annotated[int | None, Row(_window_problem, itself, feature=True)] = None
    key_mask: Annotated[Tensor | None, Row(_key_mask_problem, presence, feature=True)] = None
    documents: Annotated[
        Tensor | BatchDocuments | None, Row(_documents_problem, presence, everywhere=True)
    ] = None
    cu_seqlens: Annotated[Borders | None, Row(_documents_problem, digest)] = None
    prefix: Annotated[Prefix, Row(_prefix_problem, prefix_digest)] = None
    mask_mod: Annotated[
        MaskMod | None, Row(_mask_mod_problem, digest_of_function, feature=True)
    ] = None
    cross: Annotated[bool | None, Row(_cross_problem, itself)] = None
    query_positions: Annotated[Tensor | None, Row(_positions_problem)] = None
    key_positions: Annotated[Tensor | None, Row(_positions_problem)] = None

    # what a score is
    scale: Annotated[float | int | None, Row(_scale_problem, itself, feature=True)] = None
    softclamp: Annotated[float | int | None, Row(_softclamp_problem, itself, feature=True)] = None
    sinks: Annotated[Tensor | None, Row(_sinks_problem, sinks_note)] = None
    alibi_slopes: Annotated[Tensor | None, Row(_alibi_problem, presence, feature=True)] = None
    key_bias: Annotated[Tensor | None, Row(_bias_problem, _heads_of_bias)] = None
    dropout: Annotated[float | int, Row(_dropout_problem, float, feature=True)] = 0.0
    dropout_seed: Annotated[int | None, Row(_dropout_problem, itself)] = None

    # how it is computed
    layout: Annotated[Layout, Row(_layout_problem, str)] = "contiguous"
    kernel: Annotated[str | None, Row(agree=itself)] = None
    transport: Annotated[str | None, Row(_transport_problem, itself)] = None
    ulysses: Annotated[int, Row(_ulysses_problem, itself)] = 1
    memory: Annotated[int | None, Row(_transport_problem, itself)] = None
    bucket_size: Annotated[int, Row(_bucket_size_problem)] = 1024
    check: Annotated[str | None, Row(_notes_problem, itself)] = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Options":
        """Make options from arguments by name.

        Raises:
            ValueError: there is no such option, or one has another type.
        """
        if (problem := unknown_problem(given)) is not None:
            raise ValueError(problem)
        check = given.get("check")
        if check is None:
            check = os.environ.get("RING_ATTENTION_CHECK") or None
        return cls(**{**given, "check": check})

    @property
    def packed(self) -> bool:
        """Tell whether there are documents."""
        return self.documents is not None or self.cu_seqlens is not None

    @property
    def placed(self) -> bool:
        """Tell whether positions are given."""
        return self.query_positions is not None or self.key_positions is not None

    def problem(self, call: Call) -> str | None:
        """Say what is wrong with the options given, the first that is found; None if nothing."""
        given = vars(self)
        checks = [check for name, check in _CHECKS.items() if given[name] is not DEFAULTS[name]]
        for check in dict.fromkeys(checks):
            if (problem := check(self, call)) is not None:
                return problem
        return None

    def agreed(self, everywhere: bool = False) -> dict[str, Any]:
        """Return what ranks compare, by name: those of a ring, or of all rings of its group."""
        given, compared = vars(self), {}
        for name, agree in _AGREED[everywhere].items():
            value = given[name]
            compared[name] = None if value is None else agree(value)
        return compared

    def features(self) -> dict[str, Any]:
        """Return the options that not all kernels can do, by name."""
        given = vars(self)
        return {name: given[name] for name in _FEATURES}


# methods are not checked: plans are made often, and each check takes host time
Options.__init__.__annotations__ = get_type_hints(Options)  # errors name types, without rows
Options.__init__ = checked(Options.__init__, "make")  # type: ignore[method-assign]


_HINTS = get_type_hints(Options, include_extras=True)
ROWS: dict[str, Row] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}
DEFAULTS = {name: getattr(Options, name) for name in ROWS}
# by name, of options that have them: the check; what ranks compare, of one ring or everywhere;
# and which of them not all kernels can do
_CHECKS = {name: row.check for name, row in ROWS.items() if row.check is not None}
_AGREED: dict[bool, dict[str, Callable[[Any], Any]]] = {False: {}, True: {}}
for _name, _row in ROWS.items():
    if _row.agree is not None:
        _AGREED[_row.everywhere][_name] = _row.agree
_FEATURES = [name for name, row in ROWS.items() if row.feature]


def unknown_problem(given: Mapping[str, Any]) -> str | None:
    """Say which of these names are no options, and what may have been meant.

    >>> unknown_problem({"windw": 3})
    'there is no option windw (did you mean window?)'
    """
    unknown = []
    for name in given:
        if name not in ROWS:
            close = get_close_matches(name, ROWS, n=1)
            unknown.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return f"there is no option {', '.join(unknown)}" if unknown else None


def not_default(given: Mapping[str, Any]) -> list[str]:
    """List the names of those options that are not their defaults; all are given.

    >>> not_default(DEFAULTS | {"window": 3, "causal": True})
    ['causal', 'window']
    """
    if given == DEFAULTS:  # takes the host less than to look at each
        return []
    names = []
    for name, default in DEFAULTS.items():
        value = given[name]
        if value is not default and (isinstance(value, Tensor) or value != default):
            names.append(name)
    return names
