"""Conclusions from the facts of an installation: pure functions that return findings."""

from typing import Literal, NamedTuple

from ring_attention_pytorch.doctor.facts import Facts

Status = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """A finding: its subject and status, the text, and advice.

    Status "note" costs speed or is good to know; "bad" keeps something from working.
    """

    subject: str
    status: Status
    text: str
    advice: str = ""


def findings_of(facts: Facts, backend: str, nproc: int) -> list[Finding]:
    """Return the findings for a group of `nproc` processes with this backend."""
    return [
        _package(facts),
        Finding("python", "ok", f"{facts.python}, torch {facts.torch}"),
        _numpy(facts),
        *_packages(facts),
        *_kernels(facts),
        _backend(facts, backend),
        _processes(facts, nproc),
        Finding("machine", "ok", f"{facts.machine}; only ranks of this name share memory"),
        *_gpus(facts),
    ]


def keeps_from_trying(finding: Finding) -> bool:
    """Return True if trial processes would fail, so that none need be started."""
    return finding.status == "bad" and finding.subject in (
        "kernels",
        "backend",
        "processes",
        "GPUs",
    )


def _package(facts: Facts) -> Finding:
    seen = f"{facts.ours} from {facts.place}"
    others = [version for version in facts.listed if version != facts.ours]
    if not others:
        return Finding("package", "ok", seen)
    return Finding(
        "package", "bad",
        f"{seen}; but {', '.join(others)} of that name is installed, too: another package, which "
        "other programs of this environment may import in place of this one",
        "pip uninstall ring-attention-pytorch, until none is left; then install this one again",
    )  # fmt: skip


def _numpy(facts: Facts) -> Finding:
    if facts.numpy is not None:
        return Finding("numpy", "ok", facts.numpy)
    return Finding("numpy", "ok", "not installed; nothing here needs it")


def _packages(facts: Facts) -> list[Finding]:
    """Report packages that are broken ("bad"), or missing or old, which only costs kernels."""
    found = []
    for name, why in facts.packages.items():
        if why is None:
            found.append(Finding(name, "ok", "can be used"))
        elif "can't be imported" in why:
            advice = "it was built for another torch or lacks libraries: reinstall it, or remove it"
            found.append(Finding(name, "bad", why, advice))
        else:
            found.append(Finding(name, "note", why))
    return found


def _kernels(facts: Facts) -> list[Finding]:
    found = []
    for name, why in facts.kernels.items():
        if why is None:
            found.append(Finding(f"kernel {name}", "ok", f"runs on {facts.device}"))
        elif why.startswith("runs on "):
            found.append(Finding(f"kernel {name}", "ok", f"not for {facts.device}"))
        else:
            found.append(Finding(f"kernel {name}", "note", why))
    if all(facts.kernels.values()):
        text, advice = f"no kernel runs on {facts.device}", "see why above; --device cpu has two"
        found.append(Finding("kernels", "bad", text, advice))
    return found


def _backend(facts: Facts, backend: str) -> Finding:
    right = "nccl" if facts.device == "cuda" else "gloo"
    if backend not in facts.backends:
        there = ", ".join(facts.backends) or "none"
        return Finding(
            "backend", "bad", f"this torch has no {backend}; it has {there}",
            "install a build of torch that has it, or use --device cpu with gloo",
        )  # fmt: skip
    if backend != right:
        what = "tensors on the CPU" if backend == "gloo" else "tensors on GPUs"
        return Finding(
            "backend", "bad", f"{backend} moves {what}, yours are on {facts.device}",
            f'init_process_group("{right}"), or move the tensors',
        )  # fmt: skip
    return Finding("backend", "ok", f"{backend}, which moves tensors on {facts.device}")


def _processes(facts: Facts, nproc: int) -> Finding:
    if facts.launched > 1:
        return Finding(
            "processes", "bad",
            f"torchrun has started {facts.launched} of this, which know nothing of one another: "
            "there is no process group",
            "run the doctor without torchrun: it starts its own; in a script of yours call "
            "init_process_group, or use launch.torchrun_group",
        )  # fmt: skip
    if facts.device == "cuda" and nproc > len(facts.gpus):
        return Finding(
            "processes", "bad", f"{nproc} processes need as many GPUs, got {len(facts.gpus)}",
            f"--nproc {len(facts.gpus)}" if facts.gpus else "--device cpu",
        )  # fmt: skip
    return Finding("processes", "ok", f"the doctor starts {nproc}")


def _gpus(facts: Facts) -> list[Finding]:
    if facts.device != "cuda":
        return []
    if not facts.gpus:
        return [Finding("GPUs", "bad", "none is seen", "check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    found = [Finding("GPUs", "ok", ", ".join(facts.gpus))]
    if facts.apart:
        pairs = ", ".join(f"{a} to {b}" for a, b in facts.apart)
        found.append(
            Finding(
                "GPUs' memory", "note",
                f"not shared: {pairs}; keys are sent point to point, and calls can't be captured "
                "in CUDA graphs",
                "allow peer access (NVLink, or PCIe without ACS), or use GPUs that have it",
            )
        )  # fmt: skip
    return found
