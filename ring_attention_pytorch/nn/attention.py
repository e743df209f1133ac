"""An attention layer that can run over a ring of processes.

Parameter names, defaults and state-dict keys match ring-attention-pytorch 0.5.20.
"""

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch import operators
from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.documents import BatchDocuments, Borders
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.nn.averaging import watch_averaging
from ring_attention_pytorch.nn.checks import (
    LayerPlan,
    PlanOfLayer,
    SummaryOptions,
    check_call,
    check_kernel,
    check_plan,
    check_scores,
    check_shape,
    check_summaries,
    check_unused,
    near_plan,
)
from ring_attention_pytorch.nn.projections import HeadProjections
from ring_attention_pytorch.nn.reference import default_attention
from ring_attention_pytorch.nn.rotary import (
    THETA,
    Angles,
    RingRotaryEmbedding,
    apply_rotary_pos_emb,
)
from ring_attention_pytorch.nn.sharding import (
    ShardConfig,
    check_packed,
    report_to_group_of_module,
)
from ring_attention_pytorch.nn.shared_tokens import check_shared_tokens, shared_options
from ring_attention_pytorch.plan.checks import check_over_ring
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutOption, TransportName
from ring_attention_pytorch.plan.packing import local_packing
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import agree, reporting, typed
from ring_attention_pytorch.ranks.ring import Group, Ring
from ring_attention_pytorch.runtime.dropout import check_dropout
from ring_attention_pytorch.runtime.torch_func import run_apart, tangents_note


