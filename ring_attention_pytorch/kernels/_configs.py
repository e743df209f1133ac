"""How our Triton kernels cut a call into blocks: by direction, head size, dtype, GPU and mask."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """The cut of one kernel: rows and columns of scores at a time, and the compiler's options.

    `tma`: inputs come by the tensor memory accelerator where the GPU has one and they lie right.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    tma: bool = False


# direction -> head size up to -> config, swept on an H200
_HOPPER = {
    "forward": {
        64: Config(128, 64, 4, 3, tma=True),
        128: Config(128, 128, 8, 3, tma=True),
        256: Config(128, 64, 8, 2, tma=True),
    },
    "keys": {
        64: Config(64, 64, 4, 3, tma=True),
        128: Config(64, 64, 4, 2, tma=True),
        256: Config(64, 64, 8, 2, tma=True),
    },
    "queries": {
        64: Config(128, 64, 4, 3, tma=True),
        128: Config(128, 64, 8, 3, tma=True),
        256: Config(64, 32, 4, 3, tma=True),
    },
}
# (most, times) -> direction -> head size up to -> config, for queries that see fewer than `most`
# keys on average, and are at least `times` as many, as in short documents and windows. The first
# that has the direction and the size is taken. Smaller blocks waste less at borders
_HOPPER_FOR_FEW = {
    (500, 8): {
        "forward": {64: Config(64, 64, 4, 2, tma=True), 128: Config(64, 32, 4, 2, tma=True)},
        "queries": {64: Config(64, 32, 4, 2, tma=True), 128: Config(64, 32, 4, 2, tma=True)},
    },
    (1280, 4): {
        "forward": {64: Config(64, 64, 4, 3, tma=True)},
        "queries": {64: Config(64, 64, 4, 3, tma=True), 128: Config(64, 64, 4, 2, tma=True)},
    },
    (3072, 0): {"forward": {128: Config(64, 64, 4, 3, tma=True)}},
}
# configs that fit into the shared memory of any GPU since Ampere
_ELSEWHERE = {
    "forward": {64: Config(128, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 4, 1)},
    "keys": {64: Config(32, 64, 4, 2), 128: Config(32, 64, 4, 1), 256: Config(32, 32, 4, 1)},
    "queries": {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 1), 256: Config(32, 32, 4, 1)},
}
# in IEEE float32 no tensor core helps, so registers are what is short
_FLOAT32 = {64: Config(32, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1)}
_overrides: dict[str, Config] = {}


def config_for(
    direction: str,
    width: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    seen: float = math.inf,
    rows: int = 0,
) -> Config:
    """Return the config of a kernel: a pure function of the shape class.

    Args:
        direction: "forward"; of backward "keys", which makes dk and dv, or "queries", for dq.
        width: the larger head size.
        dtype: of queries and keys.
        capability: the GPU's.
        seen: keys that a query sees, on average.
        rows: queries.
    """
    if direction in _overrides:
        return _overrides[direction]
    hopper = capability is not None and capability[0] in (9, 10)
    if dtype == torch.float32:
        sizes = _FLOAT32
    elif hopper:
        sizes = _HOPPER[direction]
    else:
        sizes = _ELSEWHERE[direction]
    size = next(size for size in sizes if width <= size)
    if hopper and dtype != torch.float32:
        for (most, times), configs in _HOPPER_FOR_FEW.items():
            found = configs.get(direction, {}).get(size)
            if found is not None and seen < most and rows >= times * seen:
                return found
    return sizes[size]


@contextmanager
def configured(**configs: Config) -> Iterator[None]:
    """Use other configs, by direction: for benchmarks, and for tests with small blocks."""
    global _overrides
    before, _overrides = _overrides, {**_overrides, **configs}
    try:
        yield
    finally:
        _overrides = before


def is_overridden(direction: str) -> bool:
    """Tell whether a config is in place of that direction's own."""
    return direction in _overrides
