"""The eager kernel, against the recurrence token by token."""

import pytest
import torch

from ring_attention_pytorch.recurrent.eager import Grid, recurrence
from tests.support.recurrent_reference import sequential
from tests.support.reference import relative_error


@pytest.mark.parametrize("kind", ["delta", "channels", "diagonal", "plain"])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_runs_are_recurrences_with_states_of_their_own(kind, size) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths, h, d_k, d_v = [5, 1, 13, 4], 2, 3, 4

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    n = sum(lengths)
    q, k, v = normal(n, h, d_k), normal(n, h, d_k) / 2, normal(n, h, d_v)
    gate = (
        normal(n, h, d_k).sigmoid() if kind in ("channels", "diagonal") else normal(n, h).sigmoid()
    )
    gate[3], gate[8], gate[20] = 0.0, 0.0, 1.0
    g = gate.log()
    beta = normal(n, h).sigmoid() if kind in ("delta", "channels") else None
    initial = normal(len(lengths), h, d_k, d_v)
    given = [t for t in (q, k, v, g, beta, initial) if t is not None]
    spans, first = [], 0
    for length in lengths:
        spans.append((first, length))
        first += length
    spans = [spans[2], spans[0], spans[3], spans[1]]
    results = []
    for ours in (True, False):
        leaves = [t.clone().requires_grad_() for t in given]
        *qkva, last = leaves
        weights = qkva[4] if beta is not None else None
        if ours:
            grid = Grid.of(spans, size, torch.device("cpu"))
            out, state = recurrence(*qkva[:3], qkva[3], weights, last, grid)
        else:
            parts, states, rows = [None] * 4, [], [2, 0, 3, 1]
            for number, (first, length) in enumerate(spans):
                cut = [
                    None if t is None else t[None, first : first + length]
                    for t in (*qkva[:4], weights)
                ]
                begins = torch.zeros(1, length, dtype=torch.bool)
                part, state = sequential(*cut, begins, last[number][None])
                parts[rows[number]] = part[0]
                states.append(state)
            out, state = torch.cat(parts), torch.cat(states)
        drawn = torch.Generator().manual_seed(1)
        loss = sum(
            (t * torch.randn(t.shape, generator=drawn, dtype=t.dtype)).sum() for t in (out, state)
        )
        grads = torch.autograd.grad(loss, leaves)
        results.append([out, state, *grads])
    for ours, want in zip(*results):
        assert relative_error(ours, want) < 1e-12


def test_no_tokens_and_no_runs() -> None:
    empty = torch.zeros(0, 2, 3, requires_grad=True)
    grid = Grid.of([], 4, torch.device("cpu"))
    out, state = recurrence(empty, empty, empty, empty[..., 0], None, torch.zeros(0, 2, 3, 3), grid)
    assert out.shape == (0, 2, 3)
    assert state.shape == (0, 2, 3, 3)
    assert out.requires_grad
