import pytest
import torch

from tests.ranks import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools():
    """`pools(size)`: the pool of so many ranks, started when first asked for."""
    started: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return started.setdefault(size, Pool(size))

    yield pool
    for each in started.values():
        each.stop()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
