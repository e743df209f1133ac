"""The functions `ring_attn` and `ulysses_attn`: attention of shards over a ring."""

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from ring_attention_pytorch import operators
from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.attention import attention
from ring_attention_pytorch.geometry.documents import Borders
from ring_attention_pytorch.kernels import explain
from ring_attention_pytorch.plan.checks import autocast, check_qkv, like_autocast
from ring_attention_pytorch.plan.masks import Prefix
from ring_attention_pytorch.plan.option_types import (
    CheckOption,
    KernelOption,
    LayoutOption,
    TransportName,
    UlyssesOptions,
)
from ring_attention_pytorch.plan.options import DEFAULTS, Call, Options, check_only_plan
from ring_attention_pytorch.plan.placement import attention_ring
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest, MaskMod
from ring_attention_pytorch.runtime.merging import merge_attention
from ring_attention_pytorch.runtime.scores import check_bias, columns, with_bias
from ring_attention_pytorch.runtime.torch_func import (
    refuse_export,
    resolved,
    run_apart,
    tangents_note,
)
from ring_attention_pytorch.shared_keys import attend_with_shared
from ring_attention_pytorch.tensor_kinds import (
    has_values,
    shapes_of_results,
    sharded,
    swapped,
)


class CallOptions(UlyssesOptions, total=False):
    """The options of `ring_attn` but return_lse."""

    group: Group
    plan: RingPlan | None


