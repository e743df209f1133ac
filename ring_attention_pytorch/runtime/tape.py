"""Tapes: the operations of a call, to be repeated without the Python that decided on them.

With few tokens, deciding takes the host longer than a GPU takes for the operations. The second and
the third call with a cache key are therefore recorded while they run. If both ran the same
operations, they become the lines of a function, which from then on replaces such calls (one
recording will do if another plan's two had the same lines but for numbers: documents differ in each
step of training):

    def replay(a0, a1, a2):
        t3 = permute(a0, [0, 2, 1, 3])
        t4 = permute(a1, [0, 2, 1, 3])
        ...
        return (t9, t10)

A tensor that is neither an argument nor an operation's result is a constant. It must be the same
object in both calls; a tensor from an operation that was not recorded refuses the tape. Operations
that show a tensor's values to Python refuse it, too, unless within an `opaque` function.
"""

import re
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, has_torch_function

from ring_attention_pytorch.runtime.streams import capturing

Tensors = tuple[Tensor | Any, ...]  # or None, after the first
Function = Callable[..., Tensors]
_KINDS = 16  # tapes that a plan keeps at most
_NUMBER = re.compile(r"\b\d+\b")  # in a line; names have a letter before theirs
_MOST_KINDS = 1024
_P = ParamSpec("_P")
_R = TypeVar("_R")
# operations that show tensors' values to Python, or whose results' lengths depend on values
_READING = {
    *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "__iter__"),
    *("allclose", "equal", "is_nonzero", "item", "numpy", "tolist"),
    *("argwhere", "masked_select", "nonzero", "unique", "unique_consecutive"),
}


_PLAIN = {int, bool, torch.Size, torch.dtype, torch.device, torch.layout}  # Python sees these

# operations without side effects: a tape drops them if the result is not used
_PURE = {
    *("__getitem__", "detach", "empty", "flatten", "narrow", "new_empty", "permute"),
    *("split_with_sizes", "transpose", "unflatten", "unsqueeze", "view"),
}


class _Thread(threading.local):
    """The recorder of a thread, while it records."""

    recorder: "_Recorder | None" = None


_thread = _Thread()
_preparations: dict[Callable[..., Any], Callable[..., Any]] = {}  # by opaque operation


def recording() -> bool:
    """True if this thread's operations are being recorded."""
    return _thread.recorder is not None


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function one operation of a tape, whatever it runs or reads inside.

    It takes tensors and constants, by position, and returns a tensor, several, or None. If it is
    `prepared`, a tape calls the prepared function instead, and so does the call that is recorded.
    """

    @wraps(function)
    def operation(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        recorder = _thread.recorder
        if recorder is None:
            return function(*args, **kwargs)
        prepare = _preparations.get(operation)
        with torch._C.DisableTorchFunction():
            _thread.recorder = None
            try:
                replayed: Any = function if prepare is None else prepare(*args, **kwargs)
                out = (function if replayed is None else replayed)(*args, **kwargs)
            finally:
                _thread.recorder = recorder
        if replayed is not None:
            recorder.record(replayed, args, kwargs, out)
        return out

    return operation


def prepared(operation: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Decorate a function that prepares an `opaque` one: a tape calls its result instead.

    It is called with the opaque function's arguments while a tape is recorded. Its result must be
    valid for all tensors of the same shapes, strides and dtypes, and two such calls must return
    equal objects. None means that there is nothing to replay.
    """

    def register(prepare: Callable[..., Any]) -> None:
        _preparations[operation] = prepare

    return register


# kinds of which two recordings have agreed
_agreed_kinds: set[Hashable] = set()


def _nothing() -> None:
    """Return None: no memory is shared."""


class Tapes:
    """The tapes of a plan, or of its swaps of heads: one for each function and cache key.

    Attributes:
        follow: called before a replay. It makes the current stream wait for other streams' use of
            shared memory, and returns a key of that memory. If it returns another key, all tapes
            are dropped, because every rank has moved to other shared memory.
    """

    def __init__(self, follow: Callable[[], Hashable] = _nothing) -> None:
        self.follow: Callable[[], Hashable] = follow
        self.by_kind: dict[Hashable, Tape] = {}
        self._memory: Hashable = None

    def __reduce__(self) -> tuple[type["Tapes"], tuple[Any, ...]]:
        """Copy or pickle without tapes: the copy makes its own."""
        return Tapes, (self.follow,)

    def run(self, function: Function, owner: Any, *given: Tensor | Any) -> Any:
        """Return `function(owner, *given)`, replayed by a tape once there is one.

        The function's decisions must depend only on the owner, a plan or swap (which fixes the
        tensors' shapes), and on the cache key: `Tape.key` of the tensors, and global settings.
        """
        memory, of_tensors = self.follow(), Tape.key(given)
        if of_tensors is None:
            return function(owner, *given)
        if memory != self._memory:
            self.by_kind.clear()
            self._memory = memory
        key = (
            function,
            torch._C._get_deterministic_algorithms(),
            torch._C._get_float32_matmul_precision(),
            *of_tensors,
        )
        tape = self.by_kind.get(key)
        if tape is None:
            if len(self.by_kind) >= _KINDS:
                self.by_kind.clear()
            tape = self.by_kind[key] = Tape()
        return tape.run(function, owner, given)


