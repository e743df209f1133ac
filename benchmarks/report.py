"""Writes the tables of pages such as docs/performance.md from benchmarks/results/*.json.

    python -m benchmarks report            # write them
    python -m benchmarks report --check    # only tell whether the pages have them

A result file is a list of flat rows, one figure a row. `revision` is the commit that was measured;
"up to X" and "before X" where only that much is known. A row's `command` has measured it. Add the
rows of a new run, take out those that it supersedes, and write the pages again.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib import training
from benchmarks.lib.options import Parser

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
ALONE, ONE_BY_ONE, GRAPH = "theory", "one by one", "graph"
SHAPE: dict[str, object] = {
    "heads": [32, 8],
    "head_dim": 128,
    "pass": "both",
    "load": None,
}  # if no other is named
KERNELS = {
    "sdpa-cudnn": "cuDNN",
    "flash-attn-4": "flash-attn 4",
    "triton": "Triton",
    "flash-attn-2": "flash-attn 2",
    "sdpa-flash": "PyTorch flash",
}
MAGI = "as MagiAttention counts them"
LONGEST = 131072  # tokens a GPU whose predictions are told
Row = dict[str, Any]
Table = tuple[list[list[str]], list[Row]]  # lines of cells, the head first, and what they quote


@cache
def results(name: str) -> list[Row]:
    """Read the rows of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def found(name: str, **wanted: object) -> list[Row]:
    """Return the rows of a file that have these values; None stands for a missing key."""
    return [row for row in results(name) if all(row.get(k) == v for k, v in wanted.items())]


def one(name: str, **wanted: object) -> list[Row]:
    """Return the first such row in a list, or an empty list: the first run in a file counts."""
    return found(name, **wanted)[:1]


def share(rows: Sequence[Row]) -> str:
    """Write TF/s, with the share of the kernel alone."""
    if not rows:
        return ""
    (row,) = rows
    told = "share" in row and row["subject"] != ALONE
    return f"{row['tflops']:.0f} ({row['share']:.0%})" if told else f"{row['tflops']:.0f}"


def both_ways(name: str, **wanted: object) -> tuple[str, list[Row]]:
    """Write TF/s forward and backward."""
    rows = [
        *one(name, **wanted, **{"pass": "forward"}),
        *one(name, **wanted, **{"pass": "backward"}),
    ]
    return " / ".join(f"{row['tflops']:.0f}" for row in rows), rows


def thousands(tokens: int) -> str:
    """Write a number of tokens.

    >>> thousands(8192)
    '8k'
    """
    return f"{tokens // 1024}k"


def filled(
    head: Sequence[str],
    lines: Iterable[tuple[Sequence[str], Sequence[list[Row]]]],
    text: Callable[[Sequence[Row]], str] = share,
) -> Table:
    """Make a table of lines, each of its words and of the rows that its other cells quote."""
    table, quoted = [list(head)], []
    for words, cells in lines:
        if any(cells):
            table.append([*words, *map(text, cells)])
            quoted += [row for rows in cells for row in rows]
    return table, quoted


def four_gpus() -> Table:
    """One row a length and kernel: each way to launch a gather, its calls alone, and the ring."""
    lines = []
    for kernel in ("sdpa-cudnn", "flash-attn-4", "triton"):
        for power in range(11, 19):
            base = dict(SHAPE, gpus=4, tokens=1 << power, mask="causal", kernel=kernel)
            graph = dict(base, mode=GRAPH)
            single = dict(base, mode=ONE_BY_ONE)
            cells = [
                one("ring", subject=ALONE, **single),
                one("ring", subject="ring", **single),
                one("ring", subject="calls alone", **(graph if power < 15 else single)),
                one("ring", subject="gather", **single),
                one("ring", subject="gather", **graph),
                one("ring", subject="gather", **dict(single, load="lasting")),
            ]
            lines.append(((KERNELS[kernel], thousands(1 << power)), cells))
    head = ("kernel", "tokens a GPU", "kernel alone", "ring", "calls alone", "gather",
            "gather, in a graph", "gather, sustained load")  # fmt: skip
    return filled(head, lines)


ENGINE = [f"TransformerEngine {mode}, cuDNN" for mode in ("p2p", "all_gather", "a2a", "a2a+p2p")]
ENGINE_4 = [name.replace("cuDNN", "flash-attn 4") for name in ENGINE]
LENGTHS = (2048, 4096, 8192, 16384, 32768)  # of one GPU
H200 = dict(SHAPE, gpus=4, mask="causal", mode=ONE_BY_ONE, device="NVIDIA H200")


