"""Faults planted into `compat/`: a list for each battery."""

from tests.faults.mutant import Mutant

ORIGINAL = [
    Mutant(
        "everyone takes the first part", "compat/distributed.py:split_by_rank",
        "mine = x[ring.rank]", "mine = x[0]",
    ),
    Mutant(
        "a pass goes one rank, however many it should", "compat/ring.py:ring_pass",
        "(num_ring_passes, -num_ring_passes)", "(1, -1)",
    ),
    Mutant(
        "owners are taken for neighbours", "compat/ring.py:_passes",
        "circular_index_left(ring.rank, ring.size, hop)",
        "circular_index_left(ring.rank, ring.size, min(hop, 1))",
    ),
    Mutant(
        "key heads go round", "compat/zig_zag_attention.py:zig_zag_attn",
        "both.repeat_interleave(queries_per_key, 1)", "both.repeat(1, queries_per_key, 1, 1)",
    ),
    Mutant(
        "keys stand in order", "compat/zig_zag_attention.py:zig_zag_shard",
        "torch.cat(by_rank)", "torch.cat(by_rank).sort().values",
    ),
]  # fmt: skip
