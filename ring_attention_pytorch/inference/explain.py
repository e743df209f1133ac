"""A report for users: the bytes that attention to a cache reads and sends."""

import torch

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.chunk_costs import ChunkSizes, keys_travel
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.schedule.passing import (
    merged_pieces,
    merging_machines,
    passes,
    passes_spare,
)


@checked
def explain_cache(
    cache: RingCache, heads: int, tokens: int = 1, *, dtype: torch.dtype | None = None
) -> str:
    """Report the size of a cache, and the bytes that attention reads and sends on this rank.

    Args:
        cache: with its present lengths.
        heads: the number of query heads.
        tokens: new tokens per sequence and call: 1 in decoding, more in a chunk of a prompt that
            is sharded over the ranks; with no padding, nor ALiBi or a window in a layer that keeps
            all tokens.
        dtype: of the queries; None is the cache's, or bfloat16 for a cache of 8 bits.

    Returns:
        Text: a line each for the memory, the keys that are read, and the bytes sent and why. With
        several tokens also one for the memory that a call allocates. A kernel's own needs are not
        in it: of unequal head sizes CPUs copy the smaller keys or values to the larger one.

    Raises:
        ValueError: heads are not a multiple of the cache's, tokens are less than one, or its
            queries can't have the dtype.

    >>> print(explain_cache(RingCache(1, 8, 128, capacity=1024, page=16), heads=32))
    holds 0 of 0 tokens on this rank, in pages of 16: 8.00 MiB of keys and values
    reads 0.00 MiB of keys and values a layer
    sends nothing: this rank is alone
    """
    _check(cache, heads, tokens, dtype)
    mine, all_tokens = sum(cache.local_lengths), sum(cache.lengths)
    scales = 2 * cache.scales * 4
    numbers = cache.head_dim + (0 if cache.tied else cache.value_dim)
    token = cache.key_heads * (numbers * cache.dtype.itemsize + scales)
    of_queries = dtype or _of_queries(cache)
    sent = "nothing" if tokens == 1 else "the chunk's keys alone"
    circles = [
        f"layers with a window of {circle.pools.window} tokens keep "
        f"{circle.turns * cache.pages.page} of each sequence on every rank, and send {sent}"
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
    """Raise ValueError if no call could attend to the cache with these sizes."""
    if heads < 1 or heads % cache.key_heads:
        multiple = f"a multiple of the cache's {cache.key_heads}"
        raise ValueError(f"explain_cache: heads must be {multiple}, got {heads}")
    if tokens < 1:
        raise ValueError(f"explain_cache: tokens must be at least 1, got {tokens}")
    if dtype is not None and dtype not in cache.dtypes:
        dtypes = " or ".join(map(str, cache.dtypes))
        raise ValueError(f"explain_cache: dtype must be {dtypes}, as queries are, got {dtype}")


def _sent(cache: RingCache, heads: int, tokens: int, dtype: torch.dtype, keys: int) -> str:
    """Report the bytes that are sent, and the bytes of cached keys, which stay."""
    ranks, wide = cache.ring.size, accumulation_dtype(dtype).itemsize
    if ranks == 1:
        return "sends nothing: this rank is alone"
    if all(cache.memory(layer) is not cache.pools for layer in range(cache.layers)):
        if tokens == 1:
            return "sends nothing: every rank holds all that it reads"
        sent, to = _keys_sent(cache.ring, chunk_sizes(cache, heads, tokens, dtype)[0], 0)
        return (
            f"sends {_mib(sent)} a layer, its keys of the chunk to each other rank{to}: every rank "
            "holds all that it reads"
        )
    elsewhere = _mib(keys * (ranks - 1) // ranks)
    if tokens == 1:
        sent, to = _results(cache.ring, cache.sequences * heads * (cache.value_dim + 1), wide)
        return (
            f"sends {_mib(sent)} a layer, its results for all queries {to}: that depends on the "
            f"new tokens alone; the cached keys, {elsewhere} from other ranks, stay where they are"
        )
    chunk, _ = chunk_sizes(cache, heads, tokens, dtype)
    taken = _mib(chunk_memory(cache, heads, tokens, dtype))
    taken = f"takes {taken} at most beside the cache, and what a kernel needs while it runs"
    if keys_travel(chunk, sum(cache.lengths), cache.ring.machines):
        sent, to = _keys_sent(cache.ring, chunk, sum(cache.local_lengths))
        return (
            f"sends {_mib(sent)} a layer, its keys of the chunk and cached ones to each other "
            f"rank{to}: over several machines fewer bytes than queries and results; a longer cache "
            f"would stay where it is\n{taken}"
        )
    sent, to = _chunk_sent(cache.ring, chunk)
    return (
        f"sends {_mib(sent)} a layer while it computes, its part of the chunk to each other "
        f"rank{to} and results home: that depends on the chunk alone; the cached keys, {elsewhere} "
        f"from other ranks, stay where they are\n{taken}"
    )


def _results(ring: Ring, numbers: int, itemsize: int) -> tuple[int, str]:
    """Return the bytes that a rank sends to merge results of so many numbers, and to whom."""
    nbytes, me = numbers * itemsize, ring.rank
    machines = merging_machines(ring.machines, nbytes)
    if machines is None:
        return (ring.size - 1) * nbytes, "to each other rank"
    sizes, passing = merged_pieces(machines, numbers, itemsize)
    pieces, way = [size * itemsize for size in sizes], passes(passing, me)
    others = sum(machines[rank] != machines[me] for rank in way.to)
    sent = (machines.count(machines[me]) - 1) * nbytes + len(way.to) * pieces[me]
    sent += sum(pieces[owner] for _, owner in way.passed)
    crossing = f"{_mib(others * pieces[me])} of it its piece of what they merge"
    return sent, f"to each rank of its machine, {crossing} to {others} of others"


def _chunk_sent(ring: Ring, chunk: ChunkSizes) -> tuple[int, str]:
    """Return the bytes of a chunk that a rank sends, and which of them cross to other machines."""
    machines, me = ring.machines, ring.rank
    if not passes_spare(machines):
        return chunk.sent, ""
    way, mine = passes(machines, me), machines[me]
    parts = len({*machines}) - 1
    results = sum(machines[owner] != mine for owner in way.straight)
    crossing = _mib(parts * chunk.message + results * chunk.result)
    sent = way.sent * chunk.message + (ring.size - 1) * chunk.result
    return sent, f" by relays, with {crossing} between machines,"


def _keys_sent(ring: Ring, chunk: ChunkSizes, held: int) -> tuple[int, str]:
    """Return the bytes of new and cached keys that a rank sends, and which of them cross.

    All ranks are taken to hold as many tokens as this one.
    """
    machines, each = ring.machines, chunk.keys + held * chunk.key
    if not passes_spare(machines):
        return (ring.size - 1) * each, ""
    crossing = _mib((len({*machines}) - 1) * each)
    sent = passes(machines, ring.rank).sent * each
    return sent, f" by relays, with {crossing} between machines"


def chunk_sizes(
    cache: RingCache, heads: int, tokens: int, dtype: torch.dtype | None = None
) -> tuple[ChunkSizes, int]:
    """Return the sizes of a chunk's call, and the tokens cached on this rank, in whole pages."""
    chunk = ChunkSizes.of(cache, heads, tokens, dtype or _of_queries(cache))
    page = cache.pages.page
    return chunk, sum(-(-length // page) * page for length in cache.local_lengths)


def chunk_memory(
    cache: RingCache, heads: int, tokens: int, dtype: torch.dtype | None = None
) -> int:
    """Return the most bytes that a call with a chunk allocates, but for a kernel's own needs."""
    chunk, held = chunk_sizes(cache, heads, tokens, dtype)
    cached, machines = sum(cache.lengths), cache.ring.machines
    fetched = 0
    if keys_travel(chunk, cached, machines):
        fetched = cached - sum(cache.local_lengths)
    return chunk.memory(held, fetched, passes_spare(machines))


def _of_queries(cache: RingCache) -> torch.dtype:
    return torch.bfloat16 if cache.scales else cache.dtype


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
