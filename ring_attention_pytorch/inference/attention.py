"""`ring_attn_with_cache`: attention of new tokens to a `RingCache`, and to themselves.

Queries are the same on every rank. Each rank attends to the keys that it holds, and partial results
are merged by their lse:

    rank 0    q to its pages ─┐
    rank 1    q to its pages ─┼─ merged, on every rank
    rank 2    q to its pages ─┘

So what travels depends on the queries alone, however many keys there are.
"""

import os
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.agreement import agree, told_by_group, typed
from ring_attention_pytorch.geometry.layouts import Layout, all_segments, layout_problem
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.checks import check_call, check_options, triton_refusal
from ring_attention_pytorch.inference.decode_plan import Asked, DecodePlan
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.inference.prefill import Chunk, plan_chunk, prefill
from ring_attention_pytorch.inference.programs import Tuning
from ring_attention_pytorch.plan.kept import settings
from ring_attention_pytorch.plan.option_types import LayoutOption
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.resolved import resolved

_CALLER = "attention to a cache"
_UNSEEN = (
    f"{_CALLER}: before a CUDA graph is captured, the same call must have run once; run it, roll "
    "back what it appended, then capture"
)
_STATE = "what the cache holds"
_CHUNK = "chunk"  # under which a cache has the last chunk's kind and plan


def _tell(given: dict[str, Any], error: ValueError) -> None:
    cache = given.get("cache")
    if isinstance(cache, RingCache):
        told_by_group(_CALLER)({"group": cache.ring}, error)


