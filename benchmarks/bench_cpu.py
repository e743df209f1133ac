"""CPU time of causal ring attention, forward and backward, against one process' SDPA.

    python -m benchmarks.bench_cpu --save
    python -m benchmarks.bench_cpu --length 2048 --repeats 3

Every process computes with one thread. CPU time is user and system time of whole processes,
gloo's threads included, summed over the ranks. In every round all subjects take their turn,
and a subject's ratio is to the SDPA of the same round, so that a machine which slows down
slows both. Bytes are counted where `torch.distributed` is called; live bytes are those of all
tensors that Python could see, inputs and gradients included, without what a kernel allocates
inside of itself. Errors are the worst rank's, relative to dense attention in float64.

Peers are looked for in the folder `--peers`, which comes first on their processes' path:

    pip install --no-deps --target DIR ring-attention-pytorch==0.5.20 jaxtyping wadler-lindig \\
        axolotl-ringmaster==0.2.7
"""

import datetime
import multiprocessing as mp
import platform
import statistics
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.cpu_work import (
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

TARGETS = {"zigzag": 1.25, "striped": 1.50}
PEERS = (
    "ring-attention-pytorch 0.5.20, contiguous",
    "ring-attention-pytorch 0.5.20, striped",
    "axolotl-ringmaster 0.2.7, p2p",
    "axolotl-ringmaster 0.2.7, distflash",
)
PEERS_NOTE = (
    " The peers run what they have for the CPU: ring-attention-pytorch its einsum in buckets of "
    "512, axolotl-ringmaster its fallback of explicit softmax (its own kernels need CUDA)."
)


def time_all(names: dict[str, dict], ranks: int, length: int, repeats: int) -> dict[str, Any]:
    """Of each subject [(CPU seconds, system's part) of every rank] per round, or why not."""
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


def time_rows(rounds: dict[str, Any], found: dict[str, str]) -> tuple[list[list[str]], dict]:
    """The rows of the table of times, and each subject's median ratio."""
    totals = {
        name: [sum(seconds for seconds, _ in answers) for answers in result]
        for name, result in rounds.items()
        if not isinstance(result, str)
    }
    rows, ratios = [], {}
    for name, result in rounds.items():
        if name not in totals:
            rows.append([name, f"failed: {result}", *[""] * 4, found.get(name, "")])
            continue
        all_ratios = [own / one for own, one in zip(totals[name], totals[ONE])]
        ratios[name] = statistics.median(all_ratios)
        system = statistics.median(sum(part for _, part in answers) for answers in result)
        uneven = statistics.median(
            max(a)[0] * len(a) / sum(seconds for seconds, _ in a) for a in result
        )
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        rows.append([
            name, f"{statistics.median(totals[name]):.2f}", f"{system:.2f}",
            f"**{ratios[name]:.2f}** ({min(all_ratios):.2f}-{max(all_ratios):.2f})",
            target, f"{uneven:.2f}", found.get(name, ""),
        ])  # fmt: skip
    return rows, ratios


def work_rows(ranks: int, length: int) -> list[list[str]]:
    """Visible pairs of every rank, and their balance."""
    from ring_attention_pytorch.geometry.layouts import all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

    rows = []
    for layout in ("contiguous", "striped", "zigzag"):
        held = all_segments(layout, ranks, length)
        pairs = [sum(visible_pairs(tiles(q, k, Mask(causal=True))) for k in held) for q in held]
        assert sum(pairs) == length * (length + 1) // 2
        shown = ", ".join(f"{p / 1e6:.2f}" for p in pairs)
        rows.append([layout, shown, f"{max(pairs) * ranks / sum(pairs):.4f}"])
    return rows


def memory_rows(ranks: int, length: int) -> list[list[str]]:
    """Bytes sent by a rank, and live at its peak, for rings that share one length."""
    rows, first = [], None
    for size in sorted({1, 2, ranks, 2 * ranks}):
        say(f"bytes of {size} ranks")
        sent, live = zip(*once(sent_and_live, "zigzag", size, length))
        # size - 1 messages of keys forward, of keys backward and of gradients, all in float32
        shard = BATCH * (length // size) * HEADS * D * 4
        formula = 2 * shard * (3 * (size - 1))
        first = first or max(live)
        rows.append([
            str(size), f"{formula:,}", f"{max(sent):,}", f"{max(live) / 2**20:.1f}",
            f"{max(live) / shard:.1f}", f"{max(live) * size / first:.2f}",
        ])  # fmt: skip
    return rows


def all_errors(names: dict[str, dict], ranks: int) -> dict[str, str]:
    """The worst rank's errors of every subject, in float32."""
    found = {}
    for name, options in names.items():
        say(f"errors of {name}")
        try:
            found[name] = _worst(once(errors, name, 1 if name == ONE else ranks, 256, **options))
        except Failed as error:
            found[name] = str(error)
    return found


def _worst(answers: list[list[float]]) -> str:
    return ", ".join(f"{name} {max(e):.0e}" for name, e in zip(NAMES, zip(*answers)))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |".replace("\n", " ") for row in lines)


def say(what: str) -> None:
    click.echo(f"\r\x1b[K{what}", nl=False, err=True)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {mp.cpu_count()} cores"


def plot(ratios: dict[str, float], path: Path) -> None:
    """A bar for each subject; without matplotlib there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 0.45 * len(ratios) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(ratios), list(ratios.values()), color="#4878a8")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("CPU time of causal forward and backward, one process' SDPA = 1")
    figure.savefig(path, dpi=120)


@click.command()
@click.option("--length", default=8192, show_default=True, help="tokens of the whole sequence")
@click.option("--ranks", default=4, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--peers", type=click.Path(exists=True, file_okay=False), help="folder of peers")
@click.option("--save", is_flag=True, help="write benchmarks/results/DATE-cpu.md and .png")
def main(length: int, ranks: int, repeats: int, peers: str | None, save: bool) -> None:
    """Measure, print, and with --save keep."""
    if length % (2 * ranks):
        raise click.UsageError("--length must be a multiple of twice --ranks")
    layouts = ("zigzag", "striped", "contiguous")
    alone = [f"{layout}, compute alone" for layout in layouts]
    checked = {name: {} for name in (ONE, *layouts)}
    if peers is not None:
        checked |= {name: {"peers": peers} for name in PEERS}
    exact = {name: _worst(once(errors, name, ranks, 256, dtype=torch.float64)) for name in layouts}
    found = all_errors(checked, ranks)
    names = {name: checked.get(name, {}) for name in (ONE, *layouts, *alone, *checked)}
    rows, ratios = time_rows(time_all(names, ranks, length, repeats), found)
    report = "\n\n".join([
        f"# CPU time, {datetime.date.today()}",
        f"Causal forward and backward, {length} tokens over {ranks} ranks (gloo), batch {BATCH}, "
        f"{HEADS} heads of {D}, float32, one thread a process, median of {repeats} rounds (least-"
        f"most). {hardware()}; torch {torch.__version__}, Python {platform.python_version()}.",
        f"`python -m benchmarks.bench_cpu --length {length} --ranks {ranks} --repeats {repeats}"
        f"{' --peers DIR' if peers else ''}`",
        table(["", "CPU s", "of it system", "relative", "target", "ranks, max / mean",
               "errors, 256 tokens"], rows),
        "*Compute alone* is the same code with a ring that hands every message back unsent."
        + PEERS_NOTE * (peers is not None),
        "float64 errors, 256 tokens: " + "; ".join(f"{n}: {e}" for n, e in exact.items()) + ".",
        "## Work of each rank",
        table(["layout", "million visible pairs of each rank", "max / mean"],
              work_rows(ranks, length)),
        "## Bytes of each rank, zigzag",
        table(["ranks", "sent, by formula", "sent, counted", "live at peak, MiB",
               "in shards of q", "live x ranks, one = 1"], memory_rows(ranks, length)),
    ])  # fmt: skip
    say("")
    click.echo(report)
    if peers is None:
        click.echo("\nno peers measured; see --peers at the top of this file")
    if save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-cpu.md"
        path.parent.mkdir(exist_ok=True)
        plot(ratios, path.with_suffix(".png"))
        path.write_text(f"{report}\n\n![relative CPU time]({path.stem}.png)\n")
        click.echo(f"\nsaved {path}")


if __name__ == "__main__":
    main()
