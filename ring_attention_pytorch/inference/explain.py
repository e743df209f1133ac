"""What attention to a cache sends and reads, in words and bytes: for people."""

import torch

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.chunk_costs import ChunkSizes
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype


@checked
def explain_cache(
    cache: RingCache, heads: int, tokens: int = 1, *, dtype: torch.dtype | None = None
) -> str:
    """Say what a cache holds, and what attention of new tokens to it reads and sends on this rank.

    Args:
        cache: as it is now.
        heads: those of the queries.
        tokens: how many of each sequence come at a time: 1 in decoding, more in a chunk of a prompt
            that is spread over the ranks.
        dtype: of the queries; None is the cache's, or bfloat16 beside 8 bits.

    Returns:
        A line each for the memory, for the keys that are read, and for what is sent and why; for
        more tokens than one also for what memory a call takes.

    Raises:
        ValueError: heads are no multiple of the cache's, tokens less than one, or the dtype is none
            that its queries can have.

    >>> print(explain_cache(RingCache(1, 8, 128, capacity=1024, page=16), heads=32))
    holds 0 of 0 tokens on this rank, in pages of 16: 8.00 MiB of keys and values
    reads 0.00 MiB of keys and values a layer
    sends nothing: this rank is alone
    """
    _check(cache, heads, tokens, dtype)
    mine, all_tokens = sum(cache.local_lengths), sum(cache.lengths)
    numbers, scales = cache.head_dim + cache.value_dim, 2 * cache.scales * 4
    token = cache.key_heads * (numbers * cache.dtype.itemsize + scales)
    of_queries = dtype or _of_queries(cache)
    circles = [
        f"layers with a window of {circle.pools.window} tokens keep "
        f"{circle.turns * cache.pages.page} "
        "of each sequence on every rank, and send nothing"
        for circle in cache.circles
    ]
    lines = [
        f"holds {mine} of {all_tokens} tokens on this rank, in pages of {cache.pages.page}: "
        f"{_mib(cache.nbytes)} of keys and values",
        f"reads {_mib(mine * token)} of keys and values a layer",
        _sent(cache, heads, tokens, of_queries, all_tokens * token),
        *circles,
    ]
    return "\n".join(lines)


def _check(cache: RingCache, heads: int, tokens: int, dtype: torch.dtype | None) -> None:
    """Raise ValueError if no call could attend to the cache like this."""
    if heads < 1 or heads % cache.key_heads:
        multiple = f"a multiple of the cache's {cache.key_heads}"
        raise ValueError(f"explain_cache: heads must be {multiple}, got {heads}")
    if tokens < 1:
        raise ValueError(f"explain_cache: tokens must be at least 1, got {tokens}")
    if dtype is not None and dtype not in cache.dtypes:
        dtypes = " or ".join(map(str, cache.dtypes))
        raise ValueError(f"explain_cache: dtype must be {dtypes}, as queries are, got {dtype}")


def _sent(cache: RingCache, heads: int, tokens: int, dtype: torch.dtype, keys: int) -> str:
    """Say what is sent, beside what it would be if keys came to the queries."""
    ranks, wide = cache.ring.size, accumulation_dtype(dtype).itemsize
    if ranks == 1:
        return "sends nothing: this rank is alone"
    if all(cache.memory(layer) is not cache.pools for layer in range(cache.layers)):
        return "sends nothing: every rank holds all that it reads"
    elsewhere = _mib(keys * (ranks - 1) // ranks)
    if tokens == 1:
        sent = (ranks - 1) * cache.sequences * heads * (cache.value_dim + 1) * wide
        return (
            f"sends {_mib(sent)} a layer, its results for all queries to each other rank: that "
            f"depends on the new tokens alone; the cached keys, {elsewhere} from other ranks, stay "
            "where they are"
        )
    chunk, held = chunk_sizes(cache, heads, tokens, dtype)
    return (
        f"sends {_mib(chunk.sent)} a layer while it computes, its part of the chunk to each other "
        f"rank and results home: that depends on the chunk alone; the cached keys, {elsewhere} "
        f"from other ranks, stay where they are\n"
        f"takes {_mib(chunk.memory(held))} at most beside the cache"
    )


def chunk_sizes(
    cache: RingCache, heads: int, tokens: int, dtype: torch.dtype | None = None
) -> tuple[ChunkSizes, int]:
    """Return the sizes of a chunk's call, and how many tokens are held here in whole pages."""
    dtype = dtype or _of_queries(cache)
    ranks, page = cache.ring.size, cache.pages.page
    chunk = ChunkSizes(
        ranks, cache.sequences, -(-tokens // ranks), heads, cache.key_heads, cache.head_dim,
        cache.value_dim, dtype.itemsize, accumulation_dtype(dtype).itemsize,
        copied=1 + 4 + dtype.itemsize if cache.scales else dtype.itemsize,
    )  # fmt: skip
    return chunk, sum(-(-length // page) * page for length in cache.local_lengths)


def _of_queries(cache: RingCache) -> torch.dtype:
    return torch.bfloat16 if cache.scales else cache.dtype


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
