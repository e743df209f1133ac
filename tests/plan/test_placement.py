"""Placements: what attention takes from the block that it is called in, and what contradicts it."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.plan.placement import (
    OwnMask,
    Placement,
    attention_ring,
    block_of,
    check_began_here,
    current,
    note_whole,
    own_mask,
    placed,
)
from ring_attention_pytorch.ranks.ring import Ring

PACKING = (of_borders([0, 3, 8]),)
Q = torch.zeros(1, 8, 2, 4)


def placement(**how: object) -> Placement:
    return Placement(Ring.alone(), **{"layout": "zigzag", "length": 8, "packing": PACKING} | how)


def test_the_innermost_block_of_this_thread_counts():
    outer, inner = placement(), placement()
    assert current() is None
    with outer:
        with inner:
            assert current() is inner
        assert current() is outer
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
        assert found == [None]
    assert current() is None


def test_blocks_may_end_in_another_order_than_they_began():
    outer, inner = placement(), placement()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    assert current() is inner
    inner.__exit__()
    assert current() is None


def test_a_call_takes_layout_documents_and_mask_from_its_block():
    mask = torch.ones(1, 8, dtype=torch.bool)
    here = placement(key_mask=mask)
    given = {"causal": True, "scale": 0.5}
    assert placed(here.ring, Q, given) is given
    with here:
        found = placed(here.ring, Q, given)
        assert found == {**given, "layout": "zigzag", "documents": PACKING, "key_mask": mask}
        # keys of another sequence are none of the batch's
        assert placed(here.ring, Q, {"cross": True}) == {"cross": True, "layout": "zigzag"}
        assert attention_ring(None) is here.ring
        note_whole("a mean")
    assert here.wholes == ["a mean"]


CONTRADICTS = [
    (dict(layout="striped"), 8, "layout='striped' was given in the block of a batch with 'zigzag'"),
    (dict(documents=torch.zeros(1, 8)), 8, "documents was given beside that of the batch"),
    (dict(key_mask=torch.ones(1, 8)), 8, "key_mask was given beside that of the batch"),
    (dict(cu_seqlens=[0, 8]), 8, "cu_seqlens were given beside those of the batch"),
    ({}, 9, "this rank holds 8 of the batch's 8 tokens, got queries of 9"),
]


@pytest.mark.parametrize(("given", "n", "said"), CONTRADICTS)
def test_what_contradicts_the_block_is_refused(given, n, said):
    here = placement()
    here.check_call(here.ring, 8, {"layout": "contiguous", "documents": PACKING})
    with here, pytest.raises(ValueError, match=said):
        placed(here.ring, torch.zeros(1, n, 2, 4), given)


def test_attention_over_other_ranks_is_refused():
    here = placement()
    other = Ring.alone()
    other.size = 2
    with pytest.raises(ValueError, match="lies on 1 ranks, attention is over 2"):
        here.check_call(other, 8, {})


def plan_of(here: Placement, **how: object) -> SimpleNamespace:
    has = dict(ring=here.ring, layout=here.layout, packing=here.packing, own_mask=OwnMask())
    return SimpleNamespace(**has | how)


def test_a_plan_must_lie_as_the_batch_does():
    here = placement()
    here.check_plan(plan_of(here))
    for wrong in (
        dict(layout="striped"), dict(packing=None),
        dict(own_mask=OwnMask(torch.ones(1, 8, dtype=torch.bool))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="make the plan inside the block"):
            here.check_plan(plan_of(here, **wrong))


def test_masks_are_told_apart_by_the_whole_or_by_values():
    mask = torch.tensor([[True, False]])
    here = placement(key_mask=mask, whole_mask=5)
    assert here.has_mask(OwnMask(mask.clone(), 5))
    assert not here.has_mask(OwnMask(mask, 6))  # another rank's part of it differs
    assert here.has_mask(OwnMask(mask.clone(), None))
    assert not here.has_mask(OwnMask(~mask, None))
    assert not here.has_mask(OwnMask(None, None))
    with here:
        found = own_mask(mask)
        assert torch.equal(found.values, mask)
        assert found.values.data_ptr() != mask.data_ptr()
        assert found.whole == 5
        assert own_mask(None) == OwnMask(None, None)


def test_queries_of_other_lengths_are_of_no_block():
    here = placement()
    with here:
        assert block_of(Q) is here
        assert block_of(Q[:, :3]) is None
    assert block_of(Q) is None


def test_backward_in_the_block_of_another_batch_is_refused():
    mine, other = placement(), placement()
    check_began_here(mine)  # no block is open: it needs none
    with mine:
        check_began_here(mine)
        with other:
            check_began_here(mine)
    with other, pytest.raises(ValueError, match="in the block of another one"):
        check_began_here(mine)
