"""Every feature by itself, as fields of a case.

`python docs/what_works.py` tabulates them, and tests walk all pairs.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.case import Results, worst
from tests.support.cases import Options, asked_of_a_rank, dense, shard_of, step
from tests.support.random_draw import Case

B, N, HEADS, KEY_HEADS, D = 2, 29, 4, 2, 8
BORDERS = [0, 3, 3, 4, 21, N]
LAYOUTS = ("contiguous", "striped", "zigzag", "balanced")
Feature = Options  # fields of a case, but for `length` that of all tokens


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@lru_cache
def features(n: int = N) -> dict[str, Feature]:
    """All of them, of so many tokens: N, or a multiple, and all that is seen so much longer."""
    times = n // N
    ids = ([i * 7 % 5 for i in range(N)], [i // 4 % 3 for i in range(N)])
    # places of tokens of two sequences
    at = tuple(i * 2 // 3 + 4 for i in range(n))
    at_keys = (*range(-2, 9 * times - 2), *range(5, n - 9 * times + 5))
    return {
        "causal": dict(causal=True),
        "window": dict(window=5 * times),
        "key mask": dict(masked="some"),
        "softclamp": dict(softclamp=1.5),
        "scale": dict(scale=0.5),
        "one key head": dict(key_heads=1),
        "d_v != d": dict(d_v=5),
        "gradient of lse": dict(lse="differentiated"),
        "cu_seqlens": dict(borders=(tuple(times * at for at in BORDERS),)),
        "documents": dict(ids=tuple(tuple(i for i in row for _ in range(times)) for row in ids)),
        "sinks": dict(sinks=True),
        "alibi": dict(alibi=True),
        "bias": dict(bias="keys"),
        "bias of heads": dict(bias="heads"),
        "mask_mod": dict(mask_mod=0),
        "prefix": dict(prefix=(11 * times, 0), causal=True),
        "positions": dict(query_at=at, key_at=at_keys, causal=True),
        "dropout": dict(dropout=0.3, dropout_seed=7),
    }


FEATURES = features()
PARTS: dict[str, Feature] = {  # several calls of a kernel, merged
    "shared keys": dict(shared=5, shared_masked=True),
    "merged parts": dict(parts=3),
}
EVERY = FEATURES | PARTS


def together(names: Iterable[str], n: int = N, **sizes: int) -> Feature:
    merged: Feature = dict(length=n, **sizes)
    for name in names:
        merged |= (features(n) | PARTS)[name]
    return merged


class Problem:
    """A feature's tensors, whole, and what the oracle makes of them as `dtype` holds them.

    Tensors are drawn on the CPU; what is computed on is on `device`.
    """

    def __init__(
        self, feature: Feature, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> None:
        usual = dict(length=N, batch=B, heads=HEADS, key_heads=KEY_HEADS, d=D, lse="returned")
        fields = usual | dict(d_v=feature.get("d", D)) | feature
        n = fields["length"]
        dealt = tuple(n // N * at for at in BORDERS)
        self.case = Case(**fields, dtype=dtype, dealt=dealt, bucket_size=4 * n // N)
        self.device = device

    @cached_property
    def want(self) -> Results:
        return self.dense(torch.float64)

    def dense(self, dtype: torch.dtype) -> Results:
        """Return the oracle's results, computed in a dtype."""
        return dense(self.case, dtype, self.device)

    def by(self, layout: str, kernel: str | None, **how: Any) -> Case:
        """The case as it is computed."""
        return replace(self.case, layout=layout, kernel=kernel, **how)

    def shard(self, ring: Ring, layout: str, kernel: str | None, **how: Any) -> Results:
        """One rank's results; `how` are further fields of the case."""
        return shard_of(self.by(layout, kernel, **how), ring, self.device)

    def shard_replayed(
        self,
        ring: Ring,
        layout: str,
        kernel: str,
        between: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> Results:
        """Return one rank's results of the fifth call of a plan, which a tape replays if it can.

        Its tensors are others than those that were recorded. `between` is called before each.
        """
        case = self.by(layout, kernel, **how)
        given, mine, options = asked_of_a_rank(case, ring, self.device)
        plan = RingPlan.make(**given, **options)
        for scale in (0.5, 2.0, 0.25, 3.0, 1.0):
            scaled = {name: (scale * t).detach() for name, t in given.items()}
            between()
            found = step(case, scaled, mine, dict(plan=plan))
        return found

    def errors(
        self, size: int, layout: str, kernel: str | None = None, **how: Any
    ) -> dict[str, float]:
        """The worst relative error of each result over a ring of threads."""
        got, _ = threads.run(size, lambda ring: self.shard(ring, layout, kernel, **how))
        return worst(self.by(layout, kernel, **how), got, self.want)


def refusal(call: Callable[[], Any]) -> str | None:
    """The text of the ValueError, if it is one."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
