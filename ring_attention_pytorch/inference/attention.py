"""`ring_attn_with_cache`: attention of new tokens to a `RingCache`, and to themselves.

Queries are the same on every rank. Each rank attends to its own cached keys, and an LSE merge
combines the partial results:

    rank 0    q to its pages ─┐
    rank 1    q to its pages ─┼─ merged, on every rank
    rank 2    q to its pages ─┘

The bytes sent depend on the queries alone, not on the number of cached keys.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import checks_of
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.inference.cache import RingCache, values_of
from ring_attention_pytorch.inference.checks import check_call, check_options, triton_refusal
from ring_attention_pytorch.inference.decode_plan import Asked, DecodePlan
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.inference.prefill import PromptChunk, plan_chunk, prefill
from ring_attention_pytorch.inference.relayed_chunk import chunk_over
from ring_attention_pytorch.plan.checks import check_shards
from ring_attention_pytorch.plan.option_types import LayoutOption
from ring_attention_pytorch.plan.plan_cache import settings
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import (
    Check,
    agree,
    error_of,
    report_to_group,
    reporting,
    typed,
)
from ring_attention_pytorch.ranks.failures import Disagreement
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.runtime.torch_func import resolved

_CALLER = "attention to a cache"
_UNSEEN = (
    f"{_CALLER}: before a CUDA graph is captured, the same call must have run once; run it, roll "
    "back what it appended, then capture"
)
_STATE = "what the cache holds"
_CHUNK = "chunk"  # with the window, cache key of the last chunk's kind and plan
_TOKENS = "q", "k", "q_nope", "latent", "x"  # arguments `[sequences, tokens, ...]` of a call


class Given(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    @property
    def optional(self) -> dict[str, str | None]:
        """Which of the tensors that may be None are given, by name, for ranks to compare."""
        names = zip(self._fields[1:], self[1:])
        return {name: None if t is None else "given" for name, t in names}


class StepOptions(NamedTuple):
    """The layer, and the options of a call."""

    layer: int
    scale: float | None
    softclamp: float | None
    window: int | None
    kernel: str | None
    check: str | None

    def scores(self, q: Tensor) -> Scores:
        """Return the score terms for these queries: by default scaled by d ** -0.5."""
        default = max((1, *q.shape[-1:])) ** -0.5
        return Scores(
            default if self.scale is None else float(self.scale), self.softclamp, self.window
        )


def report_to_cache(given: dict[str, Any], error: ValueError) -> None:
    """Let the other ranks hear that this one raises.

    They agree on the first call with a number of tokens, on each sharded chunk, and with
    check="always". In another step they wait for this rank's messages, and find the report there.
    """
    cache = given.get("cache")
    if not isinstance(cache, RingCache):
        return
    cache.ring.report_failure(error)
    if _agrees(cache, given):
        report_to_group(_CALLER)({"group": cache.ring}, error)


def agree_on(cache: RingCache, given: dict[str, Any], **same: Any) -> None:
    """Agree on more than a call with a cache does by itself, if ranks agree in this call.

    Raises:
        ValueError: values differ; the same text on all ranks.
    """
    if _agrees(cache, given):
        agree(cache.ring, _CALLER, same)


def _agrees(cache: RingCache, given: dict[str, Any]) -> bool:
    """True if ranks agree in this call."""
    first = given.get("layout") is not None or not _has_plan(cache, given)
    return first or _compares_values(given.get("check"))


def _has_plan(cache: RingCache, given: dict[str, Any]) -> bool:
    """True if ranks have a plan for this number of tokens and this layer's memory.

    If the number is unknown, any plan counts. While a graph is captured, ranks make none.
    """
    layer = given.get("layer", 0)
    pools = cache.memory(layer if type(layer) is int else 0)
    tensors = [t for t in map(given.get, _TOKENS) if isinstance(t, Tensor) and t.ndim > 2]
    plans = [each for each in cache.plans.values() if isinstance(each, DecodePlan)]
    known = {plan.asked.shape[1] for plan in plans if plan.pools is pools}
    if cache.in_graph:
        return True
    return tensors[0].shape[1] in known if tensors else bool(known)


@typed(report_to_cache, apart=True)
def ring_attn_with_cache(
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

    One token per sequence is decoding; several are drafts to verify, or a chunk of a prompt.
    There are no gradients. Ranks agree once per shape and set of options, not for each token.

    Args:
        q: `[b, n, h, d]`, queries of the last n tokens of all sequences: the same on every rank,
            or with a layout this rank's shard.
        k, v: `[b, n, h_kv, d]` and `[b, n, h_kv, d_v]`, appended to the cache. None if they were
            appended before: then each sequence has n tokens or more, or none at all. v is always
            None for a tied cache, whose values are the first numbers of keys.
        cache: holds the sequences; all ranks of its ring call this together.
        layer: the layer of q, k and v.
        layout: None if all ranks pass the same tokens. For a sharded chunk of a prompt the layout
            of its shards, as for `ring_attn`; results are sharded in the same way.
        window: a query sees its own token and at most this many before it.
        scale: the factor of q.k in a score; None is d ** -0.5.
        softclamp: c replaces a scaled score s by c * tanh(s / c).
        sinks: `[h]`: each head's score of an additional key without value.
        alibi_slopes: `[h]`: each score is reduced by its head's slope times the distance.
        kernel: "eager" (PyTorch's operators) or "triton" (for GPUs; CUDA graphs can capture it).
            None is "triton" on CUDA, for all dtypes but float64.
        check: "always" compares q, k, v and lengths of all ranks, for debugging; with a layout all
            calls compare lengths. None reads the environment variable RING_ATTENTION_CHECK.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        `[b, n, h, d_v]` in q's dtype; with return_lse also lse `[b, h, n]`, float32 (float64 for
        float64). The same on every rank, or shards in the layout. Queries that see no key get 0
        and -inf.

    Raises:
        ValueError: an argument is invalid, does not fit the cache, or differs between ranks.
        RingError: a rank has failed or is out of step.

    >>> cache = RingCache(1, key_heads=2, head_dim=4)
    >>> for _ in range(3):
    ...     q, k = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 4)
    ...     out = ring_attn_with_cache(q, k, k, cache)
    >>> out.shape, cache.lengths
    (torch.Size([1, 1, 4, 4]), [3])
    """
    if cache.tied:
        call = {"cache": cache, "q": q, "layer": layer, "layout": layout, "check": check}
        with reporting(partial(report_to_cache, call)), checks_of(_CALLER):
            v = values_of(cache, k, v)
    given = Given(resolved(q), resolved(k), resolved(v), resolved(sinks), resolved(alibi_slopes))
    options = StepOptions(layer, scale, softclamp, window, kernel, check)
    at_once = cache.memory(layer).at_once if cache.circles and k is not None else None
    if layout is not None:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _sharded_chunk(given, cache, layout, options)
    elif at_once is not None and q.ndim == 4 and q.shape[1] > at_once:
        out, lse = _in_pieces(given, cache, options)
    elif cache.in_graph:
        out, lse = _captured_step(given, cache, options, return_lse)
    else:
        out, lse = _decode_step(given, cache, options, return_lse)
    return (out, lse) if return_lse and lse is not None else out


