"""Models that are given whole sequences spread them, and gather what they return."""

from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ring_attention_pytorch.integrations import whole
from ring_attention_pytorch.integrations.transformers import register
from ring_attention_pytorch.training.batches import ShardedBatch, shard_batch
from tests.support import trainers


def test_scores_of_a_ring_are_gathered():
    register()
    model, batch = trainers.scoring("ring"), {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    whole.spread_scores(model, lambda given: shard_batch(given), {})
    with mock.patch.object(ShardedBatch, "unshard", side_effect=lambda x: x) as unshard:
        model(**batch)
    (scores,) = unshard.call_args.args
    assert [*scores.shape] == [1, 4, 1]
