"""The eager kernel never holds more scores than its bucket."""

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attention_pytorch.geometry.tiles import Tile
from tests.support.blocks import Block


class Largest(TorchDispatchMode):
    """The most elements that any one operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return result


@pytest.mark.parametrize("bucket", [1, 4, 16])
@pytest.mark.parametrize("softclamp", [None, 2.0])
def test_eager_never_holds_more_scores_than_its_bucket(bucket, softclamp):
    n, m, h = 64, 512, 4
    for tile in (None, Tile(slice(0, n), slice(0, m), None, 0)):
        block = Block(
            (n, m, h, h, 1, 1), tile, softclamp=softclamp, bucket_size=bucket, masked=True
        )
        with Largest() as largest:
            block.run("eager")
        assert largest.elements <= 2 * h * bucket * m
