"""Handles: each of one object, as long as it is there."""

import pytest
import torch

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.runtime import handles


def drawn(**kinds):
    return [torch.randn(2, 6, h, 8, **kinds).requires_grad_() for h in (4, 2, 2)]


def test_handles_are_of_one_object_each_and_gone_ones_raise():
    class Thing:
        pass

    things = [Thing() for _ in range(3)]
    numbers = [handles.new_handle(thing) for thing in things]
    assert [handles.object_of(handles.handle_of_layer(n, 5)) for n in numbers] == [
        (thing, 5) for thing in things
    ]
    assert handles.object_of(numbers[0]) == (things[0], None)
    lost = handles.new_handle(Thing())
    with pytest.raises(RuntimeError, match="plan is gone"):
        handles.object_of(lost)


def test_layers_of_a_plan_never_meet_another_plan():
    numbers = [handles.new_handle(object) for _ in range(3)]
    layers = (0, 1, 2**20 - 2, 2**20 - 1, handles.LAYERS - 1)
    found = [handles.handle_of_layer(n, layer) for n in numbers for layer in layers]
    assert len({*found, *numbers}) == len(numbers) * (1 + len(layers))
    assert [handles.parted(n) for n in found] == [(n, layer) for n in numbers for layer in layers]
    assert max(found) < 2**63


@pytest.mark.parametrize("number", [-1, handles.LAYERS])
def test_numbers_that_no_layer_has_are_refused(number):
    plan = RingPlan.make(*drawn(), dropout=0.5, dropout_seed=1)
    with pytest.raises(ValueError, match="a layer's number must be at least 0"):
        plan.for_layer(number)


def test_those_used_last_are_kept():
    class Thing:
        pass

    def used_and_left():
        thing = Thing()
        number = handles.new_handle(thing)
        handles.object_of(number)
        return number

    first, second = used_and_left(), used_and_left()
    for _ in range(handles._MOST_KEPT - 1):
        handles.object_of(first)
        last = used_and_left()
    for number in (first, last):
        handles.object_of(number)
    with pytest.raises(RuntimeError, match="plan is gone"):
        handles.object_of(second)
