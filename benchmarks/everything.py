"""Measure all that is said of GPUs, on as many as there are, by one command.

    python -m benchmarks everything
    python -m benchmarks everything --only training --within 560
    python -m benchmarks everything --gpus 8 --list
    python -m benchmarks everything --gpus 2 --trial

Each is a command with a time limit of its own, so that one that fails takes no other along. Rows go
to JSON files as they come, what is said to a text file each; `--archive` has both in one file.

One GPU tells of parts of attention, the work of one rank of a recurrent layer, latent keys and
machines whose ranks share that GPU. Two tell what may differ with a neighbour. From four on there
are training, MagiAttention's grid, decoding, prompts, a million tokens on four GPUs and two on
eight; `--quick` is less of each, and what two GPUs run. `--within` ends after so many seconds, and
`--only` takes up what is left. `--trial` runs the commands on CPUs, with few tokens.
"""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.lib.jobs import Job, by_torchrun, run_all
from benchmarks.lib.options import Parser
from benchmarks.lib.results import RESULTS
from ring_attention_pytorch.kernels import KERNELS, package_refusal

MILLION = 1 << 20
ALONE = "--no-peers --theory-up-to 0"  # no other library, nor one GPU with all of it
LLAMA = "examples.train_torchtitan"
LLAMA_RUNS = f"{LLAMA} --tokens 32768 --tokens 131072 --steps 3 --steps 1"
LOSSES = "curves --by ring context_parallel --mask documents causal"
LATENTS_32K = "latents --machines 2 --rounds 1 --tokens 32768"
MACHINES = "tests.gpu.machines"
SMALL = "--device cpu --tokens 64 --heads 4 2"
TINY = "--device cpu --length 256 --dim 64 --depth 2 --heads 4 --steps 4"
OF_GPUS = "--graphs", "--peers"  # a trial has none
TRIALS = {  # options for CPUs, by module, else by the file of rows, else by benchmark
    "ring": f"{SMALL} --kernels sdpa --repeats 1",
    "magi": f"{SMALL} --kernels sdpa --repeats 1",
    "peers": f"{SMALL} --rounds 1",
    "decode": "--device cpu --keys 256 --batch 1",
    "prefill": "--device cpu --prefill 256 64",
    "recurrent": "--device cpu --lengths 128 64 --hybrid 64 --heads 2 4 --dim 16 --repeats 1 "
    "--profile",
    "parts": "--device cpu --tokens 64 --heads 4 2 --text 16 --dim 16 --rounds 2",
    "latents": "--device cpu --tokens 64 --heads 4 --sizes 16 8 16 32 --rounds 2",
    "curves": f"{TINY} --by ring",
    "tests.gpu.curves": TINY,
    LLAMA: "--flavor tiny --tokens 256",
    MACHINES: "--device cpu --tokens 64",
}


class Entry(NamedTuple):
    """A command: its name, its file of rows, a benchmark or module with options, its limit.

    Without a file it has no rows. `alone`: it is not torchrun that starts it. `package` is what it
    can't do without.
    """

    name: str
    file: str
    command: str
    seconds: float
    alone: bool = False
    package: str = ""

    def job(self, gpus: int, folder: Path, trial: bool) -> Job:
        """Return what runs it, with rows that go to a file in a folder."""
        module, *options = self.command.split()
        known = module if "." in module else self.file or module
        more = TRIALS[known].split() if trial else []
        options = [option for option in options if not (trial and option in OF_GPUS)]
        if "." not in module:
            module, options = "benchmarks", [module, *options]
        if self.file:
            more += ["--save", f"{folder / self.file}.json"]
        start = ("-m", module) if self.alone else by_torchrun(gpus, module)
        return Job(self.name, (*start, *options, *more), self.seconds)


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
    """Return everything that many GPUs tell, what matters most first."""
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


