"""The recipes of examples/ are the papers' definitions, with masks of all scores, in float64."""

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.block_diffusion import block_causal, block_diffusion
from examples.block_diffusion import main as block_diffusion_main
from examples.compressed_attention import (
    best_entries,
    compress,
    compress_overlapping,
    compressed_attention,
)
from examples.compressed_attention import main as compressed_main
from examples.differential_attention import differential_attention
from examples.differential_attention import main as differential_main
from examples.joint_video import JointBlock, step
from examples.joint_video import main as joint_main
from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import relative_error

SIZES = [(1, "contiguous"), (2, "zigzag"), (3, "striped"), (4, "zigzag")]
GROUPED = [(1, "contiguous"), (2, "zigzag"), (3, "contiguous"), (4, "zigzag")]  # runs of groups
Whole = list[Tensor]


def drawn(*shapes: tuple[int, ...]) -> Whole:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Dense attention; `seen` broadcasts to `[b, h, n, m]`, sinks `[h]` have no value."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., : k.shape[1]], v)


def compared(
    given: Whole,
    along: Whole,
    dense: Callable[..., tuple[Tensor, ...]],
    ringed: Callable[..., tuple[Tensor, ...]],
    learned: int = 0,
    sizes: list[tuple[int, str]] = SIZES,
) -> None:
    """Compare results and each gradient by itself, of shards; the last `learned` are on all ranks.

    `ringed` gets the positions of a rank's tokens, its leaves and the ring's options.
    """
    leaves = [t.clone().requires_grad_() for t in given]
    outs = dense(*leaves)
    want = [*outs, *torch.autograd.grad(outs, leaves, along)]
    own = len(given) - learned
    for size, layout in sizes:

        def main(ring: Ring, layout: str = layout) -> Whole:
            at = positions(layout, rank=ring.rank, ring_size=ring.size, length=given[0].shape[1])
            parts = [t[:, at] for t in given[:own]] + given[own:]
            mine = [t.clone().requires_grad_() for t in parts]
            outs = ringed(at, *mine, layout=layout, group=ring)
            grads = torch.autograd.grad(outs, mine, [t[:, at] for t in along])
            return [at, *(t.detach() for t in outs), *grads]

        results = threads.run(size, main)[0]
        sharded = len(outs) + own
        for name, whole in enumerate(want):
            each = [found[name + 1] for found in results]
            if name < sharded:
                held = [whole[:, found[0]] for found in results]
            else:
                each, held = [sum(each, torch.zeros(()))], [whole]
            worst = max(map(relative_error, each, held))
            assert worst < 1e-12, (size, layout, name, worst)


N, BLOCK = 46, 4


