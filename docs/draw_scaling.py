"""Writes docs/scaling.md and docs/scaling.svg: what the cost model predicts for many GPUs.

python docs/draw_scaling.py
"""

import json
from itertools import product
from pathlib import Path

from ring_attention_pytorch import svg
from ring_attention_pytorch.comm.transports import owners_at_once
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.schedule.cost import (
    H200,
    Hardware,
    likely_gather,
    predict,
    swap_seconds,
)
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from ring_attention_pytorch.schedule.relays import by_relays
from ring_attention_pytorch.schedule.steps import ring
from ring_attention_pytorch.svg import COLOURS, FAINT, box, line, text

HERE = Path(__file__).parent
JOB = KVShape(batch=1, heads=32, key_heads=8, d=128, d_v=128, itemsize=2)
RANKS = (64, 256, 1024, 4096)
TOKENS = (2048, 8192, 32768)  # of one GPU
DOMAINS = (8, 72)
ROOM = 8 << 30
WAYS = {  # name -> transport, Ulysses degree
    "ring": ("ring", 1),
    "gather": ("gather", 1),
    "Ulysses 8, ring": ("ring", 8),
    "Ulysses 8, gather": ("gather", 8),
}

TWO = (0,) * 8 + (1,) * 8  # machines of 8 GPUs
NETWORKS = (25, 50)  # GB/s for each GPU, of which the usable share is as of 400 Gb/s
OVER_TWO = ("ring", "gather", "gather by relays", "Ulysses 8, gather")

RESULTS = HERE.parent / "benchmarks" / "results" / "ring.json"


def measured() -> dict[tuple[str, int, int], float]:
    """Return the share of the kernel alone, by transport, GPUs and tokens of each.

    Causal, cuDNN's kernel, forward and backward, up to 16384 tokens in a CUDA graph.
    """
    wanted = {"mask": "causal", "kernel": "sdpa-cudnn", "pass": "both"}
    found: dict[tuple[str, int, int], float] = {}
    for row in json.loads(RESULTS.read_text()):
        tokens, gpus, name = row["tokens"], row["gpus"], row["subject"]
        mode = "graph" if tokens <= 16384 else "one by one"
        fits = wanted.items() <= row.items() and row["mode"] == mode and tokens <= 32768
        fits = fits and "load" not in row
        if fits and gpus in (4, 8) and name in ("gather", "ring"):
            found.setdefault((name, gpus, tokens), row["share"])  # the first run in the file
    return dict(sorted(found.items()))


