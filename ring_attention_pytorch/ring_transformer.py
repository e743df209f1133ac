"""A transformer over sequences that may be spread over processes, with its loss.

Parameter names, defaults and state-dict keys are those of ring-attention-pytorch 0.5.20.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from beartype import beartype
from torch import Tensor, nn

from ring_attention_pytorch.agreement import agree
from ring_attention_pytorch.layouts import segment_positions
from ring_attention_pytorch.loss import mean_cross_entropy, next_tokens
from ring_attention_pytorch.plan import RingPlan, segments_by_layout
from ring_attention_pytorch.ring import Group, Ring, as_ring
from ring_attention_pytorch.ring_attention import RingAttention, RMSNorm
from ring_attention_pytorch.rotary import RingRotaryEmbedding
from ring_attention_pytorch.sharding import AutoShard, Spread, mask_problem


class _Batch(NamedTuple):
    """What this rank works on: its part of ids, mask and labels, and how it came to be."""

    ids: Tensor
    mask: Tensor | None
    labels: Tensor | None
    ring: Ring
    everyone: Ring  # of whose tokens the loss is the mean
    shards: AutoShard | None


class RingTransformer(nn.Module):
    """Token ids to logits or loss: pre-norm attention and GELU feedforward blocks, rotary.

    Args:
        num_tokens, dim, depth: vocabulary, model width, blocks.
        ff_mult: width of the feedforward, in dims.
        ignore_index: the label of a token that has none.
        max_lookback_seq_len: the window, one for all blocks or one for each.
        auto_shard_seq: None is ring_attn.
        The rest: as for `RingAttention`.

    Raises:
        ValueError: arguments that contradict one another.

    >>> model = RingTransformer(num_tokens=256, dim=16, depth=2, dim_head=8, heads=2, causal=True)
    >>> model(torch.randint(0, 256, (1, 9))).shape
    torch.Size([1, 9, 256])
    """

    @beartype
    def __init__(  # noqa: PLR0913 - a public entry point
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
        layout: str | None = None,
        group: Group = None,
        softclamp: float | int | None = None,
        kernel: str | None = None,
        transport: str | None = None,
        ulysses: int = 1,
        memory: int | None = None,
    ):
        super().__init__()
        if max_lookback_seq_len is None or isinstance(max_lookback_seq_len, int):
            max_lookback_seq_len = (max_lookback_seq_len,) * depth
        if len(max_lookback_seq_len) != depth:
            raise ValueError(
                f"max_lookback_seq_len must be one for each of {depth} blocks, "
                f"got {len(max_lookback_seq_len)}"
            )
        self.spread = Spread.make(
            ring_attn, auto_shard_seq, causal, ring_seq_size, layout, striped_ring_attn, group
        )
        self.causal = causal
        self.force_regular_attn, self.ignore_index = force_regular_attn, ignore_index

        self.token_emb = nn.Embedding(num_tokens, dim)
        self.rotary_emb = RingRotaryEmbedding(dim_head, theta=rotary_embed_theta)
        self.layers = nn.ModuleList()
        for lookback in max_lookback_seq_len:
            attn = RingAttention(
                dim, dim_head=dim_head, heads=heads, causal=causal, bucket_size=bucket_size,
                num_grouped_query_heads=num_grouped_query_heads, max_lookback_seq_len=lookback,
                ring_attn=ring_attn, ring_seq_size=ring_seq_size, auto_shard_seq=False,
                layout=self.spread.layout if ring_attn else None, group=group,
                force_regular_attn=force_regular_attn, use_cuda_kernel=use_cuda_kernel,
                softclamp=softclamp, kernel=kernel, transport=transport, ulysses=ulysses,
                memory=memory,
            )  # fmt: skip
            self.layers.append(nn.ModuleList([attn, feed_forward(dim, ff_mult)]))
        self.to_logits = nn.Sequential(RMSNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    @beartype
    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = False,
        force_ring_reduce_off: bool = False,
        ring_size: int | None = None,
    ) -> Tensor:
        """Logits, or the loss.

        Args:
            x: ids `[b, n]`: this rank's batch of whole sequences with auto_shard_seq, else this
                rank's part of the sequence.
            mask: bool `[b, n]`, True where there is a real token.
            labels: `[b, n]`, targets as they stand, `ignore_index` where there is none; x is then
                all inputs. Gives the loss.
            return_loss: the loss of predicting each next token, wherever it lives.
            force_ring_reduce_off: for this call x is a whole sequence of this process alone.
            ring_size: consecutive ranks that make one ring; must divide the group.

        Returns:
            Logits `[b, n, num_tokens]` of the same tokens as x; or a scalar, the mean cross
            entropy over all real tokens of all ranks of the group, the same on every rank. Its
            gradients, averaged over ranks, are those of one process.

        Raises:
            ValueError: what can't be, or differs between ranks, on all ranks alike.
        """
        batch = self._prepare(x, mask, labels, return_loss, force_ring_reduce_off, ring_size)
        tokens = self.token_emb(batch.ids)
        plans = self._plans(tokens, batch)
        some_plan = next(iter(plans.values()), None)
        here = batch.ids.shape[1] if some_plan is None else some_plan.positions(x.device)
        angles = self.rotary_emb(here)
        for attn, ff in self.layers:
            plan = plans.get(attn.window)
            tokens = tokens + attn(tokens, batch.mask if plan is None else None, angles, plan=plan)
            tokens = tokens + ff(tokens)
        logits = self.to_logits(tokens)
        if batch.labels is not None:
            return mean_cross_entropy(logits, batch.labels, self.ignore_index, batch.everyone)
        return logits if batch.shards is None else batch.shards.unshard(logits)

    def _prepare(
        self,
        x: Tensor,
        mask: Tensor | None,
        labels: Tensor | None,
        return_loss: bool,
        off: bool,
        ring_size: int | None,
    ) -> _Batch:
        on, auto = self.spread.on(off or self.force_regular_attn), self.spread.auto
        given = {"mask": mask is not None, "labels": labels is not None, "return_loss": return_loss}
        shift = return_loss and labels is None
        classes = self.token_emb.num_embeddings
        problem = _problem(x, mask, labels, classes, self.ignore_index)
        self.spread.check(problem, on, ring_size, "RingTransformer")
        if labels is not None and mask is not None:
            labels = labels.masked_fill(~mask, self.ignore_index)
        if shift and (auto or not on):
            labels = x[:, 1:].long()
            if mask is not None:
                labels = labels.masked_fill(~mask[:, 1:], self.ignore_index)
                mask = mask[:, :-1]
            x = x[:, :-1]
        if on and auto:
            shards = self.spread.shard(x, ring_size, given)
            x, mask, labels = (t if t is None else shards.shard(t) for t in (x, mask, labels))
            return _Batch(x, mask, labels, shards.ring, as_ring(self.spread.group), shards)
        ring = self.spread.ring(on, ring_size)
        if not on:
            return _Batch(x, mask, labels, ring, ring, None)
        given["batch"] = x.shape[0]
        lengths = [own["n"] for own in agree(ring, "RingTransformer", given, {"n": x.shape[1]})]
        if shift:
            ids = x.long()
            if mask is not None:
                ids = ids.masked_fill(~mask, self.ignore_index)
            segments = segments_by_layout("RingTransformer", self.spread.layout, lengths)
            labels = next_tokens(ids, segments, ring, self.ignore_index)
            if not self.causal:  # the last token is a target only, so no other may see it
                here = segment_positions(segments[ring.rank], x.device) < sum(lengths) - 1
                mask = here.expand(x.shape) if mask is None else mask & here
        return _Batch(x, mask, labels, ring, as_ring(self.spread.group), None)

    def _plans(self, tokens: Tensor, batch: _Batch) -> dict[int | None, RingPlan]:
        """One plan for each window that occurs, made before the first block."""
        if self.force_regular_attn:
            return {}
        some_layer = {attn.window: attn for attn, _ in self.layers}
        return {
            window: attn.plan_over(batch.ring, tokens, batch.mask)
            for window, attn in some_layer.items()
        }


def _problem(
    x: Tensor, mask: Tensor | None, labels: Tensor | None, classes: int, ignored: int
) -> str | None:
    """What is wrong with this rank's arguments by themselves."""
    if x.ndim != 2 or x.dtype not in (torch.int64, torch.int32):
        return f"x must be int64 or int32 ids [batch, tokens], got {x.dtype} {list(x.shape)}"
    if labels is not None and (labels.dtype, labels.shape) != (torch.int64, x.shape):
        return f"labels must be int64 {list(x.shape)}, got {labels.dtype} {list(labels.shape)}"
    if x.device.type == "cpu":  # elsewhere a look at the values would wait for the device
        if bool(((x < 0) | (x >= classes)).any()):
            return f"ids must be 0 to {classes - 1}, got {int(x.min())} to {int(x.max())}"
        if labels is not None:
            known = labels[labels != ignored]
            if bool(((known < 0) | (known >= classes)).any()):
                return (
                    f"labels must be 0 to {classes - 1}, or ignore_index={ignored} for none, "
                    f"got {int(known.min())} to {int(known.max())}"
                )
    return mask_problem("mask", mask, x)


def feed_forward(dim: int, mult: int) -> nn.Sequential:
    """RMSNorm and two linear layers with a GELU between."""
    inner = int(dim * mult)
    return nn.Sequential(RMSNorm(dim), nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))
