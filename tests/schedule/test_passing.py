"""Messages of all ranks over several machines, followed one by one."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ring_attention_pytorch.schedule import relays
from ring_attention_pytorch.schedule.passing import (
    merged_pieces,
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


@given(placed, st.integers(0, 20_000))
@example((0,) * 8 + (1,) * 8, 1525)  # 7 of 8 messages at 45 GB/s take 0.1 ms from 643 kB on
@example((0,) * 8 + (1,) * 8, 1535)
@example((0, 0, 0, 1), 10_700)
@example((0, 0, 0, 1), 10_800)  # of a lone rank's 3 messages 2 are spared, by two more exchanges
def test_ranks_merge_where_that_spares_more_than_exchanges_take(machines, number):
    """Bytes of the rank that sends the most to other machines, counted message by message."""
    nbytes = 420 * number  # in equal pieces for up to 7 ranks
    ranks = range(len(machines))
    far = [[other for other in ranks if machines[other] != machines[rank]] for rank in ranks]
    pieces = [nbytes // machines.count(machine) for machine in machines]
    direct = max(nbytes * len(each) for each in far)
    straight = max(piece * len(each) for piece, each in zip(pieces, far))
    to = [{*passes(machines, rank).to} & {*far[rank]} for rank in ranks]
    relayed = max(piece * len(each) for piece, each in zip(pieces, to))
    merges = worth_an_exchange(direct - straight) or worth_an_exchange((direct - relayed) // 2)
    assert merging_machines(machines, nbytes) == (machines if merges else None)


@given(placed, st.integers(0, 50))
def test_ranks_of_a_machine_send_about_equal_pieces_of_its_result(machines, numbers):
    pieces, passing = merged_pieces(machines, numbers, 4)
    for machine in {*machines}:
        of_ranks = [piece for piece, its in zip(pieces, machines) if its == machine]
        assert sum(of_ranks) == numbers
        assert of_ranks == sorted(of_ranks, reverse=True)
        assert of_ranks[0] - of_ranks[-1] <= 1
    assert passing == passing_machines(machines, [4 * piece for piece in pieces])


@pytest.mark.parametrize("machines", [(0,), (0, 0), (0, 1), (0, 1, 2)])
def test_ranks_do_not_merge_where_nothing_is_spared(machines, monkeypatch):
    monkeypatch.setattr(relays, "_EXCHANGE", 0)
    assert merging_machines(machines, 1000) is None
