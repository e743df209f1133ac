"""What a reader is said to meet is what runs."""

import torch

from benchmarks.reading_path import profiled
from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.geometry.segments import Segment, count


def test_functions_count_once_and_calls_each_time():
    segments = [Segment(0, 2, 1), Segment(4, 2, 1)]
    met = profiled(lambda: [count(segments), count(segments)])
    assert met.functions[:1] == ["geometry/segments.py:count"]
    assert met.files == 1
    assert met.calls == 2
    assert met.switches == 0


def test_a_call_meets_the_loop_and_its_kernel():
    q = torch.randn(1, 4, 2, 8)
    met = profiled(lambda: ring_attn(q, q, q, causal=True, kernel="eager"))
    names = [function.split(":")[1] for function in met.functions]
    assert names.index("ring_attn") < names.index("attention") < names.index("forward")
    assert met.files > 5
    assert met.switches >= met.files - 1
    assert "OutputAccumulator" in met.classes
