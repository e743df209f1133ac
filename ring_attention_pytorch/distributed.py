"""The module of ring-attention-pytorch 0.5.20 of that name; see `original`."""

from ring_attention_pytorch.original.exchange import (
    AllGather,
    AllGatherFunction,
    all_gather,
    all_gather_same_dim,
    all_gather_variable_dim,
    gather_sizes,
    get_rank,
    get_world_size,
    has_only_one_value,
    is_distributed,
    split_by_rank,
)

__all__ = [
    "AllGather",
    "AllGatherFunction",
    "all_gather",
    "all_gather_same_dim",
    "all_gather_variable_dim",
    "gather_sizes",
    "get_rank",
    "get_world_size",
    "has_only_one_value",
    "is_distributed",
    "split_by_rank",
]
