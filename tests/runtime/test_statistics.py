"""Statistics of an observed call."""

from types import SimpleNamespace

from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.runtime.statistics import _bytes
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.steps import gather_first

TOKEN = 2 * 4 * 8 * 4  # bytes of a key and its value


def test_own_keys_that_come_among_the_others_are_not_received():
    two = all_segments("contiguous", 2, 8)
    program = gather_first(Workload(two, two, Mask())).forward
    shape = KVShape(batch=1, heads=4, key_heads=4, d=8, d_v=8, itemsize=4)
    record = SimpleNamespace(program=program, place=0, shape=shape)
    assert _bytes(record, program.transfers[0]) == 4 * TOKEN
