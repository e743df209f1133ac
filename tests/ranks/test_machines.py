"""Machines: whose names differ, and what overrides them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from ring_attention_pytorch.ranks import machines
from ring_attention_pytorch.ranks.machines import machine_name
from ring_attention_pytorch.ranks.ring import Ring, SubRing
from tests.support import threads

OVERRIDES = "RING_ATTENTION_MACHINE", "NCCL_HOSTID"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@contextmanager
def on(tmp_path: Path, host: str, boot: str, processes: str) -> Iterator[None]:
    """On a machine of that host name, boot id and namespace of processes; "": it has no such."""
    (tmp_path / "boot").unlink(missing_ok=True)
    if boot:
        (tmp_path / "boot").write_text(boot + "\n")
    if processes:
        os.symlink(processes, tmp_path / f"{processes}-link")
    with (
        mock.patch.object(socket, "gethostname", return_value=host),
        mock.patch.object(machines, "_BOOT", str(tmp_path / "boot")),
        mock.patch.object(machines, "_PROCESSES", str(tmp_path / f"{processes}-link")),
    ):
        yield


def test_machines_differ_by_name_by_boot_and_by_who_sees_whose_processes(bare, tmp_path):
    """Two called localhost are two; so are two containers of one machine and of one name."""
    kinds = ("localhost", "1", "p1"), ("localhost", "2", "p2"), ("localhost", "1", "p3")
    names = []
    for kind in (*kinds, ("node7", "1", "p4"), ("node7", "", "")):
        with on(tmp_path, *kind):
            names.append(machine_name())
            assert machine_name() == names[-1]
    assert len({*names}) == 5


def test_our_variable_comes_before_nccl_s_and_both_before_all_else(bare):
    for name, value in zip(reversed(OVERRIDES), ("m1", "m2")):
        bare.setenv(name, value)
        assert machine_name() == value


def test_an_empty_variable_is_none(bare):
    found = machine_name()
    bare.setenv("NCCL_HOSTID", "")
    assert machine_name() == found


def test_machines_are_numbered_from_the_ring_s_first_rank():
    def main(ring: threads.ThreadRing) -> tuple[tuple[int, ...], ...]:
        return ring.machines, SubRing(ring, range(4)).machines, SubRing(ring, [3, 1, 0, 2]).machines

    found, _ = threads.run(4, main, machines=(7, 3, 7, 3))
    assert found == [((0, 1, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1))] * 4
    assert Ring.alone().machines == (0,)


def of_own_name() -> tuple[int, ...]:
    """For a pool: odd and even ranks are on two machines, in a group that is new."""
    import torch.distributed as dist

    with mock.patch.dict(os.environ, RING_ATTENTION_MACHINE=f"m{dist.get_rank() % 2}"):
        return Ring(dist.new_group()).machines


def test_processes_find_out_who_shares_their_machine(pools):
    assert pools(2).run(of_own_name) == [(0, 1)] * 2