def peers() -> Table:
    """Other libraries beside ours, and which of them is the fastest at each length."""
    gathers = {
        f"ours, {KERNELS[kernel]}": ("ring", "gather", kernel, ONE_BY_ONE)
        for kernel in ("flash-attn-4", "sdpa-cudnn", "triton")
    }
    same = {
        f"ours, {KERNELS[kernel]}, in TransformerEngine's run": (
            "peers",
            "ours",
            kernel,
            ONE_BY_ONE,
        )
        for kernel in ("sdpa-cudnn", "triton")
    }
    others = {
        "PyTorch context_parallel, cuDNN": "torch context_parallel, cudnn, allgather, repeated",
        "axolotl-ringmaster, zigzag": "axolotl-ringmaster, zigzag",
        "yunchang, Ulysses 4": "yunchang, Ulysses 4 x ring 1",
    }
    theirs = {name: ("ring", subject, None, ONE_BY_ONE) for name, subject in others.items()}
    theirs |= {name: ("peers", name, None, ONE_BY_ONE) for name in ENGINE}
    found = {
        name: [
            one(file, **H200 | dict(subject=subject, kernel=kernel, mode=mode, tokens=tokens))
            for tokens in LENGTHS
        ]
        for name, (file, subject, kernel, mode) in (gathers | same | theirs).items()
    }
    head = ("library", "2k tokens a GPU", *map(thousands, LENGTHS[1:]))
    table, quoted = filled(head, [((name,), cells) for name, cells in found.items()])
    first = [fastest(found, theirs, at) for at in range(len(LENGTHS))]
    short = [name.replace("TransformerEngine", "TE") for name, _ in first]
    table.append(["**the fastest other library**", *short])
    for told, mine in (("cuDNN or Triton", same), ("flash-attn 4", ["ours, flash-attn 4"])):
        ratios = [fastest(found, mine, at)[1] / speed for at, (_, speed) in enumerate(first)]
        table.append([f"ours, {told}, is times as fast", *(f"{each:.2f}" for each in ratios)])
    return table, quoted


def fastest(found: dict[str, list[list[Row]]], among: Iterable[str], at: int) -> tuple[str, float]:
    """Return the name and the TF/s of the fastest of some in a column."""
    speeds = {name: row["tflops"] for name in among for row in found[name][at]}
    name = max(speeds, key=speeds.__getitem__)
    return name.removesuffix(", cuDNN"), speeds[name]


SUBJECTS = {f"ours, {name}": ("ours", kernel) for kernel, name in KERNELS.items()}
SUBJECTS |= {name: (name, None) for name in ENGINE}
SUBJECTS |= {name: (name, None) for name in ENGINE_4}
BY_TURNS = H200 | dict(date="2026-11-28")  # ours and TransformerEngine, one run


def columns(asked: dict[str, dict[str, object]]) -> Table:
    """Ours and TransformerEngine, a row a subject and a column a shape: forward / both, in TF/s."""
    table, quoted = [["", *asked]], []
    for name, (subject, kernel) in SUBJECTS.items():
        cells = []
        for shape in asked.values():
            wanted = shape | dict(subject=subject, kernel=kernel)
            rows = [*one("peers", **wanted | {"pass": "forward"}), *one("peers", **wanted)]
            cells.append(" / ".join(f"{row['tflops']:.0f}" for row in rows))
            quoted += rows
        if any(cells):
            table.append([name, *cells])
    return table, quoted


def turns() -> Table:
    """Ours and TransformerEngine by turns on four GPUs, by tokens."""
    h100 = BY_TURNS | dict(tokens=8192, device="NVIDIA H100 80GB HBM3")
    asked = {thousands(tokens): BY_TURNS | dict(tokens=tokens) for tokens in LENGTHS[1:]}
    return columns(asked | {"8k on H100": h100})


def shapes() -> Table:
    """More heads, a full mask, a window."""
    return columns(other_shapes(BY_TURNS))


def other_shapes(base: dict[str, object]) -> dict[str, dict[str, object]]:
    """Return these shapes by name, for 8k tokens a GPU."""
    base = base | dict(tokens=8192)
    heads = dict(heads=[64, 8])
    return {
        "64/8 heads, causal": base | heads,
        "64/8 heads, full": base | heads | dict(mask="full"),
        "window of 4096": base | dict(mask="window 4096"),
    }


def two_gpus() -> Table:
    """All that was measured on two GPUs by turns, but packed documents."""
    base = BY_TURNS | dict(gpus=2)
    lengths = {thousands(tokens): base | dict(tokens=tokens) for tokens in LENGTHS}
    return columns(lengths | {f"8k, {name}": at for name, at in other_shapes(base).items()})