@overload
def ring_attn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Tensor: ...  # fmt: skip
@overload
def ring_attn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[CallOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


@typed(report_to_group("ring attention", ring_of=attention_ring))
def ring_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    # which keys a query sees
    causal: bool = False,
    window: int | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | None = None,
    cu_seqlens: Borders | None = None,
    prefix: Prefix = None,
    mask_mod: MaskMod | None = None,
    cross: bool | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    shared_keys: tuple[Tensor, Tensor] | None = None,
    shared_key_mask: Tensor | None = None,
    # what a score is
    scale: float | int | None = None,
    softclamp: float | int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    dropout: float | int = 0.0,
    dropout_seed: int | None = None,
    # how it is computed
    group: Group = None,
    layout: LayoutOption = "contiguous",
    kernel: KernelOption | None = None,
    transport: TransportName | None = None,
    ulysses: int | None = None,
    memory: int | None = None,
    bucket_size: int = 1024,
    check: CheckOption | None = None,
    plan: RingPlan | None = None,
    heads_first: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence that is spread over a ring of processes.

    Every rank of the ring calls this with its shards of q, k and v, and gets its shard of the
    result. Results and gradients, also through lse, equal ordinary attention's over the whole
    sequence.

    The options below are in three groups: which keys a query sees (causal to key_positions), how
    scores are computed (scale to dropout_seed), and how attention is run (group to return_lse).

    Args:
        q: `[b, n, h, d]`, this rank's queries.
        k: `[b, m, h_kv, d]`, this rank's keys; h must be a multiple of h_kv, and query head i
            uses key head i // (h / h_kv).
        v: `[b, m, h_kv, d_v]`, this rank's values. q, k and v are of one dtype: float64, float32,
            bfloat16 or float16.
        causal: a query sees no later token.
        window: a query sees its own token and at most this many tokens before it; without causal
            also at most this many after it. Counted in tokens of the whole sequence.
        key_mask: bool `[b, m]`, True where a key may be seen. Queries that see no key get
            out 0, lse -inf and no gradient. Keys and values that are hidden may be NaN.
        documents: int `[b, n]`, the document of each token. Tokens see one another only if these
            are equal, wherever they are in the sequence. causal and window count the tokens of
            the document.
        cu_seqlens: documents given by their borders: ascending ints from 0 to the length of the
            whole sequence, with a document between each two; one list, or one for each sample.
        prefix: with causal, the number of first tokens of the sequence that see one another both
            ways; one number, or one for each sample.
        mask_mod: a function of (sample, head, position of the query, position of the key), int
            tensors that broadcast. It returns bool, True where the key may be seen; all other masks
            apply too. Positions count within the document. The function and the data that it reads
            must be the same on all ranks. On CUDA the kernel "flex" compiles it; it may compare,
            compute and look up in tensors. The kernel "eager", the only one elsewhere, takes any
            function.
        cross: True if keys belong to another sequence than the queries, in shards of any lengths;
            None means True if n and m differ on any rank. Excludes documents, and without
            query_positions also causal and window.
        query_positions, key_positions: int `[n]` and `[m]`, the positions for causal and window if
            keys belong to another sequence; less than 2 ** 30 from 0. Best in few runs that ascend
            by one: each pair of runs makes a tile, and so does each step of queries in steps, (t //
            B) * B, for which the kernel "triton" is the fastest.
        shared_keys: `(k [b, s, h_kv, d], v [b, s, h_kv, d_v])`, the same on all ranks: keys in
            the same softmax as the sequence's, such as text beside video, registers or
            memory tokens. All queries see all of them: causal, window, documents, prefix, mask_mod
            and key_bias are of the sequence's keys. Nothing is sent forward. Their gradients are
            sums over ranks, equal on all of them: don't sum them again. Not with alibi_slopes or
            dropout, which need positions. Values are compared only under check="always".
        shared_key_mask: bool `[b, s]`, the same on all ranks, True where a shared key may be seen.
        scale: the factor of q.k in a score; None is d ** -0.5.
        softclamp: c replaces a scaled score s by c * tanh(s / c).
        sinks: `[h]`, learnable: for each head the score of an additional key without value, which
            all queries see. It lets a head attend to nothing (Xiao et al. 2023; gpt-oss). lse
            includes it. Summed over all ranks, it has the gradients of the whole sequence.
        alibi_slopes: `[h]`: each score is reduced by its head's slope times the distance of query
            and key in their document, after softclamp (Press et al. 2022). They have no gradient.
        key_bias: `[b, m]` or `[b, m, h]`, finite, differentiable: added to all scores of a key. It
            takes additional columns of the head size: one, or one for each query head of a group;
            twice as many in 16 bits.
        dropout: the fraction of probabilities that is dropped; the others are multiplied by 1 / (1
            - dropout), and lse is computed without dropout. The choice depends only on seed,
            sample, head and the tokens' places in the whole sequence, not on ranks. Keys of another
            sequence count in the order of ranks; given positions must not repeat.
        dropout_seed: an int of 64 bits, the same on all ranks. None draws one from PyTorch's CPU
            generator when the plan is made, and all ranks use the first rank's: repeatable with
            torch.manual_seed. Steps that share a plan drop the same probabilities, and so do
            layers, unless each uses `plan.for_layer(i)`.
        group: the ring, a ProcessGroup or a DeviceMesh: of one dimension, or of two that are named
            as machines and their ranks, such as ("machine", "cp"). None is the default group,
            or this process alone if there is none; inside `with batch:` the batch's ring.
        layout: which tokens of the sequence a rank holds (`positions` lists them): "contiguous",
            "striped", "zigzag" or a result of `balanced`. Keys of another sequence are in the
            order of ranks.
        kernel: a kernel of docs/kernels.md, such as "sdpa" (PyTorch's own), "triton" (ours),
            "flash-attn" or "eager"; "triton+flash-attn" runs the first forward and the second
            backward. None takes the fastest that supports the call (`explain_kernel` says which).
            Short sequences on several GPUs get the kernel with the fewest launches, short documents
            get "triton"; `explain_plan` says which runs. A named one never falls back to another.
        transport: "ring" passes keys from neighbour to neighbour, "gather" fetches all required
            keys in one exchange. None chooses: on GPUs by a prediction from constants of the
            device, hence the same in every run; on CPUs "ring". Over several machines it is
            "gather" if that sends fewer bytes from one to another.
        ulysses: how many neighbours swap heads for sequence (all-to-all) first, so that only ranks
            with the same heads exchange keys. It must divide the ring and the heads of q. None
            chooses, where the ring spans several machines, so that the fewest bytes go from one to
            another (`explain_plan` says how many); on one machine it is 1.
        memory: a limit in bytes for other ranks' keys and gradients on this rank under "gather",
            which then fetches the keys of fewer owners at once, but of at least one. None means no
            limit if transport is named; otherwise 8 GiB, and on GPUs at most half of the free
            memory.
        bucket_size: kernels that store scores store those for this many queries at once.
        check: "always" makes ranks check in each call that they agree, and reports a rank that is
            out of step: for debugging. None uses the environment's RING_ATTENTION_CHECK.
        plan: a `RingPlan` for tensors like these. It replaces all options except return_lse, sinks,
            key_bias, shared_keys and heads_first. If sinks, key_bias or shared_keys are given, the
            plan must have been made with such; and always for q, k and v with tokens first.
        heads_first: q, k, v, shared_keys and the result are `[b, h, n, d]`, as for
            `scaled_dot_product_attention`.
        return_lse: also return the log-sum-exp of the scores.

    q, k and v may be DTensors with the sequence sharded over one dimension of their mesh: that
    dimension is the ring, and results are DTensors, too. An `AsyncCollectiveTensor` is waited for.
    From tensors without values, on the meta device or of a FakeTensorMode, results have none
    either; then all ranks must pass such tensors.

    Returns:
        `[b, n, h, d_v]` in q's dtype; with return_lse also lse `[b, h, n]`, natural
        logarithm, float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes or options are invalid or differ between ranks, shards do not fit
            the layout, or the kernel does not support the call. The same on every rank, and before
            any tensor is sent.
        NotImplementedError: forward mode over forward mode.

    Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889

    >>> q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    >>> ring_attn(q, k, v, causal=True).shape
    torch.Size([1, 6, 4, 8])
    """
    plain = type(q) is type(k) is type(v) is Tensor and not (q.is_meta or k.is_meta or v.is_meta)
    if heads_first:
        q, k, v = swapped((q, k, v))
        shared_keys = None if shared_keys is None else swapped(shared_keys)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "key_mask": key_mask, "documents": documents,
        "cu_seqlens": cu_seqlens, "prefix": prefix, "mask_mod": mask_mod, "cross": cross,
        "query_positions": query_positions, "key_positions": key_positions, "scale": scale,
        "shared_keys": shared_keys, "shared_key_mask": shared_key_mask, "softclamp": softclamp,
        "sinks": sinks, "alibi_slopes": alibi_slopes, "key_bias": key_bias, "dropout": dropout,
        "dropout_seed": dropout_seed, "layout": layout, "kernel": kernel, "transport": transport,
        "ulysses": ulysses, "memory": memory, "bucket_size": bucket_size,
        "check": check,
    }  # fmt: skip
    if plain and shared_keys is None:
        out, lse = _attention((q, k, v), options, group, plan, return_lse)
    else:
        out, lse = _attention_of_kinds((q, k, v), options, group, plan, return_lse)
    out = out.transpose(1, 2) if heads_first else out
    return (out, lse) if return_lse else out


def _attention_of_kinds(
    qkv: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    group: Group,
    plan: RingPlan | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | Any]:
    """Compute (out, lse) as `_attention`, also with shared keys, or of other kinds of tensors.

    These are DTensors, other subclasses, and tensors without values. A traced graph breaks around
    shared keys.
    """
    if options["shared_keys"] is not None and is_compiling():
        return run_apart(_attention_of_kinds, qkv, options, group, plan, return_lse)
    shards = sharded(qkv, options, group, plan)
    if shards is not None:
        qkv, group = shards.qkv, shards.group
    if is_compiling() or has_values(*qkv):
        if not is_compiling():
            q, k, v = qkv
            qkv = resolved(q), resolved(k), resolved(v)
        out, lse = _attention(qkv, options, group, plan, return_lse)
    else:
        refuse_export()
        q, k, v = map(autocast, qkv)
        out, lse = shapes_of_results((q, k, v), options["sinks"], group, plan)
        if (shared := options["shared_keys"]) is not None:
            k, v = map(autocast, shared)
            shared_plan = None if plan is None else plan.shared
            part = shapes_of_results((q, k, v), None, Ring.alone(), shared_plan)
            out, lse = merge_attention(out, lse, *part)
    if shards is None:
        return out, lse
    return shards.out(out), shards.lse(lse) if lse is not None and return_lse else None


def _attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    group: Group,
    plan: RingPlan | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | Any]:
    """Compute (out, lse), with options or with a plan; lse may be left out if not requested."""
    sinks, key_bias, shared = options["sinks"], options["key_bias"], options["shared_keys"]
    compiling = is_compiling()
    if compiling or torch._C._is_any_autocast_enabled():
        q, k, v = qkv
        qkv = autocast(q), autocast(k), autocast(v)
        if key_bias is not None:
            options["key_bias"] = key_bias = autocast(key_bias)
        if shared is not None:
            options["shared_keys"] = shared = autocast(shared[0]), autocast(shared[1])
    q, k, v = qkv
    if plan is None:
        also = tangents_note(q, k, v, sinks, key_bias, *(shared or ()))
        plan = RingPlan.make(q, k, v, group=group, also=also, **options)
    else:
        try:  # a with block takes more host time
            beside = {**options, "sinks": None, "key_bias": None, "shared_keys": None}
            if group is not None or beside != DEFAULTS:  # takes less time than to look at each
                check_only_plan(beside, group)
            if key_bias is not None:
                check_bias(key_bias, q, k, plan.terms.scale, plan.terms.softclamp)
        except ValueError as error:
            plan.ring.report_failure(error)  # others wait for this rank
            raise ValueError(f"ring attention: {error}") from None
    if key_bias is not None:
        if shared is not None:  # these have none
            shared = pad(shared[0], (0, columns(q, k, key_bias))), shared[1]
        q, k = with_bias(q, k, key_bias, plan.terms.scale)
    if shared is not None or plan.shared is not None:
        return attend_with_shared(plan, (q, k, v, sinks), shared)
    if compiling:
        return operators.attention(plan, q, k, v, sinks)
    return attention(plan, q, k, v, sinks, return_lse=return_lse)


@checked
def explain_kernel(
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
    kernel: KernelOption | None = None,
) -> str:
    """Return which kernel `ring_attn` would run for tensors and options like these, and why.

    For few tokens over several GPUs, or for short documents, a plan can choose another:
    `explain_plan` says which.

    Args:
        packed: True if there are documents.
        The rest: as for `ring_attn`; only shape, dtype and device of the tensors matter.

    Returns:
        A line for each faster kernel with the reason why it can't run, then a line for the one that
        runs.

    Raises:
        ValueError: there is no such kernel, or a number is out of range.

    >>> q = torch.randn(1, 6, 2, 8)
    >>> print(explain_kernel(q, q, q, softclamp=50.0).splitlines()[-2])
    sdpa: has no softclamp
    """
    q, k, v = like_autocast(q), like_autocast(k), like_autocast(v)
    given = dict(window=window, scale=scale, softclamp=softclamp, dropout=dropout)
    options = Options.read(given)
    with checks_of("explain_kernel"):
        check_qkv(q, k, v)
        options.check_for(Call(q, k, v, 1))
    request = KernelRequest.of(
        q, v, window=window, key_mask=key_mask, scale=scale, softclamp=softclamp,
        alibi_slopes=alibi_slopes, mask_mod=mask_mod, dropout=dropout, packed=packed,
    )  # fmt: skip
    return explain(request, kernel)


@overload
def ulysses_attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = None, return_lse: Literal[False] = False,
    **options: Unpack[UlyssesOptions],
) -> Tensor: ...  # fmt: skip
@overload
def ulysses_attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = None, return_lse: Literal[True],
    **options: Unpack[UlyssesOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def ulysses_attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = None, return_lse: bool,
    **options: Unpack[UlyssesOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@typed(report_to_group("ring attention", ring_of=attention_ring))
def ulysses_attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group = None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `ring_attn` with `ulysses` over the whole ring: all ranks swap heads for sequence.

    Args:
        q, k, v, group, options: as for `ring_attn`; the number of ranks must divide the heads
            of q.

    Returns:
        As `ring_attn`.

    Raises:
        ValueError: as `ring_attn`.

    Source: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509

    >>> q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    >>> ulysses_attn(q, k, k, causal=True).shape
    torch.Size([1, 6, 4, 8])
    """
    ring = attention_ring(group)
    return ring_attn(q, k, v, group=ring, ulysses=ring.size, **options)
