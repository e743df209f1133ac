"""Trains a conditionally routed transformer beside a dense one of as many FLOPs.

    torchrun --nproc-per-node 4 examples/train_routed.py

Both are byte-level decoders on the source code of Python's standard library, whose sequences are
spread over all processes. The routed one saves FLOPs in attention and in the feed-forward of most
tokens, and spends them on a heavy feed-forward of the others: as wide as makes both models equal.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch import nn

if __name__ == "__main__":  # torchrun puts this folder on the path, not the one above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples import train_text
from examples.pictures import curves
from examples.train_text import Config, is_first, loss_of, own_sequences, world_size
from ring_attention_pytorch import ConditionalRoutedTransformer
from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from ring_attention_pytorch.launch import TIMEOUT, torchrun_group
from ring_attention_pytorch.progress import show

LIGHT_MULT = 1.0


@dataclass(frozen=True)
class Routed:
    """Options of a routed model beside a `Config`: so many tokens of each window are routed."""

    light_window: int = 64
    heavy_window: int = 64
    queries: int = 8
    keys: int = 8
    feed_forward: int = 16
    eps: float = 4.0


class Losses(NamedTuple):
    """The losses of one step."""

    number: int
    routed: float
    dense: float


def pairs(length: int, window: int | None = None) -> int:
    """Pairs that causal attention looks at."""
    whole = (Segment(0, 1, length),)
    return visible_pairs(tiles(whole, whole, Mask(causal=True, window=window)))


def dense_flops(config: Config) -> float:
    """Count the FLOPs of one sequence's forward through the blocks; a multiply-add is two."""
    n, dim = config.length, config.dim
    projections, feed_forward = 8 * dim * dim, 16 * dim * dim
    return config.depth * (n * (projections + feed_forward) + 4 * dim * pairs(n))


def routed_flops(config: Config, routed: Routed, heavy_mult: float) -> float:
    """Count the routed model's FLOPs: all that run, empty slots and hidden pairs of blocks too."""
    n, dim, windows = config.length, config.dim, -(-config.length // routed.heavy_window)
    light = n * (8 + 4 * LIGHT_MULT) * dim * dim + 4 * dim * pairs(n, routed.light_window)
    turns = windows * (routed.queries + routed.keys)  # queries and keys of all windows by turns
    heavy = 4 * dim * dim * turns + 4 * dim * pairs(turns)
    routers = n * 2 * dim * 3
    feed_forward = windows * routed.feed_forward * 4 * heavy_mult * dim * dim
    return config.depth * (light + heavy + routers + feed_forward)


def equal_width(config: Config, routed: Routed) -> float:
    """The width of the heavy feed-forward, in dims, that makes both models' FLOPs equal."""
    without = routed_flops(config, routed, 0.0)
    width = (dense_flops(config) - without) / (routed_flops(config, routed, 1.0) - without)
    if int(width * config.dim) < 1:
        raise ValueError(
            f"a dense model of length {config.length} has too few FLOPs to route with; "
            "take a longer sequence or shorter windows"
        )
    return int(width * config.dim) / config.dim


def make_routed(config: Config, routed: Routed, *, ring: bool) -> ConditionalRoutedTransformer:
    """Make a model, with the same weights everywhere; with `ring` its sequences are sharded."""
    torch.manual_seed(config.seed)
    heads = dict(
        light_heads=config.heads, light_dim_head=config.dim // config.heads,
        heavy_heads=config.heads, heavy_dim_head=config.dim // config.heads,
    )  # fmt: skip
    return ConditionalRoutedTransformer(
        num_tokens=256, dim=config.dim, depth=config.depth, causal=True,
        num_heavy_attn_tokens_q=routed.queries, num_heavy_attn_tokens_kv=routed.keys,
        num_heavy_ff_tokens=routed.feed_forward, light_window_size=routed.light_window,
        heavy_window_size=routed.heavy_window, ring_attn=ring,
        ring_seq_size=-(-config.length // world_size()), layout=config.layout if ring else None,
        block_kwargs=dict(
            heads, light_ff_mult=LIGHT_MULT, heavy_ff_mult=equal_width(config, routed),
            router_kwargs=dict(eps=routed.eps), use_null_q_tokens=False,
        ),
    ).to(config.device)  # fmt: skip


def train(config: Config, routed: Routed) -> Iterator[Losses]:
    """Both models on the same batches, over all processes of the default group or this one."""
    ring = world_size() > 1
    models: list[nn.Module] = [
        train_text.data_parallel(model, config)
        for model in (
            make_routed(config, routed, ring=ring), train_text.make_model(config, ring=ring)
        )
    ]  # fmt: skip
    optimizers = [torch.optim.AdamW(m.parameters(), lr=config.learning_rate) for m in models]
    for number in range(config.steps):
        losses = []
        for model, optimizer in zip(models, optimizers):
            loss = loss_of(model, own_sequences(config, number), config)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield Losses(number, *losses)


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=200, help="Steps of training.")
@click.option("--length", default=1024, help="Bytes of a sequence, over all processes.")
@click.option("--batch", default=4, help="Sequences of a step, of all processes together.")
@click.option("--dim", default=64, help="Width of both models.")
@click.option("--depth", default=2, help="Blocks of both models.")
@click.option("--layout", type=click.Choice(["contiguous", "striped", "zigzag"]), default="zigzag")
@click.option("--seed", default=0)
@click.option("--window", default=64, help="Of the light branch, and by which tokens are routed.")
@click.option("--timeout", default=TIMEOUT, help="Seconds that processes wait for one another.")
def main(window: int, timeout: float, **options: int | str) -> None:
    """Train a routed and a dense byte-level transformer of as many FLOPs, and draw both losses."""
    config = Config(**options, device="cuda" if train_text.on_gpus() else "cpu")
    share = dict(queries=window // 8, keys=window // 8, feed_forward=window // 4)
    routed = Routed(light_window=window, heavy_window=window, **share)
    show()
    with torchrun_group("nccl" if config.device == "cuda" else "gloo", timeout):
        follow(replace(config, data_parallel="ddp"), routed)


def follow(config: Config, routed: Routed) -> None:
    """Train both, and print how they do."""
    ours, dense = routed_flops(config, routed, equal_width(config, routed)), dense_flops(config)
    if is_first():
        print(f"MFLOPs a sequence: routed {ours / 1e6:,.1f}, dense {dense / 1e6:,.1f}")
    history: dict[str, list[float]] = {"routed": [], "dense": []}
    for step in train(config, routed):
        history["routed"].append(step.routed)
        history["dense"].append(step.dense)
        if is_first() and (step.number % 10 == 0 or step.number == config.steps - 1):
            text = f"loss, routed {step.routed:.4f}   dense {step.dense:.4f}"
            print(f"step {step.number:>5}   {text}", flush=True)
    if is_first():
        print(curves(history))


if __name__ == "__main__":
    main()
