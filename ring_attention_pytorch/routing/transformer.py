"""A transformer of conditionally routed blocks, over sequences that can be sharded over a ring."""

from typing import Any

from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.nn.generation import Decoder
from ring_attention_pytorch.nn.layer_caches import Reading
from ring_attention_pytorch.nn.loss import mean_cross_entropy
from ring_attention_pytorch.nn.sharding import report_to_group_of_module
from ring_attention_pytorch.nn.transformer import RingTransformer
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.routing.block import ConditionalRoutedTransformerBlock
from ring_attention_pytorch.routing.generation import CachedRoutedTransformer
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.router import Tokens


class ConditionalRoutedTransformer(RingTransformer):
    """A `RingTransformer` of conditionally routed blocks: an encoder, or, if causal, a decoder.

    Args:
        num_tokens, dim, depth: size of the vocabulary, model width, number of blocks.
        causal: a decoder: no later token changes an earlier token's result or routing.
        num_heavy_attn_tokens_q, num_heavy_attn_tokens_kv, num_heavy_ff_tokens: routed tokens per
            sample, or per window if causal; a float is a share of its real tokens.
        ring_attn, ring_seq_size, auto_shard_seq, ignore_index: as for `RingTransformer`.
        block_kwargs: other options of `ConditionalRoutedTransformerBlock`.
        The rest: as for `ConditionalRoutedTransformerBlock`.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> model = ConditionalRoutedTransformer(
    ...     num_tokens=256, dim=16, depth=2, causal=True, light_window_size=4, heavy_window_size=8,
    ...     num_heavy_attn_tokens_q=2, num_heavy_attn_tokens_kv=2, num_heavy_ff_tokens=2,
    ... )
    >>> model(torch.randint(0, 256, (1, 20))).shape
    torch.Size([1, 20, 256])
    """

    @checked
    def __init__(
        self,
        *,
        num_tokens: int,
        dim: int,
        depth: int,
        num_heavy_attn_tokens_q: Tokens,
        num_heavy_attn_tokens_kv: Tokens,
        num_heavy_ff_tokens: Tokens,
        causal: bool = False,
        light_window_size: int = 128,
        heavy_window_size: int | None = None,
        ring_attn: bool = False,
        ring_seq_size: int = 512,
        auto_shard_seq: bool | None = None,
        ignore_index: int = -1,
        layout: LayoutName | None = None,
        group: Group = None,
        block_kwargs: dict[Any, Any] | None = None,
    ):
        super().__init__(
            num_tokens=num_tokens, dim=dim, depth=0, causal=causal, ring_attn=ring_attn,
            ring_seq_size=ring_seq_size, auto_shard_seq=auto_shard_seq, ignore_index=ignore_index,
            layout=layout, group=group,
        )  # fmt: skip
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.rotary_emb: Any = None  # the blocks rotate by themselves
        options: dict[str, Any] = dict(
            dim=dim, num_heavy_attn_tokens_q=num_heavy_attn_tokens_q,
            num_heavy_attn_tokens_kv=num_heavy_attn_tokens_kv,
            num_heavy_ff_tokens=num_heavy_ff_tokens, light_window_size=light_window_size,
            heavy_window_size=heavy_window_size, **self.spread.of_layers(),
        )  # fmt: skip
        more = block_kwargs or {}
        if wrong := [str(name) for name in more if name in options or not isinstance(name, str)]:
            raise ValueError(
                f"block_kwargs are options that the model does not have, got {', '.join(wrong)}; "
                "leave them out"
            )
        for _ in range(depth):
            block = ConditionalRoutedTransformerBlock(**{"rotary_emb": True, **more}, **options)
            self.layers.append(block)

    @typed(report_to_group_of_module("RingTransformer"))
    def forward(  # type: ignore[override]  # without documents and plans
        self,
        x: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = False,
        force_ring_reduce_off: bool = False,
        ring_size: int | None = None,
    ) -> Tensor:
        """Compute the logits, or the loss, as `RingTransformer.forward` does."""
        none = {"documents": None, "cu_seqlens": None}
        batch = self._prepare(
            x, mask, labels, return_loss, force_ring_reduce_off, ring_size, packed=none
        )
        tokens = self.token_emb(batch.ids)
        # on one rank the sequence is whole in any layout
        layout: Any = self.spread.layout if batch.ring.size > 1 else "contiguous"
        plan = RoutingPlan.make(tokens, batch.mask, layout=layout, group=batch.ring)
        for block in self.layers:
            tokens = block(tokens, plan=plan)
        logits = self.to_logits(tokens)
        if batch.labels is not None:
            return mean_cross_entropy(logits, batch.labels, self.ignore_index, batch.everyone)
        return logits if batch.shards is None else batch.shards.unshard(logits)

    def _decoder(self, reading: Reading) -> Decoder:
        return CachedRoutedTransformer(self, reading)

    def _check_prompt(self, ids: Tensor, mask: Tensor | None, ends: list[int]) -> None:
        if mask is not None:
            raise ValueError(
                "routed models take no mask: padding would be among what a window may choose"
            )
        super()._check_prompt(ids, mask, ends)
