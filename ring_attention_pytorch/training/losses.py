"""Losses over tokens that are spread over processes, by chunks of tokens.

A group's loss is one mean over the real tokens of all its ranks, however unequally they hold them.
At long contexts logits need more memory than attention does. So a head's logits are made, used and
forgotten a chunk of tokens at a time, and made again in backward.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch.comm.agreement import agree, problem_of, told_by_group, typed
from ring_attention_pytorch.comm.placement import current, note_whole
from ring_attention_pytorch.comm.ring import Group, Ring, as_ring
from ring_attention_pytorch.geometry.layouts import all_segments, segment_positions
from ring_attention_pytorch.nn.loss import mean_over_ranks
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.tensor_kinds import dtensor_problem
from ring_attention_pytorch.training.batches import ShardedBatch

_CHUNK = 2048  # tokens whose logits a head makes at once


@typed(told_by_group("ring_cross_entropy"), apart=True)
def ring_cross_entropy(
    x: Tensor,
    labels: Tensor,
    *,
    head: Tensor | None = None,
    weights: Tensor | None = None,
    group: Group = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Compute the mean cross entropy over all real tokens of a group, the same on all its ranks.

    Gradients averaged over the group, as DDP and FSDP do, are those of one process with all tokens.

    Args:
        x: logits `[b, n, classes]` of this rank's tokens; with a head hidden states `[b, n, d]`.
        labels: int64 `[b, n]`, what each token predicts, as `ShardedBatch.labels`.
        head: `[classes, d]`, the weight that makes logits of hidden states. All logits are never
            in memory at once.
        weights: `[b, n]`, of the labels: the mean is weighted by them.
        group: all ranks over which gradients are averaged: data parallel ones and the ring's. None
            is the default group, or this process alone.
        ignore_index: the label of tokens that predict nothing.
        chunk: tokens whose logits are widened at once. None is 2048 with a head, else all.

    Returns:
        A scalar, float32 (float64 for float64); 0 if the group has no real token.

    Raises:
        ValueError: shapes don't fit, ranks differ in what they pass, or the group has not all
            ranks of the ring in whose batch's block this is; on all ranks of the group.

    >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])
    >>> ring_cross_entropy(logits, labels).exp().item()  # one of 4 classes
    4.0
    """
    ring = as_ring(group)
    problem = problem_of(lambda: _problem(x, labels, head, weights, chunk, ring))
    same: dict[str, Any] = {}
    if problem is None:  # else there may be no such dimension
        same["classes"] = x.shape[2] if head is None else head.shape[0]
    same |= {"dtype": x.dtype, "weights": weights is not None, "ignore_index": ignore_index}
    same |= {"grad mode": torch.is_grad_enabled()}
    agree(ring, "ring_cross_entropy", same, problem=problem)
    note_whole("ring_cross_entropy")
    if head is not None and chunk is None:
        chunk = _CHUNK
    real = labels != ignore_index
    total, held = x.new_zeros((), dtype=accumulation_dtype(x.dtype)), real.sum()
    if weights is not None:
        weights = weights.to(total.dtype)
        held = (weights * real).sum()
    for part in _chunks(chunk, x, labels, weights):
        total = total + _again(_loss_of_chunk, chunk, *part, head, ignore_index)
    return mean_over_ranks(total, held.detach(), ring)


def _told_by_batch(given: Mapping[str, Any], problem: str) -> None:
    """Tell the ring of a batch what is wrong with an argument; without a batch, that of the block.

    A rank that has neither tells the default group: if that is another one, these ranks wait.
    """
    batch, placement = given.get("batch"), current()
    ring = batch.ring if isinstance(batch, ShardedBatch) else None
    if ring is None:
        ring = as_ring(None) if placement is None else placement.ring
    agree(ring, "ring_token_logprobs", {}, problem=problem)