@typed(_tell)
def ring_attn_with_cache(  # noqa: PLR0913 - a public entry point
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: RingCache,
    *,
    layer: int = 0,
    layout: LayoutOption | None = None,
    window: int | None = None,
    scale: float | int | None = None,
    softclamp: float | int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kernel: str | None = None,
    check: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append tokens to a cache, and compute causal attention of their queries to all of it.

    One token for each sequence is decoding; several are drafts to verify, or a chunk of a prompt.
    There are no gradients. Ranks agree once for each shape and set of options, not for each token.

    Args:
        q: `[b, n, h, d]`, queries of the last n tokens of all sequences: the same on every rank,
            or with a layout this rank's shard.
        k, v: `[b, n, h_kv, d]` and `[b, n, h_kv, d_v]`, appended to the cache. None if they were
            appended before: then each sequence has n tokens or more, or none at all.
        cache: holds the sequences; all ranks of its ring call this together.
        layer: the layer that q, k and v are of.
        layout: None if ranks have all the same tokens. For a chunk of a prompt that is spread over
            them, the layout of its shards, as for `ring_attn`; results are spread likewise.
        window: a query sees its own token and at most this many before it.
        scale: the factor of q.k in a score; None is d ** -0.5.
        softclamp: c replaces a scaled score s by c * tanh(s / c).
        sinks: `[h]`: for each head the score of an additional key without value.
        alibi_slopes: `[h]`: each score is reduced by its head's slope times the distance.
        kernel: "eager" (PyTorch's operators) or "triton" (ours, for GPUs, which CUDA graphs can
            hold). None is ours on CUDA, for all dtypes but float64.
        check: "always" compares q, k and v of all ranks, and lengths: for debugging. None takes
            the environment's RING_ATTENTION_CHECK.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        `[b, n, h, d_v]` in q's dtype; with return_lse also lse `[b, h, n]`, float32 (float64 for
        float64). The same on every rank, or shards in the layout. Queries that see no key get 0
        and -inf.

    Raises:
        ValueError: an argument is invalid, does not fit the cache, or differs between ranks.
        RingError: a rank is gone or out of step.

    >>> cache = RingCache(1, key_heads=2, head_dim=4)
    >>> for _ in range(3):
    ...     q, k = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 4)
    ...     out = ring_attn_with_cache(q, k, k, cache)
    >>> out.shape, cache.lengths
    (torch.Size([1, 1, 4, 4]), [3])
    """
    q, k, v = resolved(q), resolved(k), resolved(v)
    given = q, k, v, sinks, alibi_slopes = q, k, v, resolved(sinks), resolved(alibi_slopes)
    if layout is not None:
        scores = _scores(q, scale, softclamp, window)
        out, lse = _sharded(given, cache, layer, layout, scores, kernel)
        return (out, lse) if return_lse else out
    step = cache.holder(layer).at_once if cache.circles and k is not None else None
    if step is not None and q.ndim == 4 and q.shape[1] > step:
        scores = _scores(q, scale, softclamp, window)
        options = dict(sinks=sinks, alibi_slopes=alibi_slopes, kernel=kernel, check=check)
        out, lse = _in_pieces(given, cache, layer, scores, options)
        return (out, lse) if return_lse else out
    kind = (
        layer, _kind(q), _kind(k), _kind(v), _kind(sinks), _kind(alibi_slopes),
        scale, softclamp, window, kernel, check, cache.has_starts,
    )  # fmt: skip
    plan = cache.checked.get(kind)
    if plan is None:
        scores = _scores(q, scale, softclamp, window)
        plan = cache.checked[kind] = _checked(given, cache, layer, scores, kernel, check)
    if in_graph := cache.in_graph:
        _check_capture(plan)
    elif plan.checks:
        same = {"values of q, k and v": digest(q, k, v), "layer": layer, _STATE: cache.told(layer)}
        agree(cache.ring, _CALLER, same)
    n = 0 if k is None else q.shape[1]
    if n or q.shape[1] > 1:
        cache.make_ready(q.shape[1], layer, n > 0, in_graph)
    number = layer if plan.capturable else cache.mark(layer) + layer  # of messages
    terms = sinks, alibi_slopes
    out, found = plan.run(q, k, v, layer, terms, return_lse=return_lse, number=number)
    if n:
        cache.advance(n, layer, plan.asked.kernel == "eager", in_graph)
    return out if found is None else (out, found.transpose(1, 2))


def _kind(t: Tensor | None) -> Any:
    """Return all of a tensor that decides whether a call is right."""
    return None if t is None else (type(t), t.shape, t.dtype, t.device)


def _scores(q: Tensor, scale: float | None, softclamp: float | None, window: int | None) -> Scores:
    default = max((1, *q.shape[-1:])) ** -0.5
    return Scores(default if scale is None else float(scale), softclamp, window)


def _checked(
    given: tuple[Tensor | None, ...],
    cache: RingCache,
    layer: int,
    scores: Scores,
    kernel: str | None,
    check: str | None,
) -> DecodePlan:
    """Return the plan for such a call; all ranks agree on a new one."""
    q, k, _, sinks, slopes = given
    assert q is not None
    terms = tuple(None if t is None else t.dtype for t in (sinks, slopes))
    key = q.shape, q.dtype, k is not None, terms, cache.has_starts, scores, kernel, check
    plans = cache.holder(layer).plans
    plan = plans.get(key)
    if plan is None:
        if cache.in_graph:
            raise ValueError(_UNSEEN)
        plan = plans[key] = _plan(given, cache, layer, scores, kernel, check)
    else:
        try:
            check_call(given, cache, layer)
        except ValueError as error:
            cache.ring.say(f"raised ValueError: {error}")
            raise ValueError(f"{_CALLER}: {error}") from None
    return plan


def _in_pieces(
    given: tuple[Tensor | None, ...],
    cache: RingCache,
    layer: int,
    scores: Scores,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attend with more new tokens than a layer with a window takes at once: some after others."""
    q, k, v, *_ = given
    assert q is not None
    same = {"tokens": q.shape[1], "layer": layer, _STATE: cache.told(layer)}
    agree(cache.ring, _CALLER, same, check=partial(check_call, given, cache, layer))
    assert k is not None
    assert v is not None
    cache.prepare(q.shape[1], layer, cache.in_graph)
    options |= scores._asdict() | dict(layer=layer, return_lse=True)
    each = zip(*(t.split(cache.holder(layer).at_once or 1, dim=1) for t in (q, k, v)))
    found: list[Any] = [ring_attn_with_cache(a, b, c, cache, **options) for a, b, c in each]
    outs, lses = zip(*found)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def _check_capture(plan: DecodePlan) -> None:
    """Raise ValueError if a CUDA graph that is being captured can't hold what the plan does."""
    if not plan.ran:
        raise ValueError(_UNSEEN)
    if not plan.capturable:
        raise ValueError(
            f"{_CALLER}: ranks exchange messages, which a CUDA graph can't hold; call it outside"
        )


