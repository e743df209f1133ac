"""Tables of training: a known model's speed, and losses of one model over any number of ranks."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Lines = tuple[list[list[str]], list[Row]]  # cells, the head first, and the rows that they quote
FIRST, LAST = 200, 50  # steps at the beginning and the end that are compared
NAMES = {"ring": "ring attention", "context_parallel": "PyTorch's context_parallel"}
MASKS = {"documents": "packed documents", "causal": "one causal sequence"}


def name(row: Row) -> str:
    """Name a run by its attention and ranks; `gpus` is there if ranks share them.

    >>> name({"subject": "ring", "ranks": 1}), name({"subject": "ring", "ranks": 4, "gpus": 1})
    ('ring attention, 1 rank', 'ring attention, 4 ranks on 1 GPU')
    """
    on = f" on {row['gpus']} GPU" if "gpus" in row else ""
    return f"{NAMES[row['subject']]}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}{on}"


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the runs of one model with one mask, on GPUs or on CPUs, the largest model first.

    Ours come first, and of these those of fewer ranks.
    """
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (-row["weights"], row["mask"] != "documents")):
        size = row["weights"]
        size_text = f"{size / 1e6:.0f}M weights" if size >= 1e6 else f"{size / 1e3:.0f}k weights"
        where = "CPU, float32" if row["device"] == "CPU" else "GPU, bf16"
        found.setdefault(f"{MASKS[row['mask']]}, {size_text}, {where}", []).append(row)
    for runs in found.values():
        runs.sort(key=lambda row: (row["subject"] != "ring", row["ranks"]))
    return found


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return by how much two curves differ at each step that both have.

    >>> differences([3.0, 2.0], [3.0, 2.5, 2.0])
    [0.0, 0.5]
    """
    return [abs(a - b) for a, b in zip(one, other)]


def curves(rows: Sequence[Row]) -> Lines:
    """Tell how far each run is from that of a single rank."""
    head = ["model and mask", "attention", "device", "steps", "loss, first",
            f"mean of the last {LAST}", f"from one rank, first {FIRST} steps", "all steps",
            "tokens/s"]  # fmt: skip
    table, quoted = [head], []
    for title, runs in groups(rows).items():
        for row in runs:
            losses, last = row["losses"], row["losses"][-LAST:]
            far = differences(losses, runs[0]["losses"])
            whole = len(losses) == len(runs[0]["losses"])
            device, speed = row["device"].removeprefix("NVIDIA ").split()[0], "tokens_per_second"
            table.append([
                title, name(row), device, str(len(losses)), f"{losses[0]:.4f}",
                f"{sum(last) / len(last):.4f}" if whole else "",
                *(f"{max(part):.0e}" if any(part) else "" for part in (far[:FIRST], far)),
                f"{row[speed]:,}" if speed in row else "",
            ])  # fmt: skip
            quoted.append(row)
    return table, quoted


def llama(rows: Sequence[Row]) -> Lines:
    """Tell how fast Llama 3.1 8B trains, the longest sequences last."""
    head = ["GPUs", "tokens", "mask", "attention by", "tokens/s a GPU", "MFU", "attention's share",
            "peak GiB", "loss of each step"]  # fmt: skip
    table = [head]
    for row in sorted(
        rows, key=lambda row: (-row["gpus"], row["length"], row["subject"] != "ring")
    ):
        table.append([
            f"{row['gpus']} {row['device'].split()[1]}", f"{row['length'] / 1024:g}k", row["mask"],
            row["subject"].replace("_", " "), f"{row['tokens_per_second']:,}",
            f"{row['mfu']:.1%}", f"{row['attention']:.0%}", f"{row['peak_gib']:.1f}",
            ", ".join(f"{loss:.3f}" for loss in row["losses"]),
        ])  # fmt: skip
    return table, list(rows)
