"""Time a prompt in chunks against a cache, beside one call of attention over all of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.lib.calls import slowest, too_much
from benchmarks.lib.results import Row, Subject, failed, rounded
from benchmarks.lib.rings import ranks
from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.explain import chunk_memory
from ring_attention_pytorch.ranks.ring import Ring

HEADS, KEY_HEADS, D = 32, 8, 128
ROUNDS = 3


def prefill(tokens: int, chunk: int, device: torch.device) -> list[Row]:
    """Measure both ways, and what memory chunks take beside the cache.

    Args:
        tokens: of the prompt, on all ranks together.
        chunk: how many of them come at a time.
        device: of this rank.

    Returns:
        A row each; that of chunks says the share of the speed of one call, and memory in MiB.
    """
    about = {"tokens": tokens, "mask": "causal", "heads": [HEADS, KEY_HEADS], "head_dim": D}
    about |= {"dtype": "bfloat16", "pass": "forward"}
    names = "prompt at once", f"prompt in chunks of {chunk}"
    once, many = (about | Subject(name).about() for name in names)
    held = tokens * 2 * KEY_HEADS * D * 2
    own = tokens * 2 * (HEADS + KEY_HEADS) * D * 2 // ranks()  # q, out, k and v
    if (lack := too_much(held // ranks() + own + 2 * held, device)) is not None:
        return [*failed(once, lack), *failed(many, lack)]
    cache = RingCache(
        1, KEY_HEADS, D, capacity=tokens, dtype=torch.bfloat16, device=device, group=Ring()
    )
    whole, part = drawn(tokens // ranks(), device), drawn(chunk // ranks(), device)

    def chunks() -> None:
        cache.free(0)
        for _ in range(tokens // chunk):
            ring_attn_with_cache(*part, cache, layout="zigzag")

    def at_once() -> None:
        with torch.no_grad():
            ring_attn(*whole, causal=True, layout="zigzag", group=Ring())

    took = [slowest(run, 1, ROUNDS, device) for run in (at_once, chunks)]
    many |= memory(cache, chunk, chunks, device)
    many |= {"share": rounded(took[0] / took[1])}
    return [of | {"microseconds": rounded(us)} for of, us in zip((once, many), took)]


def drawn(n: int, device: torch.device) -> list[Tensor]:
    """Draw q, k and v of so many tokens of a rank."""
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.randn(1, n, h, D, device=device, dtype=torch.bfloat16) for h in heads]


def memory(cache: RingCache, chunk: int, chunks: Callable[[], None], device: torch.device) -> Row:
    """Return MiB of the cache on this rank, what chunks take beside it, and what was planned."""
    found: Row = {"cache_mib": cache.nbytes, "planned_mib": chunk_memory(cache, HEADS, chunk)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        chunks()
        torch.cuda.synchronize()
        found["more_mib"] = torch.cuda.max_memory_allocated() - before
    return {name: round(nbytes / 2**20, 1) for name, nbytes in found.items()}
