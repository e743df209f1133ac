"""Datasets of sequences: one order on any ring, all of a corpus, and resumed where they stopped."""

import copy
import pickle
import sys
from itertools import islice, product
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ring_attention_pytorch import SequenceShardedDataset, ShardedBatch, TokenFile, positions
from ring_attention_pytorch.training import dataset
from tests.support.sampling import grid

WORDS = [list(range(100 * i, 100 * i + n)) for i, n in enumerate((3, 2, 9, 1, 14, 5, 0, 8), 1)]


def whole(parts: list[ShardedBatch], name: str) -> Tensor:
    """Put a batch together again from its ranks' parts."""
    first = parts[0]
    at = dict(ring_size=first.ring_size, length=first.length)
    held = [positions(first.layout, rank=rank, **at) for rank in range(first.ring_size)]
    return torch.cat([part[name] for part in parts], 1)[:, torch.cat(held).argsort()]


def run(
    source: object,
    ring_size: int,
    replicas: int,
    steps: int,
    state: dict | None = None,
    **how: object,
) -> tuple[list[Tensor], dict]:
    """Ids and labels of all batches of so many steps, in order, and the state after them."""
    by_replica, states = [], []
    for replica in range(replicas):
        ranks = []
        for rank in range(ring_size):
            data = SequenceShardedDataset(
                source, length=7, batch_size=2, rank=rank, ring_size=ring_size, replica=replica,
                replicas=replicas, **how,
            )  # fmt: skip
            if state is not None:
                data.load_state_dict(state)
            ranks.append(list(islice(data, steps)))
            states.append(data.state_dict())
            assert all(batch.state is not None for batch in ranks[-1])
            assert not ranks[-1] or ranks[-1][-1].state == states[-1]
        by_replica.append([
            torch.stack([whole(list(parts), n) for n in ("input_ids", "shift_labels")])
            for parts in zip(*ranks)
        ])  # fmt: skip
    assert states == states[:1] * ring_size * replicas  # from every rank
    return [batch for step in zip(*by_replica) for batch in step], states[0]


def token_file(folder: Path) -> TokenFile:
    path = folder / "tokens"
    path.write_bytes(b"".join(n.to_bytes(2, sys.byteorder) for n in range(100)))
    return TokenFile(path)


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return token_file(tmp_path)


@pytest.mark.parametrize("of", ["documents", "file"])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_order_is_that_of_seed_and_epoch_alone(of, seed, file):
    source = WORDS if of == "documents" else file
    want, _ = run(source, 1, 1, 12, seed=seed)
    for ring_size, replicas in ((2, 1), (3, 2), (1, 4), (4, 3)):
        got, _ = run(source, ring_size, replicas, 12 // replicas, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (ring_size, replicas)


@pytest.mark.parametrize("of", ["documents", "file"])
def test_a_run_goes_on_with_other_rings(of, file):
    source = WORDS if of == "documents" else file
    want, _ = run(source, 1, 1, 10, seed=5)
    begun, state = run(source, 2, 2, 2, seed=5)
    rest, _ = run(source, 3, 3, 2, state, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(begun + rest, want, strict=True))


def test_documents_are_packed_without_a_gap_and_predict_nothing_beyond_them():
    batches, _ = run(WORDS, 2, 1, 6)
    ids, labels = (torch.cat([b[i].flatten() for b in batches]) for i in (0, 1))
    stream = torch.tensor([token for document in WORDS * 3 for token in document])
    assert torch.equal(ids, stream[: len(ids)])
    follows = stream[1 : len(ids) + 1]
    same = follows == ids + 1  # documents count up
    assert torch.equal(labels, follows.where(same, torch.tensor(-100)))
    data = SequenceShardedDataset(WORDS, length=7, batch_size=1, rank=0, ring_size=1)
    batch = next(iter(data))
    assert [tuple(run)[1:] for run in batch.packing[0].runs] == [(0, 3), (3, 5), (5, 7)]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]


def test_every_sequence_of_a_file_comes_once_in_an_epoch(file):
    batches, _ = run(file, 2, 1, 7, seed=1)
    assert sorted(int(b[0, row, 0]) for b in batches for row in range(2)) == [*range(0, 98, 7)]
    assert all(torch.equal(b[1], b[0] + 1) for b in batches)


def test_iterators_come_as_they_are_and_end():
    batches, _ = run((list(w) for w in WORDS), 1, 1, 99)
    assert len(batches) == (sum(map(len, WORDS)) - 1) // 14


# --- one stream ---

NUMBERS = list(range(1, 60))  # one document


def one_by_one(source: object = None, **how: object) -> SequenceShardedDataset:
    """Sequences of two tokens, a batch each; token 2 i + 1 begins batch i."""
    source = [NUMBERS] if source is None else source
    return SequenceShardedDataset(
        source, **dict(length=2, batch_size=1, rank=0, ring_size=1, layout="contiguous") | how
    )


def firsts(batches: object, count: int) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in islice(batches, count)]


SOURCES = {
    "documents": lambda folder: [NUMBERS],
    "an iterator": lambda folder: iter([[n] for n in NUMBERS]),
    "an iterable": lambda folder: dict.fromkeys((n,) for n in NUMBERS),
    "a file": lambda folder: token_file(folder),
}


