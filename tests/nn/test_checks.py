"""Checks of layers and models, each with what is just right and what just is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ring_attention_pytorch import GatedDeltaNet, Mamba2, RingAttention, RunPlan
from ring_attention_pytorch.nn import checks
from ring_attention_pytorch.ranks.ring import Ring

SHAPE = dict(dim=8, dim_head=4, heads=4, num_grouped_query_heads=2, bucket_size=1)
X, IDS = torch.zeros(2, 3, 8), torch.tensor([[0, 1, 2], [4, 3, 0]])

RIGHT = [
    partial(checks.check_shape, **SHAPE),
    partial(checks.check_sizes, 1, 0, dim=1),
    partial(checks.check_kernel, "triton", True, False, 0.5),
    partial(checks.check_kernel, None, None, True, 0.0),
    partial(checks.check_scores, 0, 1e-3),
    partial(checks.check_unused, 1e-10, True, True, 7.0),
    partial(checks.check_tokens, "x", X, 8),
    partial(checks.check_context, True, False, None, torch.ones(2, 3)),
    partial(checks.check_angles, X, torch.zeros(3, 4), 4, False),
    partial(checks.check_angles, X, torch.zeros(2, 3, 4), 4, True),
    partial(checks.check_ids, IDS, None, IDS.masked_fill(IDS == 0, -100), 5, -100),
    partial(checks.check_summaries, True, None, 0, 1, False),
]
WRONG = [
    (partial(checks.check_shape, **SHAPE | {"heads": 0}), "heads must be at least 1, got 0"),
    (
        partial(checks.check_shape, **SHAPE | {"num_grouped_query_heads": 3}),
        "num_grouped_query_heads must divide heads=4, got 3",
    ),
    (partial(checks.check_shape, **SHAPE | {"bucket_size": 0}), "bucket_size must be at least 1"),
    (partial(checks.check_sizes, 0, 1), "num_tokens must be at least 1, got 0"),
    (partial(checks.check_sizes, 1, -1), "depth must be at least 0, got -1"),
    (partial(checks.check_kernel, "flash", None, False, 0.0), "kernel must be None or one of"),
    (partial(checks.check_kernel, "sdpa", True, False, 0.0), "use_cuda_kernel=True is kernel="),
    (partial(checks.check_kernel, None, None, True, 0.1), "uses no kernel and no dropout"),
    (partial(checks.check_kernel, None, True, True, 0.0), "no dropout, got 'triton' and 0.0"),
    (partial(checks.check_scores, -1, None), "max_lookback_seq_len must be None or at least 0"),
    (partial(checks.check_scores, None, 0.0), "softclamp must be None or positive, got 0.0"),
    (partial(checks.check_unused, 1e-6, True, False, 7.0), "eps has no effect"),
    (partial(checks.check_unused, 1e-10, False, True, 7.0), "rotary_restart needs rotary_embed"),
    (partial(checks.check_unused, 1e-10, False, False, 7.0), "rotary_embed_theta needs rotary"),
    (partial(checks.check_tokens, "x", X[0], 8), r"x must be \[batch, tokens, 8\], got \[3, 8\]"),
    (partial(checks.check_tokens, "x", X.long(), 8), "must be floating and have values"),
    (partial(checks.check_tokens, "x", X.to("meta"), 8), "must be floating and have values"),
    (partial(checks.check_context, True, True, None, None), "context is another sequence"),
    (partial(checks.check_context, False, True, None, X), "context_mask needs a context"),
    (partial(checks.check_context, True, False, X, None), "its own context_mask says"),
    (partial(checks.check_angles, X, torch.zeros(2, 3, 4), 4, False), r"must be \[3, 4\], got"),
    (partial(checks.check_angles, X, torch.zeros(3, 4).to("meta"), 4, True), "must be on cpu"),
    (partial(checks.check_ids, IDS.double(), None, None, 5, -100), "x must be int64 or int32 ids"),
    (partial(checks.check_ids, IDS, None, IDS.int(), 5, -100), "labels must be int64"),
    (partial(checks.check_ids, IDS, None, None, 4, -100), "ids must be 0 to 3, got 0 to 4"),
    (partial(checks.check_ids, IDS, None, IDS - 1, 5, -100), "labels must be 0 to 4, or ignore_i"),
    (partial(checks.check_plans, [], 0, ()), "plans must be one for each of 0 blocks, got 0"),
    (partial(checks.check_summaries, False, None, 0, 1, False), "needs causal=True"),
]  # fmt: skip


@pytest.mark.parametrize("check", RIGHT)
def test_what_is_just_right_passes(check) -> None:
    check()


@pytest.mark.parametrize(("check", "why"), WRONG)
def test_what_is_just_wrong_does_not(check, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check()


@pytest.mark.parametrize("layers", [RingAttention, GatedDeltaNet, Mamba2])
def test_tokens_of_a_wider_dtype_than_the_weights_are_refused(
    layers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks have a plan they wait, so the failure is reported."""
    told: list[str] = []
    monkeypatch.setattr(Ring, "report_failure", lambda ring, error: told.append(str(error)))
    layer = layers(16, dim_head=8, heads=2)
    x = torch.randn(1, 4, 16)
    plan = layer.plan(x) if layers is RingAttention else RunPlan.make(x)
    words = r"x must be torch\.float32 as the weights are, got torch\.float64; cast it, or use"
    with pytest.raises(ValueError, match=words):
        layer(x.double(), plan=plan)
    assert any("as the weights are" in text for text in told)
    assert layer(x, plan=plan).dtype == torch.float32
    if layers is RingAttention:
        with pytest.raises(ValueError, match=words):
            layer(x.double())
        assert layer(x.bfloat16()).dtype == torch.float32  # the norm is in float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer.bfloat16()(x).dtype == torch.bfloat16
