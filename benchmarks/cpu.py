"""Compare CPU time of causal ring attention, forward and backward, with one process' SDPA.

    python -m benchmarks cpu --save
    python -m benchmarks cpu --length 2048 --repeats 3

Every process computes with one thread. CPU time is user and system time of whole processes,
gloo's threads included, summed over the ranks. In every round all subjects take their turn,
and a subject's ratio is to the SDPA of the same round, so that a machine which slows down
slows both. Figures are medians of rounds. "compute alone" is the same code with a ring that hands
every message back unsent. "work" is visible pairs of each rank, in millions. Bytes are counted
where `torch.distributed` is called; live bytes are those of all tensors that Python could see,
inputs and gradients included, without what a kernel allocates inside of itself. Errors are the
worst rank's, relative to dense attention in float64, of 256 tokens.

Peers are looked for in the folder `--peers`, which comes first on their processes' path:

    pip install --no-deps --target DIR ring-attention-pytorch==0.5.20 jaxtyping wadler-lindig \\
        axolotl-ringmaster==0.2.7

They run what they have for the CPU: ring-attention-pytorch its einsum in buckets of 512,
axolotl-ringmaster its fallback of explicit softmax (its own kernels need CUDA).
"""

import multiprocessing as mp
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.cpu_work import (
    BATCH,
    HEADS,
    NAMES,
    ONE,
    D,
    Failed,
    Ranks,
    cpu_time,
    errors,
    once,
    sent_and_live,
)
from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run, failed, named_errors
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

LAYOUTS = ("zigzag", "striped", "contiguous")
TARGETS = {"zigzag": 1.25, "striped": 1.50}
PEERS = (
    "ring-attention-pytorch 0.5.20, contiguous",
    "ring-attention-pytorch 0.5.20, striped",
    "axolotl-ringmaster 0.2.7, p2p",
    "axolotl-ringmaster 0.2.7, distflash",
)
TOKENS = 256  # of which errors are measured
Rounds = list[list[tuple[float, float]]]  # CPU seconds and the system's part, a rank, a round


def time_all(
    names: dict[str, Row], ranks: int, length: int, repeats: int
) -> dict[str, Rounds | str]:
    """Time each subject in every round, or say why not."""
    pools, rounds = {}, {}
    for name, options in names.items():
        say(f"starting {name}")
        try:
            pools[name] = Ranks(cpu_time, name, 1 if name == ONE else ranks, length, **options)
            rounds[name] = []
        except Failed as error:
            rounds[name] = str(error)
    for i in range(repeats):
        for name in list(pools):
            say(f"round {i + 1} of {repeats}: {name}")
            try:
                rounds[name].append(pools[name].ask())
            except Failed as error:
                rounds[name] = str(error)
                pools.pop(name).stop()
    for pool in pools.values():
        pool.stop()
    return rounds


def time_rows(about: Row, rounds: dict[str, Rounds | str]) -> Iterator[Row]:
    """Make a row of each subject's times."""
    totals = {
        name: [sum(seconds for seconds, _ in answers) for answers in found]
        for name, found in rounds.items()
        if not isinstance(found, str)
    }
    for name, found in rounds.items():
        row = {**about, "subject": name, "pass": "both"}
        if isinstance(found, str):
            yield from failed(row, found)
            continue
        ratios = [own / one for own, one in zip(totals[name], totals[ONE])]
        row["cpu_seconds"] = round(median(totals[name]), 2)
        row["system_seconds"] = round(median(sum(part for _, part in a) for a in found), 2)
        row["relative"] = round(median(ratios), 2)
        row["least"], row["most"] = round(min(ratios), 2), round(max(ratios), 2)
        row["slowest_over_mean"] = round(median(map(uneven, found)), 2)
        yield row | ({"target": TARGETS[name]} if name in TARGETS else {})


