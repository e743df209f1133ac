"""Messages of all ranks over several machines, followed one by one."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ring_attention_pytorch.schedule.passing import (
    merging_machines,
    passes,
    passes_spare,
    passing_machines,
)
from ring_attention_pytorch.schedule.relays import relay, worth_an_exchange
from tests.support.over_machines import placed


@given(placed)
def test_each_rank_hears_of_all_others_once_and_each_machine_does(machines):
    ways = [passes(machines, rank) for rank in range(len(machines))]
    first = Counter((rank, to) for rank, way in enumerate(ways) for to in way.to)
    second = Counter((rank, *both) for rank, way in enumerate(ways) for both in way.passed)
    assert first == Counter((o, rank) for rank, way in enumerate(ways) for o in way.straight)
    came = Counter((s, rank, o) for rank, way in enumerate(ways) for s, o in way.relayed)
    assert second == came, "one waits for a message that nobody sends"
    assert all(first[owner, by] for by, _, owner in second), "passed on before it has come"
    assert all(machines[by] == machines[to] for by, to, _ in second), "it crosses twice"
    heard = Counter({(to, owner): times for (owner, to), times in first.items()})
    heard.update((to, owner) for _, to, owner in second)
    everyone = range(len(machines))
    assert heard == Counter(
        (rank, owner) for rank in everyone for owner in everyone if rank != owner
    )
    crossed = Counter((o, machines[to]) for o, to in first if machines[o] != machines[to])
    assert all(times == 1 for times in crossed.values())
    for owner, to in first:
        if machines[owner] != machines[to]:
            assert to == relay(machines, machines[to], owner)


@given(placed)
def test_two_ranks_send_messages_in_the_order_in_which_they_are_awaited(machines):
    """Between two ranks messages match by their order: that of their owners, on both sides."""
    for rank in range(len(machines)):
        way = passes(machines, rank)
        for to in {to for to, _ in way.passed}:
            sent = [owner for other, owner in way.passed if other == to]
            assert sent == [o for sender, o in passes(machines, to).relayed if sender == rank]


def test_relays_need_machines_of_several_ranks():
    assert not any(map(passes_spare, [(0,), (0, 0), (0, 1), (0, 1, 2)]))
    assert passes_spare((0, 1, 1))


@given(placed, st.lists(st.integers(0, 5_000_000), min_size=7, max_size=7))
def test_messages_are_passed_on_where_that_spares_more_than_an_exchange_takes(machines, sizes):
    """Bytes of the rank that sends the most to other machines, counted message by message."""
    sizes = sizes[: len(machines)]
    chosen = passing_machines(machines, sizes)
    sent = []
    for way in (machines, (0,) * len(machines)):
        each = [0] * len(machines)
        for rank, size in enumerate(sizes):
            to = passes(way, rank).to
            each[rank] = size * sum(machines[rank] != machines[other] for other in to)
        sent.append(max(each))
    if passes_spare(machines):
        passed = worth_an_exchange(sent[1] - sent[0])
        assert chosen == (machines if passed else (0,) * len(machines))
    else:
        assert chosen == machines


def test_ranks_send_directly_where_another_exchange_takes_longer_than_what_it_spares():
    """Two machines of 8: 7 of 8 messages at 45 GB/s, beside 0.1 ms.

    A lone rank sends one of 3 messages if these are passed on, which takes two more exchanges.
    """
    for machines, least in (((0,) * 8 + (1,) * 8, 643_000), ((0, 0, 0, 1), 4_500_000)):
        assert merging_machines(machines, least - 1000) is None
        assert merging_machines(machines, least + 1000) == machines
