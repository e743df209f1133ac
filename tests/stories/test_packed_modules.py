"""Modules with packed documents equal themselves on each document alone."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch import RingAttention, RingTransformer, balanced, shard_sequence
from ring_attention_pytorch.nn import sharding
from tests.support.module_cases import (
    EXACT,
    TRANSFORMER,
    Errors,
    check,
    check_refused,
    gradient_errors,
    made,
    spread_of,
)
from tests.support.reference import relative_error

N = 23
BORDERS = [[0, 5, 6, 6, 19, N], [0, N], [0, 1, 2, 3, 22, N], [0, 12, 12, N]]
MODES = ("auto", "auto by ids", "by hand", "by hand by ids", "alone")
Cut = list[list[int]]  # the borders of each sample


def ids_of(cut: Cut) -> Tensor:
    rows = [torch.arange(len(c) - 1).repeat_interleave(torch.tensor(c).diff()) for c in cut]
    return torch.stack(rows) if rows else torch.empty((0, N), dtype=torch.long)


def brought(rank: int, by_hand: bool) -> Cut:
    """Return each rank's documents: different ones, and one rank brings no sample."""
    return BORDERS[:2] if by_hand else [BORDERS[:2], BORDERS[2:3], [], BORDERS[3:]][rank]


def given(cut: Cut, mode: str, layout: str) -> dict[str, Any]:
    if "ids" not in mode:
        return {"cu_seqlens": torch.tensor(cut[0]) if len(cut) == 1 else cut}
    ids = ids_of(cut) + 40
    return {"documents": shard_sequence(ids, layout=layout) if "hand" in mode else ids}


def each_alone(module: torch.nn.Module, x: Tensor, cut: Cut) -> Tensor:
    """The module on every document by itself."""
    rows = [
        torch.cat([module(x[i : i + 1, a:z]) for a, z in pairwise(borders) if a < z], 1)
        for i, borders in enumerate(cut)
    ]
    return torch.cat(rows)


def options(mode: str, layout: str | None, causal: bool, window: Any, restart: bool) -> dict:
    found = dict(causal=causal, max_lookback_seq_len=window, ring_attn=mode != "alone")
    found |= dict(auto_shard_seq="auto" in mode, ring_seq_size=4, rotary_restart=restart)
    return found if mode == "alone" or layout is None else dict(found, layout=layout)


def attention_errors(cases: list[tuple]) -> list[Errors]:
    found, rank, size = [], dist.get_rank(), dist.get_world_size()
    for mode, layout, causal, window, restart in cases:
        module = made(
            RingAttention,
            dict(options(mode, layout, causal, window, restart), rotary_embed=restart),
        )
        plain = dict(causal=causal, max_lookback_seq_len=window, rotary_embed=restart)
        whole = made(RingAttention, dict(plain, force_regular_attn=True))
        draw = torch.Generator().manual_seed(0)
        sets = [brought(r, "hand" in mode) for r in range(1 if "hand" in mode else size)]
        xs = [torch.randn((len(cut), N, 12), generator=draw).double() for cut in sets]
        douts = [torch.randn((len(cut), N, 12), generator=draw).double() for cut in sets]
        outs = [each_alone(whole, x, cut) if cut else x for x, cut in zip(xs, sets)]
        sum((out * dout).sum() for out, dout, cut in zip(outs, douts, sets) if cut).backward()
        at = 0 if "hand" in mode else rank
        x, dout, want = xs[at], douts[at], outs[at]
        if "hand" in mode:
            x, dout, want = (shard_sequence(t, layout=layout) for t in (x, dout, want))
        out = module(x, **given(sets[at], mode, layout))
        (out * dout).sum().backward()
        found.append({"out": relative_error(out, want), **gradient_errors(module, whole)})
    return found


def attention_cases(size: int) -> list[tuple]:
    masks = [(False, None), (True, None), (True, 4), (False, 3)]
    return [
        (mode, layout, *mask, restart)
        for i, (mode, mask) in enumerate(product(MODES, masks))
        for layout in (("contiguous", "striped", "zigzag")[i % 3],)
        for restart in (bool(i % 2),)
    ] + [("auto", None, *mask, True) for mask in masks]


