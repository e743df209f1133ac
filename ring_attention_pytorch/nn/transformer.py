"""A transformer over sequences that can be sharded over processes, with its loss.

Parameter names, defaults and state-dict keys match ring-attention-pytorch 0.5.20.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ring_attention_pytorch import operators
from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.geometry.documents import (
    BatchDocuments,
    Borders,
    check_end,
    digest,
    last_of_document,
)
from ring_attention_pytorch.geometry.layouts import (
    Layout,
    Segments,
    all_segments,
    segment_positions,
)
from ring_attention_pytorch.nn import recurrent
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.checks import (
    LayerPlan,
    SummaryOptions,
    check_ids,
    check_plans,
    check_sizes,
    near_plan,
)
from ring_attention_pytorch.nn.feedforward import feed_forward
from ring_attention_pytorch.nn.generation import Generation
from ring_attention_pytorch.nn.loss import mean_cross_entropy, next_tokens, shifted
from ring_attention_pytorch.nn.norm import RMSNorm
from ring_attention_pytorch.nn.rotary import Angles, RingRotaryEmbedding
from ring_attention_pytorch.nn.sharding import (
    AutoShard,
    ShardConfig,
    check_packed,
    report_to_group_of_module,
    report_to_plan,
)
from ring_attention_pytorch.operators import Ranks, TracedRing
from ring_attention_pytorch.plan.checks import check_shards
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutOption, TransportName
from ring_attention_pytorch.plan.packing import local_packing, whole_packing
from ring_attention_pytorch.plan.placement import current
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import agree, raise_together, reporting, typed
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.runtime.torch_func import run_apart


class _Tokens(NamedTuple):
    """The ids, mask and labels `[b, n]` of a batch, or this rank's part of them."""

    ids: Tensor
    mask: Tensor | None
    labels: Tensor | None


class _Batch(NamedTuple):
    """The part of ids, mask and labels that this rank works on, and how it was sharded."""

    ids: Tensor
    mask: Tensor | None
    labels: Tensor | None
    ring: Ring
    everyone: Ring  # the ranks over whose tokens the loss is the mean
    shards: AutoShard | None
    packing: BatchDocuments | None
    layout: Layout