def test_block_diffusion_is_attention_by_the_papers_mask():
    given = drawn(*[(2, N, 2, 8)] * 6)
    block = torch.arange(N) // BLOCK
    i, j = block[:, None], block[None]

    def dense(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        noisy, clean = leaves[:3], leaves[3:]
        q, k, v = (torch.cat(both, 1) for both in zip(noisy, clean))
        # the paper's block-diagonal, offset block-causal and block-causal parts
        upper = torch.cat((i == j, i > j), 1)
        lower = torch.cat((torch.zeros(N, N, dtype=torch.bool), i >= j), 1)
        return softmax(q, k, v, torch.cat((upper, lower))).split(N, 1)

    def ringed(_: Tensor, *mine: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return block_diffusion(mine[:3], mine[3:], BLOCK, N, **options)

    compared(given, drawn(*[(2, N, 2, 8)] * 2), dense, ringed)


@pytest.mark.parametrize("prefix", [0, 1, 18, N])
def test_a_prefix_over_blocks_is_seen_by_all(prefix):
    given = drawn(*[(1, N, 2, 8)] * 3)
    at = torch.arange(N)
    seen = (at[:, None] // BLOCK >= at[None] // BLOCK) | (at[None] < prefix)

    def ringed(_: Tensor, *mine: Tensor, **options: Any) -> tuple[Tensor]:
        return (block_causal(*mine, BLOCK, N, prefix=prefix, **options),)

    compared(given, drawn((1, N, 2, 8)), lambda *qkv: (softmax(*qkv, seen),), ringed)


def test_compressed_attention_is_one_softmax_over_a_window_and_entries():
    ratio, window, n, h, d = 4, 6, 96, 4, 8
    given = drawn((2, n, h, d), (2, n, 1, d), (2, n, 1, d), (ratio, d), (h,))
    t, g = torch.arange(n)[:, None], torch.arange(n // ratio)[None]
    near = (t >= torch.arange(n)) & (t - torch.arange(n) < window)
    seen = torch.cat((near, g < (t + 1) // ratio), 1)

    def dense(q: Tensor, rows: Tensor, gate: Tensor, places: Tensor, sinks: Tensor) -> Any:
        entries = []
        for first in range(0, n, ratio):
            group = slice(first, first + ratio)
            weights = (gate[:, group, 0] + places).softmax(1)
            entries.append((weights * rows[:, group, 0]).sum(1))
        keys = torch.cat((rows, torch.stack(entries, 1)[:, :, None]), 1)
        return (softmax(q, keys, keys, seen, sinks),)

    def ringed(at: Tensor, q: Tensor, rows: Tensor, gate: Tensor, *own: Tensor, **how: Any) -> Any:
        entries = compress(rows, gate, own[0])
        return (compressed_attention(q, rows, entries, own[1], at, window, **how),)

    compared(given, drawn((2, n, h, d)), dense, ringed, learned=2, sizes=GROUPED)
    at = positions("striped", rank=0, ring_size=2, length=n)
    with pytest.raises(ValueError, match="groups of 4 tokens must not span ranks"):
        compressed_attention(*(x[:, at] for x in given[:2]), given[1][:, ::8], given[4], at)


def overlapping_entries(rows: Tensor, gate: Tensor, places: Tensor) -> Tensor:
    """By the definition, of one group after another: `[b, groups, 1, d]`."""
    ratio, d = len(places), rows.shape[-1] // 2
    entries = []
    for first in range(0, rows.shape[1], ratio):
        values, logits = [], []
        for i in range(ratio):
            if first:  # the group before, by its first channels
                values.append(rows[:, first - ratio + i, 0, :d])
                logits.append(gate[:, first - ratio + i, 0, :d] + places[i, :d])
            values.append(rows[:, first + i, 0, d:])
            logits.append(gate[:, first + i, 0, d:] + places[i, d:])
        weights = torch.stack(logits).softmax(0)
        entries.append((weights * torch.stack(values)).sum(0))
    return torch.stack(entries, 1)[:, :, None]


@pytest.mark.parametrize("k", [None, 3])
def test_overlapping_entries_are_seen_all_or_the_best_by_an_indexer(k):
    ratio, window, n, h, d = 4, 6, 96, 4, 8
    given = drawn((2, n, h, d), (2, n, 1, d), *[(2, n, 1, 2 * d)] * 2, (ratio, 2 * d), (h,))
    iq, iw, ik = drawn((2, n, 3, 4), (2, n, 3), (2, n // ratio, 4))
    t, g = torch.arange(n)[:, None], torch.arange(n // ratio)[None]
    near = (t >= torch.arange(n)) & (t - torch.arange(n) < window)
    visible = (g < (t + 1) // ratio).expand(2, n, n // ratio).clone()
    if k is not None:
        for b, at in product(range(2), range(n)):
            score = (iw[b, at, :, None] * (iq[b, at] @ ik[b].T).clamp(min=0)).sum(0).tolist()
            best = sorted(range((at + 1) // ratio), key=lambda e: (-score[e], e))[:k]
            visible[b, at] = torch.isin(g[0], torch.tensor(best, dtype=torch.int64))
    seen = torch.cat((near.expand(2, n, n), visible), -1)[:, None]

    def dense(q: Tensor, rows: Tensor, wide: Tensor, gate: Tensor, *own: Tensor) -> Any:
        keys = torch.cat((rows, overlapping_entries(wide, gate, own[0])), 1)
        return (softmax(q, keys, keys, seen, own[1]),)

    def ringed(at: Tensor, *mine: Tensor, **how: Any) -> Any:
        q, rows, wide, gate, places, sinks = mine
        entries = compress_overlapping(wide, gate, places, at, n, **how)
        chosen = None
        if k is not None:
            index = iq[:, at], iw[:, at], ik[:, at[::ratio] // ratio]
            chosen = best_entries(*index, at, n, k, **how)
            assert torch.equal(chosen, visible)
        return (compressed_attention(q, rows, entries, sinks, at, window, chosen, **how),)

    compared(given, drawn((2, n, h, d)), dense, ringed, learned=2, sizes=GROUPED)
    at = positions("striped", rank=0, ring_size=2, length=n)
    with pytest.raises(ValueError, match="groups of 4 tokens must not span ranks"):
        compress_overlapping(*(x[:, at] for x in given[2:4]), given[4], at, n, "striped")


def test_differential_attention_is_a_difference_of_softmaxes():
    given = drawn(*[(2, N, 2, 8)] * 4, (2, N, 2, 16), ())
    seen = torch.ones(N, N).tril() > 0

    def dense(a: Tensor, b: Tensor, c: Tensor, d: Tensor, v: Tensor, weight: Tensor) -> Any:
        return (softmax(a, c, v, seen) - weight * softmax(b, d, v, seen),)

    def ringed(_: Tensor, *mine: Tensor, **options: Any) -> tuple[Tensor]:
        a, b, c, d, v, weight = mine
        return (differential_attention((a, b), (c, d), v, weight, causal=True, **options),)

    compared(given, drawn((2, N, 2, 16)), dense, ringed, learned=1)


# --- joint text and video ---

WORDS, TOKENS, ENDS = 7, 20, (0, 3, 4, 20)


def joint() -> tuple[list[JointBlock], Whole, Tensor]:
    torch.manual_seed(0)
    blocks = [JointBlock(heads=40, d=2).double() for _ in range(2)]
    mask = torch.arange(WORDS) < torch.tensor([[WORDS], [2]])
    return blocks, drawn((2, WORDS, 80), (2, TOKENS, 80), (2, TOKENS, 80)), mask


def dense_step(blocks: list[JointBlock], text: Tensor, video: Tensor, mask: Tensor) -> Tensor:
    """As the paper has it: both streams side by side."""
    for block in blocks:
        both = (block.video, video), (block.text, text)
        q = torch.cat([stream.queries(x) for stream, x in both], 1)
        k, v = (torch.cat(t, 1) for t in zip(*(stream.keys(x) for stream, x in both)))
        seen = torch.cat((torch.ones(2, TOKENS) > 0, mask), 1)[:, None, None]
        out = softmax(q, k, v, seen).flatten(2)
        video = video + block.video.to_out(out[:, :TOKENS])
        text = text + block.text.to_out(out[:, TOKENS:])
    return video


def test_a_joint_step_has_the_whole_models_gradients():
    blocks, (text, video, target), mask = joint()
    loss = (dense_step(blocks, text, video, mask) - target).square().sum()
    loss.backward()
    # of the text only its keys matter in the last block
    want = [p.grad for block in blocks for p in block.parameters()]

    def main(ring: Ring) -> Whole:
        mine = slice(ENDS[ring.rank], ENDS[ring.rank + 1])
        own = copy.deepcopy(blocks)
        for block in own:
            block.zero_grad()
        part = step(own, text, video[:, mine], mask, target[:, mine], ring)
        nothing = torch.zeros(())
        grads = [p.grad for block in own for p in block.parameters()]
        return [part, *(nothing if grad is None else grad for grad in grads)]

    results = threads.run(3, main)[0]
    assert relative_error(sum(found[0] for found in results), loss) < 1e-13
    compared_names = [n for block in blocks for n, _ in block.named_parameters()]
    for i, (name, whole) in enumerate(zip(compared_names, want)):
        found = sum((each[i + 1] for each in results), torch.zeros(()))
        if whole is None:
            assert not found.any(), name
        else:
            assert relative_error(found, whole) < 1e-12, name


def test_heads_that_ranks_do_not_divide_can_not_be_swapped():
    q = torch.zeros(1, 6, 40, 2)
    with pytest.raises(ValueError, match="ulysses must divide"):
        threads.run(3, lambda ring: ring_attn(q, q, q, ulysses=3, group=ring))


def test_the_examples_run_by_themselves(capsys):
    for main, small in (
        (block_diffusion_main, dict(length=64, block=8)),
        (compressed_main, dict(groups=2, ratio=8, d=4, k=3)),
        (differential_main, dict(length=32)),
        (joint_main, dict(tokens=20, words=6)),
    ):
        main(**small)
    text = capsys.readouterr().out
    for promised in (
        "64 of 64 tokens",
        "4 entries in all",
        "8 overlapping ones",
        "32 of 32 tokens",
        "tokens 0 to 20",
    ):
        assert promised in text


# --- bytes ---


def sent(size: int, call: Callable[[Ring], Any]) -> int:
    """The most bytes that a rank sends, forward and backward."""
    _, hub = threads.run(size, call)
    return max(hub.sent_bytes)


def travel() -> dict[str, int]:
    """By what is computed: of 4 ranks with 64 tokens each, in float64, 2 heads of 8 or one row."""
    n, size, h, d = 256, 4, 2, 8
    leaves = [t.requires_grad_() for t in drawn(*[(1, n // size, h, d)] * 6)]
    gather: dict[str, Any] = dict(transport="gather")

    def blocks(ring: Ring) -> None:
        noisy, clean = leaves[:3], leaves[3:]
        torch.cat(block_diffusion(noisy, clean, 8, n, group=ring, **gather)).sum().backward()

    def one_masked(ring: Ring) -> None:
        both = [torch.cat(t, 1) for t in zip(leaves[:3], leaves[3:])]
        ring_attn(*both, group=ring, **gather).sum().backward()

    def compressed(ring: Ring, ratio: int = 8) -> None:
        q, rows, gate = leaves[0], leaves[1][:, :, :1], leaves[2][:, :, :1]
        at = positions("zigzag", rank=ring.rank, ring_size=size, length=n)
        sinks, how = torch.zeros(h).double(), dict(layout="zigzag", group=ring)
        if ratio == 8:
            entries = compress(rows, gate, torch.zeros(8, d).double())
        else:  # with as many channels again, of the group before
            wide = [torch.cat((t, t), -1) for t in (rows, gate)]
            places = torch.zeros(4, 2 * d).double()
            entries = compress_overlapping(*wide, places, at, n, **how)
        compressed_attention(q, rows, entries, sinks, at, 8, **how, **gather).sum().backward()

    def gathered(ring: Ring) -> None:
        rows = leaves[1][:, :, :1]
        ring_attn(leaves[0], rows, rows, group=ring, **gather).sum().backward()

    return {
        "block diffusion": sent(size, blocks),
        "both sequences, gathered": sent(size, one_masked),
        "entries of 8": sent(size, compressed),
        "overlapping entries of 4": sent(size, lambda ring: compressed(ring, 4)),
        "all rows, gathered": sent(size, gathered),
    }


def test_few_bytes_travel():
    found = travel()
    assert found["block diffusion"] <= 0.5 * found["both sequences, gathered"]  # clean keys alone
    assert found["entries of 8"] < 0.25 * found["all rows, gathered"]
    assert found["overlapping entries of 4"] < 0.6 * found["all rows, gathered"]
    page = (Path(__file__).parents[2] / "docs/guide/parts-of-attention.md").read_text()
    assert all(f"| {number:,} |" in page for number in found.values()), found
