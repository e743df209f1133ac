"""Memory that ranks share: its tables, its halves, and how long it stays."""

import os
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ring_attention_pytorch.comm import fused_copies, symmetric_memory
from ring_attention_pytorch.comm.symmetric_memory import SymmetricBuffer
from ring_attention_pytorch.ranks.ring import Ring, SubRing


def test_of_many_tables_the_one_asked_for_longest_ago_is_given_up(monkeypatch):
    monkeypatch.setattr(symmetric_memory, "_MOST_CACHED", 2)
    monkeypatch.setattr(symmetric_memory, "capturing", lambda device: False)
    buffer = SimpleNamespace(device=torch.device("cpu"), tables={}, read_by_graphs=set())
    made = []

    def asked(kind: str) -> None:
        def make() -> SimpleNamespace:
            made.append(kind)
            return SimpleNamespace(table=torch.zeros(1))

        symmetric_memory.SymmetricBuffer.table(buffer, kind, make)

    for kind in ("a", "b", "a", "c", "a", "b"):
        asked(kind)
    assert made == ["a", "b", "c", "b"]


def test_both_slots_of_a_buffer_start_where_any_dtype_may(monkeypatch):
    def buffer(group: None, device: None, nbytes: int, meet: None, halves: int) -> SimpleNamespace:
        return SimpleNamespace(nbytes=nbytes, captured=False, memory=[None] * halves)

    monkeypatch.setattr(symmetric_memory, "SymmetricBuffer", buffer)
    monkeypatch.setattr(symmetric_memory, "timeout_of", lambda group: timedelta(seconds=1))
    monkeypatch.setattr(symmetric_memory, "allocate", lambda *_: (None, [], None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(symmetric_memory, "Ring", lambda group: Ring.alone())
    space = symmetric_memory.SymmetricWorkspace(group, torch.device("cpu"), Ring.alone(), range(2))
    space.reserve(None, keys=22_369_622, grads=5)
    assert space.keys.nbytes >= 22_369_622
    assert space.keys.nbytes % 512 == space.grads.nbytes % 512 == 0


def test_buffers_stay_whose_graphs_others_captured(monkeypatch):
    """What no graph has seen need not stay."""
    device = torch.device("cpu")

    def written() -> symmetric_memory.SymmetricBuffer:
        buffer = symmetric_memory.SymmetricBuffer.__new__(symmetric_memory.SymmetricBuffer)
        buffer.slot, buffer.device, buffer.captured, buffer.views = (
            0,
            device,
            False,
            {(0, 0, ()): []},
        )
        buffer.rank = 0
        buffer.local_view(())
        return buffer

    monkeypatch.setattr(symmetric_memory, "capturing", lambda device: False)
    assert not written().captured
    monkeypatch.setattr(symmetric_memory, "capturing", lambda device: True)
    assert written().captured


def test_what_a_graph_reads_is_made_before_it_and_stays(monkeypatch):
    """And of what no graph reads nothing stays. What is asked for too late there is not."""
    capturing = False
    monkeypatch.setattr(symmetric_memory, "capturing", lambda device: capturing)

    def buffer() -> SymmetricBuffer:
        new = SymmetricBuffer.__new__(SymmetricBuffer)
        new.device, new.tables, new.read_by_graphs = torch.device("cpu"), {}, set()
        return new

    here, t = slice(0, 2), torch.zeros(1, 2, 2, 4)
    pieces = [t], [[t]], [[fused_copies.Move(0, here, here, here, here)]]
    swaps = buffer()
    made = fused_copies.table_of_pieces(swaps, "one", *pieces)
    assert not swaps.read_by_graphs
    capturing = True
    assert fused_copies.table_of_pieces(swaps, "one", *pieces) is made
    assert swaps.read_by_graphs == {made.table}
    assert fused_copies.table_of_pieces(swaps, "another", *pieces) is None
    assert fused_copies.table_of_pieces(buffer(), "one", *pieces) is None


class Space:
    """A workspace without memory."""

    def __init__(self, group: ProcessGroup, *_: object) -> None:
        self.group, self.board = group, mock.Mock(trouble=lambda: None)


def near_of(extra: int, without: int) -> tuple[list[int], tuple[int, ...]] | None:
    """For a pool: who shares memory with this rank, ranks 1 and 3 being on a machine of their own.

    Rank `extra` has a group of itself beside, and rank `without` can share nothing.
    """
    me, device = dist.get_rank(), torch.device("cuda", 0)
    alone = [dist.new_group([me], use_local_synchronization=True)] if me == extra else []
    name = "" if me == without else "some machine"
    with (
        mock.patch.dict(os.environ, RING_ATTENTION_MACHINE=f"m{me % 2}"),
        mock.patch.object(symmetric_memory, "SymmetricWorkspace", Space),
        mock.patch.object(symmetric_memory, "_sharing_host", return_value=name),
    ):
        ring = Ring(dist.new_group())
        near = symmetric_memory.near_by(ring, device)
        assert symmetric_memory.near_by(ring, torch.device("cpu")) is None
        assert symmetric_memory.near_by(ring, device, together=2) is None, "two machines"
        again = symmetric_memory.near_by(SubRing(ring, (2, 3, me)[: 2 + (me < 2)]), device, 1)
    for group in alone:
        dist.destroy_process_group(group)
    if near is None:
        assert again is None
        return None
    assert again.space is near.space
    assert again.ranks[:2] == near.ranks[2:4]
    return dist.get_process_group_ranks(near.space.group), near.ranks


def test_each_machine_has_memory_of_its_own_or_none_has(pools):
    """Ranks with other numbers of groups would give their machine's group another name."""
    odd, even = ([1, 3], (-1, 0, -1, 1)), ([0, 2], (0, -1, 1, -1))
    pool = pools(4)
    pool.stop()  # earlier tests leave groups on some ranks; new ranks have equally many
    assert pool.run(near_of, -1, -1) == [even, odd, even, odd]
    assert pool.run(near_of, 2, -1) == [None] * 4
    assert pool.run(near_of, -1, 3) == [None] * 4
