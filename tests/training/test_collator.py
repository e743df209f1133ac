"""A collator in workers: it shards without a group."""

import pickle
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from ring_attention_pytorch import RingCollator, ring_cross_entropy
from tests.support import training
from tests.support.reference import relative_error
from tests.support.training import Model, batch_of, spread_attention

EXACT = 1e-10


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def from_workers() -> float:
    """A step whose batch a collator has made, and come from another process as pickled bytes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    collator = RingCollator(_first, rank=rank, ring_size=size)
    (batch,) = DataLoader([batch_of("borders")], collate_fn=collator)
    batch = pickle.loads(pickle.dumps(batch)).to("cpu")
    model = Model(spread_attention)
    with batch:
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = ring_cross_entropy(logits, batch.labels)
        loss.backward()
    return errors((loss.detach(), training.averaged(model)), training.one_process("borders"))


def _first(samples: list[Any]) -> Any:
    return samples[0]


def test_workers_shard_without_a_group(pools):
    assert max(pools(2).run(from_workers)) < EXACT
