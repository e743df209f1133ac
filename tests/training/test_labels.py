"""Labels that tokens predict, and places of documents, against loops over tokens."""

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import BatchDocuments
from ring_attention_pytorch.geometry.segments import Documents, Run
from ring_attention_pytorch.training.labels import documents_of_positions, next_of_whole


def packed(*lengths: list[int]) -> BatchDocuments:
    """Documents of these lengths in each sample."""
    found = []
    for sample in lengths:
        ends = torch.tensor(sample).cumsum(0).tolist()
        runs = [Run(i, end - n, end) for i, (n, end) in enumerate(zip(sample, ends))]
        found.append(Documents(tuple(runs)))
    return tuple(found)


def test_documents_begin_where_positions_are_0_again() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]])
    found = documents_of_positions(positions, None)
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 1, 1]]
    assert documents_of_positions(torch.arange(6).expand(2, -1), None) is None
    assert documents_of_positions(torch.arange(3, 9).expand(2, -1), None) is None


def test_positions_of_padding_mean_nothing() -> None:
    positions = torch.tensor([[1, 1, 0, 1, 2, 1], [0, 1, 2, 3, 9, 4]])
    real = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
    assert documents_of_positions(positions, real) is None


def test_documents_begin_behind_padding_too() -> None:
    positions = torch.tensor([[0, 1, 2, 7, 7, 0, 1], [1, 1, 0, 1, 0, 0, 0]])
    real = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 1, 1]]).bool()
    found = documents_of_positions(positions, real)
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 2]]
    with pytest.raises(ValueError, match="position_ids must ascend within a document and begin"):
        documents_of_positions(positions[:1] + (positions[:1] < 7), real[:1])


@pytest.mark.parametrize("positions", [[0, 1, 2, 1, 2], [0, 1, 1, 2, 3], [3, 2, 1, 0, 0]])
def test_positions_that_go_back_elsewhere_are_refused(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="position_ids must ascend within a document and begin"):
        documents_of_positions(torch.tensor([positions]), None)


def by_hand(x: Tensor, lengths: list[list[int]], nothing: float) -> Tensor:
    found = torch.full_like(x, nothing)
    for i, sample in enumerate(lengths):
        start = 0
        for n in sample:
            for t in range(start, start + n - 1):
                found[i, t] = x[i, t + 1]
            start += n
    return found


@pytest.mark.parametrize("lengths", [[[7], [7]], [[1, 6], [3, 4]], [[2, 2, 3], [1] * 7]])
@pytest.mark.parametrize("nothing", [-100, 0])
def test_a_token_gets_what_its_successor_has_in_its_document(lengths, nothing: int) -> None:
    x = torch.randint(1, 9, (2, 7))
    want = by_hand(x, lengths, nothing)
    assert torch.equal(next_of_whole(x, packed(*lengths), nothing), want)
    weights = x.double() / 10
    assert torch.equal(
        next_of_whole(weights, packed(*lengths), 0.0), by_hand(weights, lengths, 0.0)
    )
    if lengths[0] == [7]:
        assert torch.equal(next_of_whole(x, None, nothing), want)
