"""Plans of an all-to-all: which message goes from whom to whom, and where it lands."""

import torch

from ring_attention_pytorch.comm.all_to_all import form_between, given, taken
from tests.support.swaps import TOKENS, one_head_each, parts, wholes

RANKS = range(len(TOKENS))


def test_all_messages_together_bring_each_rank_its_head():
    plan = one_head_each()
    for rank in RANKS:
        rooms = [plan.alloc(whole, rank).fill_(torch.nan) for whole in wholes()]
        for sender in RANKS:
            theirs = [parts(whole)[sender] for whole in wholes()]
            places = taken(rooms, [plan, plan], sender, rank)
            for place, part in zip(places, given(theirs, [plan, plan], sender, rank)):
                place.copy_(part)
        for room, whole in zip(rooms, wholes()):
            assert torch.equal(room, whole[:, :, rank : rank + 1])


def test_a_message_has_the_form_of_what_is_given():
    plan = one_head_each()
    for sender in RANKS:
        for receiver in RANKS:
            mine = [parts(whole)[sender] for whole in wholes()]
            ways = [plan, plan]
            form = form_between(mine, ways, sender, receiver)
            sent = given(mine, ways, sender, receiver)
            assert [part.shape for part in form.parts] == [t.shape for t in sent]
            opened = form.open(form.pack(sent, form.empty(torch.device("cpu"))))
            assert all(map(torch.equal, opened, sent))


def test_sizes_are_those_of_the_plan_with_all_other_dimensions():
    plan = one_head_each()
    t = wholes()[0]
    assert plan.alloc(t, 1).shape == (2, sum(TOKENS), 1, 4)
    assert [plan.part(t, rank).shape for rank in RANKS] == [(2, n, 3, 4) for n in TOKENS]


def test_equal_numbers_are_of_one_kind():
    assert one_head_each().key == one_head_each().key
    assert one_head_each() != one_head_each()
    assert one_head_each().key != one_head_each((4, 0, 4)).key