@torch.no_grad()
def _sharded(
    given: tuple[Tensor | None, ...],
    cache: RingCache,
    layer: int,
    layout: LayoutOption,
    scores: Scores,
    kernel: str | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of a chunk of which each rank has a shard."""
    q, k, v, sinks, slopes = given
    chunk, plan = _agreed_chunk(given, cache, layer, layout, scores, kernel)
    assert q is not None
    assert k is not None
    assert v is not None
    if scores.window is None and slopes is None and kernel is None and not cache.has_starts:
        if plan is None:
            plan = plan_chunk((q, k, v), cache, layout, scores, sinks)
            cache.plans[_CHUNK] = _kind_of_chunk(given, layout, scores), plan
        return prefill((q, k, v), cache, layer, chunk, sinks, plan)
    with cache.ring.call("gathering a chunk"):
        q, k, v = (chunk.in_order([*t]) for t in zip(*chunk.gather(q, k, v)()))
    out, lse = ring_attn_with_cache(
        q, k, v, cache, layer=layer, window=scores.window, scale=scores.scale,
        softclamp=scores.softclamp, sinks=sinks, alibi_slopes=slopes, kernel=kernel,
        return_lse=True,
    )  # fmt: skip
    mine = chunk.positions(cache.ring.rank).to(q.device)
    return out[:, mine], lse[..., mine]


def _agreed_chunk(
    given: tuple[Tensor | None, ...],
    cache: RingCache,
    layer: int,
    layout: LayoutOption,
    scores: Scores,
    kernel: str | None,
) -> tuple[Chunk, RingPlan | None]:
    """Return the chunk that all ranks agreed on, and the last one's plan if all can take it."""
    q = given[0]
    assert q is not None
    same = {
        "layout": str(layout),
        "layer": layer,
        "dtype": q.dtype,
        "scores": list(scores),
        "given": [t is not None for t in given],
        "kernel": kernel,
        _STATE: cache.told(layer),
    }
    kind, plan = cache.plans.get(_CHUNK, (None, None))
    if kind != _kind_of_chunk(given, layout, scores):
        plan = None
    own = {"tokens": q.shape[1] if q.ndim > 1 else 0, "plan": plan.number if plan else 0}
    check = partial(_check_shard, given, cache, layer, scores)
    notes = agree(cache.ring, _CALLER, same, own, check=check)
    counts = tuple(note["tokens"] for note in notes)
    _check_layout(layout, counts)
    cache.prepare(sum(counts), layer, in_graph=False)
    kept = len({note["plan"] for note in notes}) == 1
    return Chunk(cache.ring, layout, counts), plan if kept else None


def _kind_of_chunk(
    given: tuple[Tensor | None, ...], layout: LayoutOption, scores: Scores
) -> tuple[object, ...]:
    """Return all that the plan of a chunk depends on, but for other ranks' tokens."""
    q = given[0]
    assert q is not None
    tensors = [None if t is None else (t.shape, t.dtype, t.device) for t in given]
    return (*tensors, layout, scores, settings(q.device.type))


def _check_shard(
    given: tuple[Tensor | None, ...], cache: RingCache, layer: int, scores: Scores
) -> None:
    if given[1] is None:
        raise ValueError("a chunk in a layout comes with its k and v")
    if cache.in_graph:
        raise ValueError("a chunk in a layout can't be captured in a CUDA graph; decoding can")
    check_call(given, cache, layer, some=False)
    cache.holder(layer).check_window(scores.window, 0, new=True)


def _check_layout(layout: Layout, counts: tuple[int, ...]) -> None:
    """Raise ValueError, which all ranks do alike, if they can't have so many tokens each."""
    if (problem := layout_problem(layout, len(counts), sum(counts))) is not None:
        raise ValueError(f"{_CALLER}: {problem}")
    wanted = [count(each) for each in all_segments(layout, len(counts), sum(counts))]
    if wanted != [*counts]:
        raise ValueError(
            f"{_CALLER}: shards of {layout!r} would have {wanted} tokens, got {[*counts]}"
        )
    if not sum(counts):
        raise ValueError(f"{_CALLER}: a chunk must have a token")


def plan_decoding(
    q: Tensor, cache: RingCache, scores: Scores, tuning: Tuning | None = None
) -> DecodePlan:
    """Make a plan for queries like q whose keys are appended; for benchmarks, with `tuning`."""
    kernel = "triton" if cache.device.type == "cuda" else "eager"
    asked = Asked(tuple(q.shape), True, cache.has_starts, scores, False, False, kernel)
    return DecodePlan(cache, asked, tuning)


def _plan(
    given: tuple[Tensor | None, ...],
    cache: RingCache,
    layer: int,
    scores: Scores,
    kernel: str | None,
    check: str | None,
) -> DecodePlan:
    """Make a plan, once all ranks agree on what it depends on."""
    q, k, _, sinks, slopes = given
    assert q is not None
    holder = cache.holder(layer)

    def check_all() -> None:
        check_call(given, cache, layer)
        check_options(scores, kernel, check)
        holder.check_window(scores.window, q.shape[1], k is not None)
        if kernel == "triton" and (refusal := triton_refusal(cache, q.dtype)) is not None:
            raise ValueError(refusal)

    if kernel is None:
        kernel = "triton" if q.is_cuda and triton_refusal(cache, q.dtype) is None else "eager"
    same = {
        "q": list(q.shape),
        "dtype": q.dtype,
        "scores": list(scores),
        "kernel": kernel,
        "check": check,
        "given": [t is not None for t in given],
        "padded on the left": cache.has_starts,
        _STATE: cache.told(layer),
    }
    agree(cache.ring, _CALLER, same, check=check_all)
    asked = Asked(
        tuple(q.shape),
        k is not None,
        cache.has_starts,
        scores,
        sinks is not None,
        slopes is not None,
        kernel,
    )
    plan = DecodePlan(holder, asked)
    plan.checks = "always" in (check, os.environ.get("RING_ATTENTION_CHECK"))
    return plan


def digest(*tensors: Tensor | None) -> str:
    """Return a digest of values, which waits for the device."""
    found = sha256()
    for t in tensors:
        if t is not None:
            found.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
