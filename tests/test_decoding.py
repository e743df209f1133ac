"""Decoding against keys spread over ranks is softmax attention to all of them."""

import os
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch import tree_attn_decode
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule import relays
from tests.support.decoding import Decoding
from tests.support.module_cases import Errors, check, check_refused
from tests.support.reference import relative_error

SIZES = (2, 3, 4)


def decoded(cases: list[Decoding]) -> list[Errors]:
    found = []
    for case in cases:
        out = case.got(dist.get_rank())
        assert out.dtype == case.dtype
        high, low = out.clone(), out.clone()
        dist.all_reduce(high, dist.ReduceOp.MAX)
        dist.all_reduce(low, dist.ReduceOp.MIN)
        same = (high - low).abs().max().item()
        found.append({"out": relative_error(out, case.want()), "same on all ranks": same})
    return found


def cases(size: int) -> list[Decoding]:
    spread = [
        (3, 9, 1, 4), (None, 5, 2, 3), (5, None, 0, 7), (0, 0, 6, 1), (7, 0, None, None),
    ]  # fmt: skip
    spread = [lengths[:size] for lengths in spread if any(lengths[:size])]
    found = [
        Decoding(lengths, whole, masked, key_heads=key_heads)
        for lengths, whole, masked, key_heads in product(
            spread, (False, True), ("no", "some", "all"), (4, 2, 1)
        )
    ]
    found += [Decoding((n,) + (0,) * (size - 1), whole=True) for n in (1, 2, 3, 4, 31)]
    found += [Decoding(spread[0], whole, "some", tokens=3, d_v=5) for whole in (False, True)]
    found += [Decoding(spread[0], whole, large=300.0) for whole in (False, True)]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_decoding_is_attention_to_all_keys_wherever_they_lie(pools: Callable, size: int) -> None:
    check(pools(size), decoded, cases(size))