def uneven(answers: list[tuple[float, float]]) -> float:
    """Return the slowest rank's time over the mean.

    >>> uneven([(1.0, 0.1), (3.0, 0.1)])
    1.5
    """
    each = [seconds for seconds, _ in answers]
    return max(each) * len(each) / sum(each)


def work_rows(about: Row, ranks: int, length: int) -> Iterator[Row]:
    """Count visible pairs of every rank, and their balance."""
    for layout in LAYOUTS:
        held = all_segments(layout, ranks, length)
        pairs = [sum(visible_pairs(tiles(q, k, Mask(causal=True))) for k in held) for q in held]
        assert sum(pairs) == length * (length + 1) // 2
        most = max(pairs) * ranks / sum(pairs)
        yield about | {
            "subject": f"work of {layout}",
            "million_pairs": [round(count / 1e6, 2) for count in pairs],
            "slowest_over_mean": round(most, 4),
        }


def memory_rows(about: Row, ranks: int, length: int) -> Iterator[Row]:
    """Count bytes sent by a rank, and live at its peak, for rings that share one length."""
    first = None
    for size in sorted({1, 2, ranks, 2 * ranks}):
        say(f"bytes of {size} ranks")
        sent, live = zip(*once(sent_and_live, "zigzag", size, length))
        # size - 1 messages of keys forward, of keys backward and of gradients, all in float32
        shard = BATCH * (length // size) * HEADS * D * 4
        first = first or max(live)
        yield about | {
            "ranks": size,
            "tokens": length // size,
            "subject": "bytes of zigzag",
            "bytes_sent_by_formula": 2 * shard * (3 * (size - 1)),
            "bytes_sent": max(sent),
            "peak_mib": round(max(live) / 2**20, 1),
            "peak_in_shards_of_q": round(max(live) / shard, 1),
            "peak_times_ranks": round(max(live) * size / first, 2),
        }


def all_errors(names: dict[str, Row], ranks: int) -> dict[str, Row]:
    """Find the worst rank's errors of every subject; or say why not."""
    found = {}
    for name, options in names.items():
        say(f"errors of {name}")
        try:
            answers = once(errors, name, 1 if name == ONE else ranks, TOKENS, **options)
            worst = [max(each) for each in zip(*answers)]
            found[name] = {"errors": named_errors(NAMES, worst)}
        except Failed as error:
            found[name] = {"failed": str(error)}
    return found


def say(what: str) -> None:
    """Show on one line of the terminal what is done now."""
    print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def hardware() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {mp.cpu_count()} cores"


def subjects(peers: str | None) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the options of all whose errors are told, and of all that are timed, by name."""
    checked: dict[str, Row] = {name: {} for name in (ONE, *LAYOUTS)}
    if peers is not None:
        checked |= {name: {"peers": peers} for name in PEERS}
    alone: dict[str, Row] = {f"{layout}, compute alone": {} for layout in LAYOUTS}
    return checked, checked | alone


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser("cpu", __doc__, save="cpu")
    options.add_argument("--length", type=int, default=8192, help="tokens of the whole sequence")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--peers", metavar="DIR", help="folder of other libraries")
    asked = options.parse_args(argv)
    ranks, length = asked.ranks, asked.length
    if length % (2 * ranks):
        options.error("--length must be a multiple of twice --ranks")
    about: dict[str, Any] = {"ranks": ranks, "tokens": length // ranks, "mask": "causal"}
    kinds = {"heads": [HEADS, HEADS], "head_dim": D, "dtype": "float32"}
    checked, timed = subjects(asked.peers)
    run = Run("cpu", argv, hardware(), asked.save)
    found = all_errors(checked, ranks)
    rounds = time_all(timed, ranks, length, asked.repeats)
    say("")
    times = time_rows(about | kinds, rounds)
    run.add(row | found.get(row["subject"], {}) for row in times)
    run.add(work_rows(about, ranks, length), part="work of each rank")
    run.add(memory_rows(about, ranks, length), part="bytes of each rank")
    run.finish()
