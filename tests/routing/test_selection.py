"""Hard top-k: ties go to the earlier token on any ring."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import positions, select_topk
from tests.support import threads
from tests.support.routing_reference import top

LAYOUTS = ("contiguous", "striped", "zigzag")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=19), st.integers(1, 22), st.integers(1, 5),
    st.sampled_from(LAYOUTS),
)  # fmt: skip
def test_selection_is_the_same_on_every_ring_ties_to_the_earlier_token(
    values: list[int], k: int, size: int, layout: str
) -> None:
    whole = torch.tensor([values], dtype=torch.float32)
    n = len(values)
    want = top(whole[0], k)
    at = [positions(layout, rank=r, ring_size=size, length=n) for r in range(size)]
    found, _ = threads.run(
        size, lambda ring: select_topk(whole[:, at[ring.rank]], k, layout=layout, group=ring)
    )
    for selection in found:
        assert selection.positions[0].tolist() == want
        for position, rank, place in zip(*(t[0].tolist() for t in selection)):
            assert at[rank][place] == position


def test_selection_leaves_slots_empty_where_too_few_are_real() -> None:
    mask = torch.tensor([[True, False, True, True], [False, True, False, False], [False] * 4])
    found = select_topk(torch.zeros(3, 4), 3, mask=mask)
    assert found.positions.tolist() == [[0, 2, 3], [1, -1, -1], [-1, -1, -1]]
    assert found.ranks.tolist() == [[0, 0, 0], [0, -1, -1], [-1, -1, -1]]
    assert select_topk(torch.zeros(3, 4), 0.5, mask=mask).positions.tolist() == [
        [0, 2], [1, -1], [-1, -1]
    ]  # fmt: skip
