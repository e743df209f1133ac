"""A world of one process: collectives answer as they do alone, and afterwards as they did."""

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch.ranks.alone import in_one_process, one_process
from ring_attention_pytorch.ranks.ring import Ring, as_ring


def test_collectives_of_one_give_back_what_is_given():
    t, got = torch.arange(4.0), torch.zeros(4)
    with one_process():
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        dist.all_reduce(t)
        dist.all_gather([got], t)
        assert torch.equal(got, torch.arange(4.0))
        dist.all_gather_into_tensor(got.zero_(), t)
        assert torch.equal(got, t)
        dist.reduce_scatter_tensor(got.zero_(), t)
        assert torch.equal(got, t)
        dist.barrier()


def test_an_error_leaves_torch_distributed_as_it_was():
    before = dist.all_reduce, dist.get_world_size
    with pytest.raises(ValueError, match="could not convert"), one_process(), one_process():
        float("no number" if dist.all_reduce is not before[0] else "0")
    assert (dist.all_reduce, dist.get_world_size) == before
    assert not in_one_process


def in_a_group() -> tuple[list[int], list[int], list[int]]:
    """For a pool: sizes of rings inside, within a block inside, and afterwards."""

    def sizes() -> list[int]:
        return [
            Ring().size,
            Ring(dist.group.WORLD).size,
            as_ring(whole).size,
            dist.get_world_size(),
        ]

    whole = Ring()
    before = sizes()
    with one_process(), one_process():
        within = sizes()
    return before, within, sizes()


def test_rings_are_of_this_process_whatever_group_is_named(pools):
    assert pools(2).run(in_a_group) == [([2] * 4, [1] * 4, [2] * 4)] * 2
