"""Streams of GPUs that are late at random, and buffers that are full of NaN until written."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.fabric_kernels import KernelChannel
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.symmetric_memory import SymmetricBuffer
from ring_attention_pytorch.kernels import _flash
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.streams import side_stream
from ring_attention_pytorch.runtime.tape import Tape


@contextmanager
def delays() -> Iterator[None]:
    """Buffers that are full of NaN until they are written, and streams that are late at random.

    So are calls of kernels that run side by side.
    """
    own, publish, follow, meet = (
        SymmetricBuffer.write_view,
        SymmetricBuffer.publish,
        SymmetricBuffer.side_stream_follows,
        SymmetricBuffer.wait_for_readers,
    )

    def poisoned(buffer: SymmetricBuffer, form: Form) -> list[Tensor]:
        views = own(buffer, form)
        buffer.memory[buffer.slot].fill_(255)
        return views

    def publish_late(buffer: SymmetricBuffer) -> None:
        _sleep()
        publish(buffer)
        _sleep()

    def follow_late(buffer: SymmetricBuffer) -> None:
        _sleep()  # on the stream that computes
        follow(buffer)

    def meet_late(buffer: SymmetricBuffer) -> None:
        _sleep()
        meet(buffer)
        if len(buffer.memory) == 1:  # written next
            buffer.memory.fill_(255)

    @contextmanager
    def aside_late(*how: object) -> Iterator[None]:
        with side_stream(*how):
            _sleep()
            yield
            _sleep()

    written = KernelChannel._written

    def written_as_is(call: KernelChannel) -> list[Tensor]:
        """Meeting and writing are one launch, and before it others may still read."""
        with mock.patch.object(SymmetricBuffer, "write_view", own):
            return written(call)

    def late(visit: Callable[..., None], after: bool = True) -> Callable[..., None]:
        def run(*given: object) -> None:
            _sleep()
            visit(*given)
            if after:
                _sleep()

        return run

    SymmetricBuffer.write_view, SymmetricBuffer.publish, SymmetricBuffer.side_stream_follows = (
        poisoned,
        publish_late,
        follow_late,
    )
    SymmetricBuffer.wait_for_readers = meet_late
    try:
        with (
            mock.patch.object(_flash, "side_stream", aside_late),
            mock.patch.object(KernelChannel, "_written", written_as_is),
            mock.patch.object(fused_copies, "write", late(fused_copies.write)),
            mock.patch.object(fused_copies, "pull", late(fused_copies.pull)),
            mock.patch.object(fused_copies, "add_up", late(fused_copies.add_up)),
            mock.patch.object(Tape, "run", _untaped),  # which know nothing of what is late
        ):
            yield
    finally:
        (
            SymmetricBuffer.write_view,
            SymmetricBuffer.publish,
            SymmetricBuffer.side_stream_follows,
            SymmetricBuffer.wait_for_readers,
        ) = own, publish, follow, meet


def _untaped(
    _: Tape, function: Callable, plan: RingPlan, given: tuple[object, ...]
) -> tuple[Tensor | None, ...]:
    return function(plan, *given)


def _sleep() -> None:
    torch.cuda._sleep(random.choice((0, 0, 20_000, 400_000)))  # cycles
