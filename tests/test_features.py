"""Every feature and every pair of features: right to 1e-12, or refused with a reason."""

from itertools import combinations

import pytest

from ring_attention_pytorch.ring import Ring
from tests.features import FEATURES, LAYOUTS, Problem, refusal, together

PAIRS = [*((name,) for name in FEATURES), *combinations(FEATURES, 2)]
# what can't be together, and what is said
REFUSED = {
    frozenset(("cu_seqlens", "documents")): "say the same thing",
    frozenset(("cu_seqlens", "prefix")): "prefix needs causal=True, and no documents",
    frozenset(("documents", "prefix")): "prefix needs causal=True, and no documents",
    frozenset(("positions", "prefix")): "prefix needs causal=True, and no documents",
    frozenset(("cu_seqlens", "positions")): "documents have positions of their own",
    frozenset(("documents", "positions")): "documents have positions of their own",
}


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_any_two_features_together(names):
    number = PAIRS.index(names)
    if (why := REFUSED.get(frozenset(names))) is not None:
        problem = Problem(FEATURES[names[0]])
        problem.feature = together(names)
        assert why in refusal(lambda: problem.shard(Ring.alone(), "contiguous", None))
        return
    problem = Problem(together(names))
    for i, size in enumerate((1, 2, 3, 4)):
        layout = LAYOUTS[(number + i) % len(LAYOUTS)]
        for kernel in ("eager", None):
            errors = problem.errors(size, layout, kernel)
            bad = {name: e for name, e in errors.items() if not e < 1e-12}
            assert not bad, (size, layout, kernel, bad)
