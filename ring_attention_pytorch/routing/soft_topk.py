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
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.comm.collectives import all_gather_along, replicated
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring, as_ring
from ring_attention_pytorch.routing.descent_triton import TRITON
from ring_attention_pytorch.routing.passes import PLAIN, Partition, Slope, slope
from ring_attention_pytorch.runtime.torch_func import refuse_second_order

Count = int | float | Tensor


class Solution(NamedTuple):
    """The threshold a, from which gates are 1 (s >= -a), and the terms of its gradient.

    p = min(1, exp((s + a) / eps)); da/ds is the sum over T steps of -coef * exp((s + shift) / e)
    where s < bound. a `[...]`; coef, bound, shift `[..., T]`; e `[T]`; all float64.
    """

    a: Tensor
    eps: float
    coef: Tensor
    bound: Tensor
    shift: Tensor
    e: Tensor


def fixed_point(scores: Tensor, k: Tensor, eps: float) -> Solution:
    """Solve soft top-k exactly for scores `[..., n]`, -inf where masked, and k `[...]`."""
    u = scores.double() / eps
    k = k.double()
    real = (scores > -torch.inf).sum(-1)
    if scores.shape[-1] == 0:
        u = u.new_full((*u.shape[:-1], 1), -torch.inf)
    n = u.shape[-1]
    top = u.sort(-1, descending=True).values
    rest = top.flip(-1).logcumsumexp(-1).flip(-1)  # LSE of each score and all smaller ones
    at_one = torch.arange(n, device=u.device, dtype=torch.float64)
    below_one = k.unsqueeze(-1) - at_one
    alpha = below_one.clamp(min=0).log() - rest
    most = k.ceil().long() - 1
    most = most.clamp(0, n - 1)  # if the tail is below rounding
    m = (top + alpha >= 0).sum(-1).minimum(most)
    alpha = alpha.gather(-1, m.unsqueeze(-1))
    a = eps * alpha.squeeze(-1)
    everything, nothing = real <= k, k <= 0
    a = a.masked_fill(everything, torch.inf)
    a = a.masked_fill(nothing, -torch.inf)
    coef = 1 / (k - m)
    coef = coef.masked_fill(everything | nothing, 0.0)
    last = a.unsqueeze(-1)
    e = torch.full((1,), eps, dtype=torch.float64, device=u.device)
    return Solution(a, eps, coef.unsqueeze(-1), -last, last, e)


def descent(
    scores: Tensor,
    k: Tensor,
    n_iters: int,
    eps: float,
    eps_init: float | None,
    eps_decay: float,
    by: Partition,
) -> Solution:
    """Run n_iters steps of coordinate descent on scores `[..., n]`, -inf where masked."""
    scores = scores.double()
    k = k.double()
    log_k = k.log()
    real = (scores > -torch.inf).sum(-1)
    e = max(eps if eps_init is None else eps_init, eps)
    log_real = real.clamp(min=1).double().log()
    a = e * (log_k - log_real)
    es, bounds, shifts = [], [], []
    shares = []  # the share of the next a due to scores at the bound
    for _ in range(n_iters - 1):
        e = max(e * eps_decay, eps)
        count, rest = by(scores, a, e)
        at_bound = count.log() - a / e
        whole = torch.logaddexp(at_bound, rest)
        shares.append((at_bound - whole).exp())
        bounds.append(-a)
        a = e * (log_k - whole)
        es.append(e)
        shifts.append(a)
    # backward through the steps' a: the first has no gradient, since it treats scores as equal
    coefs: list[Tensor] = []
    weight = torch.ones_like(k)
    for share in reversed(shares):
        coefs.insert(0, weight / k)
        weight = weight * share
    everything, nothing = real <= k, k <= 0
    limited = (everything | nothing).unsqueeze(-1)
    a = a.masked_fill(everything, torch.inf)
    a = a.masked_fill(nothing, -torch.inf)
    coef = _steps(coefs, k).masked_fill(limited, 0.0)
    terms = (coef, _steps(bounds, k), _steps(shifts, k))
    e_of_steps = torch.tensor(es, dtype=a.dtype).to(a.device)
    return Solution(a, max(e * eps_decay, eps), *terms, e_of_steps)


