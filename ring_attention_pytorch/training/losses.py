"""Losses over tokens that are spread over processes, by chunks of tokens.

A group's loss is one mean over the real tokens of all its ranks, however unevenly they are spread.
At long contexts logits need more memory than attention does, so a head's logits are computed, used
and freed a chunk of tokens at a time, and computed again in backward.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.nn.loss import mean_over_ranks
from ring_attention_pytorch.plan.placement import current
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.failures import Disagreement
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.runtime.recompute import recomputed
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import run_apart
from ring_attention_pytorch.training.batches import ShardedBatch, report_to_ring_of_batch
from ring_attention_pytorch.training.comparison import UnreadDigest
from ring_attention_pytorch.training.loss_inputs import (
    Head,
    check_ignored,
    check_labels,
    check_values,
    targets,
)

_CHUNK = 2048  # tokens whose logits a head computes at once, by default


@typed(report_to_group("ring_cross_entropy"), apart=True)
def ring_cross_entropy(
    x: Tensor,
    labels: Tensor,
    *,
    head: Tensor | None = None,
    weights: Tensor | None = None,
    group: Group = None,
    ignore_index: int = -100,
    chunk: int | None = None,
    softcap: float | int | None = None,
    scale: float | int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the mean cross entropy over all real tokens of a group, the same on all its ranks.

    Gradients averaged over the group, as DDP and FSDP do, equal one process's with all tokens.

    Args:
        x: logits `[b, n, classes]` of this rank's tokens; with a head hidden states `[b, n, d]`.
        labels: int64 `[b, n]`, the class that each token predicts, as `ShardedBatch.labels`.
        head: `[classes, d]`, the weight from hidden states to logits, in their dtype. Only a
            chunk's logits are in memory at once.
        weights: `[b, n]`, the labels' weights in the mean. Finite and at least 0 where there is a
            label; elsewhere they are ignored, whatever they are. Differentiable.
        group: all ranks over which gradients are averaged: data parallel ones and the ring's. None
            is the default group, or this process alone.
        ignore_index: the label of tokens that predict nothing.
        chunk: tokens whose logits are widened at once. None is 2048 with a head, without one all.
        softcap: c replaces a head's logit s by c * tanh(s / c), as in Gemma 2.
        scale: a factor of a head's logits, before the softcap, as in Cohere and Granite.
        bias: `[classes]`, added to a head's logits before the scale.

    Returns:
        A scalar, float32 (float64 for float64); 0 if the group has no real token.

    Raises:
        ValueError: shapes, dtypes or devices don't fit, a label is no class, a weight is negative
            or not finite, ranks pass different options, or the group lacks ranks of the ring of
            the current batch's block; on all ranks of the group. On GPUs the host does not wait
            for labels and weights: a wrong one makes the loss and its gradients NaN on all ranks,
            and the next loss raises.
        RuntimeError: in backward, if `head` or `bias` was changed in place since the call.

    >>> logits, labels = torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])
    >>> ring_cross_entropy(logits, labels).exp().item()  # one of 4 classes
    4.0
    """
    ring, of = as_ring(group), Head(head, bias, scale, softcap)
    total, held = _sums(ring, x, labels, of, weights, ignore_index, chunk)
    return mean_over_ranks(total, held, ring)


def counted_cross_entropy(
    logits: Tensor, labels: Tensor, items: Tensor, group: Group, ignore_index: int
) -> Tensor:
    """Compute the sum of this rank's cross entropies, divided by `items`; 0 if there are none.

    The arguments are those of `ring_cross_entropy`, and so are the errors.
    """
    if is_compiling():
        return run_apart(counted_cross_entropy, logits, labels, items, group, ignore_index)
    total, held = _sums(as_ring(group), logits, labels, Head(), None, ignore_index, None)
    items = torch.where(held.isnan(), held, items.to(total.device))
    return total / torch.where(items == 0, 1, items)