class Tape:
    """A tape of calls with one cache key: made from the second and the third, if they agree.

    From the second alone, if it is of a kind of which two have agreed before.
    """

    def __init__(self) -> None:
        self.replay: Function | None = None
        self._is_new, self._refused = True, False
        self._before: _Recorder | None = None

    @staticmethod
    def key(given: Tensors) -> tuple[Hashable, ...] | None:
        """Return the tensors' strides, alignment and identity, and whether inference mode is on.

        None if operations can't be recorded: traced, captured, transformed, or of subclasses.
        """
        if (
            torch.compiler.is_compiling()
            or (given[0].is_cuda and capturing(given[0].device))
            or torch._C._are_functorch_transforms_active()
            or torch._C._len_torch_dispatch_stack() > 0
            or has_torch_function(given)
        ):
            return None
        ids = [*map(id, given)]
        return (
            torch.is_inference_mode_enabled(),
            *map(ids.index, ids),
            *[None if t is None else (t.stride(), t.data_ptr() & 15) for t in given],
        )

    def run(self, function: Function, owner: Any, given: Tensors) -> Tensors:
        """Return `function(owner, *given)`, replayed by the tape once there is one.

        It runs without autocast and on the tensors' device, as the recorded calls did.
        """
        if self.replay is None:
            return self._recorded(function, owner, given)
        first = given[0]
        elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()
        if not (elsewhere or torch._C._is_any_autocast_enabled()):
            return self.replay(*given)
        with torch.autocast(first.device.type, enabled=False), torch.cuda.device_of(first):
            return self.replay(*given)

    def _recorded(self, function: Function, owner: Any, given: Tensors) -> Tensors:
        """Return `function(owner, *given)`, and record it, except the first call."""
        if self._is_new or self._refused:  # many plans are used once only
            self._is_new = False
            return function(owner, *given)
        recorder = _Recorder(given)
        with torch.cuda.device_of(given[0]):
            results = recorder.run(function, owner)
        first, self._before = self._before, None
        if recorder.refused or not (first is None or recorder.agrees(first)):
            self._refused = True
            return results
        kind = function, recorder.kind()
        if first is None and kind not in _agreed_kinds:
            self._before = recorder
            return results
        if len(_agreed_kinds) >= _MOST_KINDS:
            _agreed_kinds.clear()
        _agreed_kinds.add(kind)
        self.replay = recorder.replay()
        return results


class _Line(NamedTuple):
    """One operation of a tape."""

    targets: str  # names left of its `=`
    expression: str
    used: tuple[str, ...]  # names in the expression
    idle: bool  # has no side effects

    @property
    def made(self) -> set[str]:
        return {*self.targets.split(", ")} - {"_", ""}


