"""Linear recurrences of runs in plain PyTorch, chunk by chunk, in the dtype of the tensors.

    S_t = Diag(a_t) S_{t-1} + k_t v'_t^T        v'_t = b_t (v_t - (Diag(a_t) S_{t-1})^T k_t)
    o_t = S_t^T q_t                             or v'_t = v_t, without the delta rule

Within a chunk, values v' follow from a triangular system (Yang et al. 2024, "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length"). Decays between two tokens are sums of the
gates between them, never differences of sums, so that a gate may be 0. Each run begins with a state
of its own; nothing here knows of ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """Chunks of runs: the first chunks of all runs, then the second ones, and so on.

    Attributes:
        tokens: `[chunks, size]`, numbers of tokens; an empty slot has the number of tokens.
        levels: how many runs have a 1st, 2nd, ... chunk, longest runs first.
        order: the runs, longest first; places: each run's place among them.
        slots: for each token its slot in `[chunks * size]`.
    """

    tokens: Tensor
    levels: tuple[int, ...]
    order: Tensor
    places: Tensor
    slots: Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], size: int, device: torch.device) -> "Grid":
        """Make it for runs with a first token and a length each, which cover all tokens.

        >>> Grid.of([(0, 1), (1, 3)], 2, torch.device("cpu")).tokens.tolist()
        [[1, 2], [0, 4], [3, 4]]
        """
        size = max(1, min(size, max((length for _, length in spans), default=1)))
        total = sum(length for _, length in spans)
        order = sorted(range(len(spans)), key=lambda run: -spans[run][1])
        chunks, levels = [], []
        for begin in range(0, spans[order[0]][1] if order else 0, size):
            begun = [spans[run] for run in order if spans[run][1] > begin]
            levels.append(len(begun))
            for first, length in begun:
                row = [*range(first + begin, first + min(begin + size, length))]
                chunks.append(row + [total] * (size - len(row)))
        tokens = torch.tensor(chunks, dtype=torch.long).view(-1, size)
        slots = torch.empty(total + 1, dtype=torch.long)
        slots[tokens.flatten()] = torch.arange(tokens.numel())
        order_at = torch.tensor(order, dtype=torch.long)
        places = order_at.argsort()
        on = [t.to(device) for t in (tokens, order_at, places, slots[:total])]
        return cls(on[0], tuple(levels), *on[1:])


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial: Tensor,
    grid: Grid,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens, and the state after each run.

    Args:
        q, k: `[n, h, d_k]`; v: `[n, h, d_v]`.
        g: logarithms of gates a, `[n, h]` or `[n, h, d_k]`; -inf is a gate of 0.
        beta: `[n, h]`; None is without the delta rule.
        initial: `[runs, h, d_k, d_v]`.

    Returns:
        `[n, h, d_v]` and `[runs, h, d_k, d_v]`.
    """
    if not grid.levels:
        return without_tokens(initial, q, k, v, g, beta)
    q, k, v, g = (_chunked(t, grid) for t in (q, k, v, g))  # [chunks, h, size, ...]
    decay, begin, end = _decays(g)
    values, reads = v, None
    if beta is not None:
        weights = _chunked(beta, grid)[..., None]
        system = _products(k, k, decay) * weights
        right = torch.cat((weights * v, weights * begin * k), -1)
        solved = torch.linalg.solve_triangular(
            system.tril(-1), right, upper=False, unitriangular=True
        )
        values, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = _products(q, k, decay)
    of_q, of_k, through = begin * q, (end * k).mT, begin[..., -1, :, None]
    outs: list[Tensor] = []
    ended: list[Tensor] = []
    state, first = initial[grid.order], 0
    for level, runs in enumerate(grid.levels):
        at = slice(first, first + runs)
        new = values[at] if reads is None else values[at] - reads[at] @ state
        outs.append(of_q[at] @ state + scores[at] @ new)
        state = through[at] * state + of_k[at] @ new
        after = grid.levels[level + 1] if level + 1 < len(grid.levels) else 0
        ended.append(state[after:])
        state, first = state[:after], first + runs
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1)[grid.slots]
    return out, torch.cat(ended[::-1])[grid.places]


def without_tokens(
    initial: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the empty results of a rank without tokens.

    All of its tensors lead to both, so that backward exchanges there as on other ranks.
    """
    nothing = q.sum() + k.sum() + v.sum() + g.sum()
    if beta is not None:
        nothing = nothing + beta.sum()
    return v + nothing.to(v.dtype), initial + nothing.to(initial.dtype)


def _chunked(x: Tensor, grid: Grid) -> Tensor:
    """Return x `[n, h, ...]` as `[chunks, h, size, ...]`, 0 in empty slots."""
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return padded[grid.tokens].transpose(1, 2)


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decays of gates `[c, h, size]` or `[c, h, size, d_k]`, always with `d_k` or 1.

    Between tokens j and i `[c, h, i, j, d_k]`, 0 if j is later; from the chunk's start through a
    token, and from after a token to its end `[c, h, size, d_k]`.
    """
    g = g if g.ndim == 4 else g[..., None]
    size = g.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)[..., None]
    sums = torch.where(later, g[:, :, :, None], 0.0).cumsum(2)  # of gates j + 1 ... i
    seen = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()[..., None]
    decay = torch.where(seen, sums, -torch.inf).exp()
    return decay, g.cumsum(2).exp(), decay[:, :, -1]


def _products(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return decayed products of rows of x and k, `[c, h, i, j]`."""
    if decay.shape[-1] == 1:
        return (x @ k.mT) * decay[..., 0]
    return torch.einsum("chid,chijd->chij", x, decay * k[:, :, None])