def _sums(
    ring: Ring,
    x: Tensor,
    labels: Tensor,
    of: Head,
    weights: Tensor | None,
    ignore_index: int,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """Return this rank's sums, of cross entropies and of weights, once all ranks agree.

    Where the host does not read labels and weights, the second one is NaN if any is wrong.
    """
    error = error_of(partial(_check, x, labels, of, weights, ignore_index, chunk, ring))
    same = _same(x, of, error, ignore_index) | {
        "weights": weights is not None,
        "requires_grad of x or head, of weights": [
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
            for given in ((x, of.weight, of.bias), (weights,))
        ],
    }
    _agree_in_block(ring, same, error)
    total = x.new_zeros((), dtype=accumulation_dtype(x.dtype))
    found = targets(labels, weights, ignore_index, of.classes(x), total.dtype)
    held = found.real.sum() if found.weights is None else found.weights.sum()
    if found.wrong is not None:  # all ranks divide by the sum of this
        held = torch.where(found.wrong.any(), torch.nan, held.to(total.dtype))
    for part in _by_chunks(of, chunk, "sum", ignore_index, x, found.labels, found.weights):
        total = total + part
    return total, held


def _same(x: Tensor, head: Head, error: ValueError | None, ignore_index: int) -> dict[str, Any]:
    """Return by name the values that must be the same on every rank, for any loss."""
    same: dict[str, Any] = {}
    if error is None:  # with one, the dimension can be missing
        same["classes"] = head.classes(x)
    return same | {
        "dtype": x.dtype,
        "ignore_index": ignore_index,
        "head": None if head.weight is None else head.weight.dtype,
        "bias of the head": head.bias is not None,
        "scale of logits": head.scale,
        "softcap of logits": head.softcap,
        "grad mode": torch.is_grad_enabled(),
    }


def _agree_in_block(ring: Ring, same: dict[str, Any], error: ValueError | None) -> None:
    """Agree on a mean over all ranks, and record it in the current block.

    Raises:
        ValueError: ranks of one ring are in blocks of different batches, or as for `agree`.
    """
    block, own = current(), {"ring": -1, "batch": -1}  # outside of a block
    if block is not None and block.digest is not None:
        own = {"ring": block.ring.ranks[0], "batch": int(block.digest)}
    told = agree(ring, "ring_cross_entropy", same, own, check=error)
    if block is not None and isinstance(block.digest, UnreadDigest):
        block.digest.compared |= {*block.ring.ranks} <= {*ring.ranks}
    rings: dict[int, set[int]] = {}
    for note in told:
        if note["ring"] >= 0:
            rings.setdefault(note["ring"], set()).add(note["batch"])
    if any(len(batches) > 1 for batches in rings.values()):
        where = ", ".join(f"rank {rank}: {note['batch']}" for rank, note in enumerate(told))
        raise Disagreement(
            "ring_cross_entropy: ranks of one ring are in the blocks of different batches, by "
            f"their digests {where}; one has made more or fewer steps than the others, or their "
            "loaders give them different data"
        )
    if block is not None:
        block.wholes.append("ring_cross_entropy")


@typed(report_to_ring_of_batch("ring_token_logprobs"))
def ring_token_logprobs(
    x: Tensor,
    batch: ShardedBatch,
    *,
    head: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
    softcap: float | int | None = None,
    scale: float | int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the log-probability of each label of a whole sequence, on every rank of its ring.

    It is for losses over whole sequences, such as in reinforcement learning after generation. All
    ranks must compute the same loss from it. Gradients averaged over ranks, as DDP and FSDP do,
    then equal the gradients of one process. Backward sums all ranks' gradients of a token on its
    owner.

    Args:
        x: logits `[b, n, classes]` of this rank's tokens; with a head hidden states `[b, n, d]`.
        batch: from `shard_batch`, with labels.
        head, ignore_index, chunk, softcap, scale, bias: as for `ring_cross_entropy`.

    Returns:
        `[b, length]`, float32 (float64 for float64): for each token the log-probability of the
        label it predicts, 0 if it predicts nothing.

    Raises:
        ValueError: shapes don't fit, a label is no class, or an argument is of another type; on all
            ranks of the ring. On GPUs a label that is no class gets NaN, and the next call raises.

    >>> from ring_attention_pytorch import shard_batch
    >>> ids = torch.tensor([[1, 2]])
    >>> batch = shard_batch({"input_ids": ids, "labels": ids})
    >>> ring_token_logprobs(torch.zeros(1, 2, 4), batch).exp().tolist()
    [[0.25, 1.0]]
    """
    labels: Any = batch.get("shift_labels")
    ring, of = batch.ring, Head(head, bias, scale, softcap)

    def check() -> None:
        if labels is None:
            raise ValueError("the batch must have labels, got none")
        check_ignored(batch.ignore_index, ignore_index)
        _check(x, labels, of, None, ignore_index, chunk, ring)

    error = error_of(check)
    own = batch.digest.for_note() if isinstance(batch.digest, UnreadDigest) else batch.digest
    same = _same(x, of, error, ignore_index) | {"batch (its digest)": own}
    agree(ring, "ring_token_logprobs", same, check=error)
    wanted = targets(labels, None, ignore_index, of.classes(x), x.dtype)
    parts = _by_chunks(of, chunk, "none", ignore_index, x, wanted.labels, None)
    each = -torch.cat([*parts]).view(x.shape[:2])
    if wanted.wrong is not None:
        each = torch.where(wanted.wrong, torch.nan, each)
    return batch.unshard(each)


def _by_chunks(
    head: Head, chunk: int | None, reduction: str, ignore_index: int, *given: Tensor | None
) -> Iterator[Tensor]:
    """Yield the cross entropies of x, labels, weights `[b, n, ...]`, a chunk of tokens at a time.

    Logits of chunks are not stored; backward computes them again.
    """
    entropies = partial(_entropies, head=head, reduction=reduction, ignore_index=ignore_index)
    if chunk is None and head.weight is not None:
        chunk = _CHUNK
    flat: list[Any] = [None if t is None else t.flatten(0, 1) for t in given]
    n = len(flat[0])
    for start in range(0, max(1, n), chunk or max(1, n)):  # at least one, for the graph
        stop = start + (chunk or n)
        part: list[Any] = [None if t is None else t[start:stop] for t in flat]
        if chunk is None or not torch.is_grad_enabled():
            yield entropies(*part)
        else:
            read = (head.weight, head.bias)
            yield recomputed(entropies, *part, reads=read, preserve_rng_state=False)


def _entropies(
    x: Tensor, labels: Tensor, weights: Tensor | None, head: Head, reduction: str, **ignore: Any
) -> Tensor:
    """Return the cross entropy of each token `[n]`, 0 where there is no label; or their "sum"."""
    logits = head.logits(x)
    if weights is None:
        return F.cross_entropy(logits, labels, reduction=reduction, **ignore)
    return (F.cross_entropy(logits, labels, reduction="none", **ignore) * weights).sum()


def _check(
    x: Tensor,
    labels: Tensor,
    head: Head,
    weights: Tensor | None,
    ignore_index: int,
    chunk: int | None,
    ring: Ring,
) -> None:
    """Raise ValueError if this rank's arguments are wrong."""
    check_labels(x, labels, weights)
    head.check(x)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    placement = current()
    if placement is not None and placement.ring.size > ring.size:
        raise ValueError(
            f"the batch lies on {placement.ring.size} ranks, the loss is over {ring.size}; group "
            "must have all ranks over which gradients are averaged"
        )
    check_values(labels, weights, ignore_index, head.classes(x))
