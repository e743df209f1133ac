"""Trains a transformer that sees its far past in summary, beside exact ones of the same size.

    torchrun --nproc-per-node 4 examples/train_summaries.py

All are byte-level decoders on the source code of Python's standard library, whose sequences are
spread over all processes, and see the same batches. One sees everything exactly, one only a window,
and one the same window and, before it, one summary for every few tokens. At the end stand the
losses beside what attention costs: keys that a token sees, FLOPs, and bytes that travel.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch

if __name__ == "__main__":  # torchrun puts this folder on the path, not the one above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples import train_text
from examples.pictures import curves
from examples.train_text import Config, is_first, loss_of, own_sequences, world_size
from ring_attention_pytorch import RingTransformer, Summaries
from ring_attention_pytorch.launch import TIMEOUT, torchrun_group

NAMES = ("exact", "window", "summaries")
LAST = 10  # steps whose mean loss is told


def make_model(config: Config, given: Summaries | None, *, ring: bool) -> RingTransformer:
    """The same weights everywhere and in all models; `given` says what is seen in summary."""
    torch.manual_seed(config.seed)
    return RingTransformer(
        num_tokens=256, dim=config.dim, depth=config.depth, heads=config.heads,
        dim_head=config.dim // config.heads, causal=True, max_lookback_seq_len=config.lookback,
        ring_attn=ring, ring_seq_size=-(-config.length // world_size()),
        layout=config.layout if ring else None, attn_summaries=given,
    ).to(config.device)  # fmt: skip


def keys_seen(name: str, length: int, given: Summaries) -> float:
    """How many keys a token sees, on average.

    >>> keys_seen("exact", 8, Summaries(window=0, stride=2))
    4.5
    >>> keys_seen("window", 8, Summaries(window=0, stride=2))
    1.0
    >>> keys_seen("summaries", 4, Summaries(window=0, stride=2))  # 1, 2, 2 and 3
    2.0
    """
    rule, seen = given.rule, 0
    for t in range(length):
        near, cells = min(t, rule.window) + 1, max(rule.row(t), 0)
        if name == "exact":
            seen += t + 1
        elif name == "window" or rule.row(t) < 0:
            seen += near
        else:
            far = cells if rule.span is None else min(cells, rule.span)
            seen += t + 1 - cells * rule.stride + far
    return seen / length


def keys_sent(name: str, length: int, given: Summaries, ranks: int) -> float:
    """At most so many keys does a rank need of others, in layout "zigzag": of two chunks."""
    others = length * (ranks - 1) / ranks
    if name == "exact":
        return others
    border = min(others, 2 * (given.window + given.stride))
    return border + (others / given.stride if name == "summaries" else 0)


def train(config: Config, given: Summaries) -> Iterator[dict[str, float]]:
    """All models on the same batches, over all processes of the default group or this one."""
    ring, whole = world_size() > 1, replace(config, lookback=None)
    kinds = {
        "exact": (whole, None),
        "window": (replace(config, lookback=given.window), None),
        "summaries": (whole, given),
    }
    models = {
        name: train_text.data_parallel(make_model(*kind, ring=ring), config)
        for name, kind in kinds.items()
    }
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        for name, model in models.items()
    }
    for number in range(config.steps):
        losses = {}
        for name, model in models.items():
            loss = loss_of(model, own_sequences(config, number), config)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name] = loss.item()
        yield losses


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=300, help="Steps of training.")
@click.option("--length", default=1024, help="Bytes of a sequence, over all processes.")
@click.option("--batch", default=4, help="Sequences of a step, of all processes together.")
@click.option("--dim", default=64, help="Width of the models.")
@click.option("--depth", default=2, help="Blocks of the models.")
@click.option("--layout", type=click.Choice(["contiguous", "striped", "zigzag"]), default="zigzag")
@click.option("--seed", default=0)
@click.option("--window", default=32, help="Tokens before it that a token sees exactly.")
@click.option("--stride", default=8, help="Tokens that have one summary.")
@click.option("--block", type=int, default=None, help="Tokens that a summary is made of.")
@click.option("--timeout", default=TIMEOUT, help="Seconds that processes wait for one another.")
def main(window: int, stride: int, block: int | None, timeout: float, **options: int | str) -> None:
    """Train models that see the far past exactly, not at all and in summary; draw their losses."""
    config = Config(**options, device="cuda" if train_text.on_gpus() else "cpu")
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    with torchrun_group("nccl" if config.device == "cuda" else "gloo", timeout):
        follow(config, Summaries(window, stride, block))


def follow(config: Config, given: Summaries) -> None:
    """Train all, and print how they do."""
    history: dict[str, list[float]] = {name: [] for name in NAMES}
    for number, losses in enumerate(train(config, given)):
        for name, loss in losses.items():
            history[name].append(loss)
        if is_first() and (number % 10 == 0 or number == config.steps - 1):
            text = "   ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            print(f"step {number:>5}   loss, {text}", flush=True)
    if is_first():
        print(curves(history))
        print(table(history, config, given))


def table(history: dict[str, list[float]], config: Config, given: Summaries) -> str:
    """What each model costs and reaches: attention only, forward, a layer and sequence."""
    ranks = max(world_size(), 4)
    lines = [f"{'':<10} {'loss':>7} {'keys seen':>10} {'MFLOPs':>8} {'KiB to each of':>15} {ranks}"]
    for name in NAMES:
        last = history[name][-LAST:]
        seen = keys_seen(name, config.length, given)
        flops = 4 * config.dim * config.length * seen / 1e6
        sent = keys_sent(name, config.length, given, ranks) * 2 * config.dim * 4 / 1024
        lines.append(
            f"{name:<10} {sum(last) / len(last):>7.4f} {seen:>10.1f} {flops:>8.1f} {sent:>15.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
