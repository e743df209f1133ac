"""Copy engines: who pulls from whom, and by how many copies."""

from types import SimpleNamespace

from ring_attention_pytorch.comm.fabric_copies import CopyEngines
from ring_attention_pytorch.ranks.ring import Ring


def test_a_gathers_graphs_are_of_the_shelves_at_hand():
    told = []
    space = SimpleNamespace(follow_stream=lambda: told.append("waits"))
    space.keys, space.grads, space.swaps = "keys", "grads", "swaps"
    assert CopyEngines(Ring.alone(), space, (0,)).follow_stream() == ("keys", "grads", "swaps")
    assert told == ["waits"]
