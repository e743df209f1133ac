"""Cases and plans over several machines, and what their messages hold, token by token."""

import torch
from hypothesis import strategies as st

from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.machines import numbered
from ring_attention_pytorch.schedule.pieces import Chunks
from ring_attention_pytorch.schedule.relays import Leg
from tests.support import threads
from tests.support.cases import Attention

Token = tuple[int, int]  # owner, local index

TWO, UNEVEN, SHUFFLED = (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 2, 0, 1)
MIDDLE = (0, 1, 1, 2, 2, 0)  # the ring begins in the middle of a machine
CAUSAL = dict(causal=True, transport="gather")
CASES = {
    "zigzag": (dict(layout="zigzag", length=37), TWO),
    "no mask": (dict(causal=False, length=16), UNEVEN),
    "one key head": (dict(layout="zigzag", heads=6, key_heads=1, length=41), SHUFFLED),
    "window": (dict(window=9, length=43, layout="zigzag"), MIDDLE),
    "striped window": (dict(window=5, length=29, layout="striped"), UNEVEN),
    "key mask": (dict(layout="zigzag", masked=True, length=33), SHUFFLED),
    "an owner at a time": (dict(layout="zigzag", memory=0, length=48), SHUFFLED),
    "two owners at a time": (dict(causal=False, memory=9000, length=23), (0, 0, 1, 0, 1)),
    "softclamp, other sizes": (dict(softclamp=3.0, d_v=4, length=26, layout="zigzag"), MIDDLE),
    "float32": (dict(layout="zigzag", dtype=torch.float32, length=24), UNEVEN),
    "ulysses": (dict(layout="zigzag", ulysses=2, key_heads=1, length=50), (0,) * 4 + (1,) * 4),
    "documents": (
        dict(layout="zigzag", length=30, ids=((0,) * 9 + (1,) * 21, (0,) * 17 + (4,) * 13)), TWO,
    ),
    "borders": (
        dict(length=31, borders=((0, 9, 22, 31),)), MIDDLE,
    ),
    "cross": (
        dict(causal=False, cross=True, queries=(3, 0, 5, 2), keys=(4, 7, 0, 1)), UNEVEN,
    ),
}  # fmt: skip


def far(ring: threads.ThreadRing) -> int:
    """Bytes that all ranks have sent to other machines so far; all of them ask together."""
    ring.hub.barrier.wait()
    machines, ways = ring.machines, dict(ring.hub.ways)
    ring.hub.barrier.wait()
    return sum(nbytes for (i, j), nbytes in ways.items() if machines[i] != machines[j])


def planned(case: Attention, machines: tuple[int, ...]) -> RingPlan:
    """The plan of rank 0."""
    tensors, _, _, _ = case.data()

    def main(ring: threads.ThreadRing) -> RingPlan:
        at, _ = case.places(ring.rank, ring.size)
        mine = (t[:, at] for t in tensors)
        return RingPlan.make(
            *mine, **case.options(), layout=case.layout, group=ring, transport="gather"
        )

    return threads.run(len(machines), main, machines)[0][0]


masks = st.builds(
    Mask,
    st.booleans(),
    st.none() | st.integers(0, 9),
    st.sampled_from([None, of_borders([0, 3, 11, 24]), of_borders([0, 12, 24])]),
    st.none(),
)
# as many machines as there may be, uneven, and their ranks in any order
placed = st.lists(st.integers(0, 3), min_size=1, max_size=7).map(numbered)


def wanted(chunks: Chunks) -> list[Token]:
    """Tokens of chunks, in their order."""
    return [(c.owner, at) for c in chunks for at in range(c.cols.start, c.cols.stop)]


def message(leg: Leg) -> list[Token]:
    """Tokens of a message, in their order."""
    return [(span.owner, at) for span in leg.spans for at in range(span.start, span.stop)]
