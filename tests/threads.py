"""A ring of threads in this process: the cheapest way to run every rank, and the strictest.

Delivery is as late as it may be: a buffer holds NaN until `wait`, and what was sent is read
only when its receiver waits, so a sender that touches it too early is found out.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.ring import Ring

PATIENCE = 30.0  # seconds


class Hub:
    """What the threads of one ring share."""

    def __init__(self, size: int):
        self.size = size
        self.mail: dict[tuple[int, int], Queue] = defaultdict(Queue)
        self.notes: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.exchanges = [0] * size  # of each rank
        self.sent_bytes = [0] * size


class ThreadRing(Ring):
    def __init__(self, hub: Hub, rank: int):
        self.hub, self.rank, self.size, self.first, self.group = hub, rank, hub.size, 0, None

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> "ThreadTransfer":
        self.hub.exchanges[self.rank] += 1
        taken = []
        for rank, t in sends:
            assert rank != self.rank, "a message to oneself"
            assert t.is_contiguous()
            taken.append(threading.Event())
            self.hub.mail[self.rank, rank].put((t, taken[-1]))
            self.hub.sent_bytes[self.rank] += t.nbytes
        for _, t in receives:
            t.fill_(torch.nan if t.is_floating_point() else 1)
        mail = [(self.hub.mail[rank, self.rank], t) for rank, t in receives]
        return ThreadTransfer(mail, taken)

    def gather_bytes(self, message: bytes) -> list[bytes]:
        self.hub.notes[self.rank] = message
        self.hub.barrier.wait()
        notes = list(self.hub.notes)
        self.hub.barrier.wait()
        return notes


class ThreadTransfer:
    def __init__(self, mail: list[tuple[Queue, Tensor]], taken: list[threading.Event]):
        self.mail, self.taken = mail, taken

    def wait(self) -> list[Tensor]:
        for queue, buffer in self.mail:
            try:
                sent, event = queue.get(timeout=PATIENCE)
            except Empty:
                raise TimeoutError("a message never came") from None
            assert (sent.shape, sent.dtype) == (buffer.shape, buffer.dtype), "not what was expected"
            buffer.copy_(sent)
            event.set()
        for event in self.taken:
            if not event.wait(PATIENCE):
                raise TimeoutError("a message was never taken")
        return [buffer for _, buffer in self.mail]


def run(size: int, rank_main: Callable[[ThreadRing], Any]) -> tuple[list[Any], Hub]:
    """`rank_main(ring)` on every rank of a ring; every rank's result, and the hub's counts.

    The first error of any rank is raised, with the others' barriers broken.
    """
    hub, results, errors = Hub(size), [None] * size, []

    def main(rank: int) -> None:
        try:
            results[rank] = rank_main(ThreadRing(hub, rank))
        except BaseException as error:  # handed to the caller's thread
            errors.append(error)
            hub.barrier.abort()

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise (real or errors)[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results, hub
