"""Next tokens across ranks, and the mean over all real tokens whatever their places."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch import positions
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.nn.loss import mean_cross_entropy, next_tokens
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.module_cases import EXACT, Errors, check
from tests.support.reference import relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 17, 40])
def test_each_token_gets_its_successor_wherever_that_lives(
    layout: str, size: int, length: int
) -> None:
    ids = torch.randint(0, 100, (2, length))
    want = torch.cat((ids[:, 1:], torch.full((2, min(length, 1)), -7)), dim=1)
    segments = all_segments(layout, size, length)

    def of_rank(ring: threads.ThreadRing) -> Tensor:
        at = positions(layout, rank=ring.rank, ring_size=size, length=length)
        return next_tokens(ids[:, at], segments, ring, -7)

    found, hub = threads.run(size, of_rank)
    for rank, got in enumerate(found):
        at = positions(layout, rank=rank, ring_size=size, length=length)
        assert torch.equal(got, want[:, at])
    if size > 1 and layout != "striped":
        # a contiguous run needs one token from outside, whatever its length
        assert max(hub.sent_bytes) <= 2 * 2 * 8


def shares(size: int) -> list[list[int]]:
    """Return how many tokens, and how many real ones, each rank has."""
    return [
        [(5, 0, 2, 9)[r] for r in range(size)],
        [3] * size,
        [0] * size,
        [7] + [0] * (size - 1),
    ]


def loss_errors(cases: list[tuple[list[int], int, str]]) -> list[Errors]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for lengths, ignored, reduction in cases:
        draw = torch.Generator().manual_seed(0)
        logits = torch.randn((1, sum(lengths), 6), generator=draw, dtype=torch.float64)
        labels = torch.randint(0, 6, (1, sum(lengths)), generator=draw)
        labels[:, ::4] = ignored
        mine = logits.split(lengths, dim=1)[rank].clone().requires_grad_()
        logits.requires_grad_()
        real = labels != ignored
        want = F.cross_entropy(logits[real], labels[real]) if real.any() else logits.sum() * 0
        got = mean_cross_entropy(mine, labels.split(lengths, dim=1)[rank], ignored, Ring())
        (got if reduction == "same" else got * (rank + 1)).backward()
        want.backward()
        # the sum over ranks of what each made of the same loss
        times = size if reduction == "same" else size * (size + 1) / 2
        grad = logits.grad.split(lengths, dim=1)[rank] * times
        found.append({"loss": relative_error(got, want), "grad": relative_error(mine.grad, grad)})
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_mean_is_over_all_real_tokens_of_all_ranks(pools: Callable, size: int) -> None:
    cases = list(product(shares(size), (-1, -100, 2), ("same", "weighted")))
    check(pools(size), loss_errors, cases)


def sixteen_bits(dtype: torch.dtype) -> dict[str, Any]:
    logits = torch.randn((1, 64, 50), generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    labels = torch.arange(64)[None] % 50
    mine = logits.requires_grad_()
    got = mean_cross_entropy(mine, labels, -1, Ring())
    got.backward()
    want = F.cross_entropy(logits.detach().double().flatten(0, 1), labels.flatten())
    return {"dtype": got.dtype, "grad": mine.grad.dtype, "error": relative_error(got, want)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_summed_in_float32(pools: Callable, dtype: torch.dtype) -> None:
    for found in pools(2).run(sixteen_bits, dtype):
        assert found["dtype"] == torch.float32
        assert found["grad"] == dtype
        assert found["error"] < 1e-6


def test_alone_it_is_cross_entropy() -> None:
    logits = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (2, 7))
    labels[0, :3] = -1
    got = mean_cross_entropy(logits, labels, -1, Ring.alone())
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    assert relative_error(got, want) < EXACT
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (got, want)]
    assert relative_error(*grads) < EXACT


def test_without_a_real_token_the_loss_is_zero_and_no_nan() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = mean_cross_entropy(logits, torch.full((2, 3), -1), -1, Ring.alone())
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()
    empty = mean_cross_entropy(logits[:, :0], torch.empty(2, 0).long(), -1, Ring.alone())
    assert empty.item() == 0.0
