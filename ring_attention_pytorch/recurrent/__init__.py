"""Recurrent layers over the shards of attention: one layout for both."""

from ring_attention_pytorch.recurrent.halo import ring_halo, ring_short_conv
from ring_attention_pytorch.recurrent.layers import ring_gated_delta_rule, ring_kda, ring_mamba2
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.scan import ring_scan

__all__ = [
    "RunPlan",
    "ring_gated_delta_rule",
    "ring_halo",
    "ring_kda",
    "ring_mamba2",
    "ring_scan",
    "ring_short_conv",
]