def needs() -> Table:
    """The host's time and the memory of a call both ways."""
    table, quoted = [["", "host at 8k, ms", "GiB at 8k", "GiB at 32k", "GiB at 64k"]], []
    for name, (subject, kernel) in SUBJECTS.items():
        asked = BY_TURNS | dict(subject=subject, kernel=kernel)
        rows = [one("peers", **asked, tokens=tokens) for tokens in (8192, 32768, 65536)]
        if not rows[0]:
            continue
        quoted += [row for each in rows for row in each]
        peaks = [f"{each[0]['peak_gib']:.2f}" if each else "" for each in rows]
        table.append([name, f"{rows[0][0]['host_us'] / 1e3:.1f}", *peaks])
    return table, quoted


def timeline() -> Table:
    """Return where the time of a call goes, ours and TransformerEngine."""
    names = ("attention_us", "transfer_us", "other_us", "idle_us", "microseconds", "apart_us")
    head = ["ms", "attention", "only transfers", "only others", "nothing", "all",
            "attention twice at once"]  # fmt: skip
    rows = found("timeline", tokens=8192, gpus=4)
    cells = [[f"{row[name] / 1e3:.2f}" for name in names] for row in rows]
    who = ["ours, cuDNN" if row["subject"] == "ours" else row["subject"] for row in rows]
    return [head, *([name, *each] for name, each in zip(who, cells))], rows


def documents(gpus: int) -> Table:
    """Packed documents, forward / both."""
    asked: dict[str, dict[str, object]] = {}
    for heads in ([32, 8], [64, 8]):
        run = dict(SHAPE, gpus=gpus, tokens=8192, device="NVIDIA H200", heads=heads)
        for mask in dict.fromkeys(row["mask"] for row in found("peers", **run)):
            if mask.startswith("documents"):
                kind = mask.removeprefix("documents ").rpartition(": ")[2]
                asked[kind + ", 64/8 heads" * (heads[0] == 64)] = run | dict(mask=mask)
    return columns(asked)


def bursts() -> Table:
    """cuDNN's kernel in bursts and under load that lasts, with the clock and the power."""
    table, quoted = [["", "forward", "MHz", "W", "backward", "MHz", "W"]], []
    for device, subject in product(("NVIDIA H200", "NVIDIA H100 80GB HBM3"), ("bursts", "lasting")):
        cells = [f"{device.split()[1]}, {subject}"]
        for direction in ("forward", "backward"):
            asked = dict(device=device, subject=subject)
            (row,) = found("bursts", **asked, **{"pass": direction})
            cells += [str(row[name]) for name in ("tflops", "mhz", "watts")]
            quoted.append(row)
        table.append(cells)
    return table, quoted


def masks() -> Table:
    """Windows and documents, in TF/s of visible pairs, and as a share of the causal mask's."""
    names = dict.fromkeys(
        row["mask"] for row in found("masks", tokens=8192) if "share_of_full" in row
    )
    table, quoted = [["mask", "flash-attn 4", "Triton"]], []
    for mask in [name for name in names if MAGI not in name]:
        cells = []
        for kernel in ("flash-attn-4", "triton"):
            asked = dict(gpus=4, tokens=8192, mask=mask, kernel=kernel, subject="gather")
            (row,) = found("masks", **asked, **{"pass": "both"})
            cells.append(f"{row['tflops']:.0f} ({row['share_of_full']:.0%})")
            quoted.append(row)
        table.append([mask, *cells])
    return table, quoted


def magi() -> Table:
    """MagiAttention's grid, forward / backward, with what nothing but calls of the kernel reach."""
    table, quoted = [["", "causal", "packed causal"]], []
    for kernel in ("flash-attn-4", "sdpa-cudnn", "triton"):
        for subject, told in (("gather", ""), ("calls alone", ", calls alone")):
            asked = dict(kernel=kernel, subject=subject)
            cells = [
                both_ways("magi", **asked, mask=mask) for mask in ("causal", f"documents {MAGI}")
            ]
            table.append([KERNELS[kernel] + told, *(words for words, _ in cells)])
            quoted += [row for _, rows in cells for row in rows]
    table += [["MagiAttention publishes, 8 H100", "645 / 529", "459 / 361"]]
    table += [["the fastest other library that it publishes", "602 / 582", ""]]
    return table, quoted


def kernels() -> Table:
    """Each kernel on one block, forward / backward."""
    columns = [(64, "causal", 8192), (128, "causal", 2048), (128, "causal", 8192),
               (128, "causal", 32768), (128, "full", 32768), (128, "window 4096", 32768),
               (256, "causal", 8192)]  # fmt: skip
    head = [f"d {d}, {mask}, {thousands(tokens)}" for d, mask, tokens in columns]
    table, quoted = [["kernel", *head]], []
    for kernel, name in KERNELS.items():
        cells = []
        for d, mask, tokens in columns:
            asked = dict(kernel=kernel, head_dim=d, mask=mask, tokens=tokens, mode=ONE_BY_ONE)
            words, rows = both_ways("kernels", **asked)
            cells.append(words)
            quoted += rows
        table.append([name, *cells])
    return table, quoted