def share(way: tuple[str, int], ranks: int, tokens: int, machine: Hardware) -> tuple[float, float]:
    """Predicted share of the kernel alone, and seconds, of a rank in the middle."""
    transport, degree = way
    size = ranks // degree
    everyone = all_segments("zigzag", size, ranks * tokens)
    blocks = Workload(everyone, everyone, Mask(causal=True))
    job = JOB._replace(heads=JOB.heads // degree, key_heads=-(-JOB.key_heads // degree))
    inner = machine._replace(domain=max(1, machine.domain // degree))
    if transport == "ring":
        schedule = ring(blocks)
    else:
        at_once = owners_at_once(ROOM, blocks, job)
        schedule = likely_gather(blocks, job, at_once, inner)
    cost = predict(schedule, size // 2, job, inner)
    seconds = cost.forward + cost.backward + swap_seconds(tokens, JOB, degree, machine)
    return cost.ideal / seconds, seconds


def checked() -> list[tuple[str, int, int, float, float]]:
    """Transport, GPUs, tokens of each, measured share, predicted share of the slowest rank."""
    found = []
    for (transport, ranks, tokens), share_measured in measured().items():
        everyone = all_segments("zigzag", ranks, ranks * tokens)
        blocks = Workload(everyone, everyone, Mask(causal=True))
        schedule = ring(blocks) if transport == "ring" else likely_gather(blocks, JOB, ranks - 1)
        predicted = min(predict(schedule, rank, JOB).share for rank in range(ranks))
        found.append((transport, ranks, tokens, share_measured, predicted))
    return found


def shares() -> dict[tuple[int, int, int], list[tuple[float, float]]]:
    """By domain, tokens and ranks: what each way reaches."""
    return {
        (domain, tokens, ranks): [
            share(way, ranks, tokens, H200._replace(domain=domain)) for way in WAYS.values()
        ]
        for domain in DOMAINS
        for tokens in TOKENS
        for ranks in RANKS
    }


def over_two(name: str, tokens: int, key_heads: int, network: int) -> float:
    """Predicted share of the kernel alone, of the slowest rank on two machines of 8."""
    degree = 8 if name.startswith("Ulysses") else 1
    size, heads = len(TWO) // degree, JOB._replace(key_heads=key_heads)
    everyone = all_segments("zigzag", size, len(TWO) * tokens)
    blocks = Workload(everyone, everyone, Mask(causal=True))
    job = heads._replace(heads=JOB.heads // degree, key_heads=-(-key_heads // degree))
    machine = H200._replace(network=0.9e9 * network).every(degree)
    at_once, relays = owners_at_once(ROOM, blocks, job), ()
    if name == "ring":
        schedule = ring(blocks)
    elif name == "gather by relays":
        schedule, relays = by_relays(blocks, TWO, at_once), TWO
    else:
        schedule = likely_gather(blocks, job, at_once, machine)
    costs = [predict(schedule, rank, job, machine, relays) for rank in range(size)]
    swaps = swap_seconds(tokens, heads, degree, H200)
    return min(cost.ideal / (cost.forward + cost.backward + swaps) for cost in costs)


def table_of_two() -> list[str]:
    """The rows of two machines: tokens, key heads and networks."""
    head = ["tokens a GPU", "key heads", "network, GB/s", *OVER_TWO]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for tokens, key_heads, network in product((2048, 4096, 8192), (8, 2), NETWORKS):
        found = [f"{over_two(name, tokens, key_heads, network):.0%}" for name in OVER_TWO]
        lines.append(f"| {tokens} | {key_heads} | {network} | {' | '.join(found)} |")
    return lines


def length(tokens: int) -> str:
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


def page(found: dict[tuple[int, int, int], list[tuple[float, float]]]) -> str:
    lines = [PREFACE, "| transport | GPUs | tokens a GPU | measured | predicted |"]
    lines += ["| --- " * 5 + "|"]
    lines += [f"| {t} | {r} | {n} | {m:.0%} | {p:.0%} |" for t, r, n, m, p in checked()]
    lines += ["", PREDICTIONS]
    for domain in DOMAINS:
        lines += [f"\n### NVLink domains of {domain}\n"]
        head = ["tokens a GPU", "GPUs", "sequence", "kernel alone", *WAYS]
        lines += [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
        for tokens in TOKENS:
            for ranks in RANKS:
                ways = found[domain, tokens, ranks]
                ideal = ways[0][0] * ways[0][1]
                cells = [str(tokens), str(ranks), length(tokens * ranks), f"{ideal:.3g} s"]
                cells += [f"{part:.0%}" for part, _ in ways]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", OF_TWO, *table_of_two()]) + "\n"


PREFACE = """\
# How it would scale

Predictions of the cost model for up to 4096 GPUs, and a comparison of the model with measurements
on four and eight. **Everything about more than 8 GPUs, and about any network, is a prediction**:
none of it was measured.

`docs/draw_scaling.py` writes this page from `ring_attention_pytorch/schedule/cost.py`.

The model adds up, for one rank: the kernel's FLOPs at its measured speed, 0.1 ms for each kernel
call (0.04 if all calls of a gather overlap), the traffic of merging, and the part of the
transfers that compute does not hide. Its speeds were measured on H200s in one NVLink domain:
cuDNN at 600 / 525 TF/s, copies by copy engine at 350 GB/s, NCCL send/recv hops (49 GB/s for 8 MB
to 320 GB/s for 512 MB), heads swapped for sequence at 280 GB/s. The network is assumed to have
400 Gb/s for each GPU, 45 GB/s of it usable, and no other traffic.

## Comparison with measurements

Share of the same kernel alone on one GPU over the whole sequence, forward and backward; four
H200, eight H200 of an earlier day, bf16, 32 query and 8 key heads of 128, causal, zigzag, with
cuDNN's kernel, up to 16k tokens in a CUDA graph (`benchmarks/results/ring.json`).
"""

PREDICTIONS = """\
Without a graph, 2k tokens a GPU are limited by Python's launches, which this model does not
include: there a gather measures 49 to 55 %, a ring 10 to 16 %, depending on the host.

## Predictions

Share of the kernel alone, for the same shapes, with 8 GiB of memory for other ranks' keys and
gradients. *Kernel alone* is the kernel's time for forward and backward without anything else.
Under Ulysses 8, eight neighbours swap heads for sequence, so an eighth of the ranks exchange
keys, each for an eighth of the heads: a network carries an eighth of the bytes.

From 32k tokens a GPU on, everything is hidden, with any transport: compute grows with the square
of a block's tokens, bytes linearly. At 2k the network decides: only swapping heads for sequence
inside a domain keeps the kernel busy, because an eighth of the bytes leave the domain. The model
does not include congestion, stragglers or failures.

![share of the kernel alone](scaling.svg)"""


OF_TWO = """\
### Two machines of 8

The same share, of the slowest of 16 GPUs, over networks of 25 and 50 GB/s for each GPU, 90 % of it
usable. By relays each key crosses once, and is passed on by messages inside a machine while the
next keys cross ([machines](guide/machines.md)). With 2 key heads, `ulysses=8` sends four times as
much. Messages inside a machine, not the network, limit relays here: at 2k tokens they are small,
and NCCL needs 0.1 ms for each. The other columns are too good: inside a machine they count copies
out of shared memory, and a ring over several machines sends messages there, too.
"""


def drawing(found: dict[tuple[int, int, int], list[tuple[float, float]]]) -> str:
    """A panel for each domain and number of tokens: share over GPUs, a line for each way."""
    wide, high, left, top = 230, 150, 46, 30
    parts = []
    for row, domain in enumerate(DOMAINS):
        for column, tokens in enumerate(TOKENS):
            x0, y0 = left + column * (wide + 40), top + row * (high + 60)
            parts += _panel(
                x0, y0, wide, high, f"domains of {domain}, {length(tokens)} tokens a GPU"
            )
            for way, colour in enumerate(COLOURS[: len(WAYS)]):
                points = [
                    (x0 + wide * i / (len(RANKS) - 1),
                     y0 + high * (1 - found[domain, tokens, ranks][way][0]))
                    for i, ranks in enumerate(RANKS)
                ]  # fmt: skip
                parts.append(line(points, colour))
    bottom = top + 2 * (high + 60)
    for i, (name, colour) in enumerate(zip(WAYS, COLOURS)):
        parts.append(box(left + i * 180, bottom, 12, 12, colour))
        parts.append(text(left + 18 + i * 180, bottom + 11, name))
    return svg.page(left + 3 * (wide + 40), bottom + 30, *parts)


def _panel(x: float, y: float, wide: float, high: float, title: str) -> list[str]:
    parts = [text(x, y - 10, title)]
    for share in (0.0, 0.5, 1.0):
        at = y + high * (1 - share)
        parts.append(line([(x, at), (x + wide, at)], FAINT, width=1))
        parts.append(text(x - 6, at + 4, f"{share:.0%}", anchor="end"))
    for i, ranks in enumerate(RANKS):
        at = x + wide * i / (len(RANKS) - 1)
        parts.append(text(at, y + high + 16, str(ranks), anchor="middle"))
    return parts


if __name__ == "__main__":
    everything = shares()
    (HERE / "scaling.md").write_text(page(everything))
    (HERE / "scaling.svg").write_text(drawing(everything))
