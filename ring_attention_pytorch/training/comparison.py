"""Digests of batches, which the ranks of a ring compare.

Reading a digest from a GPU waits for all that was launched before, and then the GPU waits for the
host. A batch that the host has not read otherwise is therefore compared later in its step:

    values on the host      in `shard_batch`, with shapes and options
    values on a GPU         in the block's loss, which compares notes anyway; without a loss at the
                            block's end; without a block in the ring's next `shard_batch`
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import digest as of_borders
from ring_attention_pytorch.ranks.agreement import agree
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.digests import digest, mixed
from ring_attention_pytorch.runtime.streams import current_stream
from ring_attention_pytorch.training.loss_inputs import reads_at_once

# what the host reads of a batch before its ranks compare it
_READ = ("attention_mask", "key_mask", "documents", "cu_seqlens", "position_ids")
WORDS = "batch, layout and labels (their digest)"  # of an error, when it differs


class UnreadDigest:
    """A digest of tensors on a GPU, which no rank has read yet: `int(digest)` waits for it alone.

    Attributes:
        of_kinds: a digest of the tensors' names, shapes and dtypes, and of the options.
        compared: whether the ring's ranks have compared it.
    """

    def __init__(self, options: Sequence[object], tensors: Mapping[str, Tensor]):
        kinds = [(name, list(t.shape), t.dtype) for name, t in tensors.items()]
        self.of_kinds: int = crc32(repr((options, kinds)).encode())
        self.compared: bool = False
        sums = torch.stack([mixed(t) for t in {id(t): t for t in tensors.values()}.values()])
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
    given = [of_borders(batch.get("cu_seqlens")), *map(str, options)]
    is_read = at_once or any(name in tensors for name in _READ)
    places = {t.device for t in tensors.values()}
    if not is_read and len(places) == 1 and not any(map(reads_at_once, tensors.values())):
        return UnreadDigest(given, tensors)
    known: dict[int, int] = {}  # by tensor: labels are often the ids themselves
    for t in tensors.values():
        if id(t) not in known:
            known[id(t)] = digest(t)
    return crc32(repr((given, [(name, known[id(t)]) for name, t in tensors.items()])).encode())


def of_batch_before(ring: Ring) -> dict[str, int]:
    """Return the digest of the ring's batch before for the next note, if it was never compared."""
    before: UnreadDigest | None = ring.steps.unread
    ring.steps.unread = None
    if before is None or before.compared:
        return {}
    return {"the batch before (its digest)": before.for_note()}


def compare_now(ring: Ring, found: Digest | None) -> None:
    """Compare a digest that is still unread among the ring's ranks, which do so together.

    Raises:
        ValueError: ranks have different batches; on all ranks.
    """
    if isinstance(found, UnreadDigest) and not found.compared:
        agree(ring, "a batch", {WORDS: found.for_note()})
