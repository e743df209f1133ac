"""A prefix, and positions of two sequences: masks that come down to pieces and segments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS, positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import dense_attention, relative_error

quickly = settings(deadline=None, max_examples=40)


def worst(size: int, held: list[tuple[Tensor, Tensor]], m: int, mine, whole) -> float:
    """The worst error of out and gradients, where ranks hold these queries and keys."""
    n = sum(len(q) for q, _ in held)
    leaves = [
        torch.randn(2, length, 2, 4, dtype=torch.float64, requires_grad=True)
        for length in (n, m, m)
    ]
    want, _ = dense_attention(*leaves, **whole)
    dout = torch.randn_like(want)
    exact = [want, *torch.autograd.grad(want, leaves, dout)]

    def main(ring: Ring) -> float:
        at, keys = held[ring.rank]
        shards = [t.detach()[:, p].requires_grad_() for t, p in zip(leaves, (at, keys, keys))]
        out = ring_attn(*shards, group=ring, **mine(at, keys))
        got = [out, *torch.autograd.grad(out, shards, dout[:, at])]
        places = (at, at, keys, keys)
        return max(relative_error(g, w[:, p]) for g, w, p in zip(got, exact, places))

    return max(threads.run(size, main)[0])


@quickly
@given(
    st.sampled_from(sorted(LAYOUTS)), st.integers(1, 5), st.integers(0, 31),
    st.lists(st.integers(0, 35), min_size=2, max_size=2), st.none() | st.integers(0, 9),
)  # fmt: skip
def test_a_prefix_is_seen_both_ways(layout, size, n, prefix, window):
    at = [positions(layout, rank=r, ring_size=size, length=n) for r in range(size)]
    mask = dict(causal=True, window=window, prefix=prefix)
    given = lambda *_: dict(mask, layout=layout)  # noqa: E731
    assert worst(size, [(p, p) for p in at], n, given, mask) < 1e-12


@quickly
@given(st.data())
def test_two_sequences_by_their_positions(data):
    size = data.draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    sizes = [data.draw(lengths) for _ in range(2)]
    places = [
        torch.tensor(data.draw(st.lists(st.integers(-5, 20), min_size=n, max_size=n)), dtype=int)
        for n in map(sum, sizes)
    ]
    held = list(zip(*(torch.arange(sum(each)).split(each) for each in sizes)))
    mask = dict(causal=data.draw(st.booleans()), window=data.draw(st.none() | st.integers(0, 9)))

    def mine(at: Tensor, keys: Tensor) -> dict:
        return dict(mask, query_positions=places[0][at], key_positions=places[1][keys].int())

    assert worst(size, held, len(places[1]), mine, dict(mask, positions=places)) < 1e-12


AT = torch.arange(5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(prefix=3), "prefix needs causal=True"),
        (dict(prefix=3, causal=True, cu_seqlens=[0, 5]), "no documents and no positions"),
        (dict(prefix=-1, causal=True), "at least 0"),
        (dict(prefix=[1, 2], causal=True), "or 1 of them, got [1, 2]"),
        (dict(query_positions=AT), "need one another"),
        (dict(query_positions=AT[:4], key_positions=AT), "query_positions must be int64 or int32"),
        (dict(query_positions=AT, key_positions=AT + 2**30), "less than 2 ** 30 from 0"),
        (dict(query_positions=AT, key_positions=AT - 2**63), "less than 2 ** 30 from 0"),
        (dict(query_positions=AT, key_positions=AT / 2), "key_positions must be int64 or int32"),
        (dict(query_positions=AT, key_positions=AT, cu_seqlens=[0, 5]), "exclude each other"),
        (dict(sinks=torch.zeros(3)), "sinks must be floating [2]"),
        (dict(sinks=torch.zeros(2, dtype=int)), "sinks must be floating [2]"),
    ],
)
def test_what_can_not_be_is_told_to_all(given, said):
    q = torch.randn(1, 5, 2, 4)

    def main(ring: Ring) -> str:
        try:
            ring_attn(
                q, q, q, group=ring, **(given if ring.rank else {"causal": "causal" in given})
            )
        except ValueError as error:
            return str(error)
        raise AssertionError("accepted")

    texts, _ = threads.run(2, main)
    assert len(set(texts)) == 1
    assert said in texts[0]


def test_ranks_must_agree_in_prefix_and_sinks():
    q = torch.randn(1, 5, 2, 4)
    two = [
        [dict(causal=True, prefix=1), dict(causal=True, prefix=2)],
        [dict(sinks=torch.zeros(2)), dict(sinks=torch.zeros(2, requires_grad=True))],
        [dict(query_positions=AT, key_positions=AT), {}],
    ]
    for calls in two:
        with pytest.raises(ValueError, match="must be the same on every rank"):
            threads.run(
                2, lambda ring, calls=calls: ring_attn(q, q, q, group=ring, **calls[ring.rank])
            )
