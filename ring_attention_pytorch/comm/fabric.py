"""The interface of a fabric, which moves bytes between the ranks of a ring.

    a program's step         GatherCall            a fabric's channel
    start keys         ─►    start(number)   ─►    put(transfer)             own keys, for peers
    wait for keys      ─►    wait(number)    ─►    take(transfer)            peers' keys
    compute            ─►    grads(part)     ─►    grad_accumulators(keys)   for their gradients
    start gradients    ─►    start(number)   ─►    give(transfer)            to the keys' owners
    wait for gradients ─►    wait(number)    ─►    reduce(transfer)          own gradients, summed

A gather's program and Ulysses' copy plans decide, as ints, the tensors and their order.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from torch import Tensor

from ring_attention_pytorch.comm.all_to_all import CopyPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.steps import Transfer

KVGrads = tuple[GradAccumulator, GradAccumulator]


class Channel(Protocol):
    """A fabric in one call of one rank. All ranks make the same calls in the same order."""

    def put(self, transfer: Transfer) -> None:
        """Publish own keys for the ranks that need them in this transfer."""

    def take(self, transfer: Transfer) -> list[Tensor]:
        """Return the arriving keys (k, v and any mask); the current stream waits for them."""
        ...

    def grad_accumulators(self, keys: KVBlock) -> KVGrads:
        """Return accumulators (dk, dv) for a peer's keys, in memory that can be sent home."""
        ...

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        """Start sending gradients of peers' keys to their owners."""

    def reduce(self, transfer: Transfer) -> None:
        """Add the peers' gradients of own keys to the call's totals, in a fixed order."""


class Fabric(Protocol):
    """A way to move tensors between the ranks of a ring."""

    @property
    def ring(self) -> Ring:
        """The ranks."""
        ...

    @property
    def name(self) -> str:
        """A name for `explain_plan`; "" for messages."""
        ...

    @property
    def return_path(self) -> str:
        """How gradients return, as a phrase that follows "go home"."""
        ...

    @property
    def sends_messages(self) -> bool:
        """True if calls wait for the host, so that no CUDA graph can capture them."""
        ...

    @property
    def taped(self) -> bool:
        """True if a tape can record calls: all is on the current stream, and nothing waits."""
        ...

    def follow_stream(self) -> Hashable:
        """Wait for earlier calls on other streams; return a key of the shared memory."""
        ...

    def drain(self) -> None:
        """Make the current stream wait for everything in flight, after a failed call."""

    @property
    def channel_type(self) -> Callable[..., Channel]:
        """The class of its channels.

        One is made of the fabric, a program, own keys, and backward of the accumulators of their
        gradients.
        """
        ...

    def swap(
        self, tensors: Sequence[Tensor], ways: Sequence[CopyPlan], outs: Sequence[Tensor]
    ) -> None:
        """Exchange tensors by their plans; write the received ones to `outs`."""
        ...
