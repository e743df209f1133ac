"""Layers and models that swap heads for sequence are those of one process."""

import pytest
import torch

from ring_attention_pytorch import RingAttention, RingTransformer, shard_sequence, unshard_sequence
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import relative_error


def layer(transport: str | None, ulysses: int) -> float:
    """For a pool: the error of a whole layer over shards against the same layer alone."""
    torch.manual_seed(0)
    options = dict(dim=16, dim_head=4, heads=4, causal=True, rotary_embed=True)
    over = RingAttention(
        **options, ring_attn=True, layout="zigzag", transport=transport, ulysses=ulysses
    ).double()
    alone = RingAttention(**options).double()
    alone.load_state_dict(over.state_dict())
    x = torch.randn(2, 21, 16, dtype=torch.float64)
    out = over(shard_sequence(x, layout="zigzag"))
    return relative_error(unshard_sequence(out, length=21, layout="zigzag"), alone(x))


@pytest.mark.parametrize(
    ("transport", "ulysses"), [("gather", 1), (None, 2), ("gather", 2), ("ring", 4)]
)
def test_a_layer_over_processes_is_the_layer_alone(transport, ulysses, pools):
    assert max(pools(4).run(layer, transport, ulysses)) < 1e-12


def model(transport: str | None, ulysses: int) -> float:
    """For a pool: how far the loss of a model over the ring is from that of the model alone."""
    torch.manual_seed(0)
    options = dict(num_tokens=11, dim=16, depth=2, dim_head=4, heads=4, causal=True)
    over = RingTransformer(
        **options, ring_attn=True, ring_seq_size=8, transport=transport, ulysses=ulysses
    ).double()
    alone = RingTransformer(**options).double()
    alone.load_state_dict(over.state_dict())
    ids = torch.randint(0, 11, (2, 30))
    return abs(over(ids, return_loss=True) - alone(ids, return_loss=True)).item()


@pytest.mark.parametrize(("transport", "ulysses"), [("gather", 2), (None, 4)])
def test_a_model_over_processes_is_the_model_alone(transport, ulysses, pools):
    assert max(pools(4).run(model, transport, ulysses)) < 1e-12


@pytest.mark.parametrize(
    "options", [dict(transport="gather"), dict(ulysses=2), dict(memory=7)], ids=str
)
def test_modules_refuse_what_is_for_a_ring_where_there_is_none(options):
    with pytest.raises(ValueError, match="need ring_attn=True"):
        RingAttention(16, **options)


def test_a_module_refuses_a_plan_that_does_otherwise():
    def main(ring: Ring) -> None:
        options = dict(dim=8, dim_head=4, heads=2, ring_attn=True, group=ring)
        plan = RingAttention(**options, transport="gather").plan(torch.randn(1, 4, 8))
        with pytest.raises(ValueError, match="the plan has transport='gather'"):
            RingAttention(**options, transport="ring")(torch.randn(1, 4, 8), plan=plan)

    threads.run(2, main)
