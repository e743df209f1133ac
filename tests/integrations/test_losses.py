"""Labels where they are, or moved ahead: which a model takes."""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations import losses
from ring_attention_pytorch.integrations.losses import labels_in_place
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import hf, hf_kinds
from tests.support.hf import raised
from tests.support.hf_kinds import LENGTH, OTHERS, make


def test_models_say_where_their_labels_are():
    for name, (family, head, sizes) in OTHERS.items():
        in_place = head in ("ForMaskedLM", "ForTokenClassification")
        assert labels_in_place(make(family, head, sizes, "eager")) == in_place, name


def test_labels_that_were_counted_where_they_predict_are_not_in_place():
    register()
    forward = ring_forward(shard_batch(hf_kinds.whole("a loss of its own", False)))
    forward.num_items = torch.tensor(LENGTH)

    def step() -> Any:
        with forward as inputs:
            return make(*OTHERS["a loss of its own"])(**inputs)

    assert "give shard_batch shift_labels=False" in raised(step)


def model_loss(items: Any = None, num_items: Any = None, **options: Any) -> Any:
    """The loss of a Llama that is given so many items, in a block of `num_items`."""
    register()
    whole = hf.batch_of("plain") | options.pop("whole", {})
    forward = ring_forward(shard_batch(whole, **options))
    forward.num_items = num_items
    with hf.in_double(), forward as inputs:
        given = {} if items is None else {"num_items_in_batch": items}
        return hf.model_of("Llama", "ring")(**{**inputs, **given}).loss.detach()


def test_items_of_several_batches_are_the_blocks_or_an_error():
    """A model of transformers divides by `num_items_in_batch`: no other number is ignored."""
    mean, many = model_loss(), torch.tensor(500)
    for items in (500, 500.0, many, many.float()):
        assert "is not the block's" in raised(partial(model_loss, items))
    for items in (80, 80.0, torch.tensor(80), torch.tensor(80.0).bfloat16()):  # as FSDP casts
        assert torch.equal(model_loss(items), mean)
    for items in (None, 500, many):
        assert torch.allclose(model_loss(items, many), mean * 80 / 500, rtol=1e-12)


def test_items_that_the_host_does_not_read_make_another_loss_nan(monkeypatch):
    monkeypatch.setattr(losses, "reads_at_once", lambda t: False)
    assert model_loss(torch.tensor(81)).isnan()
    assert torch.equal(model_loss(torch.tensor(80)), model_loss())


def test_weights_of_labels_that_others_count_are_refused():
    weights = {"loss_weights": torch.rand(2, hf.LENGTH)}
    told = raised(lambda: model_loss(num_items=torch.tensor(80), whole=weights))
    assert "loss_weights would be ignored" in told


def test_a_model_ignores_what_the_batch_has_for_no_label():
    told = raised(lambda: model_loss(ignore_index=0))
    assert "have ignore_index=0" in told
    assert "the loss ignores -100" in told


def no_class(counted: bool) -> str:
    """For a pool: what each rank is told of a label that is no class, and is on one rank."""
    register()
    model, whole = hf.model_of("Llama", "ring"), hf.batch_of("plain")
    whole["labels"][0, 3] = hf.WORDS
    forward = ring_forward(batch := shard_batch(whole))
    forward.num_items = batch.num_items if counted else None
    with forward as inputs:
        return raised(lambda: model(**inputs).loss.backward())


@pytest.mark.parametrize("counted", [False, True])
def test_all_ranks_are_told_of_a_label_that_is_no_class(counted, pools):
    for told in pools(2).run(no_class, counted):
        assert "labels must be 0 to 30" in told
        assert "(on rank 0)" in told
