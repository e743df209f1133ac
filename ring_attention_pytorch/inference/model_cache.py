"""A cache for a model's layers: some keep all tokens, others only their window.

window of each layer   None   100      4096
cached tokens          all    window   all       on two ranks, sequences of 4000 tokens
"""

from collections.abc import Sequence
from typing import Any

from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.page_table import Pages
from ring_attention_pytorch.inference.rolling import Windows
from ring_attention_pytorch.ranks.ring import Group, as_ring

SPARE = 256  # tokens; less means more kernel calls for a prompt, more means more memory
_SHARE = 8  # spare is at most 1 / _SHARE of the tokens that other layers keep
_LARGEST_PAGE, _PAGES = 64, 4  # tokens of a page; the least pages that each rank should have


def model_cache(
    windows: Sequence[int | None],
    sequences: int,
    key_heads: int,
    head_dim: int,
    *,
    capacity: int | None,
    page: int | None = None,
    spare: int | None = None,
    group: Group = None,
    **others: Any,
) -> RingCache:
    """Make a cache for layers with these windows; a layer keeps only its window if that is less.

    Args:
        windows: of each layer; None sees all tokens.
        capacity: as for `RingCache`; None counts as more than any window.
        page: None is a size that suits the capacity.
        spare: of layers with a window; None suits prompts without rollback.
        others: arguments of `RingCache`, such as dtype and device.

    >>> cache = model_cache([None, 100], 1, key_heads=1, head_dim=4, capacity=2000)
    >>> [len(pool) * cache.pages.page for pool in cache.keys]
    [2048, 640]
    """
    ring, kept = as_ring(group), [*windows]
    if page is None:
        page = _LARGEST_PAGE if capacity is None else page_for(capacity, ring.size)
    if capacity is not None:
        share = Pages(page, ring.size).turns(capacity)
        if spare is None:
            spare = max(1, min(SPARE, share * page // _SHARE))
        turns = Windows((), spare).turns
        kept = [None if w is None or turns(w, page) >= share else w for w in windows]
    return RingCache(
        sequences, key_heads, head_dim, layers=len(kept), capacity=capacity, page=page,
        windows=kept, spare=SPARE if spare is None else spare, group=ring, **others,
    )  # fmt: skip


def page_for(capacity: int, ranks: int) -> int:
    """Return the page size: smaller for short sequences, so that every rank gets pages.

    >>> [page_for(capacity, ranks=4) for capacity in (10, 100, 1_000_000)]
    [1, 4, 64]
    """
    wanted = max(1, min(_LARGEST_PAGE, capacity // (_PAGES * ranks)))
    return 1 << (wanted.bit_length() - 1)
