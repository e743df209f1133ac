"""Trains a transformer that sees its far past in summary, beside exact ones of the same size.

    torchrun --nproc-per-node 4 examples/train_summaries.py

All are byte-level decoders on the source code of Python's standard library, whose sequences are
spread over all processes, and see the same batches. One sees everything exactly, one only a window,
and one the same window and, before it, one summary for every few tokens. At the end stand the
losses beside what training costs: keys that a token sees, FLOPs, bytes that travel, seconds. They
are of text that is not trained on.

With `--equal-flops` the cheaper models train for more steps, until each has spent as many FLOPs as
the exact one. `--models` trains some of them only, and `--history FILE` appends what is measured.
Of such files this draws losses against steps, FLOPs, bytes and seconds, and tells how they are
where all models have spent the same:

    python examples/draw_summaries.py FILE ... curves.svg
"""

import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import einx
import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":  # torchrun puts this folder on the path, not the one above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples import train_text
from examples.pictures import curves
from examples.train_text import Config, is_first, loss_of, world_size
from ring_attention_pytorch import RingPlan, RingTransformer, Summaries
from ring_attention_pytorch.launch import TIMEOUT, torchrun_group
from ring_attention_pytorch.progress import show

NAMES = ("exact", "window", "summaries")
TESTS = 20  # times that the loss is measured on text that is not trained on
TEST_BATCHES = 4


