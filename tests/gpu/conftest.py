import pytest
import torch

from tests.gpu.memory import poison


@pytest.fixture(autouse=True)
def poisoned():
    if torch.cuda.is_available():
        poison()
