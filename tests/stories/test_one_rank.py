"""A mistake of one rank alone is the same error on all, and no rank is left waiting."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist

from ring_attention_pytorch import RingAttention, RingTransformer, ring_flash_attn, unshard_sequence
from tests.support.module_cases import check_refused

SHAPE = {"dim": 16, "dim_head": 4, "heads": 4, "ring_attn": True}


def mistake(name: str) -> None:  # noqa: C901 - a table
    """Make rank 1's wrong call."""
    mine = dist.get_rank() == 1
    x = torch.randn(1, 8, 16)
    auto, hand = (RingAttention(**SHAPE, auto_shard_seq=a, ring_seq_size=4) for a in (True, False))
    model = RingTransformer(num_tokens=7, dim=16, depth=1, dim_head=4, heads=4, ring_attn=True)
    ids = torch.zeros(1, 8, dtype=torch.long)
    qkv = [torch.randn(1, 8, 2, 4)] * 3
    match name:
        case "input needs a gradient, automatic":
            auto(x.requires_grad_(mine))
        case "context needs a gradient, automatic":
            auto(x, context=torch.randn(1, 6, 16, requires_grad=mine))
        case "part needs a gradient, unsharding":
            unshard_sequence(x.requires_grad_(mine), length=16)
        case "dtype by hand":
            hand(x.double() if mine else x)
        case "ring size by hand":
            hand(x, ring_size=3 if mine else None)
        case "angles by hand":
            hand(x, rotary_emb=torch.zeros(8, 4) if mine else None)
        case "layout of the function":
            ring_flash_attn(*qkv, ring_reduce_col=True, layout="nope" if mine else "striped")
        case "ring size of the function":
            ring_flash_attn(*qkv, ring_reduce_col=True, ring_size=3 if mine else None)
        case "label":
            model(ids, labels=ids - 100 if mine else ids)
        case "id":
            model(ids + 7 if mine else ids)
        case "length to unshard":
            unshard_sequence(x, length=-3 if mine else 16)
        case "dimension to unshard":
            unshard_sequence(x, length=16, dim=4 if mine else 1)


REFUSED = {
    "input needs a gradient, automatic": "requires_grad must be the same on every rank",
    "context needs a gradient, automatic": "requires_grad must be the same on every rank",
    "part needs a gradient, unsharding": "requires_grad must be the same on every rank",
    "dtype by hand": "x must be torch.float32 as the weights are, got torch.float64",
    "ring size by hand": "ring_size must divide the group's 2 ranks, got 3",
    "angles by hand": "rotary_emb must be the same on every rank",
    "layout of the function": "layout must be one of",
    "ring size of the function": "ring_size must divide the group's 2 ranks, got 3",
    "label": "labels must be 0 to 6, or ignore_index=-1 for none, got -100 to -100",
    "id": "ids must be 0 to 6, got 7 to 7",
    "length to unshard": "length must be at least 0, got -3",
    "dimension to unshard": "has no dimension 4",
}


def test_a_mistake_of_one_rank_is_told_to_all(pools: Callable) -> None:
    check_refused(pools(2), mistake, REFUSED)


def copied() -> bool:
    module = RingAttention(**SHAPE, group=dist.group.WORLD)
    again = copy.deepcopy(module)
    return again.to_out.weight is not module.to_out.weight


def test_a_module_with_a_group_can_be_copied(pools: Callable) -> None:
    assert pools(2).run(copied) == [True, True]


def test_alone_a_ring_of_any_size_is_this_process() -> None:
    x = torch.randn(1, 8, 16)
    for auto in (True, False):
        module = RingAttention(**SHAPE, auto_shard_seq=auto)
        torch.testing.assert_close(module(x, ring_size=2), module(x))
