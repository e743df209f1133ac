"""Rounds in the memory of machines, walked on ints: what a rank reads there is what it needs.

The walker fills each slot token by token, with the owner's keys or with messages as they lie.
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.schedule.held_keys import Inside, inside, most_held
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.relays import Machines, by_relays, legs, members
from ring_attention_pytorch.schedule.steps import Program
from tests.support.over_machines import Token, masks, message, placed, wanted


def slots(program: Program, machines: Machines, machine: int, number: int) -> list[list[Token]]:
    """List the contents of each slot of a machine in a round."""
    there = members(machines, machine)
    held = Inside.of(program, machines, machine).held[number - 1]
    found: list[dict[int, Token]] = [{} for _ in there]
    if not held.relayed:
        for slot, rank in zip(found, there):
            slot.update(enumerate((rank, i) for i in range(count(program.workload.keys[rank]))))
    for leg, holder, at in held.arrived:
        assert leg.receiver == there[holder]
        assert leg.sender not in there, "a message of its own machine"
        for place, token in zip(range(at.start, at.stop), message(leg), strict=True):
            assert place not in found[holder], "two keys at one place"
            found[holder][place] = token
    for slot, length in zip(found, held.lengths):
        assert sorted(slot) == [*range(length)], "a gap, or keys beyond the end"
    return [[slot[i] for i in range(len(slot))] for slot in found]


def check(program: Program, machines: Machines, machine: int) -> None:
    there, part = members(machines, machine), Inside.of(program, machines, machine)
    for number, held in enumerate(part.held, 1):
        pieces = [program.chunks(number, rank) for rank in range(len(machines))]
        lying = slots(program, machines, machine, number)
        crossed = [leg for leg in legs(pieces, machines).first if leg.receiver in there]
        far = {leg for leg in crossed if leg.sender not in there}
        assert {leg for leg, _, _ in held.arrived} == far, "not all that crosses is in a slot"
        home = Counter[tuple[Token, int]]()
        for user, rank in enumerate(there):
            chunks = part.program.chunks(number, user)
            read = [lying[c.owner][at] for c in chunks for at in range(c.cols.start, c.cols.stop)]
            assert read == wanted(pieces[rank]), "a rank reads other keys than it needs"
            assert [c.segment for c in chunks] == [c.segment for c in pieces[rank]]
            home.update((token, rank) for token in read)
        assert all(times == 1 for times in home.values()), "a gradient is added twice"
        assert held.relayed == any(
            machines[c.owner] != machines[rank] for rank, its in enumerate(pieces) for c in its
        )
        if not held.relayed:
            assert not held.arrived


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(LAYOUTS)), masks, placed, st.integers(1, 7), st.booleans(),
    st.integers(0, 24),
)  # fmt: skip
def test_ranks_of_a_machine_read_what_they_need(layout, mask, machines, at_once, cross, keys):
    everyone = all_segments(layout, len(machines), 24)
    others = all_segments(layout, len(machines), keys) if cross else everyone
    schedule = by_relays(Workload(everyone, others, mask), machines, at_once)
    for program in (schedule.forward, schedule.backward):
        for machine in range(1 + max(machines)):
            check(program, machines, machine)
            part = Inside.of(program, machines, machine)
            for here, there in zip(program.transfers, part.program.transfers):
                ranks = machines.count(machine)
                assert there == inside(here, ranks)
                assert there.distances == tuple(range(ranks)), "a relay uses what it holds, too"
                assert (there.kind, there.block) == (here.kind, here.block)
            if part.held:
                most = max(len(wanted(c)) for held in part.held for c in held.made.pieces)
                longest = max(max(held.lengths) for held in part.held)
                assert most_held(part.held) == (most, longest)
