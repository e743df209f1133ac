"""Datasets of sequences: one order on any ring, all of a corpus, and resumed where they stopped."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ring_attention_pytorch import SequenceShardedDataset, ShardedBatch, TokenFile, positions

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
    by_replica = []
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
        by_replica.append([
            torch.stack([whole(list(parts), n) for n in ("input_ids", "shift_labels")])
            for parts in zip(*ranks)
        ])  # fmt: skip
    return [batch for step in zip(*by_replica) for batch in step], data.state_dict()


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


def test_a_worker_may_load(file):
    data = SequenceShardedDataset(file, length=7, batch_size=2, rank=0, ring_size=2)
    direct = list(islice(data, 2))
    again = SequenceShardedDataset(file, length=7, batch_size=2, rank=0, ring_size=2)
    loaded = list(islice(DataLoader(again, batch_size=None, num_workers=0), 2))
    for a, b in zip(direct, loaded, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])


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
    same, longer = first_batch(tokens, 0).told, [*tokens, 1]
    shifted = tokens[1:] + tokens[:1]
    assert first_batch(tokens, 1).told == same
    assert same not in (first_batch(longer, 1).told, first_batch(shifted, 1).told)
