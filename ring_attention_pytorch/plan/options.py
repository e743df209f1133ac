"""The options of ring attention, a row each: all that the library must know of one.

A row is a field of `Options`: a name, a type, a default, and a `Row`: its check, the value that
ranks compare, and whether kernels must support it. Checking, agreeing and the choice of kernels are
loops over the rows.

A new option is a row here, a parameter and some lines of docs in `ring_attn`, and the code that
computes it. If kernels differ in it, it is also a name in `interfaces.FEATURES`, and in the
capabilities of kernels that can do it (docs/design/adding-a-score-option.md).
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_type_hints

from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checked, correction
from ring_attention_pytorch.comm.transports import check_transport
from ring_attention_pytorch.comm.ulysses import check_ulysses
from ring_attention_pytorch.geometry.documents import (
    BatchDocuments,
    Borders,
    check_documents,
    digest,
)
from ring_attention_pytorch.geometry.layouts import Layout, check_layout
from ring_attention_pytorch.plan.checks import check_key_mask, check_notes
from ring_attention_pytorch.plan.masks import (
    Prefix,
    check_mask_mod,
    check_positions,
    check_prefix,
    prefix_digest,
)
from ring_attention_pytorch.plan.shared import (
    Shared,
    check_shared,
    check_shared_mask,
    check_with_shared,
    shared_note,
)
from ring_attention_pytorch.runtime.codec import Codec
from ring_attention_pytorch.runtime.digests import digest_of_function
from ring_attention_pytorch.runtime.dropout import check_dropout
from ring_attention_pytorch.runtime.interfaces import MaskMod
from ring_attention_pytorch.runtime.scores import check_bias, check_per_head, sinks_note


class Call(NamedTuple):
    """A call that options are for: tensors, whose values don't matter, and the ring's size."""

    q: Tensor
    k: Tensor
    v: Tensor
    ring_size: int
    codec: Codec | None = None  # which encodes k and v


Check = Callable[["Options", Call], None]


class Row(NamedTuple):
    """All of an option but its name, type and default.

    Attributes:
        check: raises ValueError if the option is given and wrong; it may read other options, too,
            and serve several of them.
        agree: returns the value that ranks compare, unless the option is None; None if ranks may
            differ.
        everywhere: rings of one group compare it, too: it decides the whole group's exchanges.
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
    """Return "given": each rank has its own value, so ranks compare only whether there is one."""
    return "given"


def _check_window(o: Any, call: Call) -> None:
    if o.window < 0:
        raise ValueError(f"window must be None or at least 0, got {o.window}")


def _check_scale(o: Any, call: Call) -> None:
    if not math.isfinite(o.scale):
        raise ValueError(f"scale must be finite, got {o.scale}")


def _check_softclamp(o: Any, call: Call) -> None:
    if not (math.isfinite(o.softclamp) and o.softclamp > 0):
        raise ValueError(f"softclamp must be None or positive, got {o.softclamp}")


def _check_cross(o: "Options", call: Call) -> None:
    if o.cross and not o.placed and (o.causal or o.window is not None):
        raise ValueError(
            "cross attention has no causal and no window: two sequences share no positions"
        )


def _check_alibi(o: Any, call: Call) -> None:
    check_per_head("alibi_slopes", call.q, o.alibi_slopes)
    if o.alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient; detach them")


def _check_bucket_size(o: "Options", call: Call) -> None:
    check_least(1, bucket_size=o.bucket_size)


def _check_documents(o: "Options", call: Call) -> None:
    check_documents(o.documents, o.cu_seqlens, call.q.shape)


def _check_prefix(o: Any, call: Call) -> None:
    if not o.causal or o.packed or o.placed:
        raise ValueError("prefix needs causal=True, and no documents and no positions beside it")
    check_prefix(o.prefix, len(call.q))


def _check_mask_mod(o: Any, call: Call) -> None:
    check_mask_mod(o.mask_mod, call.q.device)


def _check_positions(o: "Options", call: Call) -> None:
    if o.query_positions is None or o.key_positions is None:
        raise ValueError("query_positions and key_positions need one another")
    if o.packed and not isinstance(o.documents, tuple):  # a tuple includes positions
        raise ValueError(
            "documents have positions of their own: they and query_positions exclude each other"
        )
    check_positions(o.query_positions, o.key_positions, call.q, call.k)


def _check_bias(o: "Options", call: Call) -> None:
    check_bias(o.key_bias, call.q, call.k, o.scale, o.softclamp)


def _heads_of_bias(bias: Tensor) -> str:
    return "for all heads" if bias.ndim == 2 else f"for each of {bias.shape[-1]} heads"


def _check_shared(o: Any, call: Call) -> None:
    check_shared(o.shared_keys, call.q, call.k, call.v)
    check_with_shared(o)


def _check_shared_mask(o: "Options", call: Call) -> None:
    check_shared_mask(o.shared_key_mask, o.shared_keys)  # type: ignore[arg-type]


def _check_dropout(o: "Options", call: Call) -> None:
    check_dropout(o.dropout, o.dropout_seed)


def _check_transport(o: "Options", call: Call) -> None:
    check_transport(o.transport, o.memory)


