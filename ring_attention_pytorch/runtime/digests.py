"""Digests: short numbers that ranks compare to find out that tensors or functions differ."""

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
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> (version, digest)


def digest(t: Tensor) -> int:
    """Return a number that depends on a tensor's shape, dtype and all values.

    It is computed on the tensor's device, and waits for it.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    False
    """
    return crc32(f"{int(mixed(t))} {list(t.shape)} {t.dtype}".encode())


def mixed(t: Tensor) -> Tensor:
    """Return a number, int64 `[]` on the tensor's device, that depends on its values and places."""
    bits = t.detach().reshape(-1)
    if bits.is_floating_point():
        bits = bits.view(_INTS[bits.itemsize])
    places = torch.arange(1, len(bits) + 1, device=t.device)
    each = (bits.long() ^ (places * 0x1E3779B97F4A7C15)) * 0x2545F4914F6CDD1D
    return (each ^ (each >> 29)).sum()  # in 64 bits, which wrap around


def digest_of_function(function: Callable[..., Any]) -> str:
    """Return the name of a function and a digest of its code and of all values that it reads.

    These are constants, defaults, closure cells and globals; tensors by their values. An object
    counts by its type, and by the attributes whose names the code has; a module by its name.

    >>> first, same, other = (digest_of_function(lambda i: i < n) for n in (3, 3, 4))
    >>> first == same, first == other
    (True, False)
    """
    told = repr(_described(function, frozenset(), {}))
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({crc32(told.encode(errors='replace')):08x})"


def _described(thing: Any, names: frozenset[str], seen: dict[int, int]) -> Any:
    """Describe a value, read by code with these names, in plain values."""
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if id(thing) in seen:  # such as a function that calls itself
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
        except ValueError:  # still empty
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
    """Return the methods of these names, and the methods that they call."""
    found: dict[str, FunctionType] = {}
    while names:
        there = {name: getattr_static(kind, name, None) for name in sorted(names - {*found})}
        new = {name: each for name, each in there.items() if isinstance(each, FunctionType)}
        found |= new
        names = frozenset().union(*(_names(each.__code__) for each in new.values()))
    return found


def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code reads, inner functions included."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _of_tensor(t: Tensor) -> Hashable:
    """Return a tensor's digest, cached for each version of the tensor; syncs with the device."""
    if t.is_meta:
        return t.shape, t.dtype
    if t.is_inference():  # such tensors have no version
        return digest(t)
    known: Any = _known.get(t)
    if known is None or known[0] != t._version:
        _known[t] = known = t._version, digest(t)
    return known[1]
