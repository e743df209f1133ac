"""The function `ring_flash_attn` of 0.5.20."""

import math
from types import SimpleNamespace

from torch import Tensor

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.plan.option_types import KernelOption, LayoutOption
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring


@checked
def softclamp(t: Tensor, value: float | int) -> Tensor:
    """Return value * tanh(t / value), which is between -value and value."""
    if not 0 < value < math.inf:
        raise ValueError(f"softclamp: value must be positive and finite, got {value}")
    return (t / value).tanh() * value


@typed(report_to_group("ring attention", agreed=("ring_reduce_col", True)))
def ring_flash_attn(
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
    layout: LayoutOption | None = None,
    group: Group = None,
    kernel: KernelOption | None = None,
) -> Tensor:
    """Call `ring_attn` with the parameters of ring-attention-pytorch 0.5.20.

    Args:
        mask: the `key_mask` of `ring_attn`.
        max_lookback_seq_len: the `window` of `ring_attn`.
        ring_reduce_col: use the ring; if False, q, k, v are whole sequences.
        striped_ring_attn: the same as layout="striped".
        ring_size: number of consecutive ranks that make one ring; None is the whole group.
        softclamp_qk_sim, softclamp_value: `softclamp` is the value if softclamp_qk_sim is True.
        The rest: as for `ring_attn`.

    Returns:
        `[b, n, h, d_v]`.

    Raises:
        ValueError: as for `ring_attn`, or ring options without ring_reduce_col.

    >>> q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    >>> ring_flash_attn(q, k, k, causal=True).shape
    torch.Size([1, 6, 4, 8])
    """

    def check() -> None:
        given = (layout, ring_size, group) != (None, None, None)
        if not ring_reduce_col and (given or striped_ring_attn):
            raise ValueError(
                "layout, striped_ring_attn, ring_size and group need ring_reduce_col=True"
            )
        if not 0 < softclamp_value < math.inf:
            raise ValueError(f"softclamp_value must be positive and finite, got {softclamp_value}")
        if striped_ring_attn and layout not in (None, "striped"):
            raise ValueError(
                f"striped_ring_attn=True is layout='striped', got layout={layout!r} too"
            )

    ring = as_ring(group, ring_size) if ring_reduce_col else Ring.alone()
    if error := error_of(check):
        agree(ring, "ring attention", {}, check=error)
    wanted: LayoutOption = "striped" if striped_ring_attn else layout or "contiguous"
    result = ring_attn(
        q, k, v, causal=causal, window=max_lookback_seq_len, key_mask=mask,
        softclamp=softclamp_value if softclamp_qk_sim else None, layout=wanted,
        group=ring, kernel=kernel, bucket_size=bucket_size,
    )  # fmt: skip
    assert isinstance(result, Tensor)
    return result


ring_flash_attn_ = ring_flash_attn

RingFlashAttentionFunction = SimpleNamespace(apply=ring_flash_attn)
