"""A call carries out a program: it waits, starts transfers and hands out keys, step by step.

A transport is its own schedule and its own kind of `Call`: that knows how messages are packed, or
how shared memory is read. The order is the program's alone.
"""

from collections.abc import Iterator
from typing import Protocol

from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.observe import recorded
from ring_attention_pytorch.schedule.steps import Part, Program

KVGrads = tuple[GradAccumulator, GradAccumulator]


class Call(Protocol):
    """One rank's part in one call, with the blocks that are here. Transfers go by numbers."""

    def start(self, number: int) -> None:
        """Start a transfer; all ranks do."""

    def wait(self, number: int) -> None:
        """Let what follows wait for a transfer: for keys, or for gradients that are added."""

    def keys(self, part: Part) -> KVBlock:
        """Return the keys of a part."""
        ...

    def grads(self, part: Part, keys: KVBlock) -> KVGrads:
        """Return accumulators (dk, dv) for these keys of a part."""
        ...

    def computed(self, part: Part) -> None:
        """Take note that calls for a part have been launched."""


def forward(program: Program, call: Call) -> Iterator[KVBlock]:
    """Yield the keys of each part."""
    call = recorded(call)
    for part in _parts(program, call):
        keys = call.keys(part)
        if program.counts(part, keys.segments):
            yield keys
        del keys  # else they would stay while more come
        call.computed(part)


def backward(program: Program, call: Call) -> Iterator[tuple[KVBlock, KVGrads]]:
    """Yield the keys of each part, with accumulators (dk, dv) for their gradients."""
    call = recorded(call)
    for part in _parts(program, call):
        keys = call.keys(part)
        grads = call.grads(part, keys)
        if program.counts(part, keys.segments):
            yield keys, grads
        del keys, grads
        call.computed(part)


def _parts(program: Program, call: Call) -> Iterator[Part]:
    for wait, start, part in program.steps:
        for number in wait:
            call.wait(number)
        for number in start:
            call.start(number)
        if part is not None:
            yield part