def _check_ulysses(o: Any, call: Call) -> None:
    check_ulysses(o.ulysses, call.ring_size, call.q.shape[2])


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one ring attention; `ring_attn` documents each."""

    # which keys a query sees
    causal: Annotated[bool, Row(agree=itself)] = False
    window: Annotated[int | None, Row(_check_window, itself, feature=True)] = None
    key_mask: Annotated[
        Tensor | None,
        Row(lambda o, call: check_key_mask(o.key_mask, call.k), presence, feature=True),
    ] = None
    documents: Annotated[
        Tensor | BatchDocuments | None, Row(_check_documents, presence, everywhere=True)
    ] = None
    cu_seqlens: Annotated[Borders | None, Row(_check_documents, digest)] = None
    prefix: Annotated[Prefix, Row(_check_prefix, prefix_digest)] = None
    mask_mod: Annotated[MaskMod | None, Row(_check_mask_mod, digest_of_function, feature=True)] = (
        None
    )
    cross: Annotated[bool | None, Row(_check_cross, itself)] = None
    query_positions: Annotated[Tensor | None, Row(_check_positions)] = None
    key_positions: Annotated[Tensor | None, Row(_check_positions)] = None
    shared_keys: Annotated[Shared | None, Row(_check_shared, shared_note)] = None
    shared_key_mask: Annotated[Tensor | None, Row(_check_shared_mask, presence)] = None

    # what a score is
    scale: Annotated[float | int | None, Row(_check_scale, itself, feature=True)] = None
    softclamp: Annotated[float | int | None, Row(_check_softclamp, itself, feature=True)] = None
    sinks: Annotated[
        Tensor | None, Row(lambda o, call: check_per_head("sinks", call.q, o.sinks), sinks_note)
    ] = None
    alibi_slopes: Annotated[Tensor | None, Row(_check_alibi, presence, feature=True)] = None
    key_bias: Annotated[Tensor | None, Row(_check_bias, _heads_of_bias)] = None
    dropout: Annotated[float | int, Row(_check_dropout, float, feature=True)] = 0.0
    dropout_seed: Annotated[int | None, Row(_check_dropout, itself)] = None

    # how it is computed
    layout: Annotated[Layout, Row(lambda o, call: check_layout(o.layout), str)] = "contiguous"
    kernel: Annotated[str | None, Row(agree=itself)] = None
    transport: Annotated[str | None, Row(_check_transport, itself)] = None
    ulysses: Annotated[int | None, Row(_check_ulysses, itself)] = None
    memory: Annotated[int | None, Row(_check_transport, itself)] = None
    bucket_size: Annotated[int, Row(_check_bucket_size)] = 1024
    check: Annotated[str | None, Row(lambda o, call: check_notes(o.check), itself)] = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Options":
        """Make options from arguments by name.

        Raises:
            ValueError: there is no such option, or one has another type.
        """
        if not given.keys() <= ROWS.keys():
            raise ValueError(f"there is no option {_unknown(given)}")
        check = given.get("check")
        if check is None:
            check = os.environ.get("RING_ATTENTION_CHECK") or None
        return cls(**{**given, "check": check})

    @property
    def packed(self) -> bool:
        """True if there are documents."""
        return self.documents is not None or self.cu_seqlens is not None

    @property
    def placed(self) -> bool:
        """True if positions are given."""
        return self.query_positions is not None or self.key_positions is not None

    def check_for(self, call: Call) -> None:
        """Raise ValueError for the first of the options given that is wrong for such a call."""
        given = vars(self)
        checks = [check for name, check in _CHECKS.items() if given[name] is not DEFAULTS[name]]
        for check in dict.fromkeys(checks):
            check(self, call)

    def agreed(self, everywhere: bool = False) -> dict[str, Any]:
        """Return the values that ranks compare, by name: in a ring, or in all rings of a group."""
        given, compared = vars(self), {}
        for name, agree in _AGREED[everywhere].items():
            value = given[name]
            compared[name] = value if value is None or agree is itself else agree(value)
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
# by option: its check; the values that ranks compare, in one ring or everywhere; and the options
# that not all kernels support
_CHECKS = {name: row.check for name, row in ROWS.items() if row.check is not None}
_AGREED: dict[bool, dict[str, Callable[[Any], Any]]] = {False: {}, True: {}}
for _name, _row in ROWS.items():
    if _row.agree is not None:
        _AGREED[_row.everywhere][_name] = _row.agree
_FEATURES = [name for name, row in ROWS.items() if row.feature]


def _unknown(given: Mapping[str, Any]) -> str:
    """List the names that are no options, each with a likely correction.

    >>> _unknown({"windw": 3, "causal": True})
    'windw (did you mean window?)'
    """
    return ", ".join(f"{name}{correction(name, ROWS)}" for name in given if name not in ROWS)


def check_only_plan(given: Mapping[str, Any], group: object) -> None:
    """Raise ValueError if options or a group are given beside a plan; `given` has all options.

    >>> check_only_plan(DEFAULTS | {"window": 3, "causal": True}, group=None)
    Traceback (most recent call last):
    ValueError: the plan already decides causal, window; pass one or the other
    """
    decided = []
    for name, default in DEFAULTS.items():
        value = given[name]
        if value is not default and (isinstance(value, Tensor) or value != default):
            decided.append(name)
    if group is not None:
        decided.append("group")
    if decided:
        raise ValueError(f"the plan already decides {', '.join(decided)}; pass one or the other")
