"""Refused calls of attention to a cache, check by check."""

import pytest
import torch

from ring_attention_pytorch import RingCache
from ring_attention_pytorch.inference.checks import check_call, check_options, triton_refusal
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.ranks.ring import Ring


@pytest.mark.parametrize(
    ("change", "kernel", "check", "why"),
    [
        (dict(window=-1), None, None, "window must not be negative, got -1"),
        (dict(window=1 << 70), None, None, "window must be less than 2"),
        (dict(scale=float("nan")), None, None, "scale must be finite, got nan"),
        (dict(softclamp=0.0), None, None, "softclamp must be None, or positive and finite"),
        ({}, "sdpa", None, "kernel must be None, 'triton' or 'eager', got 'sdpa'"),
        ({}, None, "once", "check must be None or 'always', got 'once'"),
    ],
)
def test_options_that_can_not_be_are_refused(change, kernel, check, why) -> None:
    check_options(Scores(1.0, 30.0, 0), "eager", "always")
    with pytest.raises(ValueError, match=why):
        check_options(Scores(1.0)._replace(**change), kernel, check)


def test_a_call_must_fit_the_cache_and_itself() -> None:
    cache = RingCache(2, 2, 4, layers=2, group=Ring.alone())
    q, k = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 2, 4)
    terms = torch.zeros(4)
    check_call((q, k, k, terms, terms), cache, 1)
    check_call((q, None, None, None, None), cache, 0)
    check_call((q[:, :0], None, None, None, None), cache, 0, some=False)
    for given, layer, why in (
        ((q, k, None, None, None), 0, "k and v must be given together"),
        ((q[..., :3], k, k, None, None), 0, r"q must be \[2, n, h, 4\], got \[2, 3, 4, 3\]"),
        ((q[:, :0], None, None, None, None), 0, "q must have a token"),
        ((q[:, :, :3], k, k, None, None), 0, "heads of q must be a multiple of 2, got 3"),
        ((q[:, :, :0], k, k, None, None), 0, "heads of q must be a multiple of 2, got 0"),
        ((q.half(), None, None, None, None), 0, "q must be torch.float32 on cpu, as the cache is"),
        ((q[:, :2], k, k, None, None), 0, "q and k must be of the same tokens and dtype, got 2"),
        ((q, None, None, None, None), 2, "layer must be from 0 to 1, got 2"),
        ((q, k, k, terms[:3], None), 0, r"sinks must be floating \[4\].*; got torch.float32 \[3\]"),
        (
            (q, k, k, terms.long(), None),
            0,
            r"sinks must be floating \[4\].*; got torch.int64 \[4\]",
        ),
        ((q, k, k, None, terms > 0), 0, r"alibi_slopes must be floating \[4\].*; got torch.bool"),
        ((q, k, k, None, terms.to("meta")), 0, r"alibi_slopes must be floating \[4\].*on meta"),
    ):
        with pytest.raises(ValueError, match=why):
            check_call(given, cache, layer)


def test_our_kernel_has_no_float64_and_wants_a_gpu_or_its_interpreter(monkeypatch) -> None:
    monkeypatch.setattr("ring_attention_pytorch.inference.checks.has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cache = RingCache(1, 1, 4, group=Ring.alone())
    assert triton_refusal(cache, torch.float32) == (
        "kernel='triton' runs on CUDA, the cache is on cpu"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_refusal(cache, torch.float32) is None
    assert triton_refusal(cache, torch.float64) == "kernel='triton' has no float64"
