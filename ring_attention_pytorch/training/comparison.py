"""Digests of batches, which the ranks of a ring compare.

Reading a digest from a GPU waits for all that was launched before, and then the GPU waits for the
host. A batch that the host has not read otherwise is therefore compared later in its step:

    values on the host      in `shard_batch`, with shapes and options
    values on a GPU         in the block's loss, which compares notes anyway; without a loss at the
                            block's end
    without a block         in the ring's next agreement, before a plan or a loss; that waits
"""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import digest as of_borders
from ring_attention_pytorch.ranks.agreement import agree
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.digests import mixed
from ring_attention_pytorch.runtime.streams import current_stream

# what the host reads of a batch before its ranks compare it
_READ = ("attention_mask", "key_mask", "documents", "cu_seqlens", "position_ids")
_HOST = {"cpu"}  # devices whose values are read without a wait
WORDS = "batch, layout and labels (their digest)"  # of an error, when it differs


class UnreadDigest:
    """A digest of tensors on a GPU, which no rank has read yet: `int(digest)` waits for it alone.

    Attributes:
        of_kinds: a digest of the tensors' names, shapes and dtypes, and of the options.
        compared: whether the ring's ranks have compared it.
    """

    def __init__(self, of_kinds: int, sums: Tensor):
        self.of_kinds: int = of_kinds
        self.compared: bool = False
        self._sums = sums.to("cpu", non_blocking=True)
        self._copied = current_stream(sums.device).record_event() if sums.is_cuda else None

    def __int__(self) -> int:
        if self._copied is not None:
            self._copied.synchronize()
        return crc32(repr((self.of_kinds, self._sums.tolist())).encode())

    def for_note(self) -> int:
        """Return the digest, which ranks compare now: if it differs, they raise that once."""
        self.compared = True
        return int(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Pickle as a number: another process does not compare it."""
        return int, (int(self),)


Digest = int | UnreadDigest


def digest_of_batch(batch: Mapping[str, Any], *options: object, at_once: bool) -> Digest:
    """Return a digest of a batch and its options; on a GPU one to be read later, if possible.

    It is to be read `at_once` if it will leave this process.
    """
    tensors = {name: t for name, t in sorted(batch.items()) if isinstance(t, Tensor)}
    given: list[object] = [of_borders(batch.get("cu_seqlens")), *map(str, options)]
    given += [(name, list(t.shape), t.dtype) for name, t in tensors.items()]
    of_kinds = crc32(repr(given).encode())
    sums = [mixed(t) for t in {id(t): t for t in tensors.values()}.values()]  # labels may be ids
    places = {t.device for t in sums}
    is_read = at_once or any(name in tensors for name in _READ)
    if not is_read and len(places) == 1 and _HOST.isdisjoint(place.type for place in places):
        return UnreadDigest(of_kinds, torch.stack(sums))
    return crc32(repr((of_kinds, [int(t) for t in sums])).encode())


def leave_to_block(ring: Ring, found: Digest | None) -> None:
    """Let ranks compare a digest in its batch's block, and not in the ring's next agreement."""
    if ring.steps.unread is found:
        ring.steps.unread = None


def compare_now(ring: Ring, found: UnreadDigest) -> None:
    """Compare a digest that is still unread among the ring's ranks, which do so together.

    Raises:
        ValueError: ranks have different batches; on all ranks.
    """
    if not found.compared:
        agree(ring, "a batch", {WORDS: found.for_note()})
