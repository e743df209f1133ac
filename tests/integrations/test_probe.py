"""A probe of the first batch finds a wrong loss, and changes nothing."""

from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.transformers import register
from tests.support import trainers
from tests.support.hf import raised
from tests.support.small_trainers import Halved, check, of_trl, start


def probed(name: str) -> tuple[str, Any]:
    """For a pool: what a probe says of a wrong trainer; what one that is probed does."""

    class Probed(Halved):
        ring_probe = True

    register()
    ring = dict(parallelism_config=RingParallelismConfig(cp_size=dist.get_world_size()))
    said = raised(lambda: start(kind=Probed, **ring))
    return said, trainers.trained(name, dist.get_world_size(), 2, ring_probe=True)


@pytest.mark.parametrize("name", ["Trainer", of_trl("DPOTrainer")])
def test_a_probe_finds_a_wrong_loss_and_changes_nothing(name, pools):
    want = trainers.trained(name, 0, 2)
    for said, got in pools(2).run(probed, name):
        assert "the probe of the first batch failed" in said, said
        check(trainers.difference(got, want))


def test_a_probe_finds_a_wrong_loss_alone():
    class Probed(Halved):
        ring_probe = True

    assert "the probe of the first batch failed" in raised(lambda: start(kind=Probed))
