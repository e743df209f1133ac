"""Ring attention at work on one machine: `make demo`, or `python -m examples.demo`.

Four processes share a sequence. The demo compares them with ordinary attention, draws who has
which keys when, counts what is sent and held, and trains a small transformer on real text,
once over the four processes and once in one. It ends with an error if a comparison fails.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import click
import einx
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from examples import pictures
from examples.train_text import Config, Step, train
from ring_attention_pytorch import default_attention, ring_attn, shard_sequence
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.tiles import Mask, needed_distances
from ring_attention_pytorch.launch import started

RANKS = 4
MOST_ERROR = 1e-12  # of attention in float64
MOST_LOSS_DIFFERENCE = 1e-4  # of training in float32
TENSORS = ("out", "dq", "dk", "dv")


# Processes and the screen


def on_ranks(work: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
    """Yield from the generator `work(*args)` on the first of four processes, as it comes.

    An error in any of them is raised here.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["examples.train_text"])
    receiver, sender = context.Pipe(duplex=False)
    with started(_rank, RANKS, sender, work, args, start_method="forkserver") as workers:
        running = True
        while running:
            running = not workers.join(timeout=0.02)
            while receiver.poll():
                yield receiver.recv()


def _rank(rank: int, sender: Connection, work: Callable[..., Iterator[Any]], args: Any) -> None:
    torch.set_num_threads(1)
    for value in work(*args):
        if rank == 0:
            sender.send(value)


class Screen:
    """Where the demo prints: a terminal with colours and movement, or plain text."""

    def __init__(self) -> None:
        terminal = sys.stdout.isatty()
        self.console = _console() if terminal else None
        self.coloured = terminal and "NO_COLOR" not in os.environ
        self.paint = pictures.colour if self.coloured else pictures.plain

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def heading(self, text: str) -> None:
        self.say(f"\n\n{self.style(text, 1)}\n{'─' * len(text)}\n")

    def style(self, text: str, code: int) -> str:
        """With a terminal's attribute: 1 is bold, 31 red, 32 green."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured else text

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self.console is None:
            return self.say(pictures.table(header, rows))
        from rich import box
        from rich.table import Table

        table = Table(*header, box=box.SIMPLE_HEAD, padding=0)
        for row in rows:
            table.add_row(*row, style="red" if "FAIL" in row else "")
        return self.console.print(table)

    def animate(self, frames: Iterable[str], seconds: float = 0.0) -> None:
        """Frame after frame in one place; without a terminal, or rich, only the last."""
        if self.console is None:
            *_, last = frames
            return self.say(last)
        from rich.live import Live
        from rich.text import Text

        with Live(console=self.console, auto_refresh=False) as live:
            for frame in frames:
                live.update(Text.from_ansi(frame), refresh=True)
                time.sleep(seconds)
        return None

    def verdict(self, good: bool, text: str) -> bool:
        word = self.style("PASS", 32) if good else self.style("FAIL", 31)
        self.say(f"{word}: {text}")
        return good


def _console() -> Any | None:
    """rich's, where there is rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


# Equal to regular attention


class Case(NamedTuple):
    """One attention of 4 query heads."""

    layout: str
    causal: bool
    window: int | None
    key_heads: int

    def row(self) -> list[str]:
        mask = mask_name(self.causal, self.window)
        return [self.layout, mask, f"4/{self.key_heads}"]


def mask_name(causal: bool, window: int | None) -> str:
    names = ["causal"] * causal + [f"window {window}"] * (window is not None)
    return ", ".join(names) or "none"


def regular_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """PyTorch's own, in its plain form: all scores at once."""
    with sdpa_kernel(SDPBackend.MATH):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2)


