"""Recurrent layers over runs: gated delta rule, KDA, Mamba 2.

A kernel computes each run from a state of its own, in one call of twice the width: values with
state 0 beside zeros with state I. Their outputs and last states are

    o = o0 + O_I S_in       S_out = M S_in + U

and the states S_in come from `ring_scan`. Where M is diagonal, O_I and M follow from the gates.
"""

from collections.abc import Callable
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.ranks.agreement import report_to_ring_of, typed
from ring_attention_pytorch.recurrent.eager import Grid, recurrence
from ring_attention_pytorch.recurrent.fla import (
    backward_refused,
    borders_of,
    finite,
    fla_recurrence,
    fla_refusal,
)
from ring_attention_pytorch.recurrent.fla_passes import Call as Passes
from ring_attention_pytorch.recurrent.fla_passes import two_passes
from ring_attention_pytorch.recurrent.fla_rules import in_two_passes
from ring_attention_pytorch.recurrent.levels import first_states, in_full_precision, last_states
from ring_attention_pytorch.recurrent.plan import RunPlan, needs_gradients
from ring_attention_pytorch.recurrent.scan import scanned
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

KernelName = Literal["eager", "fla"]
_CHUNK, _CHUNK_OF_CHANNELS = 64, 16  # tokens; gates of each channel take memory for all pairs


class Call(NamedTuple):
    """A layer's call: its tensors `[b * n, ...]`, plan and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    initial: Tensor | None
    final: bool
    plan: RunPlan
    kernel: KernelName | None
    scale: float = 1.0
    normalize: bool = False
    chunk: int | None = None  # tokens that the eager kernel computes at once


@typed(report_to_ring_of("plan"), apart=True)
def ring_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    plan: RunPlan,
    scale: float | int | None = None,
    normalize: bool = False,
    initial: Tensor | None = None,
    final: bool = False,
    kernel: KernelName | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule of sequences whose shards are runs of tokens.

    The state of a head is S = a (S - b k (S^T k)^T) + b k v^T after each token, a being exp(g), and
    the output S^T q (Yang et al. 2024, "Gated Delta Networks"). All ranks of the ring call this
    together, with one exchange whose size doesn't depend on the length.

    Args:
        q, k: `[b, n, h_k, d_k]`, this rank's tokens.
        v: `[b, n, h, d_v]`; h is a multiple of h_k, and consecutive heads share keys.
        g: `[b, n, h]`, logarithms of gates, at most 0; -inf is a gate of 0.
        beta: `[b, n, h]`.
        plan: from `RunPlan.make` or `RunPlan.of`.
        scale: of q; None is d_k ** -0.5.
        normalize: divide q and k by their norms first.
        initial: `[b, h, d_k, d_v]`, the states before each sample, the same on all ranks; None is
            0. Its gradient is of this rank's use: sum it over ranks.
        final: also return the states after each sample.
        kernel: "eager" is plain PyTorch, in float32 or float64; "fla" needs package fla-core, CUDA
            and 16 bits. None is fla where it can.

    Returns:
        `[b, n, h, d_v]` in the dtype of v; and float32 `[b, h, d_k, d_v]` (float64 if v is), the
        same on all ranks, or None.

    Raises:
        ValueError: shapes don't fit, ranks differ, or the kernel can't compute this.

    >>> q, g = torch.randn(1, 6, 2, 4), -torch.rand(1, 6, 2)
    >>> out, _ = ring_gated_delta_rule(q, q, q, g, g.exp(), plan=RunPlan.make(q), normalize=True)
    >>> out.shape
    torch.Size([1, 6, 2, 4])
    """
    call = Call(q, k, v, g, beta, initial, final, plan, kernel)
    return _delta("ring_gated_delta_rule", call, 3, scale, normalize)