def _decode_step(
    given: Given,
    cache: RingCache,
    options: StepOptions,
    return_lse: bool,
    chunk: PromptChunk | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from tokens that all ranks have: new ones to append, or the last cached ones.

    Of a sharded `chunk`, in its order, a rank gets the results for its own tokens.
    """
    (q, k, v, sinks, slopes), layer = given, options.layer
    plan = _plan_for(given, cache, options)
    if plan.checks:
        same = {
            "values of q, k and v": [digest(t) for t in (q, k, v) if t is not None],
            "layer": layer,
            _STATE: cache.state_note(layer),
        }
        agree(cache.ring, _CALLER, same)
    n, eager = q.shape[1], plan.asked.kernel == "eager"
    with reporting(cache.ring.report_failure):
        if k is not None:
            cache.prepare(n, layer)
        elif n > 1 or eager or not plan.capturable:  # the host needs the lengths
            cache.check_last(n, layer)
    number = layer if plan.capturable else cache.lineage.mark(layer) + layer  # stamp of messages
    terms = sinks, slopes
    if chunk is None or k is None or v is None:
        found = plan.run(q, k, v, layer, terms, return_lse=return_lse, number=number)
    else:
        found = plan.run_chunk((q, k, v), layer, terms, chunk, number)
    if k is not None:
        cache.advance(n, layer, on_device=eager)
    return found


def _captured_step(
    given: Given, cache: RingCache, options: StepOptions, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Run `_decode_step` while a CUDA graph is captured: the device counts the tokens.

    Raises:
        ValueError: this call can't be captured.
    """
    (q, k, v, sinks, slopes), layer = given, options.layer
    plan = _plan_for(given, cache, options)
    if not plan.ran:
        raise ValueError(_UNSEEN)
    if not plan.capturable:
        raise ValueError(
            f"{_CALLER}: ranks exchange messages, which a CUDA graph can't hold; call it outside"
        )
    if k is not None:
        cache.prepare(q.shape[1], layer, in_graph=True)
    return plan.run(q, k, v, layer, (sinks, slopes), return_lse=return_lse, number=layer)


def _in_pieces(
    given: Given, cache: RingCache, options: StepOptions
) -> tuple[Tensor, Tensor | None]:
    """Attend in several steps, with more new tokens than a layer with a window takes at once.

    Raises:
        ValueError: an argument is invalid, or a CUDA graph is being captured.
    """
    (q, k, v, *terms), layer = given, options.layer
    same = {"tokens": q.shape[1], "layer": layer, _STATE: cache.state_note(layer)}
    agree(cache.ring, _CALLER, same, check=partial(check_call, given, cache, layer))
    assert k is not None
    assert v is not None
    cache.prepare(q.shape[1], layer)
    outs, lses = [], []
    for some in zip(*(t.split(cache.memory(layer).at_once or 1, dim=1) for t in (q, k, v))):
        out, lse = _decode_step(Given(*some, *terms), cache, options, return_lse=True)
        assert lse is not None
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


@torch.no_grad()
def _sharded_chunk(
    given: Given, cache: RingCache, layout: LayoutOption, options: StepOptions
) -> tuple[Tensor, Tensor | None]:
    """Attend with a chunk that is sharded over the ranks."""
    (q, k, v, sinks, slopes), layer, scores = given, options.layer, options.scores(given.q)
    chunk, plan = _agreed_chunk(given, cache, layout, options)
    assert k is not None
    assert v is not None
    by_position = slopes is not None and cache.memory(layer).window is None
    if options.kernel is None and not by_position and _sees_all(cache, layer, scores.window):
        if plan is None:
            plan = plan_chunk((q, k, v), cache, layout, scores, sinks, slopes)
            cache.plans.keep((_CHUNK, scores.window), (_kind_of_chunk(given, layout, scores), plan))
        elif slopes is not None and plan.terms.alibi is not None:
            plan.terms.alibi.copy_(slopes)  # another layer's may have been in this plan
        return prefill((q, k, v), cache, layer, chunk, sinks, plan)
    return _by_decoding_kernel(given, cache, options, chunk)


def _sees_all(cache: RingCache, layer: int, window: int | None) -> bool:
    """True if queries of a chunk see all cached tokens, or all of a window that every rank has."""
    if window is None or cache.memory(layer).window is None:
        return window is None and not cache.padding
    return cache.padding <= max(0, min(cache.lengths_in(layer)) - window)


def _by_decoding_kernel(
    given: Given, cache: RingCache, options: StepOptions, chunk: PromptChunk
) -> tuple[Tensor, Tensor | None]:
    """Attend with a sharded chunk as in decoding, once every rank has all of it."""
    (q, k, v, sinks, slopes), layer = given, options.layer
    assert k is not None
    assert v is not None
    with cache.ring.call("gathering a chunk", 0, None):
        every = chunk.gather(q, k, *([] if cache.tied else [v]))()
        q, k, *values = (chunk.in_order([*t]) for t in zip(*every))
    v = values[0] if values else k[..., : cache.value_dim]
    if cache.memory(layer).ring.size > 1:
        return _decode_step(given._replace(q=q, k=k, v=v), cache, options, True, chunk)
    out, lse = ring_attn_with_cache(
        q, k, None if cache.tied else v, cache, layer=layer, window=options.window,
        scale=options.scale, softclamp=options.softclamp, sinks=sinks, alibi_slopes=slopes,
        kernel=options.kernel, check=options.check, return_lse=True,
    )  # fmt: skip
    mine = chunk.positions(cache.ring.rank).to(q.device)
    return out[:, mine], lse[..., mine]


def _plan_for(given: Given, cache: RingCache, options: StepOptions) -> DecodePlan:
    """Return the plan of a call; only the first call of each kind is checked."""
    kinds = [None if t is None else (type(t), t.shape, t.dtype, t.device) for t in given]
    kind = *kinds, options, cache.has_starts
    return cache.plans.get(kind) or _checked(kind, given, cache, options)


def _checked(
    kind: tuple[object, ...], given: Given, cache: RingCache, options: StepOptions
) -> DecodePlan:
    """Check the first call of a kind, and return its plan; all ranks agree on a new plan.

    Raises:
        ValueError: an argument is invalid or does not fit the cache.
    """
    q, layer = given.q, options.layer
    _run_check(partial(check_call, given, cache, layer), given, cache, options)
    terms = tuple(None if t is None else t.dtype for t in (given.sinks, given.alibi_slopes))
    scores, new = options.scores(q), given.k is not None
    key = (
        cache.memory(layer).window, q.shape, q.dtype, new, terms, cache.has_starts, scores,
        options.kernel, options.check,
    )  # fmt: skip
    plan = cache.plans.get(key)
    if plan is None:
        if cache.in_graph:
            raise ValueError(_UNSEEN)
        plan = cache.plans.keep(key, _plan(given, cache, scores, options))
    return cache.plans.keep(kind, plan)


def _run_check(check: Check, given: Given, cache: RingCache, options: StepOptions) -> None:
    """Run a check of a step's arguments; the other ranks hear of its error, too."""
    if (error := error_of(check)) is not None:
        call = {"cache": cache, "q": given.q, "layer": options.layer, "check": options.check}
        report_to_cache(call, error)
        raise ValueError(f"{_CALLER}: {error}")


def _plan(given: Given, cache: RingCache, scores: Scores, options: StepOptions) -> DecodePlan:
    """Make a plan, once all ranks agree on everything that it depends on."""
    (q, k, _, sinks, slopes), layer, kernel = given, options.layer, options.kernel
    pools = cache.memory(layer)

    def check() -> None:
        check_options(scores, kernel, options.check)
        pools.check_window(scores.window, q.shape[1], k is not None)
        if kernel == "triton" and (refusal := triton_refusal(cache, q.dtype)) is not None:
            raise ValueError(refusal)

    _run_check(check, given, cache, options)
    if kernel is None:
        kernel = "triton" if q.is_cuda and triton_refusal(cache, q.dtype) is None else "eager"
    same = {
        "q": list(q.shape),
        "dtype": q.dtype,
        **scores._asdict(),
        "kernel": kernel,
        "check": options.check,
        **given.optional,
        "padded on the left": cache.has_starts,
        _STATE: cache.state_note(layer),
    }
    agree(cache.ring, _CALLER, same)
    asked = Asked(
        tuple(q.shape), k is not None, cache.has_starts, scores,
        sinks is not None, slopes is not None, kernel,
    )  # fmt: skip
    plan = DecodePlan(pools, asked)
    plan.checks = _compares_values(options.check)
    return plan


def _compares_values(check: object) -> bool:
    return "always" in (check, os.environ.get("RING_ATTENTION_CHECK"))


def _agreed_chunk(
    given: Given, cache: RingCache, layout: LayoutOption, options: StepOptions
) -> tuple[PromptChunk, RingPlan | None]:
    """Agree on a chunk; return it, and the last chunk's plan if every rank can reuse that."""
    q, layer, scores = given.q, options.layer, options.scores(given.q)
    same = {
        "layout": str(layout),
        "layer": layer,
        "heads of q": [*q.shape[2:3]],
        "dtype": q.dtype,
        **scores._asdict(),
        **given.optional,
        "kernel": options.kernel,
        _STATE: cache.state_note(layer),
    }
    kind, plan = cache.plans.get((_CHUNK, scores.window)) or (None, None)
    if kind != _kind_of_chunk(given, layout, scores):
        plan = None
    own = {"tokens": q.shape[1] if q.ndim > 1 else 0, "plan": plan.number if plan else 0}
    check = partial(_check_shard, given, cache, options)
    notes = agree(cache.ring, _CALLER, same, own, check=check)
    counts = tuple(note["tokens"] for note in notes)
    _check_layout(layout, counts)
    with reporting(cache.ring.report_failure):
        cache.prepare(sum(counts), layer)
    kept = len({note["plan"] for note in notes}) == 1
    return chunk_over(cache.ring, layout, counts), plan if kept else None


def _kind_of_chunk(given: Given, layout: LayoutOption, scores: Scores) -> tuple[object, ...]:
    """Return the cache key of a chunk's plan, except for the other ranks' token counts."""
    tensors = [None if t is None else (t.shape, t.dtype, t.device) for t in given]
    return (*tensors, layout, scores, settings(given.q.device.type))


def _check_shard(given: Given, cache: RingCache, options: StepOptions) -> None:
    layer, scores = options.layer, options.scores(given.q)
    check_options(scores, options.kernel, options.check)
    if given.k is None:
        raise ValueError("a chunk in a layout comes with its k and v")
    if cache.in_graph:
        raise ValueError("a chunk in a layout can't be captured in a CUDA graph; decoding can")
    check_call(given, cache, layer, some=False)
    cache.memory(layer).check_window(scores.window, 0, new=True)


def _check_layout(layout: Layout, counts: tuple[int, ...]) -> None:
    """Raise ValueError, on all ranks, if the layout does not give them these token counts."""

    def check() -> None:
        check_shards(layout, counts)
        if not sum(counts):
            raise ValueError("a chunk must have a token")

    if (error := error_of(check)) is not None:
        raise Disagreement(f"{_CALLER}: {error}")
