"""Our Triton forward by the name of 0.5.20: with which backward, and what it says without a GPU."""

import inspect
from unittest import mock

import pytest
import torch

from ring_attention_pytorch import ring_flash_attention_cuda as module
from ring_attention_pytorch import ring_flash_attn, ring_flash_attn_cuda


@pytest.mark.parametrize(
    ("runs", "kernel"),
    [
        ((), "triton"),
        (("flash-attn-2",), "triton+flash-attn"),
        (("flash-attn-4",), "triton+flash-attn"),
    ],
)
def test_backward_is_by_flash_attn_where_that_takes_the_call(runs, kernel: str) -> None:
    q, k = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 2, 16)
    mask = torch.ones(1, 6, dtype=torch.bool)

    def refusal(name: str, request: object) -> str | None:
        assert (request.window, request.key_mask) == (True, True)  # it is asked of this call
        return None if name in runs else "no"

    with (
        mock.patch.object(module, "refusal", refusal),
        mock.patch.object(module, "ring_flash_attn", return_value=q) as called,
    ):
        out = ring_flash_attn_cuda(
            q, k, k, mask, causal=True, max_lookback_seq_len=3, softclamp_value=9.0
        )
    assert out is q
    (given,) = called.call_args_list
    bound = inspect.signature(ring_flash_attn).bind(*given.args, **given.kwargs).arguments
    assert bound["kernel"] == kernel
    assert bound["mask"] is mask
    assert (bound["causal"], bound["max_lookback_seq_len"]) == (True, 3)
    assert (bound["softclamp_qk_sim"], bound["softclamp_value"]) == (False, 9.0)
    assert bound["bucket_size"] == 1024


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(1, 6, 4, 16)
    with pytest.raises(ValueError, match="kernel='triton'"):
        ring_flash_attn_cuda(q, q, q)
