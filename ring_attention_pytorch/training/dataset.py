"""A stream of a corpus's sequences; each rank of a ring gets its part of each sequence.

    documents, shuffled by seed     aaaaa bb cccccccc ddd ...
    packed to a length              aaaaabbcccc | ccccddd... |
    this rank's part                a.a..b.c..c   by `shard_batch`, labels included

The order of sequences depends only on seed and epoch, so a run can continue with rings of another
size, or with more of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.geometry.layouts import Layout, check_layout, positions
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.training.batches import AUTO, ShardedBatch, shard_batch

_IGNORE = -100
_SAMPLE = 1024  # tokens of a sequence that all ranks read, to check that they have the same file
_AHEAD = (
    "the worker of a DataLoader makes this dataset's batches, ahead of who takes them; the last "
    "batch that was taken has the state: load_state_dict(batch.state) to go on, or that of the "
    "beginning to begin again"
)
Document = Tensor | Sequence[int]
Sample = tuple[Tensor, list[int]]  # length + 1 ids, and the starts of documents among them


class TokenFile:
    """A file of raw tokens, mapped into memory: a rank reads its own tokens, and a small sample.

    Args:
        path: the file.
        dtype: of each token in it.

    Raises:
        ValueError: the file is not a whole number of tokens.
    """

    @checked
    def __init__(self, path: str | Path, dtype: torch.dtype = torch.uint16):
        size = Path(path).stat().st_size
        if size % dtype.itemsize:
            raise ValueError(f"{path} has {size} bytes, no whole number of tokens of {dtype}")
        tokens = size // dtype.itemsize
        self.tokens: Tensor = torch.from_file(str(path), size=tokens, dtype=dtype)

    def __len__(self) -> int:
        return len(self.tokens)

    def sample(self, numbers: Sequence[int], length: int) -> list[int]:
        """Return numbers by which ranks compare their files, though they read different tokens.

        They are the file's length, and for each of these sequences of `length` tokens a digest of
        some consecutive ones: a page or two of memory, at a different place in each sequence.
        """
        found = [len(self)]
        for number in numbers:
            first = number * length + number * _SAMPLE % max(1, length - _SAMPLE)
            stop = min(first + _SAMPLE, number * length + length)
            found.append(digest(self.tokens[first:stop]))
        return found


class SequenceShardedDataset(IterableDataset[ShardedBatch]):
    """An endless stream of batches of sequences of one length; this rank gets its part of each.

    Iterate it directly, or through a DataLoader with `batch_size=None` and at most one worker. A
    new iterator continues where the last one stopped; `batch.state` is that place after each batch.
    A worker reads ahead of the training loop. With one, `state_dict()` and a new iterator raise
    until `load_state_dict(batch.state)` sets the place to continue from.

    Args:
        source: a `TokenFile`, cut into sequences; or documents, each a list or tensor of ids, which
            are packed one after another. Documents with a length and an index can be shuffled, and
            repeat without end; others, such as an iterator's, are read in order, once.
        length: tokens per sequence.
        batch_size: sequences per batch.
        rank, ring_size: this rank's place in its ring.
        replica, replicas: the number of this ring among several; each gets its own batches.
        seed: shuffles a file's sequences, or documents, anew in each epoch. None keeps their order.
        layout: as for `shard_batch`.

    Raises:
        ValueError: numbers contradict one another, or a file is shorter than a sequence.

    >>> words = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    >>> how = dict(length=4, batch_size=1, ring_size=2, layout="contiguous")
    >>> for rank in range(2):
    ...     batch = next(iter(SequenceShardedDataset(words, rank=rank, **how)))
    ...     print(batch["input_ids"].tolist(), batch.labels.tolist())
    [[1, 2]] [[2, 3]]
    [[3, 4]] [[-100, 5]]
    """

    @checked
    def __init__(
        self,
        source: TokenFile | Iterable[Document],
        *,
        length: int,
        batch_size: int,
        rank: int,
        ring_size: int,
        replica: int = 0,
        replicas: int = 1,
        seed: int | None = None,
        layout: Layout = AUTO,
    ):
        if min(length, batch_size) < 1 or not 0 <= rank < ring_size or not 0 <= replica < replicas:
            raise ValueError(
                "a dataset needs length and batch_size of at least 1, 0 <= rank < ring_size and "
                f"0 <= replica < replicas; got {length}, {batch_size}, {rank} of {ring_size}, "
                f"{replica} of {replicas}"
            )
        if layout != AUTO:
            check_layout(layout, ring_size, length)
        if isinstance(source, TokenFile) and len(source) <= length:
            raise ValueError(f"a sequence takes {length + 1} tokens, the file has {len(source)}")
        if isinstance(source, Sequence) and not any(len(document) for document in source):
            raise ValueError("there is no token in the documents")
        if seed is not None and not isinstance(source, TokenFile | Sequence):
            raise ValueError("documents that can't be indexed can't be shuffled; leave seed out")
        self.source: Any = source
        self.length: int = length
        self.batch_size: int = batch_size
        self.place: dict[str, Any] = dict(rank=rank, ring_size=ring_size)
        self.replica: int = replica
        self.replicas: int = replicas
        self.seed: int | None = seed
        self.layout: Layout = layout
        self._done = 0  # batches that all replicas have taken, in this process
        self._batches: Iterator[Any] | None = None  # of all replicas, from number `_at` on
        self._at = 0
        # the batch at which a new iterator begins, and whether a worker has begun one there
        with torch.inference_mode(False):  # otherwise only inference mode could write it
            self._shared = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()

    @checked
    def state_dict(self) -> dict[str, int | None]:
        """Return the place of the next batch, valid for any number of ranks and rings.

        Raises:
            ValueError: a DataLoader's worker makes the batches, and this is another process.
        """
        if get_worker_info() is None and self._shared[1]:
            raise ValueError(f"state_dict(): {_AHEAD}")
        return self._state()

    def _state(self) -> dict[str, int | None]:
        return {"sequences": self._done * self.batch_size, "seed": self.seed, "length": self.length}

    @checked
    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Continue from a state: from `state_dict()`, or `batch.state`.

        Raises:
            ValueError: the state has another seed, length or batch size.
        """
        sequences, mine = state["sequences"] or 0, self._state()
        same = {name: mine[name] for name in ("seed", "length")}
        if {name: state[name] for name in same} != same or sequences % self.batch_size:
            raise ValueError(
                f"the state is {state}, which is not of batches of {self.batch_size} with {same}"
            )
        self._done = sequences // self.batch_size
        self._shared.copy_(torch.tensor([self._done, 0]))

    def __iter__(self) -> Iterator[ShardedBatch]:
        """Yield this replica's batches, from where the last iterator stopped.

        Raises:
            ValueError: there are several workers; or one has read ahead, and how many of its
                batches were used is unknown; or an iterator's documents, partly read, would have to
                start anew. The first batch raises it: a worker can't report it before.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"workers would repeat batches; take 1, not {worker.num_workers}")
        if self._shared[1]:
            raise ValueError(f"a new iterator: {_AHEAD}")
        if worker is not None:
            self._done = int(self._shared[0])  # a persistent worker has read ahead
            self._shared[1] = 1
        while (batch := self._take()) is not None:
            yield batch

    def _take(self) -> ShardedBatch | None:
        """Return this replica's next batch, and skip the other replicas'; None at the end."""
        make = self._batch(self._done + self.replica)
        if make is None:
            return None
        batch = make()
        self._done += self.replicas  # includes the other replicas' batches
        if get_worker_info() is None:
            self._shared[0] = self._done
        return replace(batch, state=self._state())

    def _batch(self, number: int) -> Any:
        """Return a function that makes batch `number` of all replicas; None past the last one."""
        once = isinstance(self.source, Iterator)
        if once and self._batches is not None and number < self._at:
            raise ValueError(
                "documents of an iterator come once, and these are gone: give the dataset a new "
                "iterator, or documents that can be read again, to go back"
            )
        if self._batches is None or number < self._at:
            first = number if isinstance(self.source, TokenFile) else 0
            self._at, self._batches = first, self._from(first)
        make = next(islice(self._batches, number - self._at, None), None)
        if make is not None:
            self._at = number + 1
        return make

    def _from(self, first: int) -> Iterator[Any]:
        of_file = isinstance(self.source, TokenFile)
        return self._of_file(first) if of_file else self._of_documents()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stream, which a copy in another process opens anew.

        Raises:
            ValueError: the stream has begun an iterator, which would continue in two places.
        """
        if self._batches is not None and isinstance(self.source, Iterator):
            raise ValueError("a dataset of an iterator that has begun can't be copied")
        return {**self.__dict__, "_batches": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._shared.is_shared():  # a worker shares its parent process's tensor
            self._shared = self._shared.clone().share_memory_()

    def _of_file(self, first: int) -> Iterator[Any]:
        """Yield functions that make the file's batches, from batch `first` on."""
        sequences = (len(self.source) - 1) // self.length
        layout = "zigzag" if self.layout == AUTO else self.layout
        held = positions(layout, **self.place, length=self.length)

        def batch(numbers: list[int]) -> ShardedBatch:
            at = torch.tensor(numbers)[:, None] * self.length + held
            ids, labels = (self.source.tokens[where].long() for where in (at, at + 1))
            tensors = {
                "input_ids": ids, "position_ids": held.expand_as(ids), "shift_labels": labels,
            }  # fmt: skip
            items = torch.tensor(len(numbers) * self.length)
            told = crc32(repr((numbers, self.source.sample(numbers, self.length))).encode())
            return ShardedBatch(
                tensors, layout, self.length, **self.place, num_items=items, uncompared=told,
                digest=told,
            )  # fmt: skip

        order = self._order(sequences, first * self.batch_size)
        while True:
            numbers = list(islice(order, self.batch_size))
            yield lambda numbers=numbers: batch(numbers)

    def _of_documents(self) -> Iterator[Any]:
        """Yield functions that make batches of packed documents."""

        def batch(samples: list[Sample]) -> ShardedBatch:
            ids = torch.stack([sample for sample, _ in samples])
            labels, borders = ids[:, 1:].clone(), []
            for row, (_, starts) in zip(labels, samples):
                row[[start - 1 for start in starts[1:]]] = _IGNORE  # not predicted across a border
                borders.append(sorted({*starts, self.length}))
            whole = {"input_ids": ids[:, :-1], "labels": labels, "cu_seqlens": borders}
            return shard_batch(whole, layout=self.layout, shift_labels=False, **self.place)

        samples = self._packed()
        while len(found := list(islice(samples, self.batch_size))) == self.batch_size:
            yield lambda found=found: batch(found)

    def _packed(self) -> Iterator[Sample]:
        """Yield sequences of `length + 1` tokens; the last token is the next sequence's first."""
        held, starts = torch.empty(0, dtype=torch.long), [0]
        for document in self._documents():
            if len(held) and len(document):
                starts.append(len(held))
            held = torch.cat((held, torch.as_tensor(document, dtype=torch.long)))
            while len(held) > self.length:
                yield held[: self.length + 1], [s for s in starts if s <= self.length]
                starts = [0, *(s - self.length for s in starts if s > self.length)]
                held = held[self.length :]

    def _documents(self) -> Iterator[Document]:
        if not isinstance(self.source, Sequence):
            yield from self.source
            return
        for number in self._order(len(self.source), 0):
            yield self.source[number]

    def _order(self, numbers: int, first: int) -> Iterator[int]:
        """Yield numbers below `numbers`, shuffled anew in each epoch, without end."""
        for epoch in count(first // numbers):
            order = list(range(numbers))
            if self.seed is not None:
                draw = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
                order = torch.randperm(numbers, generator=draw).tolist()
            yield from order[first % numbers if epoch == first // numbers else 0 :]