def errors(case: Case, length: int) -> list[float]:
    """Relative errors of out, dq, dk, dv in float64, the largest of all ranks."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, length, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, length, case.key_heads, 16, dtype=torch.float64)
    at = torch.arange(length)
    behind = einx.subtract("i, j -> i j", at, at)
    visible = behind >= 0 if case.causal else torch.ones_like(behind, dtype=torch.bool)
    if case.window is not None:
        visible = visible & (behind.abs() <= case.window)

    whole = [t.requires_grad_() for t in (q, k, v)]
    out = regular_attention(*whole, visible)
    wanted = [out, *torch.autograd.grad(out, whole, dout)]

    shards = [shard_sequence(t.detach(), layout=case.layout).requires_grad_() for t in whole]
    out = ring_attn(*shards, causal=case.causal, window=case.window, layout=case.layout)
    dout = shard_sequence(dout, layout=case.layout)
    found = [out, *torch.autograd.grad(out, shards, dout)]

    wanted = [shard_sequence(t, layout=case.layout) for t in wanted]
    worst = torch.stack([(f - w).norm() / w.norm() for f, w in zip(found, wanted)]).detach()
    worst = worst.nan_to_num(nan=math.inf)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def all_errors(cases: Sequence[Case], length: int) -> Iterator[list[float]]:
    for case in cases:
        yield errors(case, length)


def show_equality(screen: Screen, length: int = 203) -> bool:
    screen.heading(f"1. Ring attention on {RANKS} processes is regular attention")
    screen.say(
        "Relative errors in float64 against PyTorch's scaled_dot_product_attention\n"
        f"of the whole sequence: {length} tokens, which {RANKS} processes can't share evenly.\n"
        "Heads are those of queries and those of keys and values.\n"
    )
    cases = [Case(*c) for c in product(LAYOUTS, (False, True), (None, 40), (4, 2))]
    worst, rows = 0.0, []
    for case, found in zip(cases, on_ranks(all_errors, cases, length), strict=True):
        verdict = "PASS" if max(found) <= MOST_ERROR else "FAIL"
        rows.append([*case.row(), *(f"{e:.1e}" for e in found), verdict])
        worst = max(worst, *found)
    screen.table(["layout", "mask", "heads", *TENSORS, ""], rows)
    text = f"{len(rows)} cases; the worst error is {worst:.1e}; allowed is {MOST_ERROR:.0e}"
    screen.say()
    return screen.verdict(worst <= MOST_ERROR, text)


# Who has which keys when

DRAWN = {
    "contiguous": "one chunk each: simple, but the last rank works most",
    "striped": "token i on rank i mod 4: every block is a triangle",
    "zigzag": "an early chunk and a late one each: all work alike",
}


def show_pictures(screen: Screen, seconds: float = 0.6) -> bool:
    causal = Mask(causal=True)
    screen.heading("2. Who has which keys when, and what is skipped")
    screen.say("A layout says which rank holds which token. 32 tokens from left to right:\n")
    screen.say(pictures.layouts(32, RANKS, screen.paint))
    screen.say(
        "\nQueries stay, keys travel: 0 → 1 → 2 → 3 → 0. Below, a row is a query, with the\n"
        "rank that holds it, and a column a key; the digit is the hop at which they meet.\n"
        "Causal: a query sees no later key.\n"
    )
    screen.say(pictures.score_matrices(16, RANKS, screen.paint))
    screen.say(
        "\nThe same by rank and hop, of 24 tokens. A block has a row for each query of the\n"
        "rank and a column for each key that is there: █ is computed, · is hidden and\n"
        "costs nothing. Skipped keys only pass through. Work is the rank's part of all."
    )
    shown = [(name, causal, why) for name, why in DRAWN.items()]
    window = Mask(causal=True, window=3)
    shown.append(("zigzag", window, "hop 2 has nothing to see and is left out"))
    for layout, visible, why in shown:
        screen.say(f"\n\n{layout}, {mask_name(visible.causal, visible.window)}: {why}\n")
        frames = (
            pictures.hops(layout, 24, RANKS, visible, shown=hop + 1, paint=screen.paint)
            for hop in range(RANKS)
        )
        screen.animate(frames, seconds)
        few, many = (pictures.imbalance(layout, n, RANKS, visible) for n in (24, 8192))
        busiest = f"the busiest rank does {few:.2f} x the average; with 8192 tokens {many:.2f} x"
        screen.say(f"\n        {busiest}")
    return True


# What is sent and held


class Sizes(NamedTuple):
    """Sizes of the attention that is measured, in float32."""

    batch: int = 1
    length: int = 2048
    heads: int = 4
    key_heads: int = 2
    width: int = 32
    bucket: int = 128

    def tensors(self, length: int) -> list[Tensor]:
        torch.manual_seed(0)
        return [
            torch.randn(self.batch, length, h, self.width, requires_grad=True)
            for h in (self.heads, self.key_heads, self.key_heads)
        ]


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel() * t.element_size())
        return result


class SentBytes:
    """Counts the bytes that this process sends from tensor to tensor while in its context."""

    def __enter__(self) -> "SentBytes":
        self.total, self.real = 0, dist.batch_isend_irecv
        dist.batch_isend_irecv = self._count
        return self

    def __exit__(self, *_: Any) -> None:
        dist.batch_isend_irecv = self.real

    def _count(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        sent = [op.tensor for op in ops if op.op is dist.isend]
        self.total += sum(t.numel() * t.element_size() for t in sent)
        return self.real(ops)


class Measured(NamedTuple):
    """Bytes on the rank that had most."""

    forward: int
    backward: int
    scores: int


def measure(
    cases: Sequence[tuple[str, int | None]], sizes: Sizes, kernel: str = "eager"
) -> Iterator[Measured]:
    """Forward and backward of each (layout, window), causal."""
    for layout, window in cases:
        shards = sizes.tensors(sizes.length // RANKS)
        with LargestTensor() as memory:
            with SentBytes() as forward:
                out = ring_attn(
                    *shards, causal=True, window=window, layout=layout, kernel=kernel,
                    bucket_size=sizes.bucket,
                )  # fmt: skip
            with SentBytes() as backward:
                out.sum().backward()
        most = torch.tensor([forward.total, backward.total, memory.largest])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        yield Measured(*most.tolist())


def formula(layout: str, window: int | None, sizes: Sizes) -> Measured:
    """Return the figures that `measure` should find."""
    segments = all_segments(layout, RANKS, sizes.length)
    passes = len(needed_distances(segments, segments, Mask(True, window))) - 1
    block = sizes.batch * sizes.length // RANKS * sizes.key_heads * sizes.width * 4
    scores = sizes.batch * sizes.heads * sizes.bucket * sizes.length // RANKS * 4
    return Measured(passes * 2 * block, passes * 4 * block, scores)


def show_costs(screen: Screen, sizes: Sizes | None = None) -> bool:
    sizes = sizes or Sizes()
    screen.heading("3. What a rank sends, and what it holds")
    screen.say(
        f"b = {sizes.batch} sequence of N = {sizes.length} tokens on P = {RANKS} ranks, "
        f"float32, causal,\nh = {sizes.heads} heads, h_kv = {sizes.key_heads} key heads, "
        f"of d = {sizes.width} numbers.\n\n"
        "A block is a rank's keys and values: 2 · b · N/P · h_kv · d numbers. Forward\n"
        "sends P - 1 of them to the next rank; backward sends them again, and their\n"
        "gradients behind them. A short window saves hops. Bytes that a rank sent:\n"
    )
    cases = list(product(LAYOUTS, (None, 100)))
    rows, good, scores, size = [], True, 0, pictures.size
    for case, found in zip(cases, on_ranks(measure, cases, sizes), strict=True):
        expected = formula(*case, sizes)
        same = found[:2] == expected[:2]
        good, scores = good and same, max(scores, found.scores)
        sent = [size(n) for pair in zip(found[:2], expected) for n in pair]
        window = "none" if case[1] is None else str(case[1])
        rows.append([case[0], window, *sent, "PASS" if same else "FAIL"])
    screen.table(["layout", "window", "forward", "formula", "backward", "formula", ""], rows)
    screen.say("\nThe most scores that are in memory at once, forward and backward:\n")
    good &= _show_scores(screen, sizes, scores)
    screen.say()
    return screen.verdict(good, "what was measured is what the formulas say")


def _show_scores(screen: Screen, sizes: Sizes, ring_scores: int) -> bool:
    with LargestTensor() as memory:
        default_attention(*sizes.tensors(sizes.length), causal=True).sum().backward()
    dense = sizes.batch * sizes.heads * sizes.length**2 * 4
    of_ring = formula("contiguous", None, sizes).scores
    rows = [
        ["one process, regular", "b · h · N · N", dense, memory.largest],
        [f"each of {RANKS} ranks", f"b · h · {sizes.bucket} · N/P", of_ring, ring_scores],
    ]
    screen.table(
        ["", "scores", "formula", "measured", ""],
        [[*row[:2], *map(pictures.size, row[2:]), "PASS" if row[2] == row[3] else "FAIL"]
         for row in rows],
    )  # fmt: skip
    return dense == memory.largest and of_ring == ring_scores


# Training


def show_training(screen: Screen, config: Config | None = None) -> bool:
    config = config or Config(steps=60, length=512)
    screen.heading(f"4. Training over {RANKS} processes is training in one")
    screen.say(
        "A byte-level transformer learns the source code of Python's standard library,\n"
        f"{config.batch} sequences of {config.length} bytes a step. "
        f"Each is spread over {RANKS} processes ({config.layout}),\n"
        f"and gradients are averaged by {config.data_parallel}. Then the same in one process. "
        "Four that share\nthe cores of one machine are no faster; "
        "the point is that losses are equal.\n"
    )
    runs = {f"{RANKS} processes": on_ranks(train, config), "one process": train(config)}
    ring, alone = _follow(screen, runs).values()
    difference = max(abs(a - b) / abs(b) for a, b in zip(ring, alone, strict=True))
    same = screen.verdict(
        difference < MOST_LOSS_DIFFERENCE,
        f"losses differ by at most {difference:.1e} of their value (float32); "
        f"allowed {MOST_LOSS_DIFFERENCE:.0e}",
    )
    fell = f"the loss fell from {ring[0]:.2f} to {ring[-1]:.2f}"
    return screen.verdict(ring[-1] < ring[0], fell) and same


def _follow(screen: Screen, runs: dict[str, Iterator[Step]]) -> dict[str, list[float]]:
    """The losses of one run after another, shown as they come."""
    losses: dict[str, list[float]] = {}

    def frames() -> Iterator[str]:
        for name, steps in runs.items():
            losses[name] = []
            for step in steps:
                losses[name].append(step.loss)
                done, speed = step.number + 1, f"{step.tokens_per_second:,.0f} tokens/s"
                line = f"  {name:<12} step {done:>4}   loss {step.loss:.4f}   {speed}"
                if screen.console is None and (done == 1 or done % 10 == 0):
                    screen.say(line)
                yield f"\n{pictures.curves(losses)}\n\n{line if screen.console else ''}"

    screen.animate(frames())
    return losses


PARTS = {
    "equality": show_equality,
    "pictures": show_pictures,
    "costs": show_costs,
    "training": show_training,
}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Only these.")
def main(parts: tuple[str, ...]) -> None:
    """Show that ring attention is exact, how it works, and what it costs."""
    torch.set_num_threads(1)  # as in each of the processes
    start, screen = time.perf_counter(), Screen()
    try:
        passed = {name: PARTS[name](screen) for name in parts or PARTS}
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    failed = [name for name, good in passed.items() if not good]
    seconds = time.perf_counter() - start
    screen.say("\n")
    what = f"not so: {', '.join(failed)}" if failed else "all of it holds"
    screen.verdict(not failed, f"{what} ({seconds:.0f} s)")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
