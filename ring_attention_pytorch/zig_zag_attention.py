"""The module of ring-attention-pytorch 0.5.20 of that name; see `original`."""

from ring_attention_pytorch.original.zig_zag import (
    ShardOutput,
    zig_zag_attn,
    zig_zag_pad_seq,
    zig_zag_shard,
)

__all__ = ["ShardOutput", "zig_zag_attn", "zig_zag_pad_seq", "zig_zag_shard"]
