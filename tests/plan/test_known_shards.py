"""Shards remember how they were made, and calls by another layout raise."""

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import (
    RingPlan,
    RunPlan,
    balanced,
    ring_attn,
    shard_batch,
    shard_sequence,
    unshard_sequence,
)
from ring_attention_pytorch.plan import known_shards
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import relative_error

N = 24


def whole(dim: int = 1) -> Tensor:
    torch.manual_seed(0)
    q = torch.randn(1, N, 2, 4, dtype=torch.float64)
    return q if dim == 1 else q.transpose(1, 2).contiguous()


def shard(layout: object, dim: int = 1) -> Tensor:
    return shard_sequence(whole(dim), layout=layout, dim=dim)


def attend(q: Tensor, **options: object) -> Tensor:
    return ring_attn(q, q, q, **{"causal": True, **options})


def with_plan(q: Tensor, of: Tensor) -> Tensor:
    return ring_attn(q, q, q, plan=RingPlan.make(of, of, of, causal=True, layout="zigzag"))


def ids() -> Tensor:
    return torch.arange(N)[None]


LIES = "was sharded by layout='contiguous', but the call has layout='zigzag'"
DIMENSION = "was sharded along another dimension than its tokens"
WHOLE = "q is a whole sequence, gathered by unshard_sequence"
SAME = "all ranks of a ring have the same queries. Are they whole sequences, not sharded"
# what is wrong, and the text of the error; without a text it is right
CALLS: dict[str, tuple[Callable[[], object], str | None]] = {
    "right": (lambda: attend(shard("zigzag"), layout="zigzag"), None),
    "another layout": (lambda: attend(shard("contiguous"), layout="zigzag"), LIES),
    "keys by another layout": (
        lambda: ring_attn(
            shard("zigzag"), shard("contiguous"), shard("zigzag"), causal=True, layout="zigzag"
        ),
        "k " + LIES,
    ),
    "the layout is forgotten": (
        lambda: attend(shard("striped"), window=5),
        "layout='striped', but the call has layout='contiguous'",
    ),
    "a balanced layout": (
        lambda: attend(
            shard("zigzag"),
            cu_seqlens=[0, 5, N],
            layout=balanced([0, 5, N], ring_size=dist.get_world_size()),
        ),
        "layout='zigzag', but the call has layout=",
    ),
    "another layout, with a plan": (
        lambda: with_plan(shard("contiguous"), shard("zigzag")),
        LIES,
    ),
    "without a mask places don't matter": (lambda: attend(shard("zigzag"), causal=False), None),
    "positions are given": (
        lambda: attend(
            shard("zigzag"),
            query_positions=shard_sequence(ids(), layout="zigzag")[0],
            key_positions=shard_sequence(ids(), layout="zigzag")[0],
        ),
        None,
    ),
    "an operation forgets": (lambda: attend(shard("contiguous") * 1, layout="zigzag"), None),
    "a change in place forgets": (
        lambda: attend(shard("contiguous").mul_(1), layout="zigzag"),
        None,
    ),
    "heads first": (lambda: attend(shard("zigzag", 2), layout="zigzag", heads_first=True), None),
    "heads first, unsaid": (lambda: attend(shard("zigzag", 2), layout="zigzag"), DIMENSION),
    "heads first, said wrongly": (lambda: attend(shard("contiguous"), heads_first=True), DIMENSION),
    "heads first, by another layout": (
        lambda: attend(shard("contiguous", 2), layout="zigzag", heads_first=True),
        LIES,
    ),
    "gathered": (
        lambda: attend(unshard_sequence(shard("zigzag"), length=N, layout="zigzag")),
        WHOLE,
    ),
    "gathered by another layout": (
        lambda: unshard_sequence(shard("contiguous"), length=N, layout="zigzag"),
        "x " + LIES,
    ),
    "gathered, and sharded again": (
        lambda: attend(
            shard_sequence(
                unshard_sequence(shard("zigzag"), length=N, layout="zigzag"), layout="contiguous"
            ),
            layout="zigzag",
        ),
        LIES,
    ),
    "sharded twice": (lambda: shard_sequence(shard("zigzag")), f"x is a shard already, of {N}"),
    "a batch of shards": (
        lambda: shard_batch({"input_ids": shard_sequence(ids())}),
        f"input_ids is a shard already, of {N}",
    ),
    "a batch's tensor by another layout": (
        lambda: unshard_sequence(shard_batch({"input_ids": ids()})["input_ids"], length=N),
        "x was sharded by layout='zigzag'",
    ),
    "a recurrence's layout": (lambda: RunPlan.make(shard("contiguous"), layout="zigzag"), LIES),
    "not sharded": (lambda: attend(whole(), check="always"), SAME),
    "sharded": (lambda: attend(shard("contiguous"), check="always"), None),
    "padding alone": (lambda: attend(torch.zeros(1, N, 2, 4), check="always"), None),
}


def outcome(name: str) -> str | None:
    """Return the error of a call, and leave the ring in step."""
    try:
        CALLS[name][0]()
    except ValueError as error:
        return str(error)
    return None


def outcomes() -> dict[str, str | None]:
    return {name: outcome(name) for name in CALLS}


@pytest.mark.parametrize("size", [2, 3])
def test_calls_by_another_layout_raise_on_all_ranks(size: int, pools) -> None:
    for found in pools(size).run(outcomes):
        for name, (_, text) in CALLS.items():
            told = found[name] or ""
            assert told == "" if text is None else text in told, f"{name}: {told}"


def on_one_rank() -> str | None:
    q = shard("contiguous" if dist.get_rank() else "zigzag")
    try:
        attend(q, layout="zigzag")
    except ValueError as error:
        return str(error)
    return None


def test_all_ranks_hear_of_one_rank_s_shard_of_another_layout(pools) -> None:
    assert all(LIES in (told or "") for told in pools(2).run(on_one_rank))


def over_groups() -> list[str | None]:
    """Shards of a group in a call of another one, and shards of shards."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    found: list[str | None] = []
    outer = shard_sequence(whole(), group=across[rank % 2])
    try:
        attend(outer)
    except ValueError as error:
        found.append(str(error))
    inner = shard_sequence(outer, group=pairs[rank // 2])  # as contiguous over all
    got = unshard_sequence(attend(inner), length=N)
    q = whole()
    found.append(str(relative_error(got, ring_attn(q, q, q, causal=True, group=Ring.alone()))))
    return found


def test_a_shard_belongs_to_its_group(pools) -> None:
    for told, error in pools(4).run(over_groups):
        assert "q is a shard of a sequence over ranks [" in told
        assert "the call is over ranks [0, 1, 2, 3]" in told
        assert float(error) < 1e-12


def test_a_shard_is_a_plain_tensor(pools) -> None:
    """It can be copied, and saved without code, and nothing is kept of one that is gone."""
    pools(2).run(_copies)


def _copies() -> None:
    gc.collect()
    before = len(known_shards.known_shards)
    q = shard("contiguous")
    assert len(known_shards.known_shards) == before + 1
    assert not q.__dict__
    attend(copy.deepcopy(q), layout="zigzag")  # a copy is another tensor
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=True), q)
    del q
    gc.collect()
    assert len(known_shards.known_shards) == before


def test_alone_every_layout_is_right() -> None:
    q = shard("zigzag")
    torch.testing.assert_close(attend(q), attend(whole()))
    shard_sequence(q)
