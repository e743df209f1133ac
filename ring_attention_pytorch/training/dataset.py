"""Sequences of a corpus, one after another: each rank of a ring gets its part of each.

    documents, shuffled by seed     aaaaa bb cccccccc ddd ...
    packed to a length              aaaaabbcccc | ccccddd... |
    this rank's part                a.a..b.c..c   what `shard_batch` says, labels included

The order of sequences depends on seed and epoch alone. So a run can go on with rings of another
size, or more of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.geometry.layouts import Layout, layout_problem, positions
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.training.batches import AUTO, ShardedBatch, shard_batch

_IGNORE = -100
_SAMPLE = 1024  # tokens of a sequence that all ranks read, to find out whether they read one file
Document = Tensor | Sequence[int]
Sample = tuple[Tensor, list[int]]  # length + 1 ids, and where among them documents begin


class TokenFile:
    """A file of nothing but tokens, mapped into memory: a rank reads what it holds, and a sample.

    Args:
        path: the file.
        dtype: of a token in it.

    Raises:
        ValueError: the file is not a whole number of tokens.
    """

    tokens: Tensor

    @checked
    def __init__(self, path: str | Path, dtype: torch.dtype = torch.uint16):
        size = Path(path).stat().st_size
        if size % dtype.itemsize:
            raise ValueError(f"{path} has {size} bytes, no whole number of tokens of {dtype}")
        tokens = size // dtype.itemsize
        self.tokens = torch.from_file(str(path), size=tokens, dtype=dtype)

    def __len__(self) -> int:
        return len(self.tokens)

    def sample(self, numbers: Sequence[int], length: int) -> list[int]:
        """Return what tells files apart of which ranks read different tokens.

        It is the file's length, and a digest of some consecutive tokens in each of these sequences
        of that length: of a page or two of memory, at another place in each.
        """
        found = [len(self)]
        for number in numbers:
            first = number * length + number * _SAMPLE % max(1, length - _SAMPLE)
            stop = min(first + _SAMPLE, number * length + length)
            found.append(digest(self.tokens[first:stop]))
        return found


class SequenceShardedDataset(IterableDataset[ShardedBatch]):
    """Batches of sequences of one length, of which this rank gets its part; without end.

    Iterate it directly, or through a DataLoader with `batch_size=None` and at most one worker.

    Args:
        source: a `TokenFile`, cut into sequences; or documents, each a list or tensor of ids, which
            are packed one after another. Documents that have a length and can be indexed are
            shuffled; others, such as an iterator's, come as they are, once.
        length: tokens of a sequence.
        batch_size: sequences of a batch.
        rank, ring_size: this rank's place in its ring.
        replica, replicas: which of several rings it is; each takes batches of its own.
        seed: shuffles sequences of a file, or documents, anew in each epoch. None does not.
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

    length: int
    batch_size: int
    replica: int
    replicas: int
    seed: int | None
    layout: Layout

    @checked
    def __init__(  # noqa: PLR0913 - a public entry point
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
        if layout != AUTO and (problem := layout_problem(layout, ring_size, length)) is not None:
            raise ValueError(problem)
        if isinstance(source, TokenFile) and len(source) <= length:
            raise ValueError(f"a sequence takes {length + 1} tokens, the file has {len(source)}")
        if isinstance(source, Sequence) and not any(len(document) for document in source):
            raise ValueError("there is no token in the documents")
        if seed is not None and not isinstance(source, TokenFile | Sequence):
            raise ValueError("documents that can't be indexed can't be shuffled; leave seed out")
        self.source: Any = source
        self.length, self.batch_size = length, batch_size
        self.place: dict[str, Any] = dict(rank=rank, ring_size=ring_size)
        self.replica, self.replicas, self.seed, self.layout = replica, replicas, seed, layout
        self._done = 0  # batches of all replicas

    @checked
    def state_dict(self) -> dict[str, int | None]:
        """Return where the next batch begins, for any number of ranks and rings."""
        return {"sequences": self._done * self.batch_size, "seed": self.seed, "length": self.length}

    @checked
    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on where a state was taken.

        Raises:
            ValueError: it is of another seed, length or size of batches.
        """
        sequences, mine = state["sequences"] or 0, self.state_dict()
        same = {name: mine[name] for name in ("seed", "length")}
        if {name: state[name] for name in same} != same or sequences % self.batch_size:
            raise ValueError(
                f"the state is {state}, which is not of batches of {self.batch_size} with {same}"
            )
        self._done = sequences // self.batch_size

    def __iter__(self) -> Iterator[ShardedBatch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"workers would repeat batches; take 1, not {worker.num_workers}")
        first = self._done
        of_file = isinstance(self.source, TokenFile)
        batches = self._of_file(first) if of_file else self._of_documents(first)
        for number, batch in enumerate(batches, first):
            if (number - first) % self.replicas == self.replica:
                self._done = number - self.replica + self.replicas  # others' of this round, too
                yield batch()

    def _of_file(self, first: int) -> Iterator[Any]:
        """Yield batches of sequences of the file, from one on."""
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
                tensors, layout, self.length, **self.place, num_items=items, told=told,
                digest=told,
            )  # fmt: skip

        order = self._order(sequences, first * self.batch_size)
        while True:
            numbers = list(islice(order, self.batch_size))
            yield lambda numbers=numbers: batch(numbers)

    def _of_documents(self, first: int) -> Iterator[Any]:
        """Yield batches of packed documents, from one on."""

        def batch(samples: list[Sample]) -> ShardedBatch:
            ids = torch.stack([sample for sample, _ in samples])
            labels, borders = ids[:, 1:].clone(), []
            for row, (_, starts) in zip(labels, samples):
                row[[start - 1 for start in starts[1:]]] = _IGNORE  # none predicts the next one
                borders.append(sorted({*starts, self.length}))
            whole = {"input_ids": ids[:, :-1], "labels": labels, "cu_seqlens": borders}
            return shard_batch(whole, layout=self.layout, shift_labels=False, **self.place)

        samples = islice(self._packed(), first * self.batch_size, None)
        while len(found := list(islice(samples, self.batch_size))) == self.batch_size:
            yield lambda found=found: batch(found)

    def _packed(self) -> Iterator[Sample]:
        """Yield sequences of length + 1 tokens; the last one is the next one's first."""
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
