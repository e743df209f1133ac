"""Block sizes of our Triton kernels, by direction, head sizes, dtype, GPU and mask."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """One kernel's block of scores, `rows` by `cols`, and the compiler's options.

    `tma`: load inputs by the tensor memory accelerator, if the GPU has one and they are aligned.
    `pack`: the most query heads of one key head that share a block's rows. With `tma`, backward to
    keys has 32 rows at least: 16 ended in a misaligned address on an H200, probably because lse
    and delta are then loaded into 64 bytes, where TMA needs memory that is aligned to 128.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    tma: bool = False
    pack: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a block's rows."""
        return self.rows // self.pack

    def of_group(self, group: int) -> "Config":
        """Return this config for `group` query heads of a key head.

        A block has 4 tokens at least, because TMA loads 16 bytes, 4 numbers, at a time.
        """
        return self._replace(pack=math.gcd(self.pack, group, self.rows // 4))


# the largest head size of keys and values, or that of keys and that of values
Size = int | tuple[int, int]


class Rule(NamedTuple):
    """Configs for one kind of calls, by direction and head sizes.

    A key head has a multiple of `group` query heads. A query sees fewer than `seen` keys on
    average, and there are at least `times` that number of queries, as in short documents.
    """

    configs: dict[str, dict[Size, Config]]
    group: int = 1
    seen: float = math.inf
    times: int = 0

    def config_of(self, direction: str, d: int, d_v: int) -> Config | None:
        """Return the config of both sizes, or else of the larger one; None if it has neither."""
        known = self.configs.get(direction, {})
        return known.get((d, d_v)) or known.get(max(d, d_v))

    def holds(self, seen: float, rows: int, group: int) -> bool:
        if group % self.group:
            return False
        return self.seen == math.inf or (seen < self.seen and rows >= self.times * seen)


def _tma(rows: int, cols: int, warps: int, stages: int, pack: int = 1) -> Config:
    return Config(rows, cols, warps, stages, True, pack)


# swept on H200s; the first rule that holds and has the direction and head size is used. Blocks of
# fewer tokens waste less at borders, and packed ones are as fast
_HOPPER = (
    Rule({"forward": {64: _tma(64, 32, 4, 3, pack=8)}}, group=4, seen=500, times=8),
    Rule(
        {
            "forward": {128: _tma(64, 32, 4, 3, pack=8)},
            "keys": {64: _tma(64, 64, 4, 3, pack=8)},
            "queries": {64: _tma(64, 32, 4, 3, pack=8)},
        },
        group=4, seen=1280, times=4,
    ),
    Rule({"keys": {128: _tma(64, 64, 4, 2, pack=8)}}, group=4, seen=4096, times=4),
    Rule({"forward": {128: _tma(64, 64, 4, 3)}}, seen=3072, group=4),
    Rule(
        {
            "forward": {64: _tma(128, 64, 4, 3, pack=4), 128: _tma(128, 128, 8, 3, pack=4)},
            "queries": {128: _tma(64, 64, 4, 3, pack=8)},
        },
        group=4,
    ),
    Rule(
        {
            "forward": {64: _tma(64, 64, 4, 2), 128: _tma(64, 32, 4, 2)},
            "queries": {64: _tma(64, 32, 4, 2), 128: _tma(64, 32, 4, 2)},
        },
        seen=500, times=8,
    ),
    Rule(
        {
            "forward": {64: _tma(64, 64, 4, 3)},
            "queries": {64: _tma(64, 64, 4, 3), 128: _tma(64, 64, 4, 2)},
        },
        seen=1280, times=4,
    ),
    Rule({"forward": {128: _tma(64, 64, 4, 3)}}, seen=3072),
    Rule(
        {
            "forward": {
                64: _tma(128, 64, 4, 3), 128: _tma(128, 128, 8, 3), 256: _tma(128, 64, 8, 2),
                (256, 128): _tma(128, 64, 8, 3), 512: _tma(64, 64, 8, 1),
            },
            "keys": {
                64: _tma(64, 64, 4, 3), 128: _tma(64, 64, 4, 2), 256: _tma(64, 64, 8, 2),
                (256, 128): _tma(32, 64, 4, 2),
            },
            "dk": {512: _tma(32, 64, 8, 1)},
            "dv": {512: _tma(64, 64, 8, 1)},
            "queries": {
                64: _tma(128, 64, 4, 3), 128: _tma(128, 64, 8, 3), 256: _tma(64, 32, 4, 3),
                (256, 128): _tma(128, 32, 8, 2), 512: _tma(64, 32, 8, 1),
            },
        },
    ),
)  # fmt: skip
# configs that fit into the shared memory of any GPU since Ampere
_ELSEWHERE = {
    "forward": {
        64: Config(128, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 32, 4, 1),
        512: Config(32, 16, 4, 1),
    },
    "keys": {64: Config(32, 64, 4, 2), 128: Config(32, 64, 4, 1), 256: Config(32, 32, 4, 1)},
    "dk": {512: Config(16, 16, 8, 1)},
    "dv": {512: Config(16, 16, 8, 1)},
    "queries": {
        64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 1), 256: Config(32, 32, 4, 1),
        512: Config(16, 16, 4, 1),
    },
}  # fmt: skip
# in IEEE float32 tensor cores don't help, so registers are scarce
_FLOAT32 = {64: Config(32, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 8, 1)}
_WIDE_FLOAT32 = {
    "forward": Config(8, 16, 8, 1), "dk": Config(16, 8, 8, 1), "dv": Config(16, 8, 8, 1),
    "queries": Config(8, 16, 8, 1),
}  # fmt: skip
_WIDTHS = (64, 128, 256, 512)
_overrides: dict[str, Config] = {}


def config_for(
    direction: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    seen: float = math.inf,
    rows: int = 0,
    group: int = 1,
) -> Config:
    """Return the config of a kernel: a pure function of the shape class.

    Args:
        direction: "forward", or the backward's "keys", for dk and dv, or "queries", for dq. If
            `apart` of the larger size, "dk" or "dv" instead of "keys".
        sizes: the head size of queries and keys, and that of values.
        dtype: of queries and keys.
        capability: the GPU's compute capability.
        seen: keys that a query sees, on average.
        rows: number of queries.
        group: query heads per key head.
    """
    if direction in _overrides:
        return _overrides[direction].of_group(group)
    d, d_v = (next(width for width in _WIDTHS if size <= width) for size in sizes)
    widest = max(d, d_v)
    if dtype == torch.float32:
        return _WIDE_FLOAT32[direction] if apart(widest) else _FLOAT32[widest]
    if capability is None or capability[0] not in (9, 10):
        return _ELSEWHERE[direction][widest]
    for rule in _HOPPER:
        config = rule.config_of(direction, d, d_v)
        if config is not None and rule.holds(seen, rows, group):
            return config.of_group(group)
    raise AssertionError(f"no rule for {direction}, head sizes {sizes}")


def apart(width: int) -> bool:
    """True if dk and dv are made in two launches: registers hold one of them.

    The second launch computes the probabilities again, a quarter more work than one.
    """
    return width > _WIDTHS[-2]


@contextmanager
def configured(**configs: Config) -> Iterator[None]:
    """Override configs in this block, by direction: for benchmarks and tests with small blocks.

    One for "keys" holds for "dk" and "dv", too.
    """
    global _overrides
    if "keys" in configs:
        configs = {"dk": configs["keys"], "dv": configs["keys"], **configs}
    before, _overrides = _overrides, {**_overrides, **configs}
    try:
        yield
    finally:
        _overrides = before


def is_overridden(direction: str) -> bool:
    """True if `configured` overrides that direction's config."""
    return direction in _overrides