def fewer(size: int, cases: list[tuple]) -> list[tuple]:
    """All over three ranks, every third one over two and four."""
    return cases if size == 3 else cases[size // 2 % 3 :: 3]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_is_that_of_each_document_alone(pools: Callable, size: int) -> None:
    check(pools(size), attention_errors, fewer(size, attention_cases(size)))


def loss_errors(cases: list[tuple]) -> list[Errors]:
    found, rank, size = [], dist.get_rank(), dist.get_world_size()
    for mode, layout, causal, window, restart in cases:
        module = made(RingTransformer, options(mode, layout, causal, window, restart))
        plain = dict(causal=causal, max_lookback_seq_len=window, force_regular_attn=True)
        whole = made(RingTransformer, plain)
        draw = torch.Generator().manual_seed(0)
        sets = [brought(r, "hand" in mode) for r in range(1 if "hand" in mode else size)]
        if mode == "alone":
            sets = [sets[0]] * size
        xs = [torch.randint(0, 11, (len(cut), N), generator=draw) for cut in sets]
        xs = [xs[0]] * size if mode == "alone" else xs
        logits, labels = [], []
        for x, cut in zip(xs, sets):
            for row, borders in zip(x, cut):
                for a, z in pairwise(borders):
                    # nobody sees the last token of the whole, which is a target only
                    inputs = row[a : min(z, N - 1)]
                    if len(inputs):
                        logits.append(whole(inputs[None])[0, : z - a - 1])
                        labels.append(row[a + 1 : z])
        want = F.cross_entropy(torch.cat(logits), torch.cat(labels))
        want.backward()
        at = 0 if "hand" in mode else rank
        x = shard_sequence(xs[at], layout=layout) if "hand" in mode else xs[at]
        got = module(x, return_loss=True, **given(sets[at], mode, layout))
        got.backward()
        errors = {"loss": relative_error(got, want), "same": spread_of(got)}
        found.append(errors | gradient_errors(module, whole, ranks="mean"))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_loss_ends_with_each_document(pools: Callable, size: int) -> None:
    some = fewer(size, attention_cases(size)[::2])
    cases = [(*case[:3], (case[3], None), True) for case in some]
    check(pools(size), loss_errors, cases)
    # where angles go on counting, they are those of one document up to their float32
    check(pools(size), loss_errors, [(*case[:4], False) for case in cases[::3]], 1e-6)


def test_logits_are_those_of_each_document_alone() -> None:
    model = made(RingTransformer, dict(causal=True, rotary_restart=True))
    x = torch.randint(0, 11, (2, N))
    got = model(x, cu_seqlens=BORDERS[:2])
    assert relative_error(got, each_alone(model, x, BORDERS[:2])) < EXACT
    assert relative_error(model(x, documents=ids_of(BORDERS[:2])), got) < EXACT


def dealt_layouts(asked: str | None) -> list[tuple]:
    """For a pool: which layouts a model shards by, without and with documents."""
    model = made(RingTransformer, options("auto", asked, True, None, False))
    seen = []
    real = sharding.all_segments

    def noted(layout: Any, *args: Any) -> Any:
        seen.append(layout)
        return real(layout, *args)

    x, found = torch.randint(0, 11, (1, N)), []
    with mock.patch.object(sharding, "all_segments", noted):
        for packed in ({}, {"cu_seqlens": [0, 20, N]}):
            seen.clear()
            model(x, **packed)
            found.append({str(layout) for layout in seen})
    return found


def test_a_model_that_is_free_to_deals_by_work(pools: Callable) -> None:
    for without, packed in pools(3).run(dealt_layouts, None):
        assert without == {"zigzag"}
        assert packed == {str(balanced([0, 20, N], 3))}
    for without, packed in pools(3).run(dealt_layouts, "striped"):
        assert without == packed == {"striped"}


def handed_a_plan(layout: Any) -> float:
    """For a pool: a module with a plan for a balanced layout of its batch."""
    module = made(RingAttention, options("by hand", None, True, None, False))
    x = torch.randn((1, N, 12), generator=torch.Generator().manual_seed(0)).double()
    want = shard_sequence(
        each_alone(made(RingAttention, dict(causal=True)), x, BORDERS[:1]), layout=layout
    )
    mine = shard_sequence(x, layout=layout)
    plan = module.plan(mine, cu_seqlens=BORDERS[0], layout=layout)
    return relative_error(module(mine, plan=plan), want)


def test_a_module_takes_a_plan_for_a_balanced_layout(pools: Callable) -> None:
    assert max(pools(3).run(handed_a_plan, balanced(BORDERS[0], 3))) < EXACT


def misuse(name: str) -> None:
    kind, mode, what = name.split("/")
    module = made(
        RingAttention if kind == "attention" else RingTransformer,
        options(mode, None, True, None, False),
    )
    rank = dist.get_rank()
    x = torch.randn(1, N, 12).double() if kind == "attention" else torch.zeros(1, N, dtype=int)
    bad = {
        "both": dict(cu_seqlens=[0, N], documents=torch.zeros(1, N, dtype=int)),
        "short": dict(cu_seqlens=[0, 3]),
        "float": dict(documents=torch.zeros(1, N)),
        "some": dict(documents=torch.zeros(1, N, dtype=int)) if rank else {},
    }
    module(x, **bad[what])


SAID = {
    "both": "say the same thing",
    "short": "must end with the length",
    "float": "documents must be int [1, 23]",
    "some": "documents must be the same on every rank",
}


def test_what_can_not_be_is_refused_on_all_ranks_alike(pools: Callable) -> None:
    wanted = {
        f"{kind}/{mode}/{what}": said
        for kind, mode, (what, said) in product(
            ("attention", "transformer"), ("auto", "by hand"), SAID.items()
        )
    }
    check_refused(pools(2), misuse, wanted)


@pytest.mark.parametrize("kind", [RingAttention, RingTransformer])
def test_regular_attention_has_no_documents(kind: type) -> None:
    module = made(kind, dict(force_regular_attn=True))
    x = torch.randn(1, N, 12).double() if kind is RingAttention else torch.zeros(1, N, dtype=int)
    with pytest.raises(ValueError, match="a ring's kernels"):
        module(x, cu_seqlens=[0, N])


def test_angles_need_somewhere_to_restart() -> None:
    with pytest.raises(ValueError, match="rotary_restart needs rotary_embed"):
        RingAttention(8, rotary_restart=True)
    assert "rotary_restart" not in TRANSFORMER