def cpu() -> Table:
    """CPU time of four processes, relative to one."""
    table, quoted = [["", "CPU time, one process is 1", "least - most"]], []
    for row in results("cpu"):
        if "relative" in row:
            spread = f"{row['least']:.2f} - {row['most']:.2f}"
            table.append([row["subject"], f"{row['relative']:.2f}", spread])
            quoted.append(row)
    return table, quoted


def predictions(gpus: int, file: str = "predicted", mask: str = "causal") -> Table:
    """TF/s of each way to launch, beside what the cost model says and how far it is off."""
    run = dict(SHAPE, gpus=gpus, mask=mask)
    same = f"ring, Ulysses {gpus}"  # as a gather: no keys are exchanged
    rows = [
        row
        for row in found(file, **run)
        if "predicted" in row and row["tokens"] <= LONGEST and row["subject"] != same
    ]
    ways = dict.fromkeys((row["kernel"], row["subject"], row["tokens"]) for row in rows)
    lines = []
    for kernel, subject, tokens in sorted(ways, key=_by_kernel):
        way = dict(run, kernel=kernel, subject=subject, tokens=tokens)
        cells = [one(file, mode=mode, **way) for mode in (ONE_BY_ONE, GRAPH)]
        lines.append(((KERNELS[kernel], subject if gpus > 1 else "none", thousands(tokens)), cells))
    head = "kernel", "transport", "tokens a GPU", "one by one", "in a graph"
    return filled(head, lines, off)


def off(rows: Sequence[Row]) -> str:
    """Write what was measured and predicted, and how far apart they are.

    >>> off([{"tflops": 500, "predicted": 550}]), off([])
    ('500, 550 (+10%)', '')
    """
    if not rows:
        return ""
    measured, said = rows[0]["tflops"], rows[0]["predicted"]
    return f"{measured:.0f}, {said:.0f} ({said / measured - 1:+.0%})"


def _by_kernel(way: tuple[str, str, int]) -> tuple[int, str, int]:
    kernel, subject, tokens = way
    return list(KERNELS).index(kernel), subject, tokens


Tables = dict[str, Callable[[], Table]]
PAGES: dict[Path, Tables] = {
    DOCS / "performance.md": {
        "four": four_gpus,
        "masks": masks,
        "magi": magi,
        "kernels": kernels,
        "cpu": cpu,
    },
    DOCS / "peers.md": {
        "peers": peers,
        "turns": turns,
        "shapes": shapes,
        "two gpus": two_gpus,
        "documents": partial(documents, 4),
        "two": partial(documents, 2),
    },
    DOCS / "peers-inside.md": {
        "timeline": timeline,
        "needs": needs,
        "bursts": bursts,
    },
    DOCS / "predicted.md": {
        "four": partial(predictions, 4, "ring"),
        "full": partial(predictions, 4, "ring", "full"),
    },
    DOCS / "predicted-few.md": {
        "one": partial(predictions, 1),
        "two": partial(predictions, 2),
    },
    DOCS / "training-runs.md": {
        "llama": lambda: training.llama(results("llama")),
        "curves": lambda: training.curves(results("curves")),
    },
}


def written(table: Table) -> str:
    """Write a table, and below it when, of which revision and by which commands it was measured."""
    lines, quoted = table
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    rows.insert(1, "| " + " | ".join("---" for _ in lines[0]) + " |")
    runs = dict.fromkeys((row["date"], row["revision"], row["command"]) for row in quoted)
    width = max(len(revision) for _, revision, _ in runs)
    source = [f"{date}  {revision:{width}}  {command}" for date, revision, command in sorted(runs)]
    return "\n".join([*rows, "", "```", *source, "```"])


def page(text: str, tables: Tables) -> str:
    """Return a page with its tables written anew, each between its two marks.

    Raises:
        ValueError: the page has no place for a table.
    """
    for name, make in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            raise ValueError(f"the page has no {begin} and {end}")
        marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        here = f"{begin}\n{written(make())}\n{end}"
        text = marked.sub(lambda _, here=here: here, text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or tell whether they are what the results say; return the exit status."""
    parser = Parser(__doc__, "report")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    check = parser.parse_args(argv).check
    differs = False
    for file, tables in PAGES.items():
        before = file.read_text()
        after = page(before, tables)
        differs |= before != after
        if not check:
            file.write_text(after)
    return int(check and differs)


if __name__ == "__main__":
    raise SystemExit(main())
