"""Measure all that is said of several GPUs, on as many as there are, by one command.

    python -m benchmarks everything
    python -m benchmarks everything --only training --within 560
    python -m benchmarks everything --gpus 8 --list

Training, MagiAttention's grid, decoding, prompts, a million tokens on four GPUs and two on eight:
each is a command with a time limit of its own, so that one that fails takes no other along. Rows go
to JSON files as they come, what is said to a text file each. `--quick` is for few GPUs, and the
default below four: shorter, with figures of each kind. `--within` ends after so many seconds, and
`--only` takes up what is left.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.lib.jobs import Job, by_torchrun, run_all
from benchmarks.lib.options import Parser
from benchmarks.lib.results import RESULTS
from ring_attention_pytorch.kernels import KERNELS, package_refusal

MILLION = 1 << 20
ALONE = "--no-peers --theory-up-to 0"  # no other library, nor one GPU with all of it


class Entry(NamedTuple):
    """A command: its name, the file of its rows, the benchmark with its options, and seconds."""

    name: str
    file: str
    command: str
    seconds: float


def kernels() -> list[str]:
    """Return the kernels that are measured, the fastest first, less one that is not installed."""
    names = ("flash-attn-4", "sdpa-cudnn", "triton")
    packages = {name: KERNELS[name].CAN.package for name in names}
    return [name for name, each in packages.items() if each is None or not package_refusal(each)]


def training(mask: str, names: Sequence[str]) -> list[Entry]:
    """Return what is measured of training at a mask; for long sequences fewer calls of less."""
    which = f"ring --mask {mask} --kernels {' '.join(names)}"
    long = "gather ring" if mask == "causal" else "gather"
    return [
        Entry(f"training, {mask}, {told}", "ring", f"{which} --tokens {options}", seconds)
        for told, options, seconds in (
            ("2k and 4k", "2048 4096 --ulysses 1 2 --graphs", 420),
            ("8k and 16k", "8192 16384 --ulysses 1 2 --graphs --repeats 4", 480),
            ("32k", "32768 --ulysses 1 2 --graphs --repeats 2 --no-peers", 540),
            ("64k", f"65536 --ulysses 1 2 --repeats 1 {ALONE}", 360),
            ("128k", f"131072 --transports {long} --repeats 1 {ALONE}", 420),
        )
    ]


def entries(gpus: int, names: Sequence[str]) -> list[Entry]:
    """Return everything, what matters most first."""
    causal, full = training("causal", names), training("full", names)
    magi = Entry("MagiAttention's grid", "magi", f"masks --magi --kernels {' '.join(names)}", 300)
    lengths = "decode --keys 131072 524288 1048576 --batch"
    million = MILLION * (2 if gpus >= 8 else 1)
    longest = f"ring --mask causal --kernels {names[0]} --tokens {million // gpus} --repeats 1"
    return [
        *causal[:2],
        magi,
        Entry("decoding", "decode", f"{lengths} 1", 240),
        Entry("decoding, batches", "decode", f"{lengths} 8 32", 480),
        causal[2],
        Entry(f"{million // MILLION}M tokens", "ring", f"{longest} {ALONE}", 420),
        Entry("prompt of 1M", "prefill", f"decode --prefill {MILLION} 8192", 300),
        *causal[3:],
        *full,
    ]


def few_entries(names: Sequence[str]) -> list[Entry]:
    """Return what tells most in a few minutes."""
    which = f"ring --mask causal --kernels {' '.join(names)} --no-peers --repeats 4"
    magi = Entry("MagiAttention's grid", "magi", f"masks --magi --kernels {' '.join(names)}", 180)
    return [
        Entry("training", "ring", f"{which} --tokens 2048 8192 --ulysses 1 2 --graphs", 240),
        magi,
        Entry("decoding", "decode", "decode --keys 131072 --batch 1 8", 120),
        Entry("training, 32k", "ring", f"{which} --tokens 32768 --theory-up-to 0", 120),
        Entry("prompt of 128k", "prefill", "decode --prefill 131072 8192", 60),
    ]


def jobs(gpus: int, quick: bool, names: Sequence[str], folder: Path) -> list[Job]:
    """Return the commands, with rows that go to files in a folder."""
    found = few_entries(names) if quick else entries(gpus, names)
    return [
        Job(
            each.name,
            by_torchrun(
                gpus, "benchmarks", *each.command.split(), "--save", f"{folder / each.file}.json"
            ),
            each.seconds,
        )
        for each in found
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return the exit status, 1 if something could not be."""
    about = Parser(__doc__, "everything")
    about.add_argument("--gpus", type=int, help="unless all that there are")
    about.add_argument("--quick", action=argparse.BooleanOptionalAction, help="below 4 GPUs")
    about.add_argument("--only", nargs="+", metavar="NAME", help="those whose name begins so")
    about.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    about.add_argument("--results", type=Path, default=RESULTS, help="folder of rows")
    about.add_argument("--output", type=Path, default=Path("build/gpus"), help="folder of text")
    about.add_argument("--list", action="store_true", help="print commands, and run nothing")
    asked = about.parse_args(argv)
    gpus = torch.cuda.device_count() if asked.gpus is None else asked.gpus
    if gpus < 1:
        raise SystemExit("there is no CUDA device; with --gpus N --list commands are printed")
    quick = gpus < 4 if asked.quick is None else asked.quick
    found = jobs(gpus, quick, kernels(), asked.results.absolute())
    if asked.only:
        found = [job for job in found if job.name.startswith(tuple(asked.only))]
    if asked.list:
        print("\n".join(f"{job.name:26} {job.seconds:4.0f} s  {job.command}" for job in found))
        return 0
    asked.results.mkdir(parents=True, exist_ok=True)
    return run_all(found, asked.output, asked.within)


if __name__ == "__main__":
    raise SystemExit(main())
