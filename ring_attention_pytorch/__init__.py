"""Exact attention over a sequence that is spread over many processes."""

from typing import TYPE_CHECKING

from ring_attention_pytorch import compat as _compat  # noqa: F401 - old module paths
from ring_attention_pytorch.decoding import tree_attn_decode
from ring_attention_pytorch.doctor.parity import ParityReport, check_parity
from ring_attention_pytorch.functional import explain_kernel, ring_attn, ulysses_attn
from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.explain import explain_cache
from ring_attention_pytorch.latent import (
    mla_attn_with_cache,
    mla_plan,
    mla_ring_attn,
    tied_plan,
    tied_ring_attn,
)
from ring_attention_pytorch.nn.attention import RingAttention
from ring_attention_pytorch.nn.chunks import chunk_tokens
from ring_attention_pytorch.nn.latent import RingLatentAttention
from ring_attention_pytorch.nn.recurrent import GatedDeltaNet, Mamba2
from ring_attention_pytorch.nn.reference import default_attention
from ring_attention_pytorch.nn.rotary import RingRotaryEmbedding, apply_rotary_pos_emb
from ring_attention_pytorch.nn.sharding import shard_sequence, unshard_sequence
from ring_attention_pytorch.nn.transformer import RingTransformer
from ring_attention_pytorch.plan.explain import explain_plan
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.failures import RingError, fail_together
from ring_attention_pytorch.recurrent import (
    RunPlan,
    ring_gated_delta_rule,
    ring_halo,
    ring_kda,
    ring_mamba2,
    ring_scan,
    ring_short_conv,
)
from ring_attention_pytorch.routing import (
    ConditionalRoutedAttention,
    ConditionalRoutedAutoregressiveAttention,
    ConditionalRoutedCrossAttention,
    ConditionalRoutedFeedForward,
    ConditionalRoutedImageAttention,
    ConditionalRoutedTransformer,
    ConditionalRoutedTransformerBlock,
    CoordinateDescentRouter,
    RoutingPlan,
    coordinate_descent,
    select_topk,
    soft_topk,
)
from ring_attention_pytorch.runtime.merging import merge_attention
from ring_attention_pytorch.runtime.observe import observe
from ring_attention_pytorch.summaries import (
    Summaries,
    SummaryAttention,
    SummaryPlan,
    summarize,
    summary_attn,
)
from ring_attention_pytorch.top_keys import top_keys
from ring_attention_pytorch.training.batches import ShardedBatch, shard_batch
from ring_attention_pytorch.training.collator import RingCollator
from ring_attention_pytorch.training.dataset import SequenceShardedDataset, TokenFile
from ring_attention_pytorch.training.losses import ring_cross_entropy, ring_token_logprobs

if TYPE_CHECKING:  # type checkers find modules only at their real places
    from ring_attention_pytorch.compat.ring_flash_attention import ring_flash_attn, ring_flash_attn_
    from ring_attention_pytorch.compat.ring_flash_attention_cuda import (
        ring_flash_attn_cuda,
        ring_flash_attn_cuda_,
    )
else:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn, ring_flash_attn_
    from ring_attention_pytorch.ring_flash_attention_cuda import (
        ring_flash_attn_cuda,
        ring_flash_attn_cuda_,
    )

__version__ = "1.1.0"

__all__ = [
    "ConditionalRoutedAttention",
    "ConditionalRoutedAutoregressiveAttention",
    "ConditionalRoutedCrossAttention",
    "ConditionalRoutedFeedForward",
    "ConditionalRoutedImageAttention",
    "ConditionalRoutedTransformer",
    "ConditionalRoutedTransformerBlock",
    "CoordinateDescentRouter",
    "GatedDeltaNet",
    "Mamba2",
    "ParityReport",
    "RingAttention",
    "RingCache",
    "RingCollator",
    "RingError",
    "RingLatentAttention",
    "RingPlan",
    "RingRotaryEmbedding",
    "RingTransformer",
    "RoutingPlan",
    "RunPlan",
    "SequenceShardedDataset",
    "ShardedBatch",
    "Summaries",
    "SummaryAttention",
    "SummaryPlan",
    "TokenFile",
    "apply_rotary_pos_emb",
    "balanced",
    "check_parity",
    "chunk_tokens",
    "coordinate_descent",
    "default_attention",
    "explain_cache",
    "explain_kernel",
    "explain_plan",
    "fail_together",
    "merge_attention",
    "mla_attn_with_cache",
    "mla_plan",
    "mla_ring_attn",
    "observe",
    "positions",
    "ring_attn",
    "ring_attn_with_cache",
    "ring_cross_entropy",
    "ring_flash_attn",
    "ring_flash_attn_",
    "ring_flash_attn_cuda",
    "ring_flash_attn_cuda_",
    "ring_gated_delta_rule",
    "ring_halo",
    "ring_kda",
    "ring_mamba2",
    "ring_scan",
    "ring_short_conv",
    "ring_token_logprobs",
    "select_topk",
    "shard_batch",
    "shard_sequence",
    "soft_topk",
    "summarize",
    "summary_attn",
    "tied_plan",
    "tied_ring_attn",
    "top_keys",
    "tree_attn_decode",
    "ulysses_attn",
    "unshard_sequence",
]
