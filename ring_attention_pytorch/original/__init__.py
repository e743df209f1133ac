"""What ring-attention-pytorch 0.5.20 has beside its modules and names that are here, too.

Modules of its names (`distributed`, `zig_zag_attention`, ...) import it from here. Where a module
of its name is one of ours, what was there is added below; nothing else knows of this folder.
"""

from functools import partial
from types import SimpleNamespace

from ring_attention_pytorch import ring, ring_attention, ring_flash_attention
from ring_attention_pytorch.original import batches, exchange
from ring_attention_pytorch.ring_transformer import RingTransformer, feed_forward

_ADDED = {
    ring: {
        name: getattr(exchange, name)
        for name in (
            "RingInfo", "all_ring_pass", "circular_index_left", "circular_index_right",
            "circular_rank_left", "circular_rank_right", "get_rank", "get_world_size",
            "is_distributed", "null_ring_pass", "one_ring_pass", "ring_pass", "send_and_receive_",
        )
    },
    ring_attention: {
        "FeedForward": partial(feed_forward, mult=4),
        "RingTransformer": RingTransformer,
        "maybe_pad_seq_and_mask": batches.maybe_pad_seq_and_mask,
        "sharded_batch_to_sharded_seq": batches.sharded_batch_to_sharded_seq,
        "sharded_seq_to_sharded_batch": batches.sharded_seq_to_sharded_batch,
    },
    ring_flash_attention: {
        "RingFlashAttentionFunction": SimpleNamespace(apply=ring_flash_attention.ring_flash_attn),
    },
}  # fmt: skip
for module, names in _ADDED.items():
    vars(module).update(names)