class _Recorder(TorchFunctionMode):
    """A recording of one run: its lines, and the constants that they name."""

    def __init__(self, given: Tensors) -> None:
        super().__init__()
        self.refused = False
        self.given = given
        self.lines: list[_Line] = []
        self.views: dict[int, str] = {}  # constants that are views of others: their expressions
        self.constants: list[Any] = []
        self.results = ""
        self._names: dict[int, str] = {}  # of tensors, by identity
        self._alive: list[Any] = []  # keeps tensors, so that an `id` is not reused
        self._used: list[str] = []
        for number, t in enumerate(given):
            if t is not None:
                self._name(t, f"a{number}")

    def run(self, function: Function, plan: Any) -> Tensors:
        """Run the function with a plan and the given tensors, and record it."""
        _thread.recorder = self
        try:
            with self:
                results = function(plan, *self.given)
        finally:
            _thread.recorder = None
        self._used = []
        self.results = self._text(tuple(results))
        self.refused |= any(name[0] in "ac" for name in self._used)  # results that others have
        self._names, self._alive, self.given = {}, [], tuple(t is not None for t in self.given)
        return results

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _READING or (name == "__getitem__" and _has_bools(args[1])):
            self.refused = True
        if type(out) in _PLAIN:  # most are of a shape or a dtype
            return out
        if _has_tensors(out) or (out is None and name != "__get__"):
            self.record(func, args, kwargs or {}, out)
        return out

    def record(self, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        """Record an operation that has run."""
        first = args[0] if args else None
        if _is_as_given(out, first):
            self._name(out, self._text(first))
            return
        if out is first and func.__name__ in ("to", "contiguous"):
            return
        self._used = []
        texts = [self._text(each) for each in args]
        texts += [f"{name}={self._text(each)}" for name, each in kwargs.items()]
        expression = f"{self._constant(func)}({', '.join(texts)})"
        if self._is_constant_view(out, (*args, *kwargs.values())):
            self.views[len(self.constants)] = expression
            self._name(out, self._constant(out))
            return
        idle = getattr(func, "__name__", "") in _PURE
        self.lines.append(_Line(self._target(out), expression, tuple(self._used), idle))

    def agrees(self, other: "_Recorder") -> bool:
        """True if two recordings have the same operations and the same constants."""
        if (self.lines, self.views, self.results) != (other.lines, other.views, other.results):
            return False
        pairs = enumerate(zip(self.constants, other.constants, strict=True))
        return all(number in self.views or _same(a, b) for number, (a, b) in pairs)

    def kind(self) -> Hashable:
        """Return all but numbers and tensors: plans with other documents have the same."""
        lines = [_NUMBER.sub("", f"{line.targets} = {line.expression}") for line in self.lines]
        views = [(at, _NUMBER.sub("", text)) for at, text in self.views.items()]
        return (*lines, *views, self.results, *map(_role, self.constants))

    def replay(self) -> Function:
        """Compile the recorded operations to a function, which keeps no recorded tensor alive."""
        parameters = [f"a{i}" if given else f"_{i}" for i, given in enumerate(self.given)]
        body = [*self._lines_with_ends(), f"return {self.results}"]
        source = f"def replay({', '.join(parameters)}):\n    " + "\n    ".join(body)
        known = {f"c{i}": constant for i, constant in enumerate(self.constants)}
        exec(compile(source, "<tape>", "exec"), known)
        known["replay"].source = source
        return known["replay"]

    def _lines_with_ends(self) -> Iterator[str]:
        """Yield the lines, each followed by a `del` of names used last in it: frees memory."""
        kept = set(self.results.strip("()").split(", "))
        lines, last = self._needed(kept), {}
        for number, line in enumerate(lines):
            for name in (*line.used, *line.made):
                last[name] = number
        for number, line in enumerate(lines):
            yield f"{line.targets} = {line.expression}" if line.targets else line.expression
            ends = {name for name in (*line.used, *line.made) if last[name] == number}
            gone = sorted(name for name in ends - kept if name[:1] in ("t", "a"))
            if gone:
                yield f"del {', '.join(gone)}"

    def _needed(self, results: set[str]) -> list[_Line]:
        """Return the lines without idle ones whose results are not used."""
        needed, lines = {*results}, []
        for line in reversed(self.lines):
            if not line.idle or line.made & needed:
                needed.update(line.used)
                lines.append(line)
        return lines[::-1]

    def _text(self, value: Any) -> str:
        """Write a value as a Python expression."""
        if isinstance(value, Tensor):
            name = self._names.get(id(value)) or self._name(value, self._constant(value))
            self._used.append(name)
            return name
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) is tuple or (isinstance(value, tuple) and _has_tensors(value)):
            return f"({''.join(self._text(each) + ', ' for each in value)})"
        if isinstance(value, slice):
            ends = value.start, value.stop, value.step
            return f"slice({', '.join(map(self._text, ends))})"
        if value is None or isinstance(value, int | str):
            return repr(value)
        return self._constant(value)

    def _target(self, out: Any) -> str:
        """Name an operation's results; return the text left of its `=`."""
        if isinstance(out, Tensor):
            return "" if id(out) in self._names else self._name(out, f"t{len(self._names)}")
        if not isinstance(out, tuple | list):
            return ""
        self.refused |= any(isinstance(each, tuple | list) for each in out)
        return "".join((self._target(each) or "_") + ", " for each in out)

    def _name(self, t: Tensor, name: str) -> str:
        self._names[id(t)] = name
        self._alive.append(t)
        return name

    def _constant(self, value: Any) -> str:
        for number, known in enumerate(self.constants):
            if _same(known, value):
                return f"c{number}"
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"

    def _is_constant_view(self, out: Any, args: tuple) -> bool:
        """True if a tensor is a new view of a constant, and of no other tensor."""
        if not isinstance(out, Tensor) or id(out) in self._names:
            return False
        memory, shares = out.untyped_storage().data_ptr(), False
        for t in filter(_is_tensor, args):
            if not self._names[id(t)].startswith("c"):
                return False
            shares |= t.untyped_storage().data_ptr() == memory
        return shares


def _is_as_given(out: Any, t: Any) -> bool:
    """True if `out` is a view of t with the same shape, strides, dtype and address."""
    return (
        isinstance(out, Tensor)
        and isinstance(t, Tensor)
        and out is not t
        and out.shape == t.shape
        and out.stride() == t.stride()
        and out.dtype == t.dtype
        and out.data_ptr() == t.data_ptr() != 0
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _has_tensors(value: Any) -> bool:
    return _is_tensor(value) or (isinstance(value, tuple | list) and any(map(_has_tensors, value)))


def _has_bools(value: Any) -> bool:
    """True if an index has bool tensors: the result's length depends on their values."""
    if isinstance(value, tuple | list):
        return any(map(_has_bools, value))
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _role(constant: Any) -> Any:
    """Return the role of a constant: an operation itself, of anything else its type."""
    if isinstance(constant, Tensor):
        return constant.dtype, constant.device
    return constant if callable(constant) and hasattr(constant, "__name__") else type(constant)


def _same(a: Any, b: Any) -> bool:
    """True if two constants are the same: tensors by identity, others by value."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a is b or (type(a) is type(b) and a == b)
