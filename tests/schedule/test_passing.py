"""Messages of all ranks over several machines, followed one by one."""

from collections import Counter

from hypothesis import given

from ring_attention_pytorch.schedule.passing import passes, passes_spare
from ring_attention_pytorch.schedule.relays import relay
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