@pytest.mark.parametrize("of", SOURCES)
@pytest.mark.parametrize("replica", [0, 1])
def test_an_iterator_goes_on_where_the_last_one_stopped(of, replica, tmp_path):
    shift = of == "a file"  # its first token is 0
    data = one_by_one(SOURCES[of](tmp_path), replica=replica, replicas=2)
    found = firsts(data, 3) + firsts(data, 2)
    left = iter(data)
    found += firsts(left, 1) + firsts(data, 2) + firsts(left, 2)
    assert found == [1 - shift + 2 * replica + 4 * i for i in range(10)]


def test_what_fails_to_be_made_is_not_skipped():
    data = one_by_one()
    with mock.patch.object(dataset, "shard_batch", side_effect=MemoryError):
        for _ in range(2):
            with pytest.raises(MemoryError):
                next(iter(data))
    assert firsts(data, 2) == [1, 3]


def test_documents_of_an_iterator_are_not_taken_twice():
    data = one_by_one(iter([[n] for n in NUMBERS]))
    begun, third = data.state_dict(), list(islice(data, 3))[-1]
    with pytest.raises(ValueError, match="begun can't be copied"):
        copy.copy(data)
    data.load_state_dict(third.state)
    assert firsts(data, 2) == [7, 9]
    data.load_state_dict(begun)
    with pytest.raises(ValueError, match="come once, and these are gone"):
        next(iter(data))


@grid(
    "lives_on, of",
    product((False, True), ("documents", "an iterator", "a file")),
    always=3,
    drawn=2,
)
def test_behind_a_worker_the_state_comes_with_the_batch(of, lives_on, tmp_path):
    shift, data = of == "a file", one_by_one(SOURCES[of](tmp_path))
    begun = data.state_dict()
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=lives_on)
    *_, third = islice(loader, 3)
    assert third.state == {"sequences": 3, "seed": None, "length": 2}
    for ask in (data.state_dict, lambda: next(iter(data)), lambda: next(iter(loader))):
        with pytest.raises(ValueError, match=r"load_state_dict\(batch.state\) to go on"):
            ask()
    if lives_on and of == "an iterator":
        return  # the worker that lives on has begun it
    loader = DataLoader(data, batch_size=None, num_workers=1, persistent_workers=lives_on)
    for state, want in ((third.state, [7, 9]), (begun, [1, 3, 5])):
        data.load_state_dict(state)
        assert data.state_dict() == state
        assert firsts(loader, len(want)) == [n - shift for n in want]
    data.load_state_dict(third.state)
    assert firsts(data, 2) == [7 - shift, 9 - shift]
    assert data.state_dict()["sequences"] == 5


def test_a_copy_has_a_state_of_its_own():
    data = one_by_one()
    assert firsts(data, 2) == [1, 3]
    for made in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        loader = DataLoader(made, batch_size=None, num_workers=1)
        assert firsts(loader, 2) == [5, 7]
        with pytest.raises(ValueError, match="ahead of who takes them"):
            made.state_dict()
    assert firsts(data, 2) == [5, 7]


WRONG = {
    "rank": (dict(rank=2), "rank < ring_size"),
    "nothing": (dict(source=[[], []]), "no token"),
    "an iterator that is shuffled": (dict(source=iter(WORDS), seed=1), "leave seed out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_raises(case):
    more, text = WRONG[case]
    how = dict(source=WORDS, length=7, batch_size=2, rank=0, ring_size=2) | more
    with pytest.raises(ValueError, match=text):
        SequenceShardedDataset(how.pop("source"), **how)


def test_files_and_states_that_do_not_fit_raise(file, tmp_path):
    with pytest.raises(ValueError, match="the file has 100"):
        SequenceShardedDataset(file, length=100, batch_size=1, rank=0, ring_size=1)
    (tmp_path / "odd").write_bytes(b"abc")
    with pytest.raises(ValueError, match="no whole number"):
        TokenFile(tmp_path / "odd")
    data = SequenceShardedDataset(WORDS, length=7, batch_size=2, rank=0, ring_size=2, seed=1)
    for state in (dict(sequences=2, seed=2, length=7), dict(sequences=3, seed=1, length=7)):
        with pytest.raises(ValueError, match="batches of 2"):
            data.load_state_dict(state)


def test_ranks_that_read_other_files_hold_other_batches(tmp_path: Path) -> None:
    """They read different tokens of them, so each must look at some of the same, too."""

    def first_batch(tokens: list[int], rank: int) -> ShardedBatch:
        path = tmp_path / "corpus"
        path.write_bytes(b"".join(n.to_bytes(2, sys.byteorder) for n in tokens))
        how = dict(length=2000, batch_size=2, rank=rank, ring_size=2)
        return next(iter(SequenceShardedDataset(TokenFile(path), **how)))

    tokens = list(range(6001))
    same, longer = first_batch(tokens, 0).uncompared, [*tokens, 1]
    shifted = tokens[1:] + tokens[:1]
    assert first_batch(tokens, 1).uncompared == same
    assert same not in (first_batch(longer, 1).uncompared, first_batch(shifted, 1).uncompared)