class RingAttention(HeadProjections):
    """An attention layer for a sequence that can be sharded over a ring of processes.

    Args:
        dim: model width.
        dim_head, heads: size and number of the query heads.
        num_grouped_query_heads: query heads that share a key head; must divide heads.
        causal: no token sees a later one.
        eps: has no effect, as in 0.5.20; only its default is accepted.
        bucket_size: queries whose scores are in memory at once, in kernels that store scores.
        ring_attn: use the ring. If False, or with one process, each process attends only to its
            own tokens.
        ring_seq_size: tokens per rank, from which `auto_shard_seq` derives the ring size.
        max_lookback_seq_len: the window: a token sees itself and this many tokens before it.
        striped_ring_attn: the same as layout="striped".
        auto_shard_seq: every rank passes its own batch of whole sequences. The layer shards them
            over the ring and returns each rank the results of its batch. None is `ring_attn`.
        prenorm: apply RMSNorm to the input first.
        force_regular_attn: use `default_attention` on this process' tokens, as if they were a
            whole sequence.
        rotary_embed, rotary_embed_theta: rotate queries and keys by their global positions.
        rotary_restart: rotate by positions within each document instead, which keeps angles small
            and precise.
        use_cuda_kernel: True means `kernel="triton"`, for CUDA tensors; False and None do nothing.
        layout: which tokens a rank holds. None is "contiguous"; with auto_shard_seq it is
            "zigzag" if causal, or the layout that `balanced` makes if there are documents.
        group: the ring's processes, a ProcessGroup or a DeviceMesh, as for `ring_attn`; None is the
            default group.
        softclamp: c replaces scores s by c * tanh(s / c).
        kernel, transport, ulysses, memory: as for `ring_attn`; all but kernel need the ring.
        dropout: as for `ring_attn`, in training only. Layers that share a plan need
            `plan.for_layer(i)` each, to drop differently.
        attn_summaries: `Summaries(window, stride, ...)`: tokens beyond the window are seen in
            summary (docs/guide/summaries.md). Needs causal, without max_lookback_seq_len, dropout,
            ulysses and force_regular_attn.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> attn = RingAttention(32, dim_head=8, heads=4, num_grouped_query_heads=2, causal=True)
    >>> attn(torch.randn(1, 7, 32)).shape
    torch.Size([1, 7, 32])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        dim_head: int = 64,
        heads: int = 8,
        num_grouped_query_heads: int = 1,
        causal: bool = False,
        eps: float = 1e-10,
        bucket_size: int = 512,
        ring_attn: bool = False,
        ring_seq_size: int = 512,
        max_lookback_seq_len: int | None = None,
        striped_ring_attn: bool = False,
        auto_shard_seq: bool | None = False,
        prenorm: bool = True,
        force_regular_attn: bool = False,
        rotary_embed: bool = False,
        rotary_embed_theta: int | float = THETA,
        use_cuda_kernel: bool | None = None,
        layout: LayoutOption | None = None,
        group: Group = None,
        softclamp: float | int | None = None,
        kernel: KernelOption | None = None,
        transport: TransportName | None = None,
        ulysses: int | None = None,
        memory: int | None = None,
        rotary_restart: bool = False,
        dropout: float | int = 0.0,
        attn_summaries: SummaryOptions | None = None,
    ):
        super().__init__()
        over_ring: dict[str, Any] = dict(transport=transport, ulysses=ulysses, memory=memory)
        check_shape(dim, dim_head, heads, num_grouped_query_heads, bucket_size)
        check_scores(max_lookback_seq_len, softclamp)
        check_kernel(kernel, use_cuda_kernel, force_regular_attn, dropout)
        check_unused(eps, rotary_embed, rotary_restart, rotary_embed_theta)
        check_over_ring(ring_attn and not force_regular_attn, heads, **over_ring)
        check_dropout(dropout, None)
        if attn_summaries:
            check_summaries(causal, max_lookback_seq_len, dropout, ulysses, force_regular_attn)
        self.spread: ShardConfig = ShardConfig.make(
            ring_attn, auto=auto_shard_seq, causal=causal, ring_seq_size=ring_seq_size,
            layout=layout, striped=striped_ring_attn, group=group,
        )  # fmt: skip
        self.causal: bool = causal
        self.window: int | None = max_lookback_seq_len
        self.softclamp: float | None = softclamp
        self.dropout: float = dropout
        self.over_ring = over_ring
        self.kernel: KernelOption | None = "triton" if use_cuda_kernel else kernel
        self.force_regular_attn: bool = force_regular_attn
        self.bucket_size: int = bucket_size

        self.rotary_restart: bool = rotary_restart
        self.rotary_embed: RingRotaryEmbedding | None = None
        if rotary_embed:
            self.rotary_embed = RingRotaryEmbedding(dim_head, theta=rotary_embed_theta)
        key_heads = heads // num_grouped_query_heads
        self.summaries: Any = None
        self.make_projections(dim, dim_head, heads, key_heads, prenorm)
        if attn_summaries is not None:
            self.summaries = attn_summaries.layer(dim, dim_head, heads, key_heads)
        self.rotate_summaries(self.rotary_embed, rotary_restart)
        self.watched: bool = False  # by `watch_averaging`

    def rotate_summaries(self, rotary: RingRotaryEmbedding | None, restart: bool) -> None:
        """Make summaries, if the layer has any, use the rotary embedding that tokens use."""
        if self.summaries is not None and rotary is not None:
            self.summaries.rotate_by(rotary.forward, restart)

    @typed(report_to_group_of_module("ring attention"))
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotary_emb: Tensor | Angles | None = None,
        force_ring_reduce_off: bool = False,
        ring_size: int | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        plan: LayerPlan | None = None,
        documents: Tensor | None = None,
        cu_seqlens: Borders | None = None,
        shared_tokens: Tensor | None = None,
        shared_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of the tokens x to one another, or to a context.

        Args:
            x: `[b, n, dim]`: this rank's part of the sequence, or with auto_shard_seq its batch
                of whole sequences.
            mask: bool `[b, n]`, True where a token can be seen; also applies with causal.
            rotary_emb: angles `[n, dim_head]` of the tokens x, in float32 or float64; without
                auto_shard_seq also `[b, n, dim_head]`.
            force_ring_reduce_off: in this call x is a whole sequence of this process alone.
            ring_size: number of consecutive ranks that make one ring; must divide the group.
            context: `[b, m, dim]`, tokens to attend to instead of x: whole sequences or a part,
                like x. Needs a module that is not causal.
            context_mask: bool `[b, m]`, True where a token of the context can be seen.
            plan: from `RingAttention.plan`, for tokens that are sharded already.
            documents: int `[b, n]`, equal where tokens of x can see one another.
            cu_seqlens: borders of the documents, as for `ring_attn`: of the whole sequence, or
                with auto_shard_seq of this rank's own batch.
            shared_tokens: `[b, s, dim]`, the same on all ranks of the ring: tokens beside those
                that x sees, in the same softmax, such as registers, memory tokens or text. All of
                x sees all of them. They are normed and projected as x is, and not rotated, as if
                at position 0. Summed over ranks, their gradients are one process's, as the
                parameters' are. Not with auto_shard_seq, attn_summaries and dropout.
            shared_mask: bool `[b, s]`, True where a shared token can be seen.

        Returns:
            `[b, n, dim]`, of the tokens x.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        packed: dict[str, Any] = {"documents": documents, "cu_seqlens": cu_seqlens}
        shared = shared_tokens, shared_mask
        if isinstance(rotary_emb, Angles):
            rotary_emb = rotary_emb.values
        if is_compiling() and not self.force_regular_attn:
            apart = self.spread.auto or context is not None or force_ring_reduce_off
            if (apart and plan is None) or shared_tokens is not None:
                return run_apart(
                    self.forward, x, mask, rotary_emb, force_ring_reduce_off, ring_size,
                    context=context, context_mask=context_mask, plan=plan, **packed,
                    shared_tokens=shared_tokens, shared_mask=shared_mask,
                )  # fmt: skip
            if plan is None:
                plan = self.plan(x, mask, ring_size=ring_size, **packed)
                mask, ring_size, packed = None, None, dict.fromkeys(packed)
        whole = self.spread.auto or not self.spread.ring_attn
        able = context is None and not self.force_regular_attn

        def check() -> None:
            check_call(self, x, mask, rotary_emb, context, context_mask)
            check_packed(x, **packed, able=able, whole=whole)
            check_shared_tokens(self, x, *shared)

        seen = mask if context is None else context_mask
        if plan is not None:
            decided = {
                "a mask": seen, "ring_size": ring_size, "context": context, **packed,
                "force_ring_reduce_off": force_ring_reduce_off or None, "shared_mask": shared_mask,
            }  # fmt: skip
            with reporting(plan.ring.report_failure):
                self._check_plan(plan, decided)
                self.spread.check(check, False, None, "RingAttention")
            return self._attend(x, None, None, rotary_emb, plan.ring, plan=plan, shared=shared)
        on = self.spread.on(force_ring_reduce_off or self.force_regular_attn)
        self.spread.check(check, on, ring_size, "ring attention")
        if not (on and self.spread.auto):
            ring = self.spread.ring(on, ring_size)
            return self._attend(x, context, seen, rotary_emb, ring, shared=shared, **packed)
        packing = local_packing(documents, cu_seqlens, x)
        return self._auto_sharded(x, context, seen, rotary_emb, ring_size, packing)

    def _auto_sharded(
        self,
        x: Tensor,
        context: Tensor | None,
        seen: Tensor | None,
        rotary_emb: Tensor | None,
        ring_size: int | None,
        packing: BatchDocuments | None,
    ) -> Tensor:
        """Shard this rank's batch of whole sequences, attend, and return the batch's results."""
        given = {
            "mask": seen is not None, "rotary_emb": rotary_emb is not None,
            "context": context is not None,
        }  # fmt: skip
        shards = self.spread.shard(x, ring_size, given, packing, self.window)
        key_shards = shards
        if context is not None:
            key_shards = shards.like(context)
            context = key_shards.shard(context)
        if rotary_emb is not None:
            rotary_emb = rotary_emb[shards.positions(rotary_emb.device)]
        if seen is not None:
            seen = key_shards.shard(seen)
        out = self._attend(
            shards.shard(x), context, seen, rotary_emb, shards.ring,
            documents=shards.packing, layout=shards.layout,
        )  # fmt: skip
        return shards.unshard(out)

    def _check_plan(self, plan: LayerPlan, decided: Mapping[str, Any]) -> None:
        if self.spread.auto or self.force_regular_attn:
            raise ValueError("a plan is for tokens sharded by hand, and for the ring's kernels")
        if given := [name for name, value in decided.items() if value is not None]:
            raise ValueError(f"the plan already decides that; got {', '.join(given)} beside it")
        rule = None if self.summaries is None else self.summaries.rule
        plan_rule = None if isinstance(plan, RingPlan) else plan.rule
        if plan_rule != rule:
            raise ValueError(
                f"the plan is for summaries by {plan_rule}, the module's are by {rule}"
            )
        window = self.window if rule is None else rule.window
        wanted = PlanOfLayer(
            Mask(self.causal, window), self.softclamp, self.rate, self.training, self.kernel,
            self.spread.layout_here, self.spread.ring_attn, self.over_ring,
        )  # fmt: skip
        check_plan(near_plan(plan), wanted)

    @typed(report_to_group_of_module("ring attention"), apart=True)
    def plan(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        ring_size: int | None = None,
        documents: Tensor | None = None,
        cu_seqlens: Borders | None = None,
        layout: Layout | None = None,
        shared_tokens: Tensor | None = None,
        shared_mask: Tensor | None = None,
    ) -> RingPlan | Any:
        """Make the plan for tokens that are sharded already, to pass to all layers like this one.

        Args:
            x: `[b, n, dim]`, with the shape, dtype and device of the tokens in `forward`.
            mask: bool `[b, n]`, True where a token can be seen.
            ring_size, documents, cu_seqlens: as for `forward`.
            layout: replaces the module's layout, for example by one from `balanced`.
            shared_tokens, shared_mask: as for `forward`, if it will be given such tokens; the mask
                is the plan's.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.

        >>> layers = [RingAttention(16, dim_head=8, heads=2, causal=True) for _ in range(2)]
        >>> x = torch.randn(1, 5, 16)
        >>> plan = layers[0].plan(x)
        >>> for number, attn in enumerate(layers):
        ...     x = x + attn(x, plan=plan.for_layer(number))
        """
        on = self.spread.on(self.force_regular_attn)

        def check() -> None:
            check_call(self, x, mask, None, None, None)
            check_shared_tokens(self, x, shared_tokens, shared_mask)

        self.spread.check(check, on, ring_size, "ring attention")
        ring = self.spread.ring(on, ring_size)
        given: dict[str, Any] = {"documents": documents, "cu_seqlens": cu_seqlens}
        if shared_tokens is not None:
            given |= dict(shared_keys=shared_tokens.shape[1], shared_key_mask=shared_mask)
        return self.plan_over(ring, x, mask, layout=layout or self.spread.layout, **given)

    def plan_over(self, ring: Ring, x: Tensor, mask: Tensor | None, **options: Any) -> Any:
        """Make a plan as `plan` does, over a given ring; `options` go to `RingPlan.make`."""
        grad = x.requires_grad or any(p.requires_grad for p in self.parameters())
        like = torch.empty((), dtype=x.dtype, device=x.device, requires_grad=grad)
        tokens = x.shape[:2]
        heads, key_heads, _ = self.heads_here()
        q = like.expand(*tokens, heads, self.dim_head)
        k = like.expand(*tokens, key_heads, self.dim_head)
        if (number := options.pop("shared_keys", None)) is not None:
            options["shared_keys"] = (like.expand(len(x), number, key_heads, self.dim_head),) * 2
        note = tangents_note(x, *self.parameters())
        options["also"] = {**self._rotation(None), **note, **options.get("also", {})}
        return self._plan(q, k, k, mask, ring, **options)

    def _plan(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, ring: Ring, **options: Any
    ) -> Any:
        usual: dict[str, Any] = dict(layout=self.spread.layout, cross=False)
        make: Any = RingPlan.make if self.summaries is None else self.summaries.plan
        return make(
            q, k, v, causal=self.causal, window=self.window, key_mask=seen,
            softclamp=self.softclamp, group=ring, kernel=self.kernel, dropout=self.rate,
            bucket_size=self.bucket_size, **self.over_ring, **(usual | options),
        )  # fmt: skip

    def _rotation(self, angles: Tensor | None) -> dict[str, Any]:
        """Return how tokens are rotated, by name, which must be the same on all ranks."""
        return {
            "rotary_emb": angles is not None, "rotary_embed": self.rotary_embed is not None,
            "rotary_restart": self.rotary_restart,
        }  # fmt: skip

    @property
    def rate(self) -> float:
        """Dropout rate of a call: 0 in evaluation mode."""
        return self.dropout if self.training else 0.0

    def _attend(
        self,
        x: Tensor,
        context: Tensor | None,
        seen: Tensor | None,
        angles: Tensor | None,
        ring: Ring,
        *,
        plan: LayerPlan | None = None,
        shared: tuple[Tensor | None, Tensor | None] = (None, None),
        **options: Any,
    ) -> Tensor:
        try:
            q, k, v = self.project(x, context)
            key_options = shared_options(self, *shared, ring.size)
        except (RuntimeError, ValueError) as error:  # such as out of memory: other ranks wait
            if plan is None:
                agree(ring, "ring attention", {}, check=ValueError(str(error)))
            ring.report_failure(ValueError(str(error)))
            raise  # if `agree` did not
        if plan is None and not self.force_regular_attn:
            also = {**self._rotation(angles), **tangents_note(q, k, v)}
            options |= dict(key_options, cross=context is not None, also=also)
            plan = self._plan(q, k, v, seen, ring, **options)
        if plan is not None and not is_compiling() and not self.watched:  # no guard on a flag
            self.watched = watch_averaging(self, q, plan.ring, self.split_ranks)
        if self.rotary_embed is not None:
            positions: int | Tensor = x.shape[1]
            if plan is not None:
                positions = operators.positions(near_plan(plan), x, self.rotary_restart)
            angles = self.rotary_embed(positions)
        if self.summaries is not None:
            out = self.summaries(x, [q, k, v], angles, plan)
            return self.to_out(rearrange(out, "b n h d -> b n (h d)"))
        if angles is not None:
            q, k = apply_rotary_pos_emb(angles, q), apply_rotary_pos_emb(angles, k)
        if plan is not None:
            out = ring_attn(
                q, k, v, plan=near_plan(plan), shared_keys=key_options.get("shared_keys")
            )
        else:
            options = dict(causal=self.causal, window=self.window)
            if self.softclamp is not None:
                options.update(softclamp_qk_sim=True, softclamp_value=self.softclamp)
            out = default_attention(q, k, v, seen, **options)
        return self.to_out(rearrange(out, "b n h d -> b n (h d)"))
