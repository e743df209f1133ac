"""Digests: numbers by which ranks find out that they hold something else, with few words."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from inspect import getattr_static
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> its version and digest


def digest(t: Tensor) -> int:
    """Return a number that tells tensors apart: of shape, dtype and all values, on any device.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    False
    """
    bits = t.detach().reshape(-1)
    if bits.is_floating_point():
        bits = bits.view(_INTS[bits.itemsize])
    places = torch.arange(1, len(bits) + 1, device=t.device)
    mixed = (bits.long() ^ (places * 0x1E3779B97F4A7C15)) * 0x2545F4914F6CDD1D
    found = int((mixed ^ (mixed >> 29)).sum())  # in 64 bits, which wrap around
    return crc32(f"{found} {list(t.shape)} {t.dtype}".encode())


def digest_of_function(function: Callable[..., Any]) -> str:
    """Return the name of a function and what tells it from others: its code and what that reads.

    That is constants, defaults, what it closes over, and global names; tensors by their values. Of
    an object it is the type, and those attributes whose names the code has; of a module its name.

    >>> first, same, other = (digest_of_function(lambda i: i < n) for n in (3, 3, 4))
    >>> first == same, first == other
    (True, False)
    """
    told = repr(_described(function, frozenset(), {}))
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({crc32(told.encode(errors='replace')):08x})"


def _described(thing: Any, names: frozenset[str], seen: dict[int, int]) -> Any:
    """Return what is told of a thing that code with these names reads, in plain values."""
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if id(thing) in seen:  # as functions that call themselves
        return "again", seen[id(thing)]
    seen[id(thing)] = len(seen)
    if isinstance(thing, Tensor):
        return _of_tensor(thing)
    if isinstance(thing, CodeType):
        constants = [_described(each, names, seen) for each in thing.co_consts]
        return thing.co_code, constants, thing.co_names
    if isinstance(thing, FunctionType):
        return _of_function(thing, seen)
    if isinstance(thing, MethodType):
        reads = frozenset({thing.__func__.__name__})
        return thing.__func__.__name__, _described(thing.__self__, reads, seen)
    if isinstance(thing, partial):
        inner = _described(thing.func, names, seen)
        return inner, _described(thing.args, names, seen), _described(thing.keywords, names, seen)
    if isinstance(thing, (list, tuple)):
        return [_described(each, names, seen) for each in thing]
    if isinstance(thing, Mapping):
        return [(repr(name), _described(each, names, seen)) for name, each in thing.items()]
    if isinstance(thing, (set, frozenset)):
        return sorted(repr(_described(each, names, seen)) for each in thing)
    if isinstance(thing, (ModuleType, BuiltinFunctionType, type)):
        return getattr(thing, "__module__", ""), thing.__name__
    return _of_object(thing, names, seen)


def _of_function(function: FunctionType, seen: dict[int, int]) -> Any:
    code = function.__code__
    names = _names(code)
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_described(cell.cell_contents, names, seen))
        except ValueError:  # it is empty yet
            cells.append("empty")
    if (function.__module__ or "").split(".")[0] == "torch":  # the same on all ranks
        return function.__module__, function.__qualname__, cells
    read = {name: function.__globals__[name] for name in sorted(names & {*function.__globals__})}
    defaults = function.__defaults__, function.__kwdefaults__
    return [_described(each, names, seen) for each in (code, defaults, read)], cells


def _of_object(thing: Any, names: frozenset[str], seen: dict[int, int]) -> Any:
    methods = _methods(type(thing), names | {"__call__"})
    reads = names.union(*(_names(method.__code__) for method in methods.values()))
    held = {name: each for name, each in getattr(thing, "__dict__", {}).items() if name in reads}
    return type(thing).__qualname__, _described(methods, reads, seen), _described(held, reads, seen)


def _methods(kind: type, names: frozenset[str]) -> dict[str, FunctionType]:
    """Return the methods of these names, and those that they call."""
    found: dict[str, FunctionType] = {}
    while names:
        there = {name: getattr_static(kind, name, None) for name in sorted(names - {*found})}
        new = {name: each for name, each in there.items() if isinstance(each, FunctionType)}
        found |= new
        names = frozenset().union(*(_names(each.__code__) for each in new.values()))
    return found


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code reads, and functions within it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _of_tensor(t: Tensor) -> Hashable:
    """Return a tensor's digest, worked out once for each version of it; the host waits for it."""
    if t.is_meta:
        return t.shape, t.dtype
    if t.is_inference():  # which has no versions
        return digest(t)
    known: Any = _known.get(t)
    if known is None or known[0] != t._version:
        _known[t] = known = t._version, digest(t)
    return known[1]
