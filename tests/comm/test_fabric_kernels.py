"""Swaps of heads in shared memory, by kernels on one stream."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.ulysses import HeadPartition, key_heads, land
from ring_attention_pytorch.geometry.layouts import all_segments


class RecordingBuffer:
    """A buffer of two ranks that notes what is done with it, and has a table for each kind."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.kinds: dict[object, object] = {}
        self.memory = [torch.zeros(1 << 12, dtype=torch.uint8) for _ in range(2)]

    def wait_for_readers(self) -> None:
        self.told.append("all have read")

    def read_barrier(self) -> str:
        return "all have written"

    def local_view(self, form: Form) -> list[Tensor]:
        return self.peer_view(0, form)

    def peer_view(self, rank: int, form: Form) -> list[Tensor]:
        return form.open(self.memory[rank])

    def table(self, kind: object, make: Callable[[], object]) -> object:
        return self.kinds.setdefault(kind, make())


def swaps_in_shared_memory(patch: pytest.MonkeyPatch) -> None:
    """Ranks meet, write, meet and take; of the same tokens and heads there is one table."""
    buffer, waited = RecordingBuffer(), []
    space = SimpleNamespace(swaps=buffer, follow_stream=lambda: waited.append("waits"))
    space.keys = space.grads = None
    swap = OneStream(SimpleNamespace(rank=0, size=2), space, (0, 1))
    assert swap.follow_stream() == (None, None, buffer)
    assert waited == ["waits"]

    def take(visit: fused_copies.FusedCopy, *rooms: Tensor) -> None:
        written = [t.flatten()[0].item() for t in buffer.local_view(forms[0])]
        buffer.told.append((visit.barrier, visit.table, written, [t.shape for t in rooms]))

    patch.setattr(fused_copies, "take", take)
    q, kinds = torch.full((1, 6, 4, 8), 3.0), []
    for length, dtype in ((6, q.dtype), (6, q.dtype), (6, torch.float64), (5, q.dtype)):
        shards = all_segments("zigzag", 2, 2 * length)
        spread = HeadPartition((length,) * 2, length, land(shards)[1], key_heads(4, 4, 2))
        given, way = q[:, :length].to(dtype), spread.to_heads
        forms = [Form.of_parts((way.part(given, place),)) for place in range(2)]
        room = way.alloc(given, 0)
        swap.swap([given], [way], [room])
        first, (barrier, table, written, shapes) = buffer.told[-2:]
        assert (first, barrier, written) == ("all have read", "all have written", [3.0])
        assert shapes == [(1, 2 * length, 2, 8)]
        kinds.append(table)
    assert kinds[0] is kinds[1]
    assert len({id(table) for table in kinds}) == 3
    assert len(buffer.told) == 8


def test_swaps_in_shared_memory(monkeypatch):
    swaps_in_shared_memory(monkeypatch)