def _steps(terms: list[Tensor], like: Tensor) -> Tensor:
    """Stack a term `[...]` of each step as `[..., T]`; T may be 0."""
    if not terms:
        return like.new_zeros((*like.shape, 0))
    return torch.stack(terms, -1)


class _Threshold(Function):
    """(this rank's scores `[..., n]`, solution, window, by) -> a `[..., W]` of all scores.

    `window` `[n]` is the index of each score's window, of W. Gradients go to this rank's scores.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, solution: Solution, window: Tensor, by: Slope) -> Tensor:
        ctx.save_for_backward(scores, window, *solution[2:])
        ctx.by = by
        return solution.a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("soft_topk")
        scores, window, *terms = ctx.saved_tensors
        slopes = ctx.by(scores, terms, window)
        return -grad.index_select(-1, window) * slopes, None, None, None


def threshold(
    scores: Tensor, solution: Solution, window: Tensor, caller: Caller, by: Slope = slope
) -> Tensor:
    """Return a `[..., W]`, differentiable in this rank's scores `[..., n]` (float64)."""
    return replicated([_Threshold.apply(scores, solution, window, by)], caller)[0]


def gates(scores: Tensor, a: Tensor, eps: float) -> Tensor:
    """Compute gates min(1, exp((s + a) / eps)), with no gradient where they are 1."""
    x = scores + a
    x = x.masked_fill(x >= 0, 0.0) / eps
    return x.exp()


@typed(report_to_group("soft_topk"))
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
        scores: `[..., n]`, this rank's part of the scores; parts can have any lengths.
        k: int, a number; float in (0, 1], a share of each sample's real scores; or a tensor
            `[...]`, a number per sample, not necessarily an integer.
        eps: softness; if it is below the distances of scores, gates are nearly 0 or 1.
        mask: bool `[..., n]`, True where the score is real; elsewhere, and where a score is -inf,
            the gate is 0.
        group: the ranks that share the scores; None is the default group, or this process alone.

    Returns:
        Gates `[..., n]` in the dtype of the scores; solved in float64. If k is at least the
        number of real scores, all their gates are 1.

    Raises:
        ValueError: scores, k, eps or mask are invalid, or differ between ranks; on every rank.

    Source: Ainslie et al. 2023, https://arxiv.org/abs/2303.09752, section 3.1.

    >>> soft_topk(torch.tensor([3.0, 1.0, 2.0, 0.0]), 2, eps=0.1).round(decimals=3).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    ring = as_ring(group)

    def check() -> None:
        check_scores(scores, k, mask)
        check_eps(eps=eps)

    error, same, own = error_of(check), {}, {}
    if error is None:
        *rows, n = scores.shape
        own["n"] = n
        requires_grad = torch.is_grad_enabled() and scores.requires_grad
        same = dict(
            rows=rows, dtype=scores.dtype, eps=eps, mask=mask is not None, k=_note_of(k, ring),
            device=scores.device.type, requires_grad=requires_grad,
        )  # fmt: skip
    notes = agree(ring, "soft_topk", same, own, check=error)
    caller = Caller(ring, "soft_topk", 0)
    with torch.no_grad():
        hidden = scores.double()
        if mask is not None:
            hidden = hidden.masked_fill(~mask, -torch.inf)
        whole = all_gather_along(-1, hidden, [note["n"] for note in notes], caller)
        real = (whole > -torch.inf).sum(-1)
        solution = fixed_point(whole, counts(k, real), float(eps))
    return _apply(scores, mask, solution, caller)


def _apply(
    scores: Tensor, mask: Tensor | None, solution: Solution, caller: Caller, by: Slope = slope
) -> Tensor:
    """Compute the gates of this rank's scores from the solution for all ranks' scores."""
    one_window = solution._replace(
        a=solution.a.unsqueeze(-1), coef=solution.coef.unsqueeze(-2),
        bound=solution.bound.unsqueeze(-2), shift=solution.shift.unsqueeze(-2),
    )  # fmt: skip
    real = scores != -torch.inf
    if mask is not None:
        real = real & mask
    hidden, shown = (scores.double().masked_fill(~real, x) for x in (-torch.inf, 0.0))
    window = torch.zeros(scores.shape[-1], dtype=torch.long, device=scores.device)
    a = threshold(hidden, one_window, window, caller, by)
    p = gates(shown, a, solution.eps).masked_fill(~real, 0.0)
    return p.to(scores.dtype)


