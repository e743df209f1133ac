"""All that GPUs can get wrong, alone and together, by one command: `make check-gpus`.

    python -m tests.gpu.check --folder build/gpus
    python -m tests.gpu.check --at-once 3 --within 560 --archive build/gpus.tar.gz

The GPUs as two machines; tests of transports, observed calls, decoding, failing ranks, rings and
features on as many GPUs as there are, to eight; in every call ranks check that they are in step.
Then each transport under PyTorch's CUDA sanitizer. Where there is one GPU, two ranks share it, and
tests of what it does alone come first. What they say goes to a file each. They run one after the
other; `--at-once` runs some side by side on the same GPUs, which idle while Python starts and
kernels are compiled. That takes a CPU for each rank of each.
"""

import argparse
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.lib.jobs import Job, by_torchrun, run_all
from tests.support.gpu_rings import PARTS
from tests.support.ranks import gpu_ranks

CHECKED = {"RING_ATTENTION_CHECK": "always"}
TRANSPORTS = "tests.gpu.test_transports_gpu"
ALONE = ("latents", "recurrent", "parts", "tapes", "kernels")  # files of one GPU's tests
FILES = ("recurrent", "parts", "inference", "fused_copies", "rings", "features", "memory")
MACHINES = ("-m", "tests.gpu.machines", "--only", "inside", "right", "--tokens", "2048")


def jobs(gpus: int, at_once: int) -> list[Job]:
    """Return what is run on so many GPUs: first what tells most if it fails.

    Tests of a file run side by side, for most of their time goes to compilers.
    """
    ranks = gpu_ranks(gpus)
    pytest = ("-m", "pytest", "-p", "no:cacheprovider")
    if (beside := workers(ranks, at_once)) > 1:
        pytest += ("-n", str(beside))
    together = (*pytest, "-m", "several_gpus")
    return [
        Job("machines", MACHINES, 480),
        *(
            Job(f"one GPU, {name}", (*pytest, f"tests/gpu/test_{name}_gpu.py"), 540)
            for name in (ALONE if gpus == 1 else ())
        ),
        *(
            Job(f"transports, {part}", by_torchrun(ranks, TRANSPORTS, part), 540, CHECKED)
            for part in PARTS
        ),
        Job("observed calls", by_torchrun(ranks, "tests.gpu.test_observe_gpu"), 120, CHECKED),
        *(
            Job(name, (*together, f"tests/gpu/test_{name}_gpu.py"), 540, CHECKED)
            for name in FILES
            if gpus > 1 or name not in ALONE
        ),
        Job(
            "transports, CUDA sanitizer", by_torchrun(ranks, "tests.gpu.csan"), 180,
            {"TORCH_CUDA_SANITIZER": "1"},
        ),
    ]  # fmt: skip


def workers(ranks: int, at_once: int) -> int:
    """Return how many pools of ranks each of so many jobs may have: each rank has a CPU."""
    if find_spec("xdist") is None:
        return 1
    return max(1, min(4, len(os.sched_getaffinity(0)) // (at_once * (ranks + 1))))


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; return the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--folder", type=Path, default=Path("build/gpus"))
    options.add_argument("--gpus", type=int, help="with --list, of so many")
    options.add_argument("--only", nargs="+", metavar="NAME", help="those whose name begins so")
    options.add_argument("--at-once", type=int, default=1, metavar="N", help="so many side by side")
    options.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    options.add_argument("--archive", type=Path, metavar="FILE.tar.gz", help="of the folder")
    options.add_argument("--list", action="store_true", help="print commands, and run nothing")
    asked = options.parse_args(argv)
    if asked.gpus is not None and not asked.list:
        options.error("--gpus goes with --list; tests run on all GPUs, see CUDA_VISIBLE_DEVICES")
    if asked.at_once < 1:
        options.error(f"--at-once must be 1 or more, got {asked.at_once}")
    found = jobs(asked.gpus or torch.cuda.device_count(), asked.at_once)
    if asked.only:
        found = [job for job in found if job.name.startswith(tuple(asked.only))]
    if asked.list:
        print("\n".join(job.command for job in found))
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device, so every test would be skipped")
    how = dict(within=asked.within, at_once=asked.at_once, archive=asked.archive)
    return run_all(found, asked.folder, **how)


if __name__ == "__main__":
    raise SystemExit(main())
