"""A plan of routing: all layers share it, and only its making compares notes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ring_attention_pytorch import RoutingPlan, shard_batch
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.routing import ConditionalRoutedAttention
from tests.support import threads
from tests.support.reference import relative_error
from tests.support.routing_cases import DIM, Case


def test_one_plan_serves_all_layers_and_ranks_compare_notes_only_while_it_is_made() -> None:
    case = Case("block", layout="zigzag")
    x, want = case.data()["x"], case.make()(case.data()["x"])

    def main(ring: threads.ThreadRing) -> tuple[Tensor, Tensor, int, int]:
        block = case.make(ring_attn=True, layout="zigzag", group=ring)
        at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=case.length)
        plan = RoutingPlan.make(x[:, at], layout="zigzag", group=ring)
        block(x[:, at], plan=plan)
        before = ring.hub.gathers[ring.rank]
        out = block(x[:, at], plan=plan)
        return at, out, before, ring.hub.gathers[ring.rank]

    for at, out, before, after in threads.run(2, main)[0]:
        assert relative_error(out, want[:, at]) < 1e-12
        assert before == after


def in_the_block_of_a_batch(module: str, group: Any = None) -> str:
    """Return the error of a module with a batch's tokens, or with those of this process alone."""
    case = Case(module, layout="zigzag")
    over = {} if group is None else {"ring_attn": True, "group": group}
    data = case.data()
    batch = shard_batch({"inputs_embeds": data["x"], "key_mask": data["mask"]}, group=group)
    with pytest.raises(ValueError, match="the block of a batch") as told, batch:
        case.make(**over)(batch["inputs_embeds"])
    return str(told.value)


@pytest.mark.parametrize("module", ["feedforward", "causal feedforward", "attention", "block"])
def test_the_block_of_a_batch_is_refused_for_its_mask_would_be_ignored(module: str) -> None:
    told = threads.run(2, lambda ring: in_the_block_of_a_batch(module, ring))[0]
    for each in (*told, in_the_block_of_a_batch(module)):
        assert "take no layout, documents and mask from the block of a batch" in each


def layers_that_route_other_numbers_share_a_plan() -> None:
    """Though the first rank works on as many tokens of either."""
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    counts = ((6, 4), (5, 4), (5, 3), (6, 3))

    def layer(of_q: int, of_kv: int, **over: Any) -> nn.Module:
        return ConditionalRoutedAttention(
            16, num_heavy_tokens_q=of_q, num_heavy_tokens_kv=of_kv, light_window_size=4,
            heavy_heads=2, light_heads=2, heavy_dim_head=8, light_dim_head=8, **over,
        ).double()  # fmt: skip

    alone = [layer(*count) for count in counts]
    want = [each(x) for each in alone]

    def main(ring: threads.ThreadRing) -> list[Tensor]:
        mine = x.tensor_split(2, 1)[ring.rank]
        plan = RoutingPlan.make(mine, group=ring)
        found = []
        for other, count in zip(alone, counts):
            mine_too = layer(*count, ring_attn=True, group=ring)
            mine_too.load_state_dict(other.state_dict())
            found.append(mine_too(mine, plan=plan))
        return found

    for got, whole in zip(zip(*threads.run(2, main)[0]), want):
        assert relative_error(torch.cat(got, 1), whole) < 1e-12


def test_layers_that_route_other_numbers_share_a_plan() -> None:
    layers_that_route_other_numbers_share_a_plan()


def test_plans_are_checked() -> None:
    module, x = Case("block").make(), torch.randn(1, 6, DIM, dtype=torch.float64)
    plan = RoutingPlan.make(x)
    with pytest.raises(ValueError, match="the plan was made for"):
        module(x[:, :5], plan=plan)
    with pytest.raises(ValueError, match="the plan already has the mask"):
        module(x, torch.ones(1, 6, dtype=torch.bool), plan=plan)
