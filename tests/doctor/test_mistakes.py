"""Each known mistake has its trace, which nothing else leaves; a right program leaves none."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ring_attention_pytorch.doctor import mistakes
from ring_attention_pytorch.doctor.evidence import Evidence
from ring_attention_pytorch.doctor.mistakes import KNOWN, Case, RankNumbers
from ring_attention_pytorch.geometry.tiles import Mask

IDS, AT = (
    torch.tensor([[5, 3, 8, 1, 9, 2, 7, 4]]),
    torch.tensor([0, 1, 6, 7]),
)  # zigzag, rank 0 of 2
EVERY = torch.arange(8)
LABELS = torch.tensor([[3, 8, 1, 9, 2, 7, 4, -100]])
QKV = torch.randn(3, 1, 8, 2, 4, generator=torch.Generator().manual_seed(0))


def plan(**otherwise: Any) -> Any:
    """Make the attributes of a plan over two ranks that are looked at."""
    usual = dict(
        layout="zigzag", ring=SimpleNamespace(size=2), key_mask=None, packing=None,
        visible=Mask(True, None), terms=SimpleNamespace(mask_mod=None),
    )  # fmt: skip
    return SimpleNamespace(**usual | otherwise)


def seen(held: torch.Tensor, **otherwise: Any) -> Evidence:
    """Make the records of a right program with these tokens."""
    inputs = {("words", "input"): IDS[:, held], ("", "position_ids"): EVERY[held][None]}
    qkv = tuple(QKV[:, :, held])
    return Evidence(
        **{"inputs": inputs, "labels": [LABELS[:, held]], "attention": [(plan(), qkv)]} | otherwise
    )


def right() -> Case:
    """The traces of a program without a mistake, on rank 0."""
    ring = SimpleNamespace(size=2, rank=0, ranks=[0, 1])
    told = [RankNumbers(2.5, 9.0, 4), RankNumbers(2.5, 8.5, 3)]
    whole = seen(EVERY, entropy=17.5, counted=7)
    return Case(
        nn.Linear(1, 1), {"input_ids": IDS}, ring, seen(AT), whole, told, 2.5, 1.0, 1e-6
    )  # fmt: skip


def here(**otherwise: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, here=seen(AT, **otherwise))


def given(**otherwise: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, batch=case.batch | otherwise)


def attention(**otherwise: Any) -> Callable[[Case], Case]:
    return here(attention=[(plan(**otherwise), tuple(QKV[:, :, AT]))])


def positions(at: torch.Tensor) -> Callable[[Case], Case]:
    inputs = {("words", "input"): IDS[:, AT], ("", "position_ids"): at[None]}
    return here(inputs=inputs)


def of_model(**attributes: Any) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        model = nn.Sequential(nn.Dropout(0.5).eval())
        for name, value in attributes.items():
            setattr(model, name, value)
        return replace(case, model=model)

    return change


def heads_first(case: Case) -> Case:
    qkv = tuple(QKV.transpose(2, 3))
    return replace(case, whole=seen(EVERY, attention=[(plan(), qkv)]))


def rotated(case: Case) -> Case:
    q, k, v = QKV[:, :, AT]
    return here(attention=[(plan(), (q + 1, k + 1, v))])(case)


def told(*ranks: RankNumbers) -> Callable[[Case], Case]:
    return lambda case: replace(case, ranks=list(ranks))


def averaged(over: list[int]) -> Callable[[Case], Case]:
    """A model in DDP over some ranks."""

    def change(case: Case) -> Case:
        wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
        nn.Module.__init__(wrapped)
        wrapped.process_group = over
        return replace(case, model=wrapped)

    return change


PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
WINDOW = SimpleNamespace(sliding_window=4)
# what is otherwise in the traces, the mistake that it is of, words of what is said
CASES: dict[str, tuple[Callable[[Case], Case], str | None, str]] = {
    "right": (lambda case: case, None, ""),
    "mask known": (
        lambda c: attention(key_mask=PADDED.bool())(given(attention_mask=PADDED)(c)), None, "",
    ),
    "padding that nobody sees": (given(attention_mask=PADDED.flip(1)), None, ""),
    "documents known": (
        lambda c: attention(packing=((0, 4),))(given(cu_seqlens=[0, 4, 8])(c)), None, "",
    ),
    "window known": (
        lambda c: of_model(config=WINDOW)(attention(visible=Mask(True, 3))(c)), None, "",
    ),
    "DDP over more": (averaged([0, 1, 2, 3]), None, ""),
    "no dropout": (of_model(), None, ""),
    "whole sequences": (
        lambda c: replace(c, here=seen(EVERY, attention=[(plan(), tuple(QKV))])),
        "whole sequences", "all 8 tokens",
    ),
    "layout": (attention(layout="striped"), "layout", "zigzag, attention takes them as striped"),
    "heads first": (heads_first, "heads first", "[1, 2, 8, 4]"),
    "local positions": (positions(torch.arange(4)), "positions", "0 to 3 on each rank"),
    "other positions": (positions(AT + 1), "positions", "not those"),
    "rotated": (rotated, "positions", "q and k are not"),
    "local labels": (
        here(labels=[torch.tensor([[3, 7, 4, -100]])]), "labels", "the next one on its rank",
    ),
    "labels less the last": (
        here(labels=[torch.tensor([[3, 7, 4]])]), "labels", "the next one on its rank",
    ),
    "other labels": (here(labels=[LABELS[:, AT] + 1]), "labels", "4 labels here are not"),
    "mean of means": (
        told(RankNumbers(2.25, 9.0, 4), RankNumbers(2.75, 8.25, 3)),
        "mean of means", "own 4, 3 labels",
    ),
    "the same mean of means": (
        told(RankNumbers(2.5, 9.0, 4), RankNumbers(2.5, 8.25, 3)),
        "mean of means", "own 4, 3 labels",
    ),
    "means whose mean is nearly right": (
        told(RankNumbers(2.25, 9.0, 4), RankNumbers(2.25 + 3e-6, 6.75 + 9e-6, 3)),
        "mean of means", "each rank's loss is the mean over its own 4, 3 labels",
    ),
    "a mean of no labels": (
        told(RankNumbers(2.25, 9.0, 4), RankNumbers(math.nan, math.nan, 0)),
        "mean of means", "each rank's loss is the mean over its own 4, 0 labels",
    ),
    "too large": (lambda c: replace(c, size=2.0), "gradient size", "2 times too large"),
    "too small": (lambda c: replace(c, size=0.5), "gradient size", "2 times too small"),
    "mask": (given(attention_mask=PADDED), "mask", "2 tokens of padding"),
    "borders": (given(cu_seqlens=[0, 4, 8]), "documents", "borders"),
    "restarts": (
        given(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])), "documents", "anew 1 times",
    ),
    "window": (
        lambda c: of_model(config=WINDOW)(attention(visible=Mask(True, 4))(c)), "window", "counts",
    ),
    "no window": (of_model(config=WINDOW), "window", "there is none"),
    "averaging": (averaged([0, 2]), "averaging", "ranks [0, 2], the ring has [0, 1]"),
    "dropout": (of_model(drop=nn.Dropout(0.1)), "dropout", "drop drops"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_leaves_its_trace_and_no_other(name: str) -> None:
    change, mistake, words = CASES[name]
    with mock.patch.object(mistakes, "Ring", lambda ranks: SimpleNamespace(ranks=ranks)):
        found = {m.name: said for m in KNOWN if (said := m.find(change(right()))) is not None}
    assert list(found) == ([] if mistake is None else [mistake]), found
    assert mistake is None or words in found[mistake]


def test_there_is_a_case_of_every_mistake() -> None:
    assert {mistake for _, mistake, _ in CASES.values()} - {None} == {m.name for m in KNOWN}
