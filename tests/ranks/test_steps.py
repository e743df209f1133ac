"""Steps: what numbers and tags tell one call from another."""

from ring_attention_pytorch.ranks.steps import Steps


def test_steps_that_differ_have_other_tags():
    def tags(*calls: tuple[str, int]) -> list[int]:
        steps, found = Steps(), []
        steps.notes += 1
        for call in calls:
            with steps.begin(*call):
                found += [steps.tag(), steps.tag()]
        return found

    assert tags(("forward", 1), ("backward", 1)) == tags(("forward", 1), ("backward", 1))
    every = tags(("forward", 1), ("backward", 1), ("forward", 2), ("forward", 1))
    assert len({*every}) == len(every)
    assert {*tags(("forward", 1))}.isdisjoint(tags(("forward", 2)) + tags(("backward", 1)))
    assert all(0 <= tag < 2**31 for tag in every)


def test_rings_of_a_group_count_calls_by_themselves_and_notes_together():
    met = [0]
    some, others, everyone = (Steps(met) for _ in range(3))
    for steps in (some, others):
        steps.notes += 1  # as each rank does once
    with some.begin("forward", 1):
        other = everyone.tag()
    met[0] += 1
    with some.begin("forward", 2), others.begin("forward", 2):
        assert some.tag() == others.tag()
    assert some.notes == everyone.notes == 3
    assert everyone.tag() != other