@checked
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
        Gates `[..., n]` in the dtype of the scores; backward differentiates the steps taken.

    Raises:
        ValueError: an argument is invalid, or Triton has no GPU.

    >>> s = torch.tensor([3.0, 1.0, 2.0, 0.0])
    >>> coordinate_descent(s, n_iters=500, k=2).round(decimals=2).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    passes = TRITON if use_triton else PLAIN
    with checks_of("coordinate_descent"):
        check_scores(scores, k, mask)
        check_descent(n_iters, eps, eps_init, eps_decay)
        passes.check(scores.device)
    with torch.no_grad():
        hidden = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        real = (hidden > -torch.inf).sum(-1)
        count = counts(k, real)
        solution = descent(
            hidden, count, n_iters, float(eps), eps_init, float(eps_decay), by=passes.partition
        )
    return _apply(scores, mask, solution, Caller(Ring.alone(), "soft_topk", 0), passes.slope)


def counts(k: Count, real: Tensor) -> Tensor:
    """Return how many of `real` `[...]` scores to choose: k, or a share k of them; at most all."""
    if isinstance(k, Tensor):
        wanted = k.to(real.device).double()
        return wanted.expand(real.shape).minimum(real)
    if isinstance(k, float):
        share = k * real.double() - 1e-9  # 0.1 * 30 is 3, not 4
        return share.ceil().clamp(min=0)
    return real.clamp(max=k).double()


def check_count(name: str, k: Count | None) -> None:
    """Raise ValueError unless k is a valid number or share of tokens; None passes."""
    if isinstance(k, float):
        if not 0 < k <= 1:
            raise ValueError(f"{name} as a share must be above 0 and at most 1, got {k}")
    elif not isinstance(k, Tensor):
        check_least(1, **{name: k})


def _note_of(k: Count, ring: Ring) -> object:
    """Return k for the ranks' agreement; a tensor's values over a ring, which synchronizes."""
    if not isinstance(k, Tensor):
        return k
    if ring.size == 1:
        return "a tensor"
    return f"a tensor of {k.flatten().tolist()}"


def check_scores(scores: Tensor, k: Count, mask: Tensor | None) -> None:
    """Raise ValueError if k of these scores can't be chosen."""
    shape = list(scores.shape)
    if scores.ndim < 1 or not scores.is_floating_point():
        raise ValueError(f"scores must be floating [..., n], got {scores.dtype} {shape}")
    devices = {t.device for t in (scores, k, mask) if isinstance(t, Tensor)}
    if scores.is_meta or len(devices) > 1:
        raise ValueError(
            f"scores, k and mask must be on one device, with values, got {scores.device}"
        )
    if isinstance(k, Tensor) and list(k.shape) != shape[:-1]:
        raise ValueError(f"k must be {shape[:-1]}, one of each sample, got {list(k.shape)}")
    if isinstance(k, Tensor) and (k.is_complex() or k.dtype == torch.bool):
        raise ValueError(f"k must be integers or floating, got {k.dtype}")
    if mask is not None and (mask.dtype != torch.bool or list(mask.shape) != shape):
        raise ValueError(f"mask must be bool {shape}, got {mask.dtype} {list(mask.shape)}")
    check_count("k", k)


def check_eps(**softness: float | None) -> None:
    """Raise ValueError for the first of these that is not a valid eps."""
    for name, eps in softness.items():
        if eps is not None and not 0 < eps < float("inf"):
            raise ValueError(f"{name} must be positive, got {eps}")


def check_descent(n_iters: int, eps: float, eps_init: float | None, eps_decay: float) -> None:
    """Raise ValueError if options of coordinate descent are invalid."""
    if n_iters < 1 or not 0 < eps_decay <= 1:
        raise ValueError(
            "n_iters must be at least 1, and eps_decay above 0 and at most 1, "
            f"got {n_iters} and {eps_decay}"
        )
    check_eps(eps=eps, eps_init=eps_init)