@typed(report_to_ring_of("plan"), apart=True)
def ring_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    plan: RunPlan,
    scale: float | int | None = None,
    normalize: bool = False,
    initial: Tensor | None = None,
    final: bool = False,
    kernel: KernelName | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute Kimi delta attention: the gated delta rule with a gate for each channel of a key.

    The state of a head is S = S' - b k (S'^T k)^T + b k v^T with S' = Diag(exp(g)) S (Kimi Linear,
    2025).

    Args:
        g: `[b, n, h, d_k]`, logarithms of gates.
        The rest: as for `ring_gated_delta_rule`.

    Raises:
        ValueError: shapes don't fit, ranks differ, or the kernel can't compute this.

    >>> q, beta = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2)
    >>> ring_kda(q, q, q, -q.abs(), beta, plan=RunPlan.make(q), normalize=True)[0].shape
    torch.Size([1, 6, 2, 4])
    """
    call = Call(q, k, v, g, beta, initial, final, plan, kernel)
    return _delta("ring_kda", call, 4, scale, normalize)


@typed(report_to_ring_of("plan"), apart=True)
def ring_mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    plan: RunPlan,
    skip: Tensor | None = None,
    initial: Tensor | None = None,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the state space of Mamba 2 for sequences whose shards are runs of tokens.

    The state of a head is S = exp(dt a) S + dt b x^T after each token, and the output S^T c (Dao
    and Gu 2024, "Transformers are SSMs"). All ranks of the ring call this together.

    Args:
        x: `[b, n, h, p]`, this rank's tokens.
        dt: `[b, n, h]`, steps after softplus, at least 0.
        a: `[h]`, negative.
        b, c: `[b, n, groups, d]`; consecutive heads share a group.
        plan: from `RunPlan.make` or `RunPlan.of`.
        skip: `[h]` or `[h, p]`, a factor of x that is added to the output (D); None is 0.
        initial: `[b, h, p, d]`, the states before each sample, as for `ring_gated_delta_rule`.
        final: also return the states after each sample.

    Returns:
        `[b, n, h, p]` in the dtype of x; and float32 `[b, h, p, d]` (float64 if x is) or None.

    Raises:
        ValueError: shapes don't fit, or ranks differ.

    >>> x, dt, b = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2), torch.randn(1, 6, 1, 3)
    >>> ring_mamba2(x, dt, -torch.ones(2), b, b, plan=RunPlan.make(x))[0].shape
    torch.Size([1, 6, 2, 4])
    """
    name = "ring_mamba2"
    _check_mamba2(name, plan, x, dt, a, b, c, skip=skip, initial=initial)
    state = None if initial is None else initial.mT
    wide = accumulation_dtype(x.dtype)
    dt, values = dt.to(wide), x.to(wide)
    call = Call(
        c, b, values * dt[..., None], dt * a.to(wide), None, state, final, plan, "eager"
    )  # fmt: skip
    plan.agree_once(name, skip=None if skip is None else tuple(skip.shape))
    out, last = computed(name, call)
    if skip is not None:
        factor = skip.to(wide)
        out = out + values * (factor if skip.ndim == 2 else factor[:, None])
    return out.to(x.dtype), None if last is None else last.mT


