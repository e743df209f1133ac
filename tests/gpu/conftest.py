from pathlib import Path

import pytest
import torch

from tests.gpu.memory import poison
from tests.gpu.turns import in_turn
from tests.support.ranks import Pool, gpu_ranks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():  # thousands of tests, each of which would say so
        here = Path(__file__).parent
        ours = [item for item in items if here in item.path.parents]
        for item in ours[:1]:  # it says so for all; pytest fails if it has nothing to run
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        left_out = {*ours[1:]}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        size = item.callspec.params.get("size", 2) if hasattr(item, "callspec") else 2
        if "nccl" in getattr(item, "fixturenames", ()) and 2 <= size <= gpu_ranks():
            item.add_marker("several_gpus")


@pytest.fixture(autouse=True)
def poisoned():
    if torch.cuda.is_available():
        poison()


@pytest.fixture(scope="module")
def nccl():
    """`nccl(size)`: a pool of that many processes on GPUs, kept as long as it is used."""
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        if size not in pools:
            for pool in pools.values():
                pool.stop()
            pools.clear()
            pools[size] = Pool(size, timeout=300.0, backend="nccl")
        return pools[size]

    yield of
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def taking_turns():
    """Every kernel is called by one thread at a time: flash-attn 4 can't be compiled by two."""
    with in_turn():
        yield
