"""How often ranks compare notes in a step of training: as often with many layers as with one."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import (
    RingAttention,
    RingTransformer,
    ring_attn,
    ring_cross_entropy,
    shard_batch,
)
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.ranks import Pool, unhurried

LENGTH, WORDS, LAYERS = 24, 16, 3
ATTENTION = dict(dim_head=8, heads=2, causal=True, ring_attn=True)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count, in this block, notes by their subject, sums over ranks, and plans that are made."""
    found: Counter[str] = Counter()

    def counting(owner: object, name: str, of: Callable[..., str]) -> object:
        own = getattr(owner, name)

        def again(*args: object, **given: object) -> object:
            found[of(*args)] += 1
            return own(*args, **given)

        return patch.object(owner, name, again)

    with (
        counting(Ring, "gather_notes", lambda ring, subject, *_: subject),
        counting(Ring, "total", lambda *_: "sums"),
        counting(RingPlan, "_agreed", lambda *_: "plans"),
    ):
        yield found


class Layers(nn.Module):
    """Attention by a function, in layers that may be recomputed, with other windows in turn."""

    def __init__(self, windows: tuple[int | None, ...], recomputed: bool = False) -> None:
        super().__init__()
        self.embed, self.windows, self.recomputed = nn.Embedding(WORDS, 16), windows, recomputed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in range(LAYERS):
            window = self.windows[number % len(self.windows)]

            def layer(x: Tensor, window: int | None = window) -> Tensor:
                q = x.unflatten(-1, (2, 8))
                return x + ring_attn(q, q, q, causal=True, window=window).flatten(2)

            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return x


class Modules(nn.Module):
    """Attention by modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.Sequential(*[RingAttention(16, **ATTENTION) for _ in range(LAYERS)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.embed(ids))


def our_transformer() -> nn.Module:
    given = dict(num_tokens=WORDS, dim=16, depth=LAYERS, auto_shard_seq=False, **ATTENTION)
    return RingTransformer(**given)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a function": lambda: Layers((None,)),
    "two windows": lambda: Layers((None, 5)),
    "recomputed": lambda: Layers((None,), recomputed=True),
    "modules": Modules,
    "our transformer": our_transformer,
}


def steps(model: nn.Module, batches: list[dict]) -> list[dict[str, int]]:
    """Return the counts of each step."""
    found = []
    for whole in batches:
        with counted() as here:
            batch = shard_batch(whole)
            with batch:
                ring_cross_entropy(model(batch["input_ids"]), batch.labels).backward()
        found.append(dict(here))
    return found


def every_model() -> dict[str, list[dict[str, int]]]:
    """For a pool: the counts of three steps of each: twice alike, then of new documents."""
    ids = torch.arange(LENGTH)[None] % WORDS
    whole = {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids).masked_fill(torch.arange(LENGTH) > 20, 0)
    found = {}
    for name, make in MODELS.items():
        plan_cache.forget()
        found[name] = steps(make(), [whole, whole, whole | {"cu_seqlens": [0, 5, LENGTH]}])
    return found | {"padding": steps(Layers((None,)), [whole | {"attention_mask": mask}] * 2)}


def test_ranks_compare_notes_once_for_all_layers_of_a_kind(pools) -> None:
    first, *others = pools(2).run(every_model)
    assert all(other == first for other in others)
    for name, found in first.items():
        kinds = 2 if name == "two windows" else 1
        for number, counts in enumerate(found):
            made = counts.pop("plans", 0)
            # a plan is made for new documents, and for padding, which may be another each time
            assert number == 0 or made == kinds * (number == 2 or name == "padding"), (name, made)
            if name == "our transformer":
                assert counts.pop("RingTransformer") == 1
            assert counts == {
                "shard_batch": 1, "ring attention": kinds, "ring_cross_entropy": 1, "sums": 2,
            }, (name, number)  # fmt: skip


def a_wrong_layer() -> str:
    """For a pool: what each rank hears where one of them makes a mistake in a later layer."""
    ids = torch.arange(LENGTH)[None] % WORDS
    q = torch.zeros(1, LENGTH // 2, 2, 8)
    try:
        with shard_batch({"input_ids": ids}):
            ring_attn(q, q, q, causal=True)
            wrong = q[:, :3] if dist.get_rank() == 1 else q
            ring_attn(wrong, q, q, causal=True)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.thorough
def test_a_rank_that_is_wrong_in_a_later_layer_raises_and_others_do_not_wait_for_long(
    pools,
) -> None:
    pool = Pool(2, group_timeout=unhurried(4.0))
    answers = pool.answers(a_wrong_layer)
    pool.stop()
    told = [each for _, each in answers]
    assert "this rank holds 12 of the batch's 24 tokens" in told[1], told
    assert told[0], told