def _check_mamba2(
    name: str, plan: RunPlan, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor,
    **more: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError if shapes or dtypes don't fit."""
    plan.check_tokens(name, x=x, dt=dt, b=b, c=c)
    heads, skip, initial = x.shape[2:3], more["skip"], more["initial"]
    fits = x.ndim == b.ndim == 4 and c.shape == b.shape and 0 not in (*x.shape[2:], *b.shape[2:])
    fits = fits and dt.shape == x.shape[:3] and a.shape == heads and not heads[0] % b.shape[2]
    if not fits or (skip is not None and skip.shape not in (heads, x.shape[2:])):
        raise plan.error(
            f"{name}: x must be [b, n, h, p], dt [b, n, h], a [h], b and c [b, n, groups, d], h a "
            f"multiple of groups, skip [h] or [h, p], and none of these 0; got {[*x.shape]}, "
            f"{[*dt.shape]}, {[*a.shape]}, {[*b.shape]}, {[*c.shape]} and "
            f"{None if skip is None else [*skip.shape]}"
        )
    want = plan.runs.batch, *x.shape[2:], b.shape[3]
    if initial is not None and initial.shape != want:
        raise plan.error(f"{name}: initial must be {[*want]}, got {[*initial.shape]}")
    plan.check_numbers(name, x, x=x, dt=dt, a=a, b=b, c=c, **more)


def _delta(
    name: str, call: Call, gate_dims: int, scale: float | int | None, normalize: bool
) -> tuple[Tensor, Tensor | None]:
    """Check a call with the delta rule, choose its kernel, and compute it.

    Gates have 3 dimensions, or 4 if each channel of a key has one.
    """
    q, k, v, beta = call.q, call.k, call.v, call.beta
    assert beta is not None
    check_call(name, call.plan, q, k, v, call.initial, g=(call.g, gate_dims), beta=(beta, 3))
    if scale is not None and not isfinite(scale):
        raise call.plan.error(f"{name}: scale must be finite, got {scale}")
    why = fla_refusal(q, k, v)
    if call.kernel == "fla" and why is not None:
        raise call.plan.error(f"{name}: kernel='fla': {why}")
    kernel: KernelName = call.kernel or ("eager" if why else "fla")
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    g = call.g.to(accumulation_dtype(v.dtype))
    call = call._replace(g=g, kernel=kernel, scale=scale, normalize=normalize)
    out, last = computed(name, call)
    return out.to(v.dtype), last


def normalized(x: Tensor) -> Tensor:
    """Return x over its norm along the last dimension, as flash-linear-attention does.

    >>> normalized(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def computed(name: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the outputs `[b, n, h, d_v]` and last states of a call of tensors `[b, n, ...]`.

    Ranks agree on the call first, which errors name so. Autocast doesn't reach it: states stay in
    float32.
    """
    has_states = call.final or call.initial is not None
    apart = not call.plan.runs.continues and (call.plan.ring.size == 1 or not has_states)
    passes = call.kernel == "fla" and _by_passes(call, apart)
    _agree(name, call, passes)
    with in_full_precision(call.v.device):
        return _computed(call, apart, passes)


def _agree(name: str, call: Call, passes: bool) -> None:
    """Agree with the other ranks on all that decides results and exchanges."""
    tensors = call.q, call.k, call.v, call.g, call.beta, call.initial
    same = {
        "heads and their sizes": (*call.v.shape[2:], *call.k.shape[2:]),
        "dtype": call.v.dtype,
        "kernel": f"{call.kernel} in two passes" if passes else call.kernel,
        "scale": call.scale,
        "normalize": call.normalize,
        "final": call.final,
        "initial": call.initial is not None,
        "requires_grad of q, k, v, g, beta, initial": needs_gradients(*tensors),
    }
    call.plan.agree_once(name, **same)


def _computed(call: Call, apart: bool, passes: bool) -> tuple[Tensor, Tensor | None]:
    plan, v = call.plan, call.v
    if passes:
        return _two_passes(call)
    flat = call._replace(
        q=call.q.flatten(0, 1), k=call.k.flatten(0, 1), v=v.flatten(0, 1), g=call.g.flatten(0, 1),
        beta=None if call.beta is None else call.beta.flatten(0, 1),
    )  # fmt: skip
    state = call.k.new_zeros(
        len(plan.mine), v.shape[2], call.k.shape[3], v.shape[3], dtype=accumulation_dtype(v.dtype)
    )
    if apart:
        out, last = _from_states(flat, state)
    elif call.beta is None:
        out, last = _diagonal(flat, state)
    else:
        out, last = _widened(flat, state)
    return out.unflatten(0, v.shape[:2]), last


def _from_states(call: Call, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute a call whose runs are whole documents, of this process alone if states are given."""
    if not call.final and call.initial is None:
        return _kernel(call, state)[0], None
    route = call.plan.route(call.final)
    initial = None if call.initial is None else call.initial.to(state.dtype)
    state = first_states(state, route.chains, route.starts, initial)[route.mine]
    out, ended = _kernel(call, state)
    if route.ends is None:
        return out, None
    samples, _, places = route.ends
    ended = ended[route.sent][places]
    return out, last_states(call.plan.runs.batch, samples, ended, initial)


def _widened(call: Call, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute a call with the delta rule: values beside zeros, state 0 beside I."""
    k, v = call.k, call.v
    d_k, d_v = k.shape[-1], v.shape[-1]
    identity = torch.eye(d_k, dtype=state.dtype, device=v.device).expand(*state.shape[:3], d_k)
    wide = call._replace(v=torch.cat((v, v.new_zeros(*v.shape[:2], d_k)), -1))
    out, maps = _kernel(wide, torch.cat((state, identity), -1))
    out, reads = out.split((d_v, d_k), -1)
    u, m = maps.split((d_v, d_k), -1)
    before, last = _scanned(call, m, u)
    return _with_states(call, out, before, lambda span: reads[span]), last


def _by_passes(call: Call, apart: bool) -> bool:
    """Return whether fla's kernels compute a call in two passes.

    They do if states cross ranks or runs, or if fla refuses its own backward.
    """
    if call.beta is None or not in_two_passes(call.k.shape[-1], call.v.shape[-1]):
        return False
    leading = call.q, call.k, call.v, call.g, call.beta, call.initial
    return not apart or (call.g.ndim == 3 and backward_refused(*leading))


def _two_passes(call: Call) -> tuple[Tensor, Tensor | None]:
    """Compute a call with the delta rule by fla's kernels, the maps of runs first."""
    assert call.beta is not None
    initial = None if call.initial is None else call.initial.to(call.g.dtype)
    given = call.q, call.k, call.v, finite(call.g), call.beta, initial
    back = any(needs_gradients(*given))
    passes = Passes(call.plan, call.scale, call.normalize, call.final, back)
    return two_passes(*given, passes)


def _diagonal(call: Call, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute a call without the delta rule: a run multiplies its state by all of its gates."""
    plan, g = call.plan, call.g
    out, u = _kernel(call, state)
    totals = g.new_zeros(len(plan.mine), *g.shape[1:]).index_add(0, plan.run_of_token, g)
    before, last = _scanned(call, totals.exp(), u)
    share = call.v.shape[1] // call.q.shape[1]

    def reads(span: slice) -> Tensor:
        decay = g[span].cumsum(0).exp()
        q = call.q[span].to(g.dtype).repeat_interleave(share, 1)
        return q * (decay if decay.ndim == 3 else decay[..., None])

    return _with_states(call, out, before, reads), last


def _scanned(call: Call, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the states before runs, and those after samples or None."""
    initial = None if call.initial is None else call.initial.to(u.dtype)
    return scanned(m, u, call.plan, initial, call.final)


def _with_states(
    call: Call, out: Tensor, before: Tensor, reads: Callable[[slice], Tensor]
) -> Tensor:
    """Add to outputs `[n, h, d_v]` the products of the states before runs and tokens' reads."""
    tokens, products = [], []
    state = before.to(out.dtype)
    for number, (run, (first, length)) in enumerate(zip(call.plan.mine, call.plan.spans)):
        if run.position or (call.initial is not None and call.plan.runs.begins(run) is not None):
            read = reads(slice(first, first + length)).to(out.dtype)
            products.append(torch.einsum("nhk,hkv->nhv", read, state[number]))
            tokens.append((first, length))
    if not products:  # backward exchanges on all ranks, also on one that reads no state
        return out + state.flatten()[:0].sum()
    key = "read", tuple(tokens)
    places = call.plan.once(key, lambda: _places(tokens, out.device))
    return out.index_add(0, places, torch.cat(products))


def _places(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(first, first + length) for first, length in spans]).to(device)


def _kernel(call: Call, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs of tokens and last states of runs that begin with these states."""
    plan, dtype = call.plan, state.dtype
    if call.kernel == "fla" and call.beta is not None:
        borders = plan.once("borders", lambda: borders_of(plan.spans, plan.device))
        how = dict(scale=call.scale, use_qk_l2norm_in_kernel=call.normalize)
        return fla_recurrence(call.q, call.k, call.v, call.g, call.beta, state, borders, **how)
    share = call.v.shape[1] // call.k.shape[1]
    q, k = call.q.to(dtype), call.k.to(dtype)
    if call.normalize:
        q, k = normalized(q), normalized(k)
    q, k = (t.repeat_interleave(share, 1) for t in (q * call.scale, k))
    beta = None if call.beta is None else call.beta.to(dtype)
    size = call.chunk or (_CHUNK if call.g.ndim == 2 else _CHUNK_OF_CHANNELS)
    grid = plan.once(("grid", size), lambda: Grid.of(plan.spans, size, plan.device))
    return recurrence(q, k, call.v.to(dtype), call.g, beta, state, grid)


def check_call(
    name: str,
    plan: RunPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    **by_head: tuple[Tensor, int],
) -> None:
    """Raise ValueError if shapes don't fit; ranks that wait for this one are notified.

    `by_head` are tensors with a number for each head, and their dimensions.
    """
    tensors = {each: t for each, (t, _) in by_head.items()}
    plan.check_tokens(name, q=q, k=k, v=v, **tensors)
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape == k.shape
    if not fits or 0 in (*k.shape[2:], *v.shape[2:]) or v.shape[2] % k.shape[2]:
        raise plan.error(
            f"{name}: queries and keys must be [b, n, h_k, d_k] and values [b, n, h, d_v], h a "
            f"multiple of h_k, and none of these 0; got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    heads, d_k, d_v = v.shape[2], k.shape[3], v.shape[3]
    for each, (t, ndim) in by_head.items():
        want = [*v.shape[:3], d_k][:ndim]
        if [*t.shape] != want:
            raise plan.error(f"{name}: {each} must be {want}, got {[*t.shape]}")
    if initial is not None and [*initial.shape] != [plan.runs.batch, heads, d_k, d_v]:
        raise plan.error(
            f"{name}: initial states of {plan.runs.batch} samples and {heads} heads must have d_k "
            f"{d_k} and d_v {d_v}, got {[*initial.shape]}"
        )
    plan.check_numbers(name, v, v=v, q=q, k=k, initial=initial, **tensors)
