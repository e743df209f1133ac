"""Faults planted into `nn/`: a list for each battery."""

from tests.faults.mutant import Mutant

SECOND_ORDER = [
    Mutant(
        "gathering keeps its gradients' gradients", "nn/sharding.py:_Gather.backward",
        "list(_AllToAll.apply(ctx.ring, [ctx.shape] * len(others), *others))",
        "_swap(ctx.ring, [ctx.shape] * len(others), others)",
    ),
]  # fmt: skip

ORIGINAL = [
    Mutant(
        "gathered gradients are a rank's own alone", "nn/sharding.py:_Gather.backward",
        "for part in mine[1:]:", "for part in mine[:0]:",
    ),
]  # fmt: skip
