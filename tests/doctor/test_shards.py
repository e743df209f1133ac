"""Which tokens a rank was given is found, in whatever layout they lie."""

from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.doctor.evidence import Evidence
from ring_attention_pytorch.doctor.shards import EVERYTHING, held, tokens_of, whole_tokens

TOKENS = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(0))
DEALT = {  # by hand: the tokens of rank 1 of 3
    "contiguous": [4, 5, 6, 7],
    "striped": [1, 4, 7, 10],
    "zigzag": [2, 3, 8, 9],
}


def ring(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size)


@pytest.mark.parametrize("layout", DEALT)
def test_the_layout_is_found_by_the_tokens(layout: str) -> None:
    found = held(TOKENS[:, DEALT[layout]], TOKENS, ring(1, 3), Evidence())
    assert found is not None
    assert (found.layout, found.positions.tolist()) == (layout, DEALT[layout])
    embedded = torch.randn(2, 12, 5)
    same = held(embedded[:, DEALT[layout]], embedded, ring(1, 3), Evidence())
    assert same is not None
    assert same.layout == layout


def test_all_tokens_on_each_rank_and_tokens_of_no_layout() -> None:
    found = held(TOKENS, TOKENS, ring(1, 3), Evidence())
    assert found is not None
    assert (found.layout, found.positions.tolist()) == (EVERYTHING, [*range(12)])
    for wrong in ([0, 1, 2, 4], [4, 5, 6], [7, 6, 5, 4]):
        assert held(TOKENS[:, wrong], TOKENS, ring(1, 3), Evidence()) is None


def test_where_tokens_repeat_it_is_the_layout_of_attention() -> None:
    alike = torch.ones(1, 12, dtype=torch.long)
    plan = SimpleNamespace(layout="zigzag", ring=ring(1, 3))
    for seen, layout in (
        (Evidence(attention=[(plan, ())]), "zigzag"),
        (Evidence(), "contiguous"),
    ):
        found = held(alike[:, :4], alike, ring(1, 3), seen)
        assert found is not None
        assert found.layout == layout


def test_tokens_are_the_ids_or_else_the_first_tensor_of_such_a_shape() -> None:
    ids, embedded = torch.ones(1, 4), torch.zeros(1, 4, 2)
    assert whole_tokens({"labels": embedded, "input_ids": ids}) is ids
    assert whole_tokens({"length": torch.ones(1), "inputs_embeds": embedded}) is embedded
    assert whole_tokens({"length": torch.ones(1), "patches": embedded}) is embedded
    assert whole_tokens({"length": 4}) is None


def test_a_model_s_tokens_are_those_in_the_place_of_the_whole() -> None:
    mine = TOKENS[:, :4]
    whole = Evidence(inputs={("mask", "m"): TOKENS + 1, ("embed", "input"): TOKENS})
    seen = Evidence(inputs={("mask", "m"): mine + 1, ("embed", "input"): mine})
    assert tokens_of(seen, whole, TOKENS) is mine
    assert tokens_of(Evidence(), whole, TOKENS) is None
