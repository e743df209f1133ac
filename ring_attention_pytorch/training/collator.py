"""A collator for a DataLoader that shards another collator's batches."""

from collections.abc import Callable, Mapping
from typing import Any

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.geometry.layouts import Layout, check_layout
from ring_attention_pytorch.training.batches import AUTO, ShardedBatch, shard_batch


class RingCollator:
    """A collator for DataLoader that shards another one's batches. It needs no process group.

    Args:
        inner: the collator that makes batches of whole sequences, as for `shard_batch`.
        rank, ring_size: this rank's place in its ring. Its ranks must load the same samples.
        layout, shift_labels, ignore_index, check_same: as for `shard_batch`.

    In the training loop set the ring if it is not the default group: `batch.over(mesh["cp"])`.

    >>> import torch
    >>> def stack(ids):
    ...     return {"input_ids": torch.stack(ids)}
    >>> batch = RingCollator(stack, rank=0, ring_size=2)([torch.arange(4)])
    >>> batch["input_ids"].tolist()
    [[0, 3]]
    """

    @checked
    def __init__(
        self,
        inner: Callable[[Any], Mapping[str, Any]],
        *,
        rank: int,
        ring_size: int,
        layout: Layout = AUTO,
        shift_labels: bool = True,
        ignore_index: int = -100,
        check_same: bool = True,
    ):
        if not 0 <= rank < ring_size:
            raise ValueError(
                f"rank must be at least 0 and less than ring_size={ring_size}, got {rank}"
            )
        if layout != AUTO:
            check_layout(layout)
        self.inner = inner
        self.options: dict[str, Any] = dict(
            rank=rank, ring_size=ring_size, layout=layout, shift_labels=shift_labels,
            ignore_index=ignore_index, check_same=check_same,
        )  # fmt: skip

    def __call__(self, samples: Any) -> ShardedBatch:
        """Collate samples, and return this rank's part."""
        return shard_batch(self.inner(samples), **self.options)
