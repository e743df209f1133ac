"""Checks of arguments that every public function makes: names, types, and least numbers.

`checked` is for functions of one rank by itself; `ranks.agreement.typed`, made of the same parts,
for functions that other ranks take part in. A bool is not accepted as a number: True for 1 is a
slip, mostly of two arguments swapped.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from typing import Annotated, Any, TypeVar

import torch
from beartype import BeartypeConf, FrozenDict, beartype
from beartype.roar import BeartypeCallHintParamViolation
from beartype.vale import Is, IsInstance
from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable[..., Any])


def _ints(items: Sequence[Any]) -> bool:
    return _are_ints({*map(type, items)})  # a loop over items would take longer than a call


def _ints_or_none(items: Sequence[Any]) -> bool:
    return _are_ints({*map(type, items)} - {type(None)})


def _are_ints(kinds: set[type]) -> bool:
    return all(issubclass(kind, int) and kind is not bool for kind in kinds)


_NUMBERS: Any = FrozenDict({
    int: Annotated[int, ~IsInstance[bool]],
    # of a sequence, beartype checks one item, drawn at random
    Sequence[int]: Annotated[Sequence, Is[_ints]],
    Sequence[int | None]: Annotated[Sequence, Is[_ints_or_none]],
})  # fmt: skip
_CONF = BeartypeConf(is_color=False, hint_overrides=_NUMBERS)
# beartype's messages about a bool for an int, and about an item that is no int
_NO_BOOL = re.compile(
    r"([Vv])iolates validator ~beartype\.vale\.IsInstance\[builtins\.bool\]: .*? \)"
)
_PAIR = re.compile(r"parameter window=[(\[].*")  # as flash-attn's
_NO_INTS = re.compile(r"([Vv])iolates validator beartype\.vale\.Is\[(_ints\w*)\]: .*?\[\2\]")

# Python's message when a function passes on an option that it sets itself
_DECIDED = re.compile(r"got multiple values for keyword argument '(\w+)'")


# names of parameters in other libraries, and what is the same here
_ELSEWHERE = {
    "is_causal": "causal", "attn_mask": "key_mask", "attention_mask": "key_mask",
    "dropout_p": "dropout", "softmax_scale": "scale", "window_size": "window",
    "softcap": "softclamp", "return_attn_probs": "return_lse",
}  # fmt: skip
_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")


def correction(name: str, known: Iterable[str]) -> str:
    """Return a likely correction of a name that is not known, in brackets; "" if there is none.

    >>> correction("is_causal", ["window", "causal"])
    ' (did you mean causal?)'
    """
    names = [*known]
    there = _ELSEWHERE.get(name)
    close = [there] if there in names else get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class WrongArgument(ValueError, TypeError):
    """An argument has the wrong type, is missing, or is not a parameter."""


class Arguments:
    """The parameters of a function, by which arguments are checked and errors explained."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        *_, owner, own = ("", *function.__qualname__.split("."))
        self.name: str = name or (owner if own == "__init__" else own)
        self.signature: inspect.Signature = inspect.signature(function)
        self.call: Callable[..., Any] = _checked(function)

    def refusal(self, error: Exception, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
        """Return the mistake in the arguments, as text, if this error is about them; else None."""
        if isinstance(error, BeartypeCallHintParamViolation):
            trace: Any = error.__traceback__  # the decorated call, and beartype's check of it
            own = trace.tb_next is not None and trace.tb_next.tb_next is None
            return in_one_line(error, self.name) if own else None
        decided = _DECIDED.search(str(error))
        if decided and decided[1] in kwargs and decided[1] not in self.signature.parameters:
            return f"{self.name}() decides {decided[1]!r} itself; leave it out"
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as unfit:
            unknown = _UNKNOWN.search(str(unfit))
            meant = correction(unknown[1], self.signature.parameters) if unknown else ""
            return f"{self.name}() {unfit}{meant}"
        return None

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by name, with unknown keywords, without surplus positional ones."""
        return {**kwargs, **dict(zip(self.signature.parameters, args))}


def checked(function: Function, name: str | None = None) -> Function:
    """Decorate a function or class: arguments must be parameters, of the annotated types.

    Errors have the function's name, or `name`. torch.compile traces the function itself, without
    checks.

    Raises:
        WrongArgument: an argument has the wrong type, is missing, or is not a parameter.

    >>> @checked
    ... def twice(x: int) -> int:
    ...     return 2 * x
    >>> twice(y=2)
    Traceback (most recent call last):
    ring_attention_pytorch.arguments.WrongArgument: twice() missing a required argument: 'x'
    """
    if isinstance(function, type):
        made: Any = function
        made.__init__ = checked(made.__init__, name or made.__name__)
        return made
    arguments = Arguments(function, name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return function(*args, **kwargs)
        try:
            return arguments.call(*args, **kwargs)
        except (BeartypeCallHintParamViolation, TypeError) as error:
            if (why := arguments.refusal(error, args, kwargs)) is None:
                raise
        raise WrongArgument(why)

    return call  # type: ignore[return-value]


def _checked(function: Function) -> Function:
    """Wrap a function in beartype's check of arguments, but not of its result, to save time."""
    if inspect.isgeneratorfunction(inspect.unwrap(function)):
        raise TypeError(f"{function}: a generator is checked when it is run; return one instead")
    hints = function.__annotations__
    function.__annotations__ = {name: hints[name] for name in hints if name != "return"}
    found = beartype(conf=_CONF)(function)
    function.__annotations__ = hints
    return found


def in_one_line(error: BaseException, name: str) -> str:
    """Shorten beartype's message to the parameter and its type, and add the function's name."""
    text = _NO_BOOL.sub(r"\1iolates int: a bool is no number", " ".join(str(error).split()))
    text = _PAIR.sub(
        r"\g<0>; it is one number, the tokens before a query's own: of flash-attn's "
        "(left, 0) it is left, with causal=True",
        text,
    )
    text = _NO_INTS.sub(r"\1iolates it: each item must be an int, and a bool is none", text)
    return f"{name}() {text[max(0, text.find('parameter ')) :]}"


def known_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return a torch.device from its name or number, or None; raise ValueError if it is invalid."""
    if device is None or isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"device must be one of PyTorch's, got {device!r}: {text}") from None


@contextmanager
def checks_of(caller: str) -> Iterator[None]:
    """Put the caller's name before the errors of checks in this block.

    >>> with checks_of("pad"):
    ...     check_least(1, length=0)
    Traceback (most recent call last):
    ValueError: pad: length must be at least 1, got 0
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None


def check_least(least: float, **numbers: float | None) -> None:
    """Raise ValueError for the first number below `least`, infinite or NaN; None is allowed.

    >>> check_least(1, dim=4, window=None)
    """
    for name, number in numbers.items():
        if number is not None and not least <= number < math.inf:
            finite = " and finite" if number == math.inf else ""
            raise ValueError(f"{name} must be at least {least}{finite}, got {number}")
