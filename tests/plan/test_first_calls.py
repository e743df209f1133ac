"""Results of first calls: shared by a plan and those that differ from it in dropout, or not."""

import torch

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.runtime.uncopied import replaced


def test_tiles_are_shared_with_layers_but_not_their_records_or_plans():
    q = torch.randn(1, 6, 2, 4)
    plan = RingPlan.make(q, q, q, dropout=0.5, dropout_seed=1)
    layer = plan.for_layer(1)
    assert layer._shared is plan._shared
    assert layer._own is not plan._own
    assert replaced(plan)._own.made == {}
    assert plan.for_layer(1) is layer
