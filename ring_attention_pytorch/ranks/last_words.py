"""Last words: what a rank that fails leaves in its group's store, for those who wait for it.

A rank that waits in vain knows its own call only. Others that wait, or have raised, leave word.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

import torch.distributed as dist
from torch.distributed import ProcessGroup

_LONGEST = 300  # characters
_MEANWHILE = 0.4  # seconds in which others that wait, too, leave theirs
_PATIENCE = 1.0  # seconds for all of it: the store may be gone with the rank that has it


def leave(group: ProcessGroup | None, notes: int, words: str) -> None:
    """Leave word of this rank, which has failed after the group compared so many notes."""
    if not isinstance(group, ProcessGroup):
        return
    told = json.dumps([notes, " ".join(words.split())[:_LONGEST]])
    _in_time(lambda: _store().set(_key(group, dist.get_rank(group)), told))


def found(group: ProcessGroup | None, notes: int, ranks: Sequence[int]) -> dict[int, str]:
    """Return the words of those of a group's ranks that have left some since, by rank."""
    words: dict[int, str] = {}
    if isinstance(group, ProcessGroup):
        _in_time(lambda: _look(group, notes, ranks, words))
    return words


def _look(group: ProcessGroup, notes: int, ranks: Sequence[int], words: dict[int, str]) -> None:
    store, end = _store(), time.monotonic() + _MEANWHILE
    while len(words) < len(ranks) and time.monotonic() < end:
        for rank in ranks:
            if rank not in words and store.check([_key(group, rank)]):
                since, text = json.loads(store.get(_key(group, rank)))
                if since >= notes:  # else they are of a failure that was mended
                    words[rank] = text
        time.sleep(0.02)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _key(group: ProcessGroup, rank: int) -> str:
    return f"ring_attention_pytorch/last words/{group.group_name}/{rank}"


def _in_time(work: Callable[[], object]) -> None:
    """Work in a thread, for no longer than a second: what is not known then is not known."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