class RingTransformer(Generation, nn.Module):
    """A transformer from token ids to logits or loss, over sequences that can be sharded.

    Its blocks are pre-norm attention with rotary embedding, and a GELU feed-forward.

    Args:
        num_tokens, dim, depth: size of the vocabulary, model width, number of blocks.
        ff_mult: width of the feed-forward, as a multiple of dim.
        ignore_index: the label of a token that has no target.
        max_lookback_seq_len: the window, one for all blocks or one for each.
        auto_shard_seq: None is ring_attn.
        rotary_restart: angles by positions in the document, not in the whole sequence.
        layers: kinds of blocks, repeated to depth: "a" has attention, "r" a `GatedDeltaNet`, "m" a
            `Mamba2`, as in "rrra". None is attention. Needs causal, and no striped layout.
        attn_dropout: dropout of attention's probabilities, in training only.
        The rest: as for `RingAttention`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> model = RingTransformer(num_tokens=256, dim=16, depth=2, dim_head=8, heads=2, causal=True)
    >>> model(torch.randint(0, 256, (1, 9))).shape
    torch.Size([1, 9, 256])
    """

    @checked
    def __init__(
        self,
        *,
        num_tokens: int,
        dim: int,
        depth: int,
        causal: bool = False,
        dim_head: int = 64,
        heads: int = 8,
        ff_mult: int = 4,
        num_grouped_query_heads: int = 1,
        bucket_size: int = 512,
        ring_attn: bool = False,
        striped_ring_attn: bool = False,
        ring_seq_size: int = 512,
        auto_shard_seq: bool | None = None,
        max_lookback_seq_len: Sequence[int | None] | int | None = None,
        rotary_embed_theta: int | float = 10000,
        ignore_index: int = -1,
        force_regular_attn: bool = False,
        use_cuda_kernel: bool | None = None,
        layout: LayoutOption | None = None,
        group: Group = None,
        softclamp: float | int | None = None,
        kernel: KernelOption | None = None,
        transport: TransportName | None = None,
        ulysses: int | None = None,
        memory: int | None = None,
        rotary_restart: bool = False,
        attn_dropout: float | int = 0.0,
        attn_summaries: SummaryOptions | None = None,
        layers: str | Sequence[str] | None = None,
    ):
        super().__init__()
        check_sizes(num_tokens, depth, dim=dim, dim_head=dim_head, ff_mult=ff_mult)
        if max_lookback_seq_len is None or isinstance(max_lookback_seq_len, int):
            max_lookback_seq_len = (max_lookback_seq_len,) * depth
        if (got := len(max_lookback_seq_len)) != depth:
            raise ValueError(
                f"max_lookback_seq_len: give one for each of {depth} blocks, got {got}"
            )
        self.spread: ShardConfig = ShardConfig.make(
            ring_attn, auto=auto_shard_seq, causal=causal, ring_seq_size=ring_seq_size,
            layout=layout, striped=striped_ring_attn, group=group,
        )  # fmt: skip
        self.pattern: str = recurrent.pattern_of(layers, depth)
        recurrent.check_pattern(self.pattern, causal, self.spread.layout, max_lookback_seq_len)
        self.causal: bool = causal
        self.rotary_restart: bool = rotary_restart
        self.force_regular_attn: bool = force_regular_attn
        self.ignore_index: int = ignore_index

        self.token_emb: nn.Embedding = nn.Embedding(num_tokens, dim)
        self.rotary_emb: Any = RingRotaryEmbedding(dim_head, theta=rotary_embed_theta)
        self.layers: Any = nn.ModuleList()  # of pairs: attention, feed-forward
        for kind, lookback in zip(self.pattern, max_lookback_seq_len):
            if kind != "a":
                self.layers.append(recurrent.recurrent_block(kind, dim, dim_head, heads, ff_mult))
                continue
            attn = RingAttention(
                dim, dim_head=dim_head, heads=heads, max_lookback_seq_len=lookback,
                num_grouped_query_heads=num_grouped_query_heads, bucket_size=bucket_size,
                force_regular_attn=force_regular_attn, use_cuda_kernel=use_cuda_kernel,
                softclamp=softclamp, kernel=kernel, transport=transport, ulysses=ulysses,
                memory=memory, dropout=attn_dropout,
                attn_summaries=attn_summaries, **self.spread.of_layers(),
            )  # fmt: skip
            attn.rotate_summaries(self.rotary_emb, rotary_restart)
            self.layers.append(nn.ModuleList([attn, feed_forward(dim, ff_mult)]))
        self.to_logits: nn.Sequential = nn.Sequential(
            RMSNorm(dim), nn.Linear(dim, num_tokens, bias=False)
        )

    @typed(report_to_group_of_module("RingTransformer"))
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = False,
        force_ring_reduce_off: bool = False,
        ring_size: int | None = None,
        *,
        documents: Tensor | None = None,
        cu_seqlens: Borders | None = None,
        plans: Sequence[LayerPlan] | None = None,
    ) -> Tensor:
        """Compute the logits, or the loss.

        Args:
            x: ids `[b, n]`: this rank's part of the sequence, or with auto_shard_seq its batch of
                whole sequences.
            mask: bool `[b, n]`, True where there is a real token.
            labels: `[b, n]`, at each index the target of that token (not shifted here), or
                `ignore_index`. If given, the result is the loss.
            return_loss: return the loss. Without labels, the target of each token is the next one
                of the sequence, also across ranks.
            force_ring_reduce_off: in this call x is a whole sequence of this process alone.
            ring_size: number of consecutive ranks that make one ring; must divide the group.
            documents: int `[b, n]`, equal where tokens of x can see one another. The last token of
                a document has no target.
            cu_seqlens: borders of the documents, as for `ring_attn`: of the whole sequence, or
                with auto_shard_seq of this rank's own batch.
            plans: from `RingTransformer.plans`, for tokens that are sharded already. Pass only x
                and labels with them. Ranks exchange only keys, gradients and the loss.

        Returns:
            Logits `[b, n, num_tokens]` of the tokens x; or the loss, a scalar: the mean cross
            entropy over the real tokens of all ranks of the group, the same on every rank. Its
            gradients, averaged over ranks, equal the gradients on one process.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """
        packed = {"documents": documents, "cu_seqlens": cu_seqlens}
        classes = self.token_emb.num_embeddings
        if plans is not None:
            decided = mask, ring_size, return_loss or None, force_ring_reduce_off or None
            with reporting(report_to_plan(plans)), checks_of("RingTransformer"):
                check_plans(plans, len(self.layers), [*decided, *packed.values()])
                check_ids(x, None, labels, classes, self.ignore_index)
            logits = self._logits(self.token_emb(x), None, plans)
            return self._loss_or(logits, labels, TracedRing(near_plan(plans[0])))
        off = force_ring_reduce_off or self.force_regular_attn
        given = x, mask, labels, return_loss, off, ring_size, packed
        prepare = self._prepared
        batch, tokens, plans = run_apart(prepare, *given) if is_compiling() else prepare(*given)
        logits = self._logits(tokens, batch.mask, plans)
        everyone = TracedRing(near_plan(plans[0])) if plans and is_compiling() else batch.everyone
        result = self._loss_or(logits, batch.labels, everyone)
        if batch.labels is not None or batch.shards is None:
            return result
        return batch.shards.unshard(result)

    def _prepared(self, *given: Any) -> tuple[_Batch, Tensor, tuple[RingPlan | Any, ...]]:
        """Prepare a batch, embed its tokens, and make the plans for it."""
        batch = self._prepare(*given)
        tokens = self.token_emb(batch.ids)
        return batch, tokens, self._plans(tokens, batch)

    def _logits(self, tokens: Tensor, mask: Tensor | None, plans: Sequence[LayerPlan]) -> Tensor:
        """Compute the logits of this rank's tokens; without plans, by regular attention."""
        positions: int | Tensor = tokens.shape[1]
        if plans:
            positions = operators.positions(near_plan(plans[0]), tokens, self.rotary_restart)
        angles = Angles(self.rotary_emb(positions))
        for number, (attn, ff) in enumerate(self.layers):
            if self.pattern[number] != "a":
                tokens = tokens + recurrent.run_recurrent(attn, tokens, mask, plans[number:])
            elif plans:
                tokens = tokens + attn(tokens, None, angles, plan=plans[number])
            else:
                tokens = tokens + attn(tokens, mask, angles)
            tokens = tokens + ff(tokens)
        return self.to_logits(tokens)

    def _loss_or(self, logits: Tensor, labels: Tensor | None, everyone: Ranks) -> Tensor:
        if labels is None:
            return logits
        return mean_cross_entropy(logits, labels, self.ignore_index, everyone)

    @typed(report_to_group_of_module("RingTransformer"), apart=True)
    def plans(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        ring_size: int | None = None,
        documents: Tensor | None = None,
        cu_seqlens: Borders | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[RingPlan | Any, ...]:
        """Make the plans of all blocks for ids that are sharded already, to pass to `forward`.

        Use it with `torch.compile`, which can't trace the ranks' agreement, and for batches that
        are used more than once.

        Args:
            dtype: dtype of the tokens between blocks; None is the dtype of the embedding's weight.
            The rest: as for `forward`. Only the shape and device of x matter.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.

        >>> model = RingTransformer(num_tokens=9, dim=16, depth=2, dim_head=8, heads=2, causal=True)
        >>> ids = torch.arange(6)[None]
        >>> plans = model.plans(ids)
        >>> torch.equal(model(ids, plans=plans), model(ids))
        True
        """
        if self.spread.auto or self.force_regular_attn:
            raise ValueError("plans are for tokens sharded by hand, and for the ring's kernels")
        packed = {"documents": documents, "cu_seqlens": cu_seqlens}
        batch = self._prepare(x, mask, None, False, False, ring_size, packed)
        weight = self.token_emb.weight
        like = torch.empty((), dtype=dtype or weight.dtype, device=x.device)
        return self._plans(like.expand(*batch.ids.shape, weight.shape[1]), batch)

    def _prepare(
        self,
        x: Tensor,
        mask: Tensor | None,
        labels: Tensor | None,
        return_loss: bool,
        off: bool,
        ring_size: int | None,
        packed: dict[str, Any],
    ) -> _Batch:
        on, auto = self.spread.on(off), self.spread.auto
        given = dict(mask=mask is not None, labels=labels is not None, return_loss=return_loss)
        shift = return_loss and labels is None
        classes = self.token_emb.num_embeddings
        able = not self.force_regular_attn

        def check() -> None:
            check_ids(x, mask, labels, classes, self.ignore_index)
            check_packed(x, **packed, able=able, whole=auto or not on)

        self.spread.check(check, on, ring_size, "RingTransformer")
        if labels is not None and mask is not None:
            labels = labels.masked_fill(~mask, self.ignore_index)
        if on and not auto:
            return self._by_hand(_Tokens(x, mask, labels), shift, ring_size, given, packed)
        packing = local_packing(**packed, x=x)
        if shift:
            x, mask, labels, packing = shifted(x, mask, packing, self.ignore_index)
        if not on:
            ring = self.spread.ring(on, ring_size)
            return _Batch(x, mask, labels, ring, ring, None, packing, self.spread.layout)
        window = None if packing is None else self._widest_window()
        shards = self.spread.shard(x, ring_size, given, packing, window)
        x = shards.shard(x)
        if mask is not None:
            mask = shards.shard(mask)
        if labels is not None:
            labels = shards.shard(labels)
        return _Batch(
            x, mask, labels, shards.ring, as_ring(self.spread.group), shards, shards.packing,
            shards.layout,
        )  # fmt: skip

    def _widest_window(self) -> int | None:
        windows: list[Any] = [attn.window for attn in self._attentions]
        if None in windows:
            return None
        return max(windows, default=None)

    def _by_hand(
        self,
        tokens: _Tokens,
        shift: bool,
        ring_size: int | None,
        given: dict[str, Any],
        packed: dict[str, Any],
    ) -> _Batch:
        """Prepare tokens that the caller has sharded; with `shift`, fetch their next tokens."""
        x, mask, labels = tokens
        batch, n = x.shape
        ring = self.spread.ring(True, ring_size)
        layout, of_block = self.spread.layout_here, current()
        if of_block is not None:
            mask = of_block.key_mask if mask is None else mask
        has_documents = packed["documents"] is not None
        borders = packed["cu_seqlens"]
        given |= {"batch": batch, "device": x.device.type, "cu_seqlens": digest(borders)}
        everywhere = {"documents": "given" if has_documents else None}
        notes = agree(ring, "RingTransformer", given, {"n": n}, everywhere=everywhere)
        lengths = [own["n"] for own in notes]
        total = sum(lengths)
        packing, segments = None, tuple[Segments, ...]()
        located = shift or has_documents or borders is not None

        def check() -> None:
            if located:
                check_shards(layout, lengths)
                check_end(borders, total)

        raise_together(ring, "RingTransformer", check=check)
        if located:
            segments = all_segments(layout, ring.size, total)
            packing = whole_packing(ring, **packed, segments=segments, batch=batch)
        if of_block is not None and packing is None:
            packing = of_block.packing
        if shift:
            labels = self._next_labels(x, mask, ring, segments, packing)
            if not self.causal:  # the sequence's last token is only a target: hide it from all
                positions = segment_positions(segments[ring.rank], x.device)
                seen = positions < total - 1
                mask = seen.expand(x.shape) if mask is None else mask & seen
        everyone = as_ring(self.spread.group)
        return _Batch(x, mask, labels, ring, everyone, None, packing, layout)

    def _next_labels(
        self,
        x: Tensor,
        mask: Tensor | None,
        ring: Ring,
        segments: tuple[Segments, ...],
        packing: BatchDocuments | None,
    ) -> Tensor:
        """Return the next token of each local token x; `ignore_index` where there is none."""
        ids = x.long()
        if mask is not None:
            ids = ids.masked_fill(~mask, self.ignore_index)
        labels = next_tokens(ids, segments, ring, self.ignore_index)
        if packing is None:
            return labels
        positions = segment_positions(segments[ring.rank], x.device)
        return labels.masked_fill(last_of_document(packing, positions), self.ignore_index)

    def _plans(self, tokens: Tensor, batch: _Batch) -> tuple[RingPlan | Any, ...]:
        """List the plans of all blocks, made once for each (window, dropout) that occurs."""
        if self.force_regular_attn:
            return ()
        layers = {(attn.window, attn.rate): attn for attn in self._attentions}
        also: dict[str, Any] = {"rotary_restart": self.rotary_restart}
        also["dropout of layers"] = tuple(attn.rate for attn in self._attentions)
        options = dict(documents=batch.packing, layout=batch.layout, also=also)
        plans = {}
        for kind, attn in layers.items():
            plans[kind] = attn.plan_over(batch.ring, tokens, batch.mask, **options)
        return recurrent.plans_by_layer(plans, self.pattern, self.layers)

    @property
    def _attentions(self) -> list[RingAttention]:
        return [attn for kind, (attn, _) in zip(self.pattern, self.layers) if kind == "a"]
