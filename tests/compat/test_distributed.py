"""Functions that gather all ranks' tensors: any sizes, and each gradient once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ring_attention_pytorch.distributed import (
    AllGather,
    AllGatherFunction,
    all_gather_same_dim,
    all_gather_variable_dim,
    gather_sizes,
    get_rank,
    get_world_size,
    is_distributed,
    split_by_rank,
)

from tests.support.original import Errors, check
from tests.support.ranks import alone
from tests.support.reference import relative_error

# --- helpers ---


def gathered() -> Errors:
    """Lengths that differ, one of them 0, along any dim, and what comes home backward."""
    rank, size = get_rank(), get_world_size()
    lengths = [(3 * r + 2) % 5 for r in range(size)]
    draw, found = torch.Generator().manual_seed(5), {}
    for dim in (0, -2):
        shapes = [(n, 2, 3) if dim == 0 else (2, n, 3) for n in lengths]
        xs = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
        whole = torch.cat(xs, dim)
        weights = [torch.randn(whole.shape, generator=draw, dtype=torch.float64) for _ in xs]
        mine = xs[rank].clone().requires_grad_()
        for how, sizes in ((AllGather(dim=dim), None), (AllGather(dim=dim), torch.tensor(lengths))):
            mine.grad = None
            got, told = how(mine, sizes)
            (got**2 * weights[rank]).sum().backward()
            want = (2 * whole * sum(weights)).split(lengths, dim)[rank]
            found[f"{dim} {sizes}"] = relative_error(got, whole)
            found[f"{dim} {sizes} d"] = relative_error(mine.grad, want)
            assert told.tolist() == lengths
        assert gather_sizes(mine, dim=dim).tolist() == lengths
        mask, _ = all_gather_variable_dim(mine > 0, dim)
        assert torch.equal(mask, whole > 0)
        assert torch.equal(AllGatherFunction.apply(mine, dim, None)[0], whole)
    each = all_gather_same_dim(torch.tensor(float(rank)))
    assert [t.item() for t in each] == list(range(size))
    return found


def sizes_that_are_wrong() -> Errors:
    x = torch.zeros(2, 3 + get_rank())
    for sizes in ([3, 3], [3, 4, 5]):
        with pytest.raises(ValueError, match="sizes must be"):
            all_gather_variable_dim(x, 1, torch.tensor(sizes))
    return {"right": relative_error(all_gather_variable_dim(x, 1)[0], torch.zeros(2, 7))}


@pytest.mark.parametrize("size", [2, 4])
def test_all_gather_takes_any_sizes_and_brings_every_rank_s_gradient_home(
    pools: Callable, size: int
) -> None:
    check(pools(size).run(gathered))


def test_sizes_are_compared(pools: Callable) -> None:
    check(pools(2).run(sizes_that_are_wrong))


def split() -> Errors:
    rank, size = get_rank(), get_world_size()
    draw = torch.Generator().manual_seed(1)
    x, weights = (torch.randn((2, 3, size), generator=draw, dtype=torch.float64) for _ in range(2))
    mine = x.clone().requires_grad_()
    whole, _ = all_gather_variable_dim(mine, 0)
    lengths = [3 + r % 2 for r in range(size)]
    parts = whole.flatten(0, 1)[: sum(lengths)].split(lengths)
    part, sizes = split_by_rank(parts)
    assert sizes.tolist() == lengths
    begin = sum(lengths[:rank])
    (part * (rank + 1) * weights[0, 0]).sum().backward()
    # of all ranks' results, what is made of my x
    factor = torch.cat([torch.full((n,), r + 1.0).double() for r, n in enumerate(lengths)])
    want = torch.zeros(size * 6, size, dtype=torch.float64)
    want[: len(factor)] = factor[:, None] * weights[0, 0]
    even, told = split_by_rank(torch.arange(2.0 * size).view(size, 2))
    assert (even.tolist(), told.tolist()) == ([2.0 * rank, 2.0 * rank + 1], [2] * size)
    return {
        "part": relative_error(part, x.repeat(size, 1, 1).flatten(0, 1)[begin:][: lengths[rank]]),
        "dx": relative_error(mine.grad, want.view(size, 2, 3, size)[rank]),
    }


def test_split_by_rank_after_all_gather_counts_each_gradient_once(pools: Callable) -> None:
    check(pools(4).run(split))


def before_and_in_a_group(rank: int, folder: str) -> list[tuple[int, int, bool]]:
    told = [(get_rank(), get_world_size(), is_distributed())]
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(folder, 2))
    told.append((get_rank(), get_world_size(), is_distributed()))
    dist.barrier()  # or the other one may still be connecting
    dist.destroy_process_group()
    return [*told, (get_rank(), get_world_size(), is_distributed())]


def test_d19_ranks_are_asked_for_anew(tmp_path: Any) -> None:
    """D19: asked for once before there was a group, every rank was 0 of 1 for ever."""
    told = alone(before_and_in_a_group, 2, str(tmp_path / "store"))
    lonely = (0, 1, False)
    assert told == [[lonely, (rank, 2, True), lonely] for rank in range(2)]
