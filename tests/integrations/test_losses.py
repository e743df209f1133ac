"""Labels where they are, or moved ahead: which a model takes."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ring_attention_pytorch import shard_batch
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
