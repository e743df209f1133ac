"""A routed feed-forward: a mistake of one rank is an error on all."""

import pytest

from ring_attention_pytorch.geometry.layouts import positions
from tests.support import threads
from tests.support.routing_cases import Case


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(x=lambda t: t[..., :4]), r"must be \[batch, tokens, 8\]"),
        (dict(x=lambda t: t[:, :-2], mask=lambda t: t[:, :-2]), "puts"),
        (dict(mask=lambda t: t.long()), "mask must be bool"),
        (dict(k=lambda k: 3), "num_heavy_tokens must be the same on every rank"),
        (dict(k=lambda k: 0), "num_heavy_tokens must be at least 1"),
    ],
)
def test_a_mistake_of_one_rank_is_the_same_error_on_all(wrong: dict, message: str) -> None:
    case = Case("feedforward", layout="zigzag")
    data = case.data()

    def main(ring: threads.ThreadRing) -> str:
        at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=case.length)
        given = {"x": data["x"][:, at], "mask": data["mask"][:, at], "k": 5}
        if ring.rank == 1:
            given |= {name: f(given[name]) for name, f in wrong.items()}
        module = case.make(ring_attn=True, layout="zigzag", group=ring)
        with pytest.raises(ValueError, match=message) as error:
            module(given["x"], given["mask"], num_heavy_tokens=given["k"])
        return str(error.value)

    said, hub = threads.run(3, main)
    assert len(set(said)) == 1
    assert not any(hub.sent_bytes)
