"""Every rank hears what one gets wrong, whichever function or module they call."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import (
    RingAttention,
    RingPlan,
    RingTransformer,
    ring_attn,
    ring_flash_attn,
    tree_attn_decode,
    ulysses_attn,
)
from ring_attention_pytorch.nn.sharding import unshard_sequence
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing import ConditionalRoutedFeedForward, soft_topk
from ring_attention_pytorch.routing.plan import RoutingPlan
from tests.support import threads
from tests.support.telling import said

# --- several rings in one group ---


def wrong(kind: str, rank: int) -> dict[str, Any]:
    """A call of ranks 0 and 1, in which their ring is wrong, and of 2 and 3, which is not."""
    n = {"lengths": (3, 5), "lengths of documents": (3, 5)}.get(kind, (4, 4))[rank % 2]
    m = {"keys": (4, 6), "causal cross": (4, 6)}.get(kind, (n, n))[rank % 2]
    n, m = (n, m) if rank < 2 else (4, 4)
    at = torch.arange(n) + n * (rank % 2)
    how: dict[str, dict[str, Any]] = {
        "lengths": {},
        "lengths of documents": dict(documents=torch.zeros(1, n, dtype=torch.long)),
        "keys": dict(cross=False),
        "causal cross": dict(causal=True),
        "borders": dict(cu_seqlens=[0, 9 if rank < 2 else 8]),
        "positions": dict(
            query_positions=at, key_positions=at // (2 if rank < 2 else 1), dropout=0.1
        ),
    }
    q, k = torch.zeros(1, n, 2, 8), torch.zeros(1, m, 2, 8)
    return dict(q=q, k=k, v=k, **how[kind])


WRONG = {
    "lengths": r"puts \[4, 4\] of 8 tokens on the ranks, got \[3, 5\]",
    "lengths of documents": r"puts \[4, 4\] of 8 tokens on the ranks, got \[3, 5\]",
    "keys": "cross=False needs as many keys as queries",
    "causal cross": "causal and window need as many keys as queries",
    "borders": "must end with the length of the whole, 8, got 9",
    "positions": "dropout draws by positions",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_one_ring_gets_wrong_the_other_is_told(kind):
    def call(whole: threads.ThreadRing) -> None:
        RingPlan.make(**wrong(kind, whole.rank), group=threads.PartRing(whole, 2))

    (told,) = {*said(4, call)}
    assert told is not None
    assert told.endswith("(on ranks 0, 1)")
    assert re.search(WRONG[kind], told)


def test_rings_of_other_lengths_and_masks_go_on():
    def call(whole: threads.ThreadRing) -> list[int]:
        n = 4 if whole.rank < 2 else 3
        q = torch.zeros(1, n, 2, 8)
        ring = threads.PartRing(whole, 2)
        plan = RingPlan.make(q, q, q, causal=whole.rank < 2, group=ring)
        return plan.positions().tolist()

    assert threads.run(4, call)[0] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2], [3, 4, 5]]


def test_routing_tells_the_other_ring_too():
    def call(whole: threads.ThreadRing) -> None:
        x = torch.zeros(1, 6 if whole.rank == 1 else 4, 8)
        RoutingPlan.make(x, group=threads.PartRing(whole, 2))

    (told,) = {*said(4, call)}
    assert told is not None
    assert told.endswith("(on ranks 0, 1)")


def of_two_rings() -> str | None:
    """For a pool of four, in rings of two: what is said of a shard that is too long."""
    model = RingTransformer(
        num_tokens=8, dim=16, depth=1, dim_head=8, heads=2, causal=True, ring_attn=True,
        auto_shard_seq=False,
    )  # fmt: skip
    ids = torch.zeros(1, 6 if dist.get_rank() == 1 else 4, dtype=torch.long)
    try:
        model(ids, return_loss=True, ring_size=2)
    except ValueError as error:
        return str(error)
    return None


def test_a_model_tells_the_other_ring_too(pools):
    (told,) = {*pools(4).run(of_two_rings)}
    assert told is not None
    assert told.endswith("(on ranks 0, 1)")


def test_a_predicate_that_fails_on_one_rank_is_told_to_all():
    def call(ring: Ring) -> None:
        table = torch.zeros(4 * (ring.rank != 1), dtype=torch.long)
        q = torch.zeros(1, 4, 2, 8)
        RingPlan.make(q, q, q, group=ring, mask_mod=lambda b, h, i, j: table[i] == table[j])

    (told,) = {*said(3, call)}
    assert told is not None
    assert "mask_mod fails, asked of one pair: IndexError" in told
    assert told.endswith("(on rank 1)")


# --- other calls, other notes, other types ---


def test_ranks_in_different_calls_are_all_told_which():
    def call(ring: Ring) -> None:
        if ring.rank == 1:
            unshard_sequence(torch.zeros(1, 4), length=12, group=ring)
        else:
            q = torch.zeros(1, 4, 2, 8)
            ring_attn(q, q, q, group=ring)

    (told,) = {*said(3, call)}
    assert "ranks are in different calls" in told
    found = (
        r"ranks 0, 2: ring attention at test_every_rank_hears.py:\d+; "
        r"rank 1: unshard_sequence at test_every_rank_hears.py:\d+"
    )
    assert re.search(found, told)


WRONG_TYPES = {
    "ring_attn": dict(window="four"),
    "plan of a module": dict(documents=7),
    "ulysses_attn": dict(causal=1.5),
    "ring_flash_attn": dict(bucket_size="large"),
    "RingPlan": dict(memory="much"),
    "tree_attn_decode": dict(eps="small"),
    "unshard_sequence": dict(length="long"),
    "soft_topk": dict(eps="soft"),
    "RingAttention": dict(cu_seqlens=1),
    "RingTransformer": dict(return_loss="yes"),
    "ConditionalRoutedFeedForward": dict(num_heavy_tokens="few"),
}


def called_with(name: str, ring: Ring, wrong: dict[str, Any]) -> None:
    """That function, or module, over a ring, with what may be of a wrong type."""
    q, x = torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 16)
    attention = dict(dim=16, dim_head=8, heads=2, ring_attn=True, group=ring, auto_shard_seq=False)
    calls = {
        "ring_attn": lambda: ring_attn(q, q, q, group=ring, **wrong),
        "plan of a module": lambda: RingAttention(**attention).plan(x, **wrong),
        "ulysses_attn": lambda: ulysses_attn(q, q, q, group=ring, **wrong),
        "ring_flash_attn": lambda: ring_flash_attn(
            q, q, q, ring_reduce_col=True, group=ring, **wrong
        ),
        "RingPlan": lambda: RingPlan.make(q, q, q, group=ring, **wrong),
        "tree_attn_decode": lambda: tree_attn_decode(q, q, q, group=ring, **wrong),
        "unshard_sequence": lambda: unshard_sequence(x, group=ring, **{"length": 12} | wrong),
        "soft_topk": lambda: soft_topk(x, 2, group=ring, **wrong),
        "RingAttention": lambda: RingAttention(**attention)(x, **wrong),
        "RingTransformer": lambda: RingTransformer(num_tokens=9, depth=1, **attention)(
            x[..., 0].long(), **wrong
        ),
        "ConditionalRoutedFeedForward": lambda: ConditionalRoutedFeedForward(
            16, num_heavy_tokens=2, ring_attn=True, group=ring
        )(x, **wrong),
    }
    calls[name]()


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_all_ranks_hear_of_a_wrong_type(name):
    (told,) = {*said(3, lambda r: called_with(name, r, WRONG_TYPES[name] if r.rank == 1 else {}))}
    assert told is not None
    assert f"parameter {next(iter(WRONG_TYPES[name]))}=" in told
    assert "violates type hint" in told
    assert told.endswith("(on rank 1)")


PREFIXES = [torch.tensor(1.5), torch.zeros(1), torch.zeros(1, 1), torch.ones(1, device="meta")]


@pytest.mark.parametrize("prefix", PREFIXES, ids=["0-d float", "float", "2-d", "meta"])
def test_all_ranks_hear_of_a_prefix_that_can_t_be(prefix):
    def call(ring: Ring) -> None:
        q = torch.zeros(1, 4, 2, 8)
        RingPlan.make(q, q, q, causal=True, group=ring, prefix=prefix if ring.rank == 1 else 1)

    (told,) = {*said(3, call)}
    assert told is not None
    assert told.endswith("(on rank 1)")


@pytest.mark.parametrize("name", ["key_mask", "documents", "query_positions", "cu_seqlens"])
def test_all_ranks_hear_of_tensors_without_values(name):
    def call(ring: Ring) -> None:
        device = "meta" if ring.rank == 1 else "cpu"
        q, at = torch.zeros(1, 4, 2, 8), torch.arange(4, device=device) + 4 * ring.rank
        given = {
            "key_mask": dict(key_mask=torch.ones(1, 4, dtype=torch.bool, device=device)),
            "documents": dict(documents=torch.zeros(1, 4, dtype=torch.long, device=device)),
            "query_positions": dict(query_positions=at, key_positions=at),
            "cu_seqlens": dict(cu_seqlens=torch.tensor([0, 5, 12], device=device)),
        }
        RingPlan.make(q, q, q, group=ring, **given[name])

    (told,) = {*said(3, call)}
    assert told is not None
    assert told.endswith("(on rank 1)")


def without_values(name: str, ring: Ring) -> None:
    """Call that function, or module, on one rank with tensors on meta."""
    device = "meta" if ring.rank == 1 else "cpu"
    q, x = torch.zeros(1, 4, 3, 8, device=device), torch.zeros(1, 4, 16, device=device)
    attention = dict(dim=16, dim_head=8, heads=2, ring_attn=True, group=ring, auto_shard_seq=False)
    angles = torch.zeros(4, 8, device=device)
    calls = {
        "ring_attn": lambda: ring_attn(q, q, q, group=ring),
        "keys": lambda: tree_attn_decode(
            torch.zeros(1, 4, 1, 8), q, q, shard_kv_seq=False, group=ring
        ),
        "tree_attn_decode": lambda: tree_attn_decode(q, q, q, group=ring),
        "unshard_sequence": lambda: unshard_sequence(x, length=12, group=ring),
        "scores": lambda: soft_topk(x, 2, group=ring),
        "k": lambda: soft_topk(torch.zeros(1, 4, 16), x[..., 0] + 1, group=ring),
        "RoutingPlan": lambda: RoutingPlan.make(x, group=ring),
        "no tensor": lambda: RoutingPlan.make(x if ring.rank != 1 else None, group=ring),
        "RingAttention": lambda: RingAttention(**attention)(x),
        "plan": lambda: RingAttention(**attention).plan(x),
        "rotary_emb": lambda: RingAttention(**attention)(torch.zeros(1, 4, 16), rotary_emb=angles),
        "RingTransformer": lambda: RingTransformer(num_tokens=9, depth=1, **attention)(
            x[..., 0].long()
        ),
    }
    calls[name]()


NO_VALUES = [
    "ring_attn", "keys", "tree_attn_decode", "unshard_sequence", "scores", "k", "RoutingPlan",
    "no tensor", "RingAttention", "plan", "rotary_emb", "RingTransformer",
]  # fmt: skip


@pytest.mark.parametrize("name", NO_VALUES)
def test_all_ranks_hear_of_calls_without_values(name):
    (told,) = {*said(3, lambda ring: without_values(name, ring))}
    assert told is not None
    assert "rank 1" in told


def test_a_group_that_is_none_is_named():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="parameter group='everyone' violates type hint"):
        ring_attn(q, q, q, group="everyone")


def test_numbers_of_each_sample_are_the_same_on_all_ranks():
    texts = said(2, lambda r: soft_topk(torch.rand(1, 4), torch.tensor([1.0 + r.rank]), group=r))
    assert texts[0] == texts[1]
    assert "k must be the same on every rank" in texts[0]
