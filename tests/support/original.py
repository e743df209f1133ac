"""Shared by tests of the modules of 0.5.20: names, batches, layers by dense attention."""

import torch
from einops import rearrange
from ring_attention_pytorch.distributed import get_world_size
from ring_attention_pytorch.ring_attention import RingAttention, apply_rotary_pos_emb
from torch import Tensor

from tests.support.reference import dense_attention

EXACT = 1e-12
Errors = dict[str, float]

NAMES = {
    "": "RingAttention RingTransformer RingRotaryEmbedding apply_rotary_pos_emb default_attention "
    "ring_flash_attn ring_flash_attn_ ring_flash_attn_cuda ring_flash_attn_cuda_ tree_attn_decode",
    ".distributed": "get_rank get_world_size is_distributed all_gather_same_dim gather_sizes "
    "has_only_one_value all_gather_variable_dim AllGatherFunction AllGather split_by_rank "
    "all_gather pad_dim_to",
    ".ring": "circular_index_left circular_index_right circular_rank_left circular_rank_right "
    "send_and_receive_ ring_pass one_ring_pass RingInfo null_ring_pass all_ring_pass get_rank "
    "get_world_size is_distributed",
    ".ring_attention": "default_attention RingRotaryEmbedding apply_rotary_pos_emb RingAttention "
    "RMSNorm FeedForward RingTransformer maybe_pad_seq_and_mask sharded_batch_to_sharded_seq "
    "sharded_seq_to_sharded_batch pad_at_dim pad_to_multiple rotate_half softclamp",
    ".ring_flash_attention": "RingFlashAttentionFunction ring_flash_attn ring_flash_attn_ "
    "softclamp",
    ".ring_flash_attention_cuda": "RingFlashAttentionCUDAFunction ring_flash_attn_cuda "
    "ring_flash_attn_cuda_",
    ".tensor_typing": "TorchTyping Float Int Bool",
    ".tree_attn_decoding": "tree_attn_decode",
    ".triton_flash_attn": "flash_attn_forward flash_attn_backward",
    ".zig_zag_attention": "zig_zag_pad_seq ShardOutput zig_zag_shard zig_zag_attn",
}


# --- the flows of the scripts ---


def attended(attn: RingAttention, x: Tensor, causal: bool, angles: Tensor | None = None) -> Tensor:
    """Compute the layer on a whole sequence, by its weights and dense attention."""
    qkv = rearrange(attn.to_qkv(x), "b n (h d) -> b n h d", d=attn.dim_head)
    q, k, v = qkv.split(attn.qkv_head_breakdown, dim=2)
    if angles is not None:
        q, k = (apply_rotary_pos_emb(angles, t) for t in (q, k))
    return attn.to_out(
        rearrange(dense_attention(q, k, v, causal=causal)[0], "b n h d -> b n (h d)")
    )


def everyones(var_len: bool, *shape: int, ids: int | None = None) -> list[Tensor]:
    """A batch for each rank, of 2 or 3 samples with var_len; the same batches on all ranks."""
    draw, found = torch.Generator().manual_seed(3), []
    for rank in range(get_world_size()):
        whole = (2 + rank % 2 if var_len else 2, *shape)
        if ids is None:
            found.append(torch.randn(whole, generator=draw, dtype=torch.float64))
        else:
            found.append(torch.randint(0, ids, whole, generator=draw))
    return found


def check(by_rank: list[Errors], limit: float = EXACT) -> None:
    """Every result of every rank."""
    for rank, errors in enumerate(by_rank):
        assert errors
        bad = {name: error for name, error in errors.items() if not error < limit}
        assert not bad, f"rank {rank}"
