"""Steps: what numbers and tags tell one call from another."""

from ring_attention_pytorch.ranks.steps import Steps


def test_steps_that_differ_have_other_tags():
    def tags(*calls: tuple[str, int, int | None]) -> list[int]:
        steps, found = Steps(), []
        steps.notes += 1
        for call in calls:
            with steps.begin(*call):
                found += [steps.tag(), steps.tag()]
        return found

    forward, backward = ("forward", 1, None), ("backward", 1, 1)
    assert tags(forward, backward) == tags(forward, backward)
    every = tags(forward, backward, ("forward", 2, None), forward)
    assert len({*every}) == len(every)
    assert all(0 <= tag < 2**31 for tag in every)
    assert {*tags(forward)}.isdisjoint(tags(("forward", 2, None)) + tags(backward))
    assert {*tags(backward)}.isdisjoint(tags(("backward", 1, 2)))


def test_calls_that_derivatives_are_of_differ_after_an_agreement_too():
    steps = Steps()
    numbers = []
    for _ in range(2):
        steps.notes += 1
        for _ in range(2):
            with steps.begin("forward", 1, None):
                numbers.append(steps.number)
    assert len({*numbers}) == 4


def test_rings_of_a_group_count_calls_by_themselves_and_notes_together():
    met = [0]
    some, others, everyone = (Steps(met) for _ in range(3))
    for steps in (some, others):
        steps.notes += 1  # as each rank does once
    with some.begin("forward", 1, None):
        other = everyone.tag()
    met[0] += 1
    with some.begin("forward", 2, None), others.begin("forward", 2, None):
        assert some.tag() == others.tag()
    assert some.notes == everyone.notes == 3
    assert everyone.tag() != other
