"""The interface of a fabric: what carries bytes among the ranks of a ring.

    a program's step         GatherCall            a fabric's channel
    start keys         ─►    start(number)   ─►    put(transfer)     own keys, for all who need them
    wait for keys      ─►    wait(number)    ─►    take(transfer)    others' keys
    compute            ─►    grads(part)     ─►    room(keys)        where their gradients are made
    start gradients    ─►    start(number)   ─►    give(transfer)    to the keys' owners
    wait for gradients ─►    wait(number)    ─►    reduce(transfer)  those of own keys, summed

What is carried and in which order is decided elsewhere, as ints: by a gather's program, and by the
copy plans of Ulysses.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ring_attention_pytorch.comm.all_to_all import CopyPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.replay import Replay
from ring_attention_pytorch.schedule.steps import Program, Transfer

KVGrads = tuple[GradAccumulator, GradAccumulator]


class Channel(Protocol):
    """A fabric in one call of one rank. All ranks do the same, in the same order."""

    def put(self, transfer: Transfer) -> None:
        """Give own keys to whoever needs them in this transfer."""

    def take(self, transfer: Transfer) -> list[Tensor]:
        """Return the keys that come, k, v and a mask if there is one; let what follows wait."""
        ...

    def grad_accumulators(self, keys: KVBlock) -> KVGrads:
        """Make the accumulators (dk, dv) of others' keys, in memory from which they go home."""
        ...

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        """Give the gradients of others' keys to their owners."""

    def reduce(self, transfer: Transfer) -> None:
        """Add what others have given to the call's totals, always in one order."""


class Fabric(Protocol):
    """A way for the ranks of a ring to give one another tensors."""

    @property
    def ring(self) -> Ring:
        """The ranks."""
        ...

    @property
    def name(self) -> str:
        """The name of what things go through; "" is plain messages."""
        ...

    @property
    def return_path(self) -> str:
        """How gradients go home, as words that follow "go home"."""
        ...

    @property
    def replay(self) -> Replay:
        """What may replay all that it does."""
        ...

    def drain(self) -> None:
        """Let the current stream wait for all that is under way, after a call has failed."""

    def channel(self, program: Program, own: KVBlock, totals: KVGrads | None) -> Channel:
        """Begin a call with own keys; `totals` are accumulators of their gradients, if back."""
        ...

    def swap(
        self, tensors: Sequence[Tensor], ways: Sequence[CopyPlan], outs: Sequence[Tensor]
    ) -> None:
        """Exchange tensors by their plans; write to rooms what arrives at this rank."""
        ...