def make_model(config: Config, given: Summaries | None, *, ring: bool) -> RingTransformer:
    """Make a model, with the same weights in all of them; `given` says what is seen in summary."""
    torch.manual_seed(config.seed)
    return RingTransformer(
        num_tokens=256, dim=config.dim, depth=config.depth, heads=config.heads,
        dim_head=config.dim // config.heads, causal=True, max_lookback_seq_len=config.lookback,
        ring_attn=ring, ring_seq_size=-(-config.length // world_size()),
        layout=config.layout if ring else None, attn_summaries=given,
    ).to(config.device)  # fmt: skip


@cache
def text() -> tuple[Tensor, Tensor]:
    """Python's standard library as bytes: to train on, and every twentieth file to test on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [f for f in sorted(folder.rglob("*.py")) if "site-packages" not in f.parts]
    parts: tuple[list[bytes], list[bytes]] = [], []
    for number, file in enumerate(files):
        parts[number % 20 == 0].append(file.read_bytes())
    trained, tested = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return trained, tested


def own_sequences(config: Config, number: int, *, tested: bool = False) -> Tensor:
    """This process' share of a batch, ids `[b, length + 1]`; drawn alike on all processes."""
    if config.batch % world_size():
        raise ValueError(f"batch must be a multiple of {world_size()}, got {config.batch}")
    source = text()[tested]
    draw = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
    starts = torch.randint(len(source) - config.length, (config.batch,), generator=draw)
    ids = source[einx.add("b, n -> b n", starts, torch.arange(config.length + 1))].long()
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ids.chunk(world_size())[rank].to(config.device)


def keys_seen(name: str, length: int, given: Summaries) -> float:
    """Return how many keys a token sees, on average.

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


def bytes_sent(name: str, config: Config, given: Summaries) -> float:
    """Bytes of keys and values that a rank of four or more gets, of a sequence and layer."""
    itemsize = train_text.DTYPES[config.dtype].itemsize
    return keys_sent(name, config.length, given, at_least_four()) * 2 * config.dim * itemsize


def at_least_four() -> int:
    """As if there were four processes, if there are fewer."""
    return max(world_size(), 4)


def flops(name: str, config: Config, given: Summaries) -> float:
    """FLOPs of a step: of attention forward and 2.5 times that backward, of the rest and twice."""
    weights = config.depth * 12 * config.dim**2 + 256 * config.dim
    scores = config.depth * config.dim * keys_seen(name, config.length, given)
    return config.batch * config.length * (3 * 2 * weights + 3.5 * 4 * scores)


@dataclass
class History:
    """The losses and figures of one model."""

    name: str
    flops: float  # of a step
    sent: float  # bytes that each of several ranks gets in a step, forward
    steps: int  # to train for
    seconds: float = 0.0  # so far, of training alone
    points: list[tuple[int, float, float]] = field(default_factory=list)  # steps, seconds, loss

    @property
    def loss(self) -> float:
        """The last that was measured."""
        return self.points[-1][2]


class Pupil:
    """A model that is trained."""

    def __init__(self, name: str, config: Config, given: Summaries, steps: int) -> None:
        self.config = replace(config, lookback=given.window if name == "window" else None)
        model = make_model(
            self.config, given if name == "summaries" else None, ring=world_size() > 1
        )
        self.model = train_text.data_parallel(model, config)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
        sent = bytes_sent(name, config, given) * config.depth * config.batch
        self.history = History(name, flops(name, config, given), sent, steps)
        self.plans: Sequence[RingPlan] | None = None

    def loss(self, ids: Tensor) -> Tensor:
        """The loss of a batch; in one process by plans that are made once, for all are alike."""
        if world_size() > 1:
            return loss_of(self.model, ids, self.config)
        dtype = train_text.DTYPES[self.config.dtype]
        with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype == torch.bfloat16):
            if self.plans is None:
                self.plans = self.model.plans(ids[:, :-1])
            return self.model(ids[:, :-1], labels=ids[:, 1:], plans=self.plans)

    def step(self, number: int) -> None:
        """Train on a batch, and test now and then."""
        history = self.history
        if number % max(1, history.steps // TESTS) == 0:
            self.test(number)
        start = time.perf_counter()
        loss = self.loss(own_sequences(self.config, number))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss.item()  # waits for the GPU
        history.seconds += time.perf_counter() - start
        if number == history.steps - 1:
            self.test(number + 1)

    @torch.no_grad()
    def test(self, done: int) -> None:
        """Measure the loss on text that is not trained on, always the same."""
        losses = [
            self.loss(own_sequences(self.config, i, tested=True)).item()
            for i in range(TEST_BATCHES)
        ]
        self.history.points.append((done, self.history.seconds, sum(losses) / len(losses)))


def train(
    config: Config, given: Summaries, names: tuple[str, ...] = NAMES, equal_flops: bool = False
) -> Iterator[list[History]]:
    """All models on the same batches, over all processes of the default group or this one."""
    most, pupils = flops("exact", config, given), []
    for name in names:
        more = most / flops(name, config, given) if equal_flops else 1
        pupils.append(Pupil(name, config, given, round(config.steps * more)))
    for number in range(max(pupil.history.steps for pupil in pupils)):
        for pupil in pupils:
            if number < pupil.history.steps:
                pupil.step(number)
        yield [pupil.history for pupil in pupils]


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=300, help="Steps of training, of the exact model.")
@click.option("--length", default=1024, help="Bytes of a sequence, over all processes.")
@click.option("--batch", default=4, help="Sequences of a step, of all processes together.")
@click.option("--dim", default=64, help="Width of the models.")
@click.option("--depth", default=2, help="Blocks of the models.")
@click.option("--layout", type=click.Choice(["contiguous", "striped", "zigzag"]), default="zigzag")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--learning-rate", default=3e-3)
@click.option("--seed", default=0)
@click.option("--window", default=32, help="Tokens before it that a token sees exactly.")
@click.option("--stride", default=8, help="Tokens that have one summary.")
@click.option("--block", type=int, default=None, help="Tokens that a summary is made of.")
@click.option("--models", "names", multiple=True, type=click.Choice(NAMES), default=NAMES)
@click.option("--equal-flops", is_flag=True, help="Cheaper models train for more steps.")
@click.option("--history", type=click.Path(dir_okay=False), help="Append what was measured.")
@click.option("--timeout", default=TIMEOUT, help="Seconds that processes wait for one another.")
def main(
    window: int, stride: int, block: int | None, names: tuple[str, ...], equal_flops: bool,
    history: str | None, timeout: float, **options: Any,
) -> None:  # fmt: skip
    """Train models that see the far past exactly, not at all and in summary; draw their losses."""
    config = Config(**options, device="cuda" if train_text.on_gpus() else "cpu")
    given = Summaries(window, stride, block)
    show()
    with torchrun_group("nccl" if config.device == "cuda" else "gloo", timeout):
        follow(config, given, names, equal_flops, history)


def follow(
    config: Config, given: Summaries, names: tuple[str, ...], equal_flops: bool, file: str | None
) -> None:
    """Train all, print how they do, and append what is measured to a file."""
    found: list[History] = []
    known: dict[str, int] = {}
    for number, found in enumerate(train(config, given, names, equal_flops)):
        if file is not None and is_first():
            write(found, known, file)
        if is_first() and (number % 10 == 0 or number == config.steps - 1):
            text = "   ".join(f"{each.name} {each.loss:.4f}" for each in found)
            print(f"step {number:>5}   loss, {text}", flush=True)
    if is_first():
        print(curves({each.name: [loss for *_, loss in each.points] for each in found}))
        print(table(found, config, given))


def write(found: list[History], known: dict[str, int], file: str) -> None:
    """Append what was measured since it was known, a line of JSON each."""
    with open(file, "a") as lines:
        for each in found:
            for steps, seconds, loss in each.points[known.get(each.name, 0) :]:
                point = {"name": each.name, "steps": steps, "flops": each.flops * steps}
                point |= {"bytes": each.sent * steps, "seconds": round(seconds, 3)}
                point |= {"loss": round(loss, 4)}
                lines.write(json.dumps(point) + "\n")
            known[each.name] = len(each.points)


def table(found: list[History], config: Config, given: Summaries) -> str:
    """List what each model costs and reaches; bytes are of a layer and sequence, forward."""
    ranks = at_least_four()
    head = f"{'loss':>7} {'keys seen':>10} {'TFLOPs':>8} {'KiB to each of':>15} {ranks}"
    lines = [f"{'':<10} {head} {'steps':>7} {'seconds':>8}"]
    for each in found:
        seen = keys_seen(each.name, config.length, given)
        sent = bytes_sent(each.name, config, given) / 1024
        spent = each.flops * each.steps / 1e12
        lines.append(
            f"{each.name:<10} {each.loss:>7.4f} {seen:>10.1f} {spent:>8.2f} {sent:>15.0f}   "
            f"{each.steps:>7} {each.seconds:>8.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
