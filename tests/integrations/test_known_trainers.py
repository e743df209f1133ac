"""Which trainer's loss is known, by class."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ring_attention_pytorch.integrations.known_trainers import TOKENS, loss_of
from ring_attention_pytorch.integrations.transformers import RingTrainerMixin
from tests.support.small_trainers import Halved


def test_a_subclass_of_both_may_have_a_loss_of_its_own():
    assert loss_of(Halved, RingTrainerMixin) == TOKENS
