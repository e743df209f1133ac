"""Summaries of blocks."""

from typing import Any

import pytest
import torch

from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.summaries import SummaryPlan, summarize


def test_what_the_plan_was_not_made_for_is_not_summarised() -> None:
    k, v = torch.randn(2, 30, 2, 6), torch.randn(2, 30, 2, 5)
    q = torch.randn(2, 30, 4, 6)
    plan = SummaryPlan.make(q, k, v, window=5, stride=3, block=4, group=Ring.alone())
    weights, far = torch.zeros(2, 4), torch.zeros(2, 6)
    right: dict[str, Any] = dict(k=k, v=v, weights=(weights, weights), queries=(far, None))
    summarize(**right, plan=plan)
    for wrong, why in (
        (dict(k=k[:, :9], v=v[:, :9]), r"k must be \[2, 30, 2, 6\] by the plan, got \[2, 9, 2, 6"),
        (dict(k=torch.cat((k, k), 1)), r"got \[2, 60, 2, 6\]; make one for these"),
        (dict(k=k[:1]), "k must be"),
        (dict(k=k[0]), "k must be"),
        (dict(v=v[..., :1]), r"v must be \[2, 30, 2, 5\]"),
        (dict(weights=(weights[:, :3], weights)), r"weights of keys must be \[2, 4\]"),
        (dict(weights=(weights, weights[:1])), r"weights of values must be \[2, 4\]"),
        (dict(queries=(far[:, :1], None)), r"queries of keys must be \[2, 6\]"),
        (dict(queries=(far, far)), r"queries of values must be \[2, 5\]"),
    ):
        with pytest.raises(ValueError, match=f"^summarize: .*{why}"):
            summarize(**{**right, **wrong}, plan=plan)
