"""The name of this process's machine: ranks of one name can share memory."""

import os
import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress

_BOOT = "/proc/sys/kernel/random/boot_id"
_PROCESSES = "/proc/self/ns/pid"


def machine_name() -> str:
    """Return the name of this process's machine, by which all ranks decide who shares memory.

    `RING_ATTENTION_MACHINE` is the name if it is set, otherwise `NCCL_HOSTID`, so that machines
    emulated for NCCL are machines here, too. Without them it is the host's name with the kernel's
    boot id, as in NCCL: two machines may both be called localhost. It ends with the namespace of
    process ids, since memory is shared by process id: containers that do not see each other's
    processes are two machines, even if both have one name.

    >>> machine_name() == machine_name()
    True
    """
    given = os.environ.get("RING_ATTENTION_MACHINE") or os.environ.get("NCCL_HOSTID")
    if given:
        return given
    parts = [socket.gethostname(), "", ""]
    with suppress(OSError), open(_BOOT, encoding="ascii") as file:
        parts[1] = file.read().strip()
    with suppress(OSError):
        parts[2] = os.readlink(_PROCESSES)
    return " ".join(parts)


def numbered(names: Sequence[Hashable]) -> tuple[int, ...]:
    """Return a number for each name: 0 for the first, and for all that are equal to it.

    >>> numbered(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def are_apart(machines: Sequence[int], together: int) -> bool:
    """True if any neighbours, so many `together`, are not all on one machine.

    >>> [are_apart((0, 0, 1, 1, 0, 0), together) for together in (1, 2, 3)]
    [False, False, True]
    """
    starts = range(0, len(machines), together)
    return any(len({*machines[at : at + together]}) > 1 for at in starts)
