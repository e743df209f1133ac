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


def test_columns_of_rows_are_passed_on_and_others_are_named():
    register()
    model, batch = trainers.scoring("ring"), {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    whole.spread_scores(model, lambda given: shard_batch(given), {})
    want = model(**batch).logits
    assert torch.equal(model(**batch, margin=torch.tensor([0.5])).logits, want)
    with pytest.raises(ValueError, match="pixels can't be spread; leave it out of the dataset"):
        model(**batch, pixels=torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw"])
@pytest.mark.parametrize("spread", [whole.spread_scores, whole.spread_probabilities])
def test_images_are_refused_with_the_way_that_spreads_them(name, spread):
    register()
    of_scores = spread is whole.spread_scores
    model = trainers.scoring("ring") if of_scores else trainers.causal("ring")
    spread(model, lambda given: shard_batch(given), {})
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), name: torch.zeros(1, 3)}
    text = rf"{name} are of whole images.*merged\(model, batch\)"
    with pytest.raises(ValueError, match=text):
        model(**batch, **({} if of_scores else {"fused_lm_head": True}))


def test_sums_of_log_probabilities_round_as_copies_of_them_do():
    """DDP copies the policy's; a reference's must have the same sums, for margins of 0."""
    from types import SimpleNamespace

    class Out(dict):
        log_probs = torch.zeros(2, 3)

    batch = SimpleNamespace(unshard=lambda rows: rows)
    out = Out(log_probs=torch.rand(2, 3), entropy=torch.rand(2, 3))
    found = whole._of_whole_sequences(out, batch)
    assert all(t.is_contiguous() for t in found.values())
