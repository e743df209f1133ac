"""A cache that takes over another's states is that one, or is as it was and says why not."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import RingCache, ring_attn_with_cache
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import dense_attention


def moved(sizes: tuple[int, int], options: dict[str, Any]) -> float:
    """Take what ranks of one cache hold over to a cache of other ranks."""
    k = torch.randn(2, 11, 1, 4, generator=torch.Generator().manual_seed(1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {size: dist.new_group(list(range(size))) for size in (1, *sizes)}
    states: list[Any] = [None] * ranks
    mine = None
    if rank < sizes[0]:
        cache = RingCache(2, 1, 4, page=2, group=groups[sizes[0]], **options)
        cache.append(k, -k)
        cache.rollback([0, 4])
        mine = cache.state_dict()
    dist.all_gather_object(states, mine)
    if rank >= sizes[1]:
        return 0.0
    other = RingCache(2, 1, 4, page=3, group=groups[sizes[1]], **options)
    with pytest.raises(ValueError, match="give those of all ranks"):
        other.load_state_dict(*states[: sizes[0] - 1], states[0])
    other.load_state_dict(*states[: sizes[0]])
    assert other.lengths == [11, 7]
    worst, k = 0.0, other.rounded(k)
    for i in range(2):
        keys, values, tokens = other.memory(0).local(i)
        worst = max(worst, (keys - k[i, tokens]).abs().max().item() if len(keys) else 0.0)
        worst = max(worst, (values + k[i, tokens]).abs().max().item() if len(keys) else 0.0)
    return worst


MOVES = [
    ((2, 3), dict(dtype=torch.float8_e4m3fn)),
    ((3, 1), {}),
    ((3, 2), dict(windows=[2], spare=4)),
]


@pytest.mark.parametrize(("sizes", "options"), MOVES)
def test_a_cache_can_be_taken_over_by_other_ranks(
    sizes: tuple[int, int], options: dict[str, Any], pools: Callable
) -> None:
    assert pools(3).run(moved, sizes, options) == [0.0] * 3


SIZES: dict[str, Any] = dict(sequences=2, key_heads=2, head_dim=4, layers=2, page=2)
State = dict[str, Any]


def filled(n: int = 7, **options: Any) -> RingCache:
    cache = RingCache(**{**SIZES, **options}, group=Ring.alone())
    draw = torch.Generator().manual_seed(n)
    for layer in range(cache.layers):
        shape = cache.sequences, n, cache.key_heads
        k, v = (torch.randn(*shape, d, generator=draw) for d in (cache.head_dim, cache.value_dim))
        cache.append(k.to(cache.taken_as(k.dtype)), v.to(cache.taken_as(v.dtype)), layer)
    return cache


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


OTHERS = {
    "layers": (dict(layers=1), "must have 2 layers, got 1"),
    "more layers": (dict(layers=3), "must have 2 layers, got 3"),
    "sequences": (dict(sequences=1), "lengths of 2 sequences"),
    "one key head": (dict(key_heads=1), "keys of the states must be [7, 2, 4]"),
    "more key heads": (dict(key_heads=4), "keys of the states must be [7, 2, 4]"),
    "keys of one number": (dict(head_dim=1), "keys of the states must be [7, 2, 4]"),
    "values of one number": (dict(value_dim=1), "values of the states must be [7, 2, 4]"),
    "wider": (dict(dtype=torch.float64), "in torch.float32 for a cache of torch.float32, got"),
    "16 bits": (dict(dtype=torch.bfloat16), "[7, 2, 4] in torch.bfloat16"),
    "8 bits": (dict(dtype=torch.float8_e4m3fn), "[7, 2, 4] in torch.uint8"),
    "windows": (dict(windows=[2, None], spare=1), "the states hold 4 of the 7 tokens"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_caches_are_refused(name: str) -> None:
    options, why = OTHERS[name]
    refused(filled(5), [filled(**options).state_dict()], why)


def refused(cache: RingCache, states: list[State], why: str) -> None:
    cache.hide_before([1, 2])
    before, mark = cache.state_dict(), cache.lineage.mark(0)
    with pytest.raises(ValueError, match=f"^RingCache: .*{re.escape(why)}"):
        cache.load_state_dict(*states)
    after = cache.state_dict()
    assert all(same(before[name], after[name]) for name in before)
    assert cache.lineage.mark(0) == mark


def test_wide_states_are_none_of_8_bits() -> None:
    refused(filled(dtype=torch.float8_e4m3fn), [filled().state_dict()], "in torch.uint8 for a")
    state = filled(dtype=torch.float8_e4m3fn).state_dict()
    k, v, tokens, *scales = state["held"][0][0]
    state["held"][0][0] = k, v, tokens, *(s[..., :0] for s in scales)
    refused(filled(dtype=torch.float8_e4m3fn), [state], "scales of keys of the states must be")


def changed(change: Callable[[State], object]) -> list[State]:
    state = filled().state_dict()
    change(state)
    return [state]


BROKEN = {
    "none": ([], "there are none"),
    "no starts": (changed(lambda s: s.pop("starts")), "and has starts"),
    "too few tokens": (changed(lambda s: s.update(lengths=[7, 8])), "hold 7 of the 8 tokens"),
    "too many tokens": (changed(lambda s: s.update(lengths=[6, 7])), "hold 7 of the 6 tokens"),
    "no number": (changed(lambda s: s.update(lengths=[7, None])), "lengths of 2 sequences"),
    "negative": (changed(lambda s: s.update(starts=[0, -1])), "starts of 2 sequences"),
    "twice": ([filled().state_dict()] * 2, "hold 14 of the 7 tokens"),
    "another's": ([filled().state_dict(), filled(3).state_dict()], "lengths or starts differ"),
    "no tensors": (changed(lambda s: s.update(held=[[1, 2], [3, 4]])), "TypeError"),
    "no scales": (
        changed(lambda s: s["held"][1].__setitem__(0, s["held"][1][0][:3])),
        "keys, values, tokens, scales of keys, scales of values",
    ),
    "a layer's longest": (changed(lambda s: s.update(longest=[[7, 7]])), "2 layers"),
    "a longest": (changed(lambda s: s.update(longest=[[7], [7]])), "longest lengths of 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_states_that_are_none_are_refused(name: str) -> None:
    refused(filled(5), *BROKEN[name])


def test_what_does_not_fit_is_refused() -> None:
    cache = filled(5, capacity=6)
    refused(cache, [filled().state_dict()], "7 tokens of a sequence, more than the capacity of 6")
    assert cache.capacity == 6
    fits = filled(6, capacity=100)
    cache.load_state_dict(fits.state_dict())
    assert same(cache.state_dict()["held"], fits.state_dict()["held"])
    assert cache.capacity == 6


def test_what_graphs_point_to_does_not_grow() -> None:
    cache = filled(5)
    cache.captured = True
    refused(cache, [filled(9).state_dict()], "a CUDA graph uses the memory")


def test_where_there_is_no_memory_nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, states = filled(5), [filled(9).state_dict()]
    before = cache.state_dict()

    def none(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(cache, "_pool", none)
    with pytest.raises(torch.OutOfMemoryError):
        cache.load_state_dict(*states)
    assert same(before["held"], cache.state_dict()["held"])
    monkeypatch.undo()
    k = torch.ones(2, 9, 2, 4)
    for layer in range(2):
        cache.append(k, k, layer)  # into pages of its own
    cache.rollback(9)
    assert same(before["held"], cache.state_dict()["held"])
    cache.load_state_dict(*states)
    assert same(states[0]["held"], cache.state_dict()["held"])


def test_old_padding_does_not_stay() -> None:
    cache, state = filled(5), filled().state_dict()
    cache.hide_before([3, 2])
    cache.load_state_dict(state)
    assert cache.starts.tolist() == [0, 0]
    q = torch.ones(2, 1, 2, 4)
    k, v = (torch.stack([held[i] for held in state["held"][0]]) for i in (0, 1))
    want, _ = dense_attention(q.double(), k.double(), v.double())
    out = ring_attn_with_cache(q, None, None, cache)
    assert (out - want).abs().max() < 1e-6


def test_pages_that_were_shared_are_not_when_other_tokens_come() -> None:
    cache, state = filled(8), filled().state_dict()
    cache.fork(0, 1)
    cache.load_state_dict(state)
    assert same(cache.state_dict()["held"], state["held"])


@pytest.mark.parametrize(
    ("length", "pages", "before"),
    [(9, (4, 1), 0), (11, (4, 1), 0), (11, (1, 4), 0), (20, (4, 4), 1), (20, (1, 1), 2)],
)
def test_of_a_window_as_much_can_be_rolled_back_as_before(
    length: int, pages: tuple[int, int], before: int
) -> None:
    """Another cache, with pages of its own, has kept the tokens and was rolled back."""
    window, spare, q = 5, 2, torch.ones(1, 1, 1, 4)
    one: dict[str, Any] = dict(sequences=1, key_heads=1, layers=1, spare=spare)
    k, v, *_ = filled(length, **one).state_dict()["held"][0][0]
    saved = filled(length, page=pages[0], windows=[window], **one)
    saved.rollback(before)
    kept = min(-(-(window + 2 * spare) // page) * page for page in pages)
    for back in range(before, length):
        cache = filled(3, page=pages[1], windows=[window], **one)
        cache.load_state_dict(saved.state_dict())
        if length > kept and back > spare:
            with pytest.raises(ValueError, match="roll back less"):
                cache.rollback(back - before)
            continue
        cache.rollback(back - before)
        seen = slice(max(0, length - back - 1 - window), length - back)
        want, _ = dense_attention(q.double(), *(t[None, seen].double() for t in (k, v)))
        out = ring_attn_with_cache(q, None, None, cache, window=window)
        assert (out - want).abs().max() < 1e-6


def test_a_state_that_does_not_say_how_long_sequences_were_is_taken_for_all_there_was() -> None:
    options = dict(sequences=1, key_heads=1, layers=1, windows=[2], spare=2, page=1)
    saved = filled(20, **options)
    state = saved.state_dict()
    state.pop("longest")
    k, v, tokens, *scales = state["held"][0][0]
    state["held"][0][0] = tuple(t[-4:] for t in (k, v, tokens, *scales))  # as none is rolled back
    cache = filled(3, **options)
    cache.load_state_dict(state)
    with pytest.raises(ValueError, match="roll back less"):
        cache.rollback(1)
