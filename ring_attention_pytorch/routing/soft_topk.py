"""Soft top-k: gates in [0, 1] that sum to k, near 1 for the k largest of n scores; differentiable.

Entropy-regularised top-k (Wright 2015, "Coordinate descent algorithms"; used by CoLT5, Ainslie et
al. 2023, section 3.1) maximises s.p + eps * H(p) over 0 <= p <= 1, sum p = k. Its solution is

    p_i = min(1, exp((s_i + a) / eps)),     a the root of sum p = k

With scores in descending order and m gates at 1, a(m) = eps * (log(k - m) - LSE(s[m:] / eps)). m
is the number of i for which a(i) would still give score i a gate of at least 1: one sort, no
iteration. With U the scores whose gates are below 1, da/ds_j = -p_j / sum_U p for j in U and 0
elsewhere, so backward needs no iteration either.

`coordinate_descent` is the published iteration. Its vector b is -relu(s + a), so its state is the
one number a, and its result is the formula above with another a. A step is one pass over the
scores, and so is all of backward.
"""

from typing import Any, NamedTuple

import torch
from beartype import beartype
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.comm.agreement import agree, problem_of, told_by_group, typed
from ring_attention_pytorch.comm.ring import Group, Ring, as_ring
from ring_attention_pytorch.routing.descent_triton import TRITON
from ring_attention_pytorch.routing.exchange import everyones, total_over_ranks
from ring_attention_pytorch.routing.passes import PLAIN, Partition, Slope, partition, slope
from ring_attention_pytorch.runtime.torch_func import refuse_second_order

Count = int | float | Tensor


class Solution(NamedTuple):
    """The threshold a, from which gates are 1 (s >= -a), and the terms of its gradient.

    p = min(1, exp((s + a) / eps)); da/ds = -sum over t of coef * exp((s + at) / e) where s < bound.
    a `[...]`; coef, bound, at `[..., T]`; e `[T]`; all float64.
    """

    a: Tensor
    eps: float
    coef: Tensor
    bound: Tensor
    at: Tensor
    e: Tensor


def fixed_point(scores: Tensor, k: Tensor, eps: float) -> Solution:
    """Solve soft top-k exactly for scores `[..., n]`, -inf for no token, and k `[...]`."""
    u, k = scores.double() / eps, k.double()
    real = (scores > -torch.inf).sum(-1)
    if scores.shape[-1] == 0:
        u = u.new_full((*u.shape[:-1], 1), -torch.inf)
    top = u.sort(-1, descending=True).values
    rest = top.flip(-1).logcumsumexp(-1).flip(-1)  # LSE of each score and all smaller ones
    at_one = torch.arange(top.shape[-1], device=u.device, dtype=torch.float64)
    alpha = (k.unsqueeze(-1) - at_one).clamp(min=0).log() - rest
    most = (k.ceil().long() - 1).clamp(0, top.shape[-1] - 1)  # where the tail is below rounding
    m = (top + alpha >= 0).sum(-1).minimum(most)
    a = eps * alpha.gather(-1, m.unsqueeze(-1)).squeeze(-1)
    everything, nothing = real <= k, k <= 0
    a = a.masked_fill(everything, torch.inf).masked_fill(nothing, -torch.inf)
    coef = (1 / (k - m)).masked_fill(everything | nothing, 0.0)
    one = torch.full((1,), eps, dtype=torch.float64, device=u.device)
    return Solution(a, eps, coef.unsqueeze(-1), -a.unsqueeze(-1), a.unsqueeze(-1), one)


def descent(
    scores: Tensor,
    k: Tensor,
    n_iters: int,
    eps: float,
    eps_init: float | None,
    eps_decay: float,
    by: Partition = partition,
) -> Solution:
    """Run n_iters steps of coordinate descent on scores `[..., n]`, -inf for no token."""
    scores, k = scores.double(), k.double()
    real = (scores > -torch.inf).sum(-1)
    everything, nothing = real <= k, k <= 0
    e = max(eps if eps_init is None else eps_init, eps)
    es, ats = [e], [e * (k.log() - real.clamp(min=1).double().log())]
    shares = []  # the share of the next a that comes from scores at the bound
    for _ in range(n_iters - 1):
        e = max(e * eps_decay, eps)
        count, rest = by(scores, ats[-1], e)
        at_bound = count.log() - ats[-1] / e
        whole = torch.logaddexp(at_bound, rest)
        shares.append((at_bound - whole).exp())
        es.append(e)
        ats.append(e * (k.log() - whole))
    # backward through the steps' a: the first has no gradient, since it treats scores as equal
    weights = [torch.ones_like(k)]
    for share in reversed(shares):
        weights.append(weights[-1] * share)
    coef = torch.stack(weights[::-1][1:], -1) if shares else k.new_zeros((*k.shape, 0))
    bound, at = (torch.stack(t, -1) if t else coef for t in ([-a for a in ats[:-1]], ats[1:]))
    coef = (coef / k.unsqueeze(-1)).masked_fill((everything | nothing).unsqueeze(-1), 0.0)
    a = ats[-1].masked_fill(everything, torch.inf).masked_fill(nothing, -torch.inf)
    e_out = max(es[-1] * eps_decay, eps)
    return Solution(a, e_out, coef, bound, at, torch.tensor(es[1:], dtype=a.dtype).to(a.device))


