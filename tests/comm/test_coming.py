"""Kernels that begin early, with own keys, while others' come: what they are told, and what not."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.comm import gather_serial, visits
from ring_attention_pytorch.comm.gather import some_of
from ring_attention_pytorch.comm.gather_serial import SerialGather
from ring_attention_pytorch.geometry.segments import Segment
from ring_attention_pytorch.geometry.tiles import Tile, band, trim
from ring_attention_pytorch.kernels import eager
from ring_attention_pytorch.kernels._tile_table import in_two, table_in_two
from ring_attention_pytorch.runtime.interfaces import KVBlock, Tiles
from tests.support import threads
from tests.support.cases import Attention, check_symmetric

N, M = 37, 41
CASE = Attention(29, "zigzag", causal=True, d_v=5, kernel="eager")


def begin_early(patch: pytest.MonkeyPatch) -> list[bool]:
    """Let the kernel "eager" begin early, and keys come only when it waits for them.

    If it is not told that they are coming, it is launched as ever: when they have come.

    Returns a list that grows with each call of it forward: whether any keys were coming.
    """
    whole, under_way = eager.forward, {}
    told: list[bool] = []

    def pull(how: visits.Pulling, room: Tensor) -> None:
        how.meeting.publish()
        parts, here = how.table
        if how.early:
            for at in here:
                room[:, at] = torch.nan
            under_way[get_ident()] = room, here, [part.clone() for part in parts]
        else:
            gather_serial._copy_all(room, here, parts)

    def come() -> None:
        if get_ident() in under_way:
            gather_serial._copy_all(*under_way.pop(get_ident()))

    def forward(q: Tensor, keys: KVBlock, *more: Any) -> None:
        told.append(bool(keys.coming))
        if not keys.coming:
            come()
        coming = torch.zeros(keys.k.shape[1], dtype=torch.bool)
        for span in keys.coming:
            coming[span] = True
        coming &= get_ident() in under_way
        for t in (keys.k, keys.v):
            assert (t.isnan().flatten(2).all(2) == coming).all()
            assert (t.isnan().flatten(2).any(2) == coming).all()
        come()
        whole(q, keys, *more)

    patch.setattr(eager, "forward", forward)
    patch.setattr(
        eager, "CAN", eager.CAN._replace(traits=eager.CAN.traits._replace(begins_early=True))
    )
    patch.setattr(gather_serial, "can_begin_early", lambda device: True)
    patch.setattr(threads.ThreadShelf, "to_read", lambda shelf: shelf, raising=False)
    patch.setattr(visits, "table_of_copies", lambda shelf, room, parts, here: (parts, here))
    patch.setattr(visits, "pull", pull)
    return told


def others_keys_are_coming(patch: pytest.MonkeyPatch) -> None:
    """And only those; where no mask comes with them, and own keys are in the same block."""
    told = begin_early(patch)
    for case in (CASE, replace(CASE, causal=False), replace(CASE, layout="contiguous", window=9)):
        told.clear()
        check_symmetric(case, 3, 9, together=True)
        assert any(told)
    differ = Attention(12, kernel="eager", ids=((0,) * 12, (3, 3, 0, 0) * 3))
    for case, how in (
        (CASE, dict(own_apart=True)), (replace(CASE, masked=True), dict(together=True)),
        (differ, dict(together=True)),
    ):  # fmt: skip
        told.clear()
        check_symmetric(case, 3, 9, **how)
        assert told
        assert not any(told)


def test_others_keys_are_coming(monkeypatch):
    others_keys_are_coming(monkeypatch)


def keys_have_come_where_parts_have_their_times(patch: pytest.MonkeyPatch) -> None:
    """The kernel is told of them all the same, for in that order it sums; results stay the same."""
    told, like = begin_early(patch), SerialGather.like
    pull, early = visits.pull, []

    def noted(how: visits.Pulling, room: Tensor) -> None:
        early.append(how.early)
        pull(how, room)

    patch.setattr(SerialGather, "like", lambda *given, **how: like(*given, **how).in_turn())
    patch.setattr(visits, "pull", noted)
    check_symmetric(CASE, 3, 9, together=True)
    assert all(told)
    assert not any(early)


def test_keys_have_come_where_parts_have_their_times(monkeypatch):
    keys_have_come_where_parts_have_their_times(monkeypatch)


def nothing_is_coming_to_parts() -> None:
    """Of samples or tokens: the launch right before may be that of others."""
    k, spans = torch.randn(2, 6, 1, 4), (slice(0, 2),)
    keys = KVBlock(k, k, None, (Segment(0, 1, 6),), coming=spans)
    assert keys.samples(slice(None)).coming == some_of(keys, slice(0, 6)).coming == spans
    assert keys.samples(slice(0, 1)).coming == some_of(keys, slice(2, 6)).coming == ()


def test_nothing_is_coming_to_parts():
    nothing_is_coming_to_parts()


def shown(tiles: Iterable[Tile], rows: slice = slice(0, N)) -> Tensor:
    """How often tiles show each pair of these rows and all columns."""
    found = torch.zeros(N, M, dtype=torch.int)
    for tile in tiles:
        found[tile.rows, tile.cols] += band(tile, torch.device("cpu"))
    return found[rows]


def tiles_of_coming_keys_are_behind() -> None:
    """A block looks at all that it sees, and at first reads nothing that is coming."""
    draw = random.Random(0)
    for _ in range(40):
        rows, cols = (slice(draw.randrange(9), end - draw.randrange(9)) for end in (N, M))
        bounds = (draw.choice([None, draw.randrange(20)]) for _ in range(2))
        tile = trim(rows, cols, *bounds)
        coming = slice(0, draw.randrange(1, 12)), slice(20, draw.randrange(21, M))
        for block, width in product((8, 16), (4, 8)):
            for part in in_two([tile], coming, width)[0]:
                read = {*range(part.cols.start, part.cols.stop)}
                read |= {*range(part.cols.start, M)[: -(-len(read) // width) * width]}
                assert not any(read & {*range(span.start, span.stop)} for span in coming)
            table = table_in_two(Tiles([tile]), coming, block, width, torch.empty(1, N))
            parts = [Tile(slice(*t[:2]), slice(*t[2:4]), *t[4:]) for t in table.tiles.tolist()]
            here = len(in_two([tile], coming, width)[0])
            assert table.count == -(-N // block)
            for number, a, b, c, d in table.blocks.tolist():
                assert b <= here <= c
                at = slice(number * block, number * block + block)
                assert torch.equal(shown(parts[a:b] + parts[c:d], at), shown([tile], at))


def test_tiles_of_coming_keys_are_behind():
    tiles_of_coming_keys_are_behind()