@typed(_told_by_batch)
def ring_token_logprobs(
    x: Tensor,
    batch: ShardedBatch,
    *,
    head: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Compute the log-probability of each label of a whole sequence, on every rank of its ring.

    It is for losses that look at whole sequences, such as those of reinforcement learning after
    generation. All ranks must compute the same loss of it. Its gradients averaged over ranks, as
    DDP and FSDP do, are those of one process: no rank sends any in backward.

    Args:
        x: logits `[b, n, classes]` of this rank's tokens; with a head hidden states `[b, n, d]`.
        batch: what `shard_batch` made, with labels.
        head, ignore_index, chunk: as for `ring_cross_entropy`.

    Returns:
        `[b, length]`, float32 (float64 for float64): at each token that of the label it predicts,
        0 where it predicts nothing.

    Raises:
        ValueError: shapes don't fit, or an argument is of another type; on all ranks of the ring.

    >>> from ring_attention_pytorch import shard_batch
    >>> ids = torch.tensor([[1, 2]])
    >>> batch = shard_batch({"input_ids": ids, "labels": ids})
    >>> ring_token_logprobs(torch.zeros(1, 2, 4), batch).exp().tolist()
    [[0.25, 1.0]]
    """
    labels: Any = batch.get("shift_labels")
    problem: str | None = "the batch must have labels, got none"
    if labels is not None:
        problem = problem_of(lambda: _problem(x, labels, head, None, chunk, batch.ring))
    agree(batch.ring, "ring_token_logprobs", {"dtype": x.dtype}, problem=problem)
    if head is not None and chunk is None:
        chunk = _CHUNK
    found = []
    for part in _chunks(chunk, x, labels, None):
        found.append(_again(_logprobs_of_chunk, chunk, *part, head, ignore_index))
    return _Whole.apply(torch.cat(found).view(x.shape[:2]), batch)


class _Whole(Function):
    """(x, batch) -> the whole of all ranks' x; backward takes this rank's part of the gradient.

    Every rank has the same gradient of the whole. So its own part, times the ranks, is what a mean
    over ranks makes right.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: ShardedBatch) -> Tensor:
        segments = all_segments(batch.layout, batch.ring_size, batch.length)[batch.rank]
        ctx.held, ctx.times = segment_positions(segments, x.device), batch.ring_size
        return batch.unshard(x).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(1, ctx.held) * ctx.times, None


def _chunks(chunk: int | None, *given: Tensor | Any) -> Iterator[list[Tensor | Any]]:
    """Yield tensors `[b, n, ...]` as chunks of so many of their b * n tokens."""
    flat: list[Any] = [None if t is None else t.flatten(0, 1) for t in given]
    n = len(flat[0])
    for start in range(0, max(1, n), chunk or max(1, n)):  # of no tokens one, for its graph
        stop = start + (chunk or n)
        yield [None if t is None else t[start:stop] for t in flat]


def _again(function: Any, chunk: int | None, *given: Any) -> Tensor:
    """Call a function; what it makes of chunks is made again in backward, and not kept."""
    if chunk is None or not torch.is_grad_enabled():
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def _entropies(
    x: Tensor, labels: Tensor, head: Tensor | None, ignore_index: int, reduction: str = "none"
) -> Tensor:
    """Return the cross entropy of each token `[n]`, 0 where there is no label; or their sum."""
    logits = x if head is None else F.linear(x, head)
    logits = logits.to(accumulation_dtype(logits.dtype))
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)


def _loss_of_chunk(
    x: Tensor, labels: Tensor, weights: Tensor | None, head: Tensor | None, ignore_index: int
) -> Tensor:
    if weights is None:
        return _entropies(x, labels, head, ignore_index, "sum")
    return (_entropies(x, labels, head, ignore_index) * weights).sum()


def _logprobs_of_chunk(
    x: Tensor, labels: Tensor, _: None, head: Tensor | None, ignore_index: int
) -> Tensor:
    return -_entropies(x, labels, head, ignore_index)


def _problem(
    x: Tensor,
    labels: Tensor,
    head: Tensor | None,
    weights: Tensor | None,
    chunk: int | None,
    ring: Ring,
) -> str | None:
    """Say what is wrong with this rank's arguments; None if nothing is."""
    if problem := dtensor_problem("x", x) or dtensor_problem("labels", labels):
        return problem
    if x.ndim != 3 or not x.is_floating_point():
        return f"logits or hidden states must be floating [b, n, d], got {x.dtype} {list(x.shape)}"
    want = list(x.shape[:2])
    if labels.dtype != torch.int64 or list(labels.shape) != want:
        return f"labels must be int64 {want}, got {labels.dtype} {list(labels.shape)}"
    if weights is not None and list(weights.shape) != want:
        return f"weights must be {want}, got {list(weights.shape)}"
    if head is not None and (head.ndim != 2 or head.shape[1] != x.shape[2]):
        return f"head must be [classes, {x.shape[2]}], got {list(head.shape)}"
    if chunk is not None and chunk < 1:
        return f"chunk must be at least 1, got {chunk}"
    placement = current()
    if placement is not None and placement.ring.size > ring.size:
        return (
            f"the batch lies on {placement.ring.size} ranks, the loss is over {ring.size}; group "
            "must have all ranks over which gradients are averaged"
        )
    return None
