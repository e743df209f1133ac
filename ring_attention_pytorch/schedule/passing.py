"""The ways of a message of each rank to all ranks, across to each machine once. Arithmetic on ints.

owner ──► ranks of its machine, and its relay on each other one
          relay ──► the other ranks of its machine
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ring_attention_pytorch.schedule.relays import Machines, members, relay, worth_an_exchange


class Passes(NamedTuple):
    """One rank's messages, in two exchanges: of owners, then of relays.

    The own message goes to the ranks `to`, and messages of the owners `straight` come from these.
    `passed` has the receiver and the owner of each message that this rank passes on, `relayed` the
    sender and the owner of each that is passed on to it.
    """

    to: tuple[int, ...]
    straight: tuple[int, ...]
    passed: tuple[tuple[int, int], ...]
    relayed: tuple[tuple[int, int], ...]

    @property
    def sent(self) -> int:
        """The number of messages that this rank sends, own ones and others'."""
        return len(self.to) + len(self.passed)


def passes_spare(machines: Machines) -> bool:
    """True if ranks share machines, of which there are several.

    >>> [passes_spare(machines) for machines in ((0, 0, 0), (0, 1, 2), (0, 0, 1))]
    [False, False, True]
    """
    return len({*machines}) not in (1, len(machines))


def passing_machines(machines: Machines, sizes: Sequence[int]) -> Machines:
    """Return the machines for `passes`: as they are, or one for all, whose ranks send directly.

    They do if the bytes spared between machines take less time than one more exchange. `sizes` are
    bytes of each rank's message. All ranks decide alike.

    >>> [passing_machines((0, 0, 1, 1), [size] * 4) for size in (1 << 10, 1 << 30)]
    [(0, 0, 0, 0), (0, 0, 1, 1)]
    """
    if passes_spare(machines):
        far = [len(machines) - machines.count(machine) for machine in machines]
        direct = max(size * ranks for size, ranks in zip(sizes, far))
        if not worth_an_exchange(direct - max(sizes) * (len({*machines}) - 1)):
            return (0,) * len(machines)
    return machines


def merging_machines(machines: Machines, nbytes: int) -> Machines | None:
    """Return the machines whose ranks merge messages of so many bytes before these cross.

    None if ranks send them directly: where the bytes spared take less time than one more exchange,
    after which each rank sends a piece of its machine's result, or two, if relays pass pieces on.

    >>> merging_machines((0, 0, 1, 1), 1 << 30)
    (0, 0, 1, 1)
    >>> eights = (0,) * 8 + (1,) * 8
    >>> [merging_machines(eights, 32 * 129 * 4 * sequences) == eights for sequences in (1, 64)]
    [False, True]
    """
    if not passes_spare(machines):
        return None
    near = [*map(machines.count, machines)]
    direct = max(nbytes * (len(machines) - n) for n in near)
    pieces = max(nbytes * (len(machines) - n) // n for n in near)
    relayed = nbytes * (len({*machines}) - 1)  # of a rank that is alone; for others pieces decide
    spared = max(direct - pieces, (direct - relayed) // 2)
    return machines if worth_an_exchange(spared) else None


def merged_pieces(machines: Machines, numbers: int, itemsize: int) -> tuple[list[int], Machines]:
    """Return how many numbers of its machine's result each rank sends, and machines for `passes`.

    A result has so many `numbers`, of `itemsize` bytes each.

    >>> merged_pieces((0, 0, 0, 1), 8, 4)
    ([3, 3, 2, 8], (0, 0, 0, 0))
    """
    pieces = [
        -((machines[:rank].count(machine) - numbers) // machines.count(machine))
        for rank, machine in enumerate(machines)
    ]
    return pieces, passing_machines(machines, [piece * itemsize for piece in pieces])


@lru_cache(maxsize=256)
def passes(machines: Machines, rank: int) -> Passes:
    """Return a rank's messages.

    >>> passes((0, 0, 0, 1), 3)
    Passes(to=(0,), straight=(0, 1, 2), passed=(), relayed=())
    >>> passes((0, 0, 0, 1), 0)
    Passes(to=(1, 2, 3), straight=(1, 2, 3), passed=((1, 3), (2, 3)), relayed=())
    """
    mine = machines[rank]
    near = [other for other in members(machines, mine) if other != rank]
    far = [other for other, machine in enumerate(machines) if machine != mine]
    other_relays = [relay(machines, machine, rank) for machine in {*machines} - {mine}]
    straight, passed, relayed = [*near], [], []
    for owner in far:
        by = relay(machines, mine, owner)
        if by == rank:
            straight.append(owner)
            passed += [(receiver, owner) for receiver in near]
        else:
            relayed.append((by, owner))
    return Passes(
        tuple(sorted([*near, *other_relays])),
        tuple(sorted(straight)),
        tuple(passed),
        tuple(relayed),
    )