class _Threshold(Function):
    """(this rank's scores `[..., n]`, solution, window, ring, by) -> a `[..., W]` of all scores.

    `window` `[n]` is the number of each score's window, of W. Gradients go to this rank's scores.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, solution: Solution, window: Tensor, ring: Ring, by: Slope
    ) -> Tensor:
        ctx.save_for_backward(scores, window, *solution[2:])
        ctx.ring, ctx.by = ring, by
        return solution.a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("soft_topk")
        scores, window, *terms = ctx.saved_tensors
        grad = total_over_ranks(grad, ctx.ring).index_select(-1, window)
        return -grad * ctx.by(scores, terms, window), None, None, None, None


def threshold(
    scores: Tensor, solution: Solution, window: Tensor, ring: Ring, by: Slope = slope
) -> Tensor:
    """Return a `[..., W]`, differentiable in this rank's scores `[..., n]` (float64)."""
    return _Threshold.apply(scores, solution, window, ring, by)


def gates(scores: Tensor, a: Tensor, eps: float) -> Tensor:
    """Compute gates min(1, exp((s + a) / eps)), with no gradient where they are 1."""
    x = scores + a
    return (x.masked_fill(x >= 0, 0.0) / eps).exp()


@typed(told_by_group("soft_topk"))
def soft_topk(
    scores: Tensor,
    k: Count,
    *,
    eps: float | int = 1.0,
    mask: Tensor | None = None,
    group: Group = None,
) -> Tensor:
    """Compute gates in [0, 1] that sum to k, near 1 for the k largest scores; exact on any ring.

    Args:
        scores: `[..., n]`, this rank's part of the scores, in shards of any lengths.
        k: int, how many; float in (0, 1], the share of each sample's real scores; or a tensor
            `[...]`, how many of each sample, not necessarily integers.
        eps: how soft; if it is below the distances of scores, gates are nearly 0 or 1.
        mask: bool `[..., n]`, True where the score is real; elsewhere the gate is 0.
        group: the ranks that share the scores; None is the default group, or this process alone.

    Returns:
        Gates `[..., n]` in the dtype of the scores; solved in float64. Where k is at least the
        number of real scores, all their gates are 1.

    Raises:
        ValueError: scores, k, eps or mask are invalid, or differ between ranks; on every rank.

    Source: Ainslie et al. 2023, https://arxiv.org/abs/2303.09752, section 3.1.

    >>> soft_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), 2, eps=0.1).round(decimals=3).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    ring = as_ring(group)
    problem = problem_of(lambda: scores_problem(scores, k, mask) or eps_problem(eps))
    grad = torch.is_grad_enabled()
    same = {} if problem else dict(
        rows=list(scores.shape[:-1]), dtype=scores.dtype, eps=eps, mask=mask is not None,
        k=_note_of(k, ring), device=scores.device.type,
        requires_grad=grad and scores.requires_grad,
    )  # fmt: skip
    own = {} if problem else {"n": scores.shape[-1]}
    lengths = agree(ring, "soft_topk", same, own, problem)
    with torch.no_grad():
        hidden = scores.double()
        if mask is not None:
            hidden = hidden.masked_fill(~mask, -torch.inf)
        shapes = [(*scores.shape[:-1], each["n"]) for each in lengths]
        whole = torch.cat(everyones(hidden, shapes, ring), -1)
        solution = fixed_point(whole, counts(k, (whole > -torch.inf).sum(-1)), float(eps))
    return _apply(scores, mask, solution, ring)


def _apply(
    scores: Tensor, mask: Tensor | None, solution: Solution, ring: Ring, by: Slope = slope
) -> Tensor:
    """Compute the gates of this rank's scores, by a solution for all ranks' scores."""
    a, eps, coef, bound, at, e = solution
    one = Solution(a.unsqueeze(-1), eps, *(t.unsqueeze(-2) for t in (coef, bound, at)), e)
    wide = scores.double()
    hidden = wide if mask is None else wide.masked_fill(~mask, -torch.inf)
    window = torch.zeros(scores.shape[-1], dtype=torch.long, device=scores.device)
    p = gates(wide, threshold(hidden, one, window, ring, by), eps)
    return (p if mask is None else p.masked_fill(~mask, 0.0)).to(scores.dtype)


@beartype
def coordinate_descent(
    scores: Tensor,
    *,
    n_iters: int,
    k: Count,
    eps: float | int = 1e-1,
    eps_init: float | int | None = None,
    eps_decay: float | int = 1.0,
    mask: Tensor | None = None,
    use_triton: bool = False,
) -> Tensor:
    """Compute gates by the published iteration; they sum to k only once it has converged.

    It converges to `soft_topk`.

    Args:
        scores: `[..., n]`, all of them on this process.
        n_iters: number of steps, at least 1.
        k, mask: as for `soft_topk`.
        eps, eps_init, eps_decay: step t uses max(eps_init * eps_decay ** t, eps).
        use_triton: one launch for a step and one for backward; for a million scores on a GPU.

    Returns:
        Gates `[..., n]` in the dtype of the scores; their gradient is that of the steps made.

    Raises:
        ValueError: an argument is invalid, or Triton has no GPU.

    >>> s = torch.tensor([3.0, 1.0, 2.0, 0.0])
    >>> coordinate_descent(s, n_iters=500, k=2).round(decimals=2).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    passes = TRITON if use_triton else PLAIN
    problem = scores_problem(scores, k, mask) or descent_problem(n_iters, eps, eps_init, eps_decay)
    problem = problem or passes.problem(scores.device)
    if problem is not None:
        raise ValueError(f"coordinate_descent: {problem}")
    with torch.no_grad():
        hidden = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        count = counts(k, (hidden > -torch.inf).sum(-1))
        solution = descent(
            hidden, count, n_iters, float(eps), eps_init, float(eps_decay), by=passes.partition
        )
    return _apply(scores, mask, solution, Ring.alone(), passes.slope)