def in_float32(dtype_name: str) -> list[tuple[float, float]]:
    """Our errors, and those of PyTorch's own attention in the same precision."""
    dtype, rank, size = getattr(torch, dtype_name), dist.get_rank(), dist.get_world_size()
    found = []
    for n, large in ((64, 1.0), (512, 1.0), (512, 4.0)):
        case = Decoding((n // size,) * size, dtype=dtype, large=large)
        q, k, v, _ = case.data()
        plain = F.scaled_dot_product_attention(q, k, v)
        found.append(tuple(relative_error(t, case.want()) for t in (case.got(rank), plain)))
    return found


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_sixteen_bits_are_merged_in_float32(pools: Callable, size: int, dtype_name: str) -> None:
    for found in pools(size).run(in_float32, dtype_name):
        for ours, plain in found:
            assert 0 < ours <= 2 * plain


def fewer_keys_than_ranks(dtype_name: str) -> float:
    case = Decoding((2, 0, 0, 0), whole=True, dtype=getattr(torch, dtype_name))
    return relative_error(case.got(dist.get_rank()), case.want())


@pytest.mark.parametrize(("dtype_name", "limit"), [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_ranks_may_outnumber_keys_in_every_precision(
    pools: Callable, dtype_name: str, limit: float
) -> None:
    assert max(pools(4).run(fewer_keys_than_ranks, dtype_name)) < limit


@pytest.mark.parametrize("masked", ["no", "some", "all"])
@pytest.mark.parametrize("whole", [False, True])
def test_no_process_group_is_one_rank(whole: bool, masked: str) -> None:
    case = Decoding((9,), whole, masked, key_heads=2, tokens=2)
    assert relative_error(case.got(0), case.want()) < 1e-12


def test_who_sees_nothing_gets_zero(pools: Callable) -> None:
    for out in pools(3).run(of_nothing):
        assert not out.any()


def of_nothing() -> Tensor:
    return Decoding((2, None, 3), masked="all").got(dist.get_rank())


def in_groups(case: Decoding) -> list[float]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    return [
        relative_error(case.got(rank // 2, groups[rank % 2]), case.want()),
        relative_error(Decoding((4,)).got(0, Ring.alone()), Decoding((4,)).want()),
    ]


def test_the_keys_of_a_group_are_its_own(pools: Callable) -> None:
    for found in pools(4).run(in_groups, Decoding((5, 2), masked="some")):
        assert max(found) < 1e-12


def on_machines(case: Decoding) -> tuple[float, tuple[int, ...]]:
    """Ranks 0 and 2 are on one machine, 1 and 3 on another."""
    name = f"m{dist.get_rank() % 2}"
    with (
        mock.patch.dict(os.environ, RING_ATTENTION_MACHINE=name),
        mock.patch.object(relays, "_EXCHANGE", 0),
    ):
        ring = Ring(dist.new_group())
        return relative_error(case.got(ring.rank, ring), case.want()), ring.machines


def test_machines_merge_what_their_ranks_have_found(pools: Callable) -> None:
    for case in (Decoding((3, 0, 5, 2)), Decoding((1, None, 0, 0), masked="some", tokens=2)):
        for error, machines in pools(4).run(on_machines, case):
            assert machines == (0, 1, 0, 1)
            assert error < 1e-12


def test_no_gradients_are_promised_and_none_come() -> None:
    q = torch.randn(1, 2, 1, 4, requires_grad=True)
    assert not tree_attn_decode(q, q, q).requires_grad


def misuse(name: str) -> None:
    odd_one = dist.get_rank() == 1
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 6, 8)
    mask = torch.ones(1, 6, dtype=torch.bool)
    args: dict[str, Any] = dict(q=q, k=k, v=k, shard_kv_seq=False)
    wrong: dict[str, dict[str, Any]] = {
        "triton": {"use_triton": True},
        "eps": {"eps": 0.0},
        "no v": {"v": None},
        "a mask of nothing": {"k": None, "v": None, "key_mask": mask},
        "heads": {"k": k[:, :1].repeat(1, 3, 1, 1), "v": k[:, :1].repeat(1, 3, 1, 1)},
        "dtypes": {"v": k.double()},
        "dtypes differ": {"q": q.double(), "k": k.double(), "v": k.double()},
        "whole or not": {"shard_kv_seq": True},
        "whole without keys": {"shard_kv_seq": True, "k": None, "v": None},
        "whole, of other length": {"shard_kv_seq": True, "k": k[:, :, 1:], "v": k[:, :, 1:]},
        "masked or not": {"shard_kv_seq": True, "key_mask": mask},
        "q": {"q": q[:, :2]},
        "width of v": {"v": k[..., :3]},
        "mask too short": {"key_mask": mask[:, 1:]},
        "mask of numbers": {"key_mask": mask.float()},
        "no keys anywhere": {"k": None, "v": None},
        "one batch less": {"q": q[0]},
        "other ways": {"use_triton": False},
    }
    if name.startswith(("whole", "masked")) and name != "whole or not":
        args["shard_kv_seq"] = True
    if odd_one or name == "no keys anywhere":
        args |= wrong[name]
    tree_attn_decode(**args)


REFUSED = {
    "triton": "use_triton=True needs tensors on CUDA",
    "eps": "eps must be positive",
    "no v": "k and v must be given together",
    "a mask of nothing": "k and v must be given together",
    "heads": "heads of q must be a multiple of those of k",
    "dtypes": "must have one floating dtype",
    "dtypes differ": "dtype must be the same on every rank",
    "whole or not": "shard_kv_seq must be the same on every rank",
    "whole without keys": "shard_kv_seq=True needs the whole k and v",
    "whole, of other length": "k must be the same on every rank",
    "masked or not": "key_mask must be the same on every rank",
    "q": "q must be the same on every rank",
    "width of v": "all v one head size, got [3, 8]",
    "mask too short": "key_mask must be bool [1, 6]",
    "mask of numbers": "key_mask must be bool [1, 6]",
    "no keys anywhere": "some rank must have keys",
    "other ways": "use_triton must be the same on every rank",
    "one batch less": "q, k, v must be [batch, heads, tokens, head size]",
}


@pytest.mark.parametrize("size", [2, 4])
def test_what_cannot_be_is_refused_in_the_same_words_on_all_ranks(
    pools: Callable, size: int
) -> None:
    check_refused(pools(size), misuse, REFUSED)
