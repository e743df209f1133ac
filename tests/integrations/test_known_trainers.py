"""Which trainer's loss is known, by class."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ring_attention_pytorch.integrations.known_trainers import PROBABILITIES, TOKENS, loss_of
from ring_attention_pytorch.integrations.transformers import RingTrainerMixin
from tests.support.small_trainers import Halved


def test_a_subclass_of_both_may_have_a_loss_of_its_own():
    assert loss_of(Halved, RingTrainerMixin) == TOKENS


class Mixin:
    """Which is found by what comes after it."""


def listed(name: str) -> type:
    """A class of the name of one on the list."""
    module, _, own = name.rpartition(".")
    return type(own, (), {"__module__": module, "compute_loss": None})


def test_the_first_class_after_the_mixin_that_is_on_the_list_counts():
    dpo, base = listed("trl.trainer.dpo_trainer.DPOTrainer"), listed("transformers.trainer.Trainer")
    both = type("Both", (dpo, base), {"__module__": "trl.trainer.dpo_trainer"})
    assert loss_of(type("A", (Mixin, dpo), {}), Mixin) == PROBABILITIES
    assert loss_of(type("A", (Mixin, base), {}), Mixin) == TOKENS
    assert loss_of(type("A", (Mixin, both), {}), Mixin) == PROBABILITIES
    assert loss_of(Mixin, Mixin) == TOKENS


@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss", "prediction_step"])
def test_a_class_between_them_with_a_loss_of_its_own_is_refused(method: str):
    base = listed("transformers.trainer.Trainer")
    between = type("Between", (base,), {method: None})
    with pytest.raises(ValueError, match=f"Mine: Between has a {method} of its own"):
        loss_of(type("Mine", (Mixin, between), {}), Mixin)
    assert loss_of(type("Mine", (Mixin, base), {method: None}), Mixin) == TOKENS