def counts(k: Count, real: Tensor) -> Tensor:
    """Return how many of `real` `[...]` scores to choose: k or the share k, at most all."""
    if isinstance(k, Tensor):
        return k.to(real.device).double().expand(real.shape).minimum(real)
    if isinstance(k, float):
        return (k * real.double() - 1e-9).ceil().clamp(min=0)  # 0.1 * 30 is 3, not 4
    return real.clamp(max=k).double()


def count_problem(name: str, k: Count) -> str | None:
    """Say what is wrong with a number or share of tokens; None if nothing is."""
    if isinstance(k, Tensor):
        return None
    if isinstance(k, float) and not 0 < k <= 1:
        return f"{name} as a share must be above 0 and at most 1, got {k}"
    return f"{name} must be at least 1, got {k}" if not isinstance(k, float) and k < 1 else None


def _note_of(k: Count, ring: Ring) -> object:
    """Return k for the check between ranks; of a tensor its numbers, which waits for its device."""
    if not isinstance(k, Tensor):
        return k
    return "a tensor" if ring.size == 1 else f"a tensor of {k.flatten().tolist()}"


def scores_problem(scores: Tensor, k: Count, mask: Tensor | None) -> str | None:
    if scores.ndim < 1 or not scores.is_floating_point():
        return f"scores must be floating [..., n], got {scores.dtype} {list(scores.shape)}"
    given = [t for t in (scores, k, mask) if isinstance(t, Tensor)]
    if scores.is_meta or len({t.device for t in given}) > 1:
        return f"scores, k and mask must be on one device, with values, got {scores.device}"
    if isinstance(k, Tensor) and k.shape != scores.shape[:-1]:
        return f"k must be {list(scores.shape[:-1])}, one of each sample, got {list(k.shape)}"
    if mask is not None and (mask.dtype, mask.shape) != (torch.bool, scores.shape):
        return f"mask must be bool {list(scores.shape)}, got {mask.dtype} {list(mask.shape)}"
    return count_problem("k", k)


def eps_problem(eps: float) -> str | None:
    return None if 0 < eps < float("inf") else f"eps must be positive, got {eps}"


def descent_problem(
    n_iters: int, eps: float, eps_init: float | None, eps_decay: float
) -> str | None:
    """Say what is wrong with the options of coordinate descent; None if nothing is."""
    if n_iters < 1 or not 0 < eps_decay <= 1:
        return (
            "n_iters must be at least 1, and eps_decay above 0 and at most 1, "
            f"got {n_iters} and {eps_decay}"
        )
    return eps_problem(eps) or eps_problem(1.0 if eps_init is None else eps_init)
