"""Cells: which tokens are seen exactly, which in summary."""

import pytest
import torch

from ring_attention_pytorch import RingAttention, Summaries
from ring_attention_pytorch.geometry.documents import Documents
from ring_attention_pytorch.summaries.cells import Cells, Places, shares


@pytest.mark.parametrize("rule", [Cells(5, 3, 3), Cells(0, 4, 4), Cells(7, 1, 1), Cells(9, 3, 3)])
def test_each_earlier_token_is_covered_exactly_once(rule: Cells) -> None:
    places = Places.of(rule, None, 1, 40)
    cells, tokens, _ = shares(rule, places.held(torch.arange(40)))
    for query in range(40):
        start = max(0, rule.row(query) * rule.stride)
        seen = tokens[cells < rule.row(query)].tolist() + list(range(start, query + 1))
        assert seen == list(range(query + 1))
        assert query - start < rule.window + rule.stride


def test_no_samples_have_no_cells() -> None:
    places = Places.of(Cells(2, 2, 2), None, 0, 6)
    assert (places.borders, places.tokens.shape) == ([0], (0, 6, 4))
    assert places.held(torch.arange(3)).shape == (0, 4)


def test_documents_without_tokens_have_no_cells() -> None:
    places = Places.of(Cells(2, 2, 2), (Documents(()), Documents(())), 2, 0)
    assert (places.borders, places.tokens.shape) == ([0], (2, 0, 4))
    layer = RingAttention(8, dim_head=4, heads=2, causal=True, attn_summaries=Summaries(2, 2))
    x = torch.randn(2, 0, 8)
    assert layer(x, documents=torch.zeros(2, 0, dtype=torch.long)).shape == x.shape
