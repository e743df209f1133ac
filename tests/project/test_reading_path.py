"""Walks through the code are what really runs, and not longer than they may be."""

import pytest
import torch

from benchmarks.reading_path import Met, profiled, walks, walks_around, walks_of_transformers
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


# functions and files; a change that needs more says why, one that needs fewer lowers the number
MOST = {
    # two or three files decide on what crosses between machines; a batch's block may have the plan;
    # a codec is a part of what ranks agree on; digests of batches, some read later, have a file;
    # losses of trainers sum as ours do, and attention of all kinds casts by one function; shards
    # remember their layout, and every exchange has the number of its call; forward looks shards up
    # in a file more where other tests of the process have made some
    "RingPlan.make, ring": (110, 31), "RingPlan.make, gather": (128, 33),
    "forward, again, ring": (49, 15), "backward, again, ring": (49, 11),
    "forward, again, gather": (56, 16), "backward, again, gather": (64, 12),
    "decode step, again": (37, 13), "ring_cross_entropy, again": (47, 12),
    "shard_batch, again": (38, 15), "RingAttention, again": (105, 28),
    "Hugging Face, again": (200, 44),
}  # fmt: skip
# functions, for what differs from run to run: what other tests have left in the processes, and
# whether a rank comes last and so need not wait
SPARE = 8


def longer(found: dict[str, Met]) -> dict[str, tuple[int, int]]:
    """Functions and files of the walks that have more than they may."""
    counts = {name: (len(met.functions), met.files) for name, met in found.items() if name in MOST}
    return {
        name: (functions, files)
        for name, (functions, files) in counts.items()
        if functions > MOST[name][0] + SPARE or files > MOST[name][1]
    }


def around_attention() -> dict[str, Met]:
    """For a pool: what is met where a call is not the first, and in a plan."""
    rank, found = torch.distributed.get_rank(), walks_around(0)
    for transport in ("ring", "gather"):
        found |= {f"{name}, {transport}": met for name, met in walks(rank, transport).items()}
    return found


def around_a_model() -> dict[str, Met]:
    """For a pool: what a model of transformers and its loss meet."""
    return walks_of_transformers(torch.distributed.get_rank())


def test_no_walk_gets_longer(pools):
    found = pools(4).run(around_attention)[1]
    assert {*MOST} - {*found} == {"Hugging Face, again"}
    assert not longer(found)


def test_the_walk_of_a_model_gets_no_longer(pools):
    pytest.importorskip("transformers")
    found = pools(2).run(around_a_model)[1]
    assert {*MOST} & {*found} == {"Hugging Face, again"}
    assert not longer(found)
