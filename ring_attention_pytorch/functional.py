"""`ring_attn` and `ulysses_attn`: attention of shards, as functions."""

from typing import Any

from beartype import beartype
from torch import Tensor

from ring_attention_pytorch.attention import RingAttentionFunction
from ring_attention_pytorch.comm.agreement import told_by_group, typed
from ring_attention_pytorch.comm.ring import Group, as_ring
from ring_attention_pytorch.geometry.documents import Borders
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.kernels import explain
from ring_attention_pytorch.plan.checks import autocast_dtype, like_autocast
from ring_attention_pytorch.plan.masks import Prefix
from ring_attention_pytorch.plan.options import not_default, rows
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.interfaces import KernelRequest, MaskMod
from ring_attention_pytorch.runtime.scores import bias_problem, with_bias
from ring_attention_pytorch.runtime.torch_func import tangents_note


@typed(told_by_group("ring attention"))
def ring_attn(  # noqa: PLR0913 - a public entry point
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | int | None = None,
    softclamp: float | int | None = None,
    layout: Layout = "contiguous",
    group: Group = None,
    kernel: str | None = None,
    transport: str | None = None,
    ulysses: int = 1,
    memory: int | None = None,
    plan: RingPlan | None = None,
    return_lse: bool = False,
    bucket_size: int = 1024,
    cross: bool | None = None,
    documents: Tensor | None = None,
    cu_seqlens: Borders | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    mask_mod: MaskMod | None = None,
    prefix: Prefix = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    dropout: float | int = 0.0,
    dropout_seed: int | None = None,
    check: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence that is spread over a ring of processes.

    Every rank of the ring calls this with its shards and gets its shard of the result, equal
    to ordinary attention over the whole; so are the gradients of q, k, v and lse.

    Args:
        q: `[b, n, h, d]`, this rank's queries.
        k: `[b, m, h_kv, d]`, this rank's keys; h must be a multiple of h_kv, and query head i
            uses key head i // (h / h_kv).
        v: `[b, m, h_kv, d_v]`. All three of one dtype: float64, float32, bfloat16 or float16.
        causal: a query sees no later token.
        window: a query sees itself and at most that many tokens before it, and, without
            causal, after it. Counted in tokens of the whole sequence.
        key_mask: bool `[b, m]`, True where a key may be seen. Queries that see nothing get
            out 0, lse -inf and no gradient.
        scale: of the scores; None is d ** -0.5.
        softclamp: c makes a scaled score s into c * tanh(s / c).
        layout: "contiguous", "striped", "zigzag" or what `balanced` made: which tokens a rank
            holds (`positions`). Keys of another sequence stand in the order of ranks.
        group: the ring, a ProcessGroup or a DeviceMesh of one dimension. None is the default
            group, or this process alone if there is none.
        kernel: a kernel of docs/kernels.md, as "sdpa" (PyTorch's own), "triton" (ours),
            "flash-attn" or "eager"; "triton+flash-attn" is forward by one and backward by
            another. None takes the fastest that can do it (`explain_kernel` tells), a named one
            never falls back.
        transport: "ring" passes keys from neighbour to neighbour, "gather" has all that are needed
            come at once; None chooses, on GPUs by speeds that the group's first plan measures
            (under torch.use_deterministic_algorithms by those of H200s).
        ulysses: so many neighbours swap heads for sequence first, and only ranks with the same
            heads exchange keys. It must divide the ring and the heads of q.
        memory: bytes that other ranks' keys and gradients may take here under "gather", which
            then brings fewer owners at once, but at least one. None is no bound where the
            transport is named; else 8 GiB, and on GPUs at most half of what is left.
        plan: a `RingPlan` for tensors like these. It stands for all options but return_lse,
            sinks and key_bias, of which it must know that they come.
        return_lse: also return the log-sum-exp of the scores.
        bucket_size: kernels that hold scores in memory hold those of so many queries at once.
        cross: True if the keys are of another sequence than the queries, in shards of any
            lengths; None is True where any rank's n and m differ. Then no causal, window or
            documents.
        documents: int `[b, n]`: tokens see one another only where these are equal, wherever
            they stand; causal and window count the document's own tokens.
        cu_seqlens: the same by borders: ints that ascend from 0 to the length of the whole
            sequence, between which documents lie; one list, or one for each sample.
        sinks: `[h]`, learnable: the score of a key without value that all queries see, which
            lets a head attend to nothing (Xiao et al. 2023; gpt-oss). lse has it too. Gradients
            of all ranks sum up to that of the whole.
        alibi_slopes: `[h]`: scores lose a head's slope times the distance of query and key
            (Press et al. 2022), in their document; after softclamp. They have no gradient.
        key_bias: `[b, m]` or `[b, m, h]`, finite, differentiable: added to the scores of a key,
            whatever the query. It takes columns of the head size (one, or one for each query
            head of a group; twice that in 16 bits).
        mask_mod: a predicate of (sample, head, position of the query, of the key), int tensors that
            broadcast: bool, True where the key may be seen, beside all other masks. Positions are
            those in the document. On CUDA it is compiled, by "flex": it compares, computes and
            looks up in tensors; "eager", all that there is elsewhere, takes any.
        prefix: under causal, so many first tokens of the sequence see one another both ways;
            one number, or one for each sample.
        query_positions, key_positions: int `[n]` and `[m]`, by which causal and window go where
            keys are of another sequence; less than 2 ** 30 from 0. Best in few runs that ascend
            by one, for tiles are made of pairs of them.
        dropout: so much of the probabilities is dropped, the rest multiplied by 1 / (1 - dropout);
            lse is without. What is dropped depends on seed, sample, head and the tokens' places
            in the whole sequence alone, not on ranks; keys of another sequence count in the order
            of ranks, and positions that are given must not repeat.
        dropout_seed: of 64 bits, the same on all ranks. None is drawn by PyTorch's generator on
            the CPU when the plan is made, and is the first rank's; so torch.manual_seed repeats
            it. Layers that share a plan take `plan.for_layer(i)`, or drop alike; as do steps
            that share one.
        check: "always" lets ranks compare notes in each call, too, and tells where one is out of
            step: for debugging. None is what RING_ATTENTION_CHECK says in the environment.

    Returns:
        `[b, n, h, d_v]` in q's dtype; with return_lse also lse `[b, h, n]`, natural
        logarithm, float32 (float64 for float64).

    Raises:
        ValueError: the same on every rank and before any tensor is sent: shapes, dtypes or
            options that can't be or that differ between ranks, shards that are not the
            layout's, a kernel that can't do it.
        NotImplementedError: second derivatives or forward mode of another kernel than "eager".

    Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889

    >>> q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    >>> ring_attn(q, k, v, causal=True).shape
    torch.Size([1, 6, 4, 8])
    """
    given = locals()
    q, k, v = (t.to(autocast_dtype(t)) for t in (q, k, v))
    if key_bias is not None:
        given["key_bias"] = key_bias = key_bias.to(autocast_dtype(key_bias))
    if plan is None:
        also = tangents_note(q, k, v, sinks, key_bias)
        options = {name: given[name] for name in rows()}
        plan = RingPlan.make(q, k, v, group=group, also=also, **options)
    else:
        _check_only_plan(given)
        if (why := bias_problem(key_bias, q, k, *plan.terms[:2])) is not None:
            raise ValueError(f"ring attention: {why}")
    if key_bias is not None:
        q, k = with_bias(q, k, key_bias, plan.terms.scale)
    plan.check(q, k, v, sinks)
    if plan.ulysses is not None:
        q, k, v = plan.ulysses.to_heads(q, k, v)
        sinks = None if sinks is None else sinks[plan.ulysses.heads]
    out, lse = RingAttentionFunction.apply(plan, q, k, v, sinks)
    if plan.ulysses is not None:
        out, lse = plan.ulysses.to_sequence(out, lse if return_lse else None)
    return (out, lse) if return_lse else out


@beartype
def explain_kernel(  # noqa: PLR0913 - a public entry point
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    key_mask: Tensor | None = None,
    scale: float | int | None = None,
    softclamp: float | int | None = None,
    alibi_slopes: Tensor | None = None,
    mask_mod: MaskMod | None = None,
    dropout: float | int = 0.0,
    packed: bool = False,
    kernel: str | None = None,
) -> str:
    """Which kernel `ring_attn` would run for tensors and options like these, and why.

    Args:
        packed: whether there are documents.
        The rest: as for `ring_attn`; of the tensors only shape, dtype and device matter.

    Returns:
        A line for each faster kernel with what keeps it from running, then the one that runs.

    Raises:
        ValueError: there is no such kernel.

    >>> q = torch.randn(1, 6, 2, 8)
    >>> print(explain_kernel(q, q, q, softclamp=50.0).splitlines()[-2])
    sdpa: has no softclamp
    """
    q, v = like_autocast(q), like_autocast(v)
    asked = dict(window=window, key_mask=key_mask, scale=scale, softclamp=softclamp)
    asked |= dict(alibi_slopes=alibi_slopes, mask_mod=mask_mod, dropout=dropout, packed=packed)
    return explain(KernelRequest.of(q, v, **asked), kernel)


@typed(told_by_group("ring attention"))
def ulysses_attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`ring_attn` with `ulysses` being the whole ring: all ranks swap heads for sequence.

    Args:
        q, k, v, group, options: as for `ring_attn`; the heads of q must divide by the ranks.

    Returns:
        As `ring_attn`.

    Raises:
        ValueError: as `ring_attn`.

    Source: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509

    >>> q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    >>> ulysses_attn(q, k, k, causal=True).shape
    torch.Size([1, 6, 4, 8])
    """
    ring = as_ring(group)
    return ring_attn(q, k, v, group=ring, ulysses=ring.size, **options)


def _check_only_plan(given: dict[str, Any]) -> None:
    """Raise ValueError where options are given beside a plan, which has some already."""
    of_call = ("sinks", "key_bias")  # of which a plan knows that they come
    beside = [name for name in not_default(given) if name not in of_call]
    if given["group"] is not None:
        beside.append("group")
    if beside:
        raise ValueError(
            f"ring_attn: the plan already decides {', '.join(beside)}; pass one or the other"
        )