def neighbours(names: Sequence[str]) -> list[Entry]:
    """Return what tells most of ranks and their neighbours, in a few minutes each."""
    which = f"ring --mask causal --kernels {' '.join(names)} --no-peers --repeats 4"
    magi = Entry("MagiAttention's grid", "magi", f"masks --magi --kernels {' '.join(names)}", 180)
    return [
        Entry("recurrent layers", "", "recurrent --graphs", 540),
        Entry("latent keys", "latents", "latents", 150),
        Entry("parts", "", "parts --only shared diffusion errors", 240),
        Entry("few tokens", "ring", "few --tokens 2048 4096 --graphs --peers", 180),
        Entry("other libraries", "peers", "peers --tokens 2048 8192 32768 --graphs", 300),
        Entry("Llama", "llama", LLAMA_RUNS, 420, package="torchtitan"),
        Entry("losses", "curves", LOSSES, 240),
        *machines(),
        Entry("machines, latent keys, 32k", "latents", LATENTS_32K, 300, alone=True),
        Entry("training", "ring", f"{which} --tokens 2048 8192 --ulysses 1 2 --graphs", 240),
        magi,
        Entry("decoding", "decode", "decode --keys 131072 --batch 1 8", 120),
        Entry("training, 32k", "ring", f"{which} --tokens 32768 --theory-up-to 0", 120),
        Entry("prompt of 128k", "prefill", "decode --prefill 131072 8192", 60),
    ]


def machines() -> list[Entry]:
    """Return what is measured of several machines, which have two ranks each."""
    times = f"{MACHINES} --only times --key-heads 8 2 --within 270"
    latents = "latents --machines 2 --rounds 3 --tokens 8192"
    return [
        Entry("machines", "", times, 300, alone=True),
        Entry("machines, latent keys", "latents", latents, 240, alone=True),
        Entry("machines, decoding", "", f"{MACHINES} --only decode graphs", 180, alone=True),
    ]


def one_gpu() -> list[Entry]:
    """Return what one GPU tells."""
    return [
        Entry("parts", "", "parts", 300, alone=True),
        Entry("recurrent layers", "", "recurrent --of 2 --graphs", 540, alone=True),
        *machines(),
        Entry("latent keys", "latents", "latents", 120),
        Entry("losses", "curves", LOSSES, 240),
        Entry("losses of threads", "curves", "tests.gpu.curves --seconds 75", 150, alone=True),
    ]


def jobs(
    gpus: int, quick: bool, names: Sequence[str], folder: Path, trial: bool = False
) -> list[Job]:
    """Return the commands, with rows that go to files in a folder; say which can't run here."""
    found = neighbours(names) if quick else entries(gpus, names)
    if gpus == 1:
        found = one_gpu()
    there = [each for each in found if not each.package or find_spec(each.package)]
    for each in found:
        if each not in there:
            print(f"{each.name} is left out: {each.package} is not installed")
    return [each.job(gpus, folder, trial) for each in there]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return the exit status, 1 if something could not be."""
    about = Parser(__doc__, "everything")
    about.add_argument("--gpus", type=int, help="unless all that there are")
    about.add_argument("--quick", action=argparse.BooleanOptionalAction, help="below 4 GPUs")
    about.add_argument("--only", nargs="+", metavar="NAME", help="those whose name begins so")
    about.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    about.add_argument("--results", type=Path, help="folder of rows, unless benchmarks/results")
    about.add_argument("--output", type=Path, default=Path("build/gpus"), help="folder of text")
    about.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="of both folders")
    about.add_argument("--trial", action="store_true", help="on CPUs, with few tokens")
    about.add_argument("--list", action="store_true", help="print commands, and run nothing")
    asked = about.parse_args(argv)
    gpus = torch.cuda.device_count() if asked.gpus is None else asked.gpus
    if gpus < 1:
        raise SystemExit("there is no CUDA device; with --gpus N --list commands are printed")
    if gpus == 1 and asked.quick is not None:
        about.error("--quick and --no-quick are for several GPUs, and there is one")
    quick = gpus < 4 if asked.quick is None else asked.quick
    rows = asked.results or (asked.output / "rows" if asked.trial else RESULTS)
    found = jobs(gpus, quick, kernels(), rows.absolute(), asked.trial)
    if asked.only:
        found = [job for job in found if job.name.startswith(tuple(asked.only))]
    if asked.list:
        print("\n".join(f"{job.name:26} {job.seconds:4.0f} s  {job.command}" for job in found))
        return 0
    rows.mkdir(parents=True, exist_ok=True)
    return run_all(found, asked.output, asked.within, archive=asked.archive, more=[rows])


if __name__ == "__main__":
    raise SystemExit(main())
