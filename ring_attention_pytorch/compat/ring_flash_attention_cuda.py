"""The function `ring_flash_attn_cuda` of 0.5.20."""

from types import SimpleNamespace

from torch import Tensor

from ring_attention_pytorch.kernels import refusal
from ring_attention_pytorch.plan.checks import like_autocast
from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from ring_attention_pytorch.runtime.interfaces import KernelRequest


@typed(report_to_group("ring attention", agreed=("ring_reduce_col", True)))
def ring_flash_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    bucket_size: int = 1024,
    ring_reduce_col: bool = False,
    striped_ring_attn: bool = False,
    max_lookback_seq_len: int | None = None,
    ring_size: int | None = None,
    softclamp_qk_sim: bool = False,
    softclamp_value: float | int = 50.0,
    *,
    layout: str | None = None,
    group: Group = None,
) -> Tensor:
    """Compute `ring_flash_attn` with our Triton forward, and flash-attn's backward if possible.

    If flash-attn is not installed or does not support the call, backward uses our Triton kernels.

    Args, Returns: as for `ring_flash_attn`. No dtype is cast: float32 stays float32.

    Raises:
        ValueError: as for `ring_flash_attn`, or the Triton kernel can't run: see
            `explain_kernel(q, k, v, kernel="triton")`.
    """
    request = KernelRequest.of(
        like_autocast(q), like_autocast(v), window=max_lookback_seq_len, key_mask=mask,
        softclamp=softclamp_value if softclamp_qk_sim else None,
    )  # fmt: skip
    flash = any(refusal(name, request) is None for name in ("flash-attn-4", "flash-attn-2"))
    return ring_flash_attn(
        q, k, v, mask, causal, bucket_size, ring_reduce_col, striped_ring_attn,
        max_lookback_seq_len, ring_size, softclamp_qk_sim, softclamp_value, layout=layout,
        group=group, kernel="triton+flash-attn" if flash else "triton",
    )  # fmt: skip


ring_flash_attn_cuda_ = ring_flash_attn_cuda

RingFlashAttentionCUDAFunction = SimpleNamespace(apply=ring_flash_attn_cuda)
