"""The commands of `python -m ring_attention_pytorch`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

import torch

from ring_attention_pytorch import progress
from ring_attention_pytorch.doctor.facts import gather_facts
from ring_attention_pytorch.doctor.findings import Finding, findings_of, keeps_from_trying
from ring_attention_pytorch.doctor.memory import Sizes, Training, described, table
from ring_attention_pytorch.doctor.speed import SIZES, Speed
from ring_attention_pytorch.doctor.trials import Parity, Trial, explained, try_out
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments

_SLOW = {  # advice, by device
    "cpu": "ranks wait for cores: end other programs, or take fewer processes by --nproc",
    "cuda": "see nvidia-smi for other programs on these GPUs and for their clocks; if GPUs idle, "
    "capture the step in a CUDA graph (docs/guide/graphs.md); docs/guide/profiling.md shows waits",
}
_SIGNS = {"ok": ("ok  ", 32), "note": ("note", 33), "bad": ("BAD ", 31)}  # with ANSI colours


def main(given: Sequence[str]) -> int:
    """Run a command; return its exit code: 0, or 1 if something is wrong."""
    args = parser().parse_args(given)
    if args.command is None:
        parser().print_help()
        return 0
    progress.show()
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "demo": _demo, "doctor": _doctor, "explain": _explain, "memory": _memory,
    }  # fmt: skip
    return commands[args.command](args)


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="python -m ring_attention_pytorch",
        description="Exact attention over a sequence that is spread over many processes.",
    )
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser("demo", help="compare processes that share a sequence with one")
    demo.add_argument("--nproc", type=_positive, default=4, help="processes (4)")
    doctor = commands.add_parser("doctor", help="say what works here, and why the rest does not")
    doctor.add_argument("--nproc", type=_positive, help="processes (all GPUs, at most 4; or 4)")
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="where tensors are")
    doctor.add_argument("--backend", choices=("gloo", "nccl"), help="what moves them")
    doctor.add_argument("--quick", action="store_true", help="look only; start no processes")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    explain = commands.add_parser("explain", help="say who receives which keys when; needs no GPU")
    explain.add_argument("--tokens", type=_positive, default=8192, help="of all ranks (8192)")
    explain.add_argument(
        "--heads", type=_positive, nargs=2, default=(32, 8), metavar=("H", "KV"),
        help="query heads and key heads (32 8)",
    )  # fmt: skip
    explain.add_argument("--width", type=_positive, default=128, help="of a head (128)")
    explain.add_argument("--ranks", type=_positive, default=4, help="that share them (4)")
    explain.add_argument("--machines", type=_positive, default=1, help="that ranks are on (1)")
    explain.add_argument(
        "--layout", choices=tuple(LAYOUTS), default="zigzag", help="of tokens (zigzag)"
    )
    explain.add_argument("--no-mask", action="store_true", help="not causal")
    _add_memory(commands)
    return whole


def _add_memory(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command that counts a GPU's memory: sizes of a Llama, and how it is trained."""
    memory = commands.add_parser("memory", help="count bytes of training by cause; needs no GPU")
    memory.add_argument(
        "--tokens", type=_positive, nargs="+", default=[131072], help="of all GPUs (131072)"
    )
    memory.add_argument("--ranks", type=_positive, nargs="+", default=[4], help="GPUs (4)")
    for name, default in Sizes()._asdict().items():
        memory.add_argument(
            f"--{name.replace('_', '-')}", type=_positive, default=default,
            help=f"of a Llama ({default})",
        )  # fmt: skip
    memory.add_argument("--no-checkpoint", action="store_true", help="layers keep all for backward")
    memory.add_argument("--offload", action="store_true", help="inputs of layers are on the host")
    memory.add_argument("--chunk", type=_positive, help="tokens=, of chunk_tokens (none)")
    memory.add_argument("--logits", type=_positive, default=2048, help="tokens of a loss (2048)")
    memory.add_argument("--all-logits", action="store_true", help="of all tokens at once")
    memory.add_argument("--float32", action="store_true", help="weights, gradients and moments")


def _memory(args: argparse.Namespace) -> int:
    sizes = Sizes(*(getattr(args, name) for name in Sizes._fields))
    if sizes.heads % sizes.key_heads:
        print(f"--key-heads: {sizes.key_heads} must divide {sizes.heads}", file=sys.stderr)
        return 2
    every = [
        Training(
            tokens, ranks, not args.no_checkpoint, args.offload, args.chunk,
            None if args.all_logits else args.logits, args.float32,
        )
        for tokens in args.tokens for ranks in args.ranks
    ]  # fmt: skip
    print(described(sizes, every[0]) if len(every) == 1 else table(sizes, every))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _doctor(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backend = args.backend or ("nccl" if device == "cuda" else "gloo")
    nproc = args.nproc or (min(4, torch.cuda.device_count()) if device == "cuda" else 4) or 1
    say = _say_nothing if args.json else _say
    found = findings_of(gather_facts(device), backend, nproc)
    for finding in found:
        say(finding)
    trial = Trial([], None)
    if not args.quick and not any(keeps_from_trying(f) for f in found):
        try:
            trial = try_out(device, backend, nproc)
        except Exception as error:
            found.append(_of_failure(error))
            say(found[-1])
    parity = trial.parities
    for finding in _of_trial(trial, nproc, device):
        say(finding)
    well = all(f.status != "bad" for f in found) and all(p.right for p in parity)
    if args.json:
        told = {
            "well": well,
            "findings": [f._asdict() for f in found],
            "parity": [p._asdict() | {"right": p.right} for p in parity],
            "bytes_per_second": trial.bandwidth,
            "flops_per_second": trial.speed and trial.speed._asdict(),
            "machines": len({*trial.machines}),
            "ulysses": trial.ulysses,
        }
        print(json.dumps(told, indent=2))
    else:
        looked = "" if parity else ", as far as was looked"
        last = Finding("", "ok", f"All is well{looked}.")
        say(last if well else Finding("", "bad", "See the lines that say BAD."))
    return 0 if well else 1


def _of_failure(error: Exception) -> Finding:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return Finding("trial", "bad", lines[-1].strip(), "what a process raised; please report this")


def _of_trial(trial: Trial, nproc: int, device: str) -> list[Finding]:
    """Return a finding for each kernel and transport, the links, and the speed of attention."""
    found = [_of_parity(each, nproc) for each in trial.parities]
    if trial.bandwidth is not None:
        text = f"{trial.bandwidth / 1e9:.2f} GB/s to a neighbour while as much comes"
        found.append(Finding("links", "ok", f"{text}, {nproc} at once"))
    if trial.machines:
        found.append(_of_machines(trial, device))
    if trial.speed is not None:
        found.append(_of_speed(trial.speed, device))
    return found


def _of_machines(trial: Trial, device: str) -> Finding:
    """Say on how many machines the ranks are, and how many of them would swap heads."""
    ranks, machines, size = len(trial.machines), len({*trial.machines}), SIZES[device]
    text = (
        f"{ranks} rank{'s' * (ranks > 1)} on {machines}; {size.heads} heads and {size.key_heads} "
        f"key heads would take ulysses={trial.ulysses}"
    )
    return Finding("machines", "ok", text)


def _of_speed(speed: Speed, device: str) -> Finding:
    """Compare the measured speed with the expected one; a third of it needs an explanation."""
    alone, expected, measured = (rate / 1e9 for rate in speed)
    text = (
        f"{measured:.4g} GFLOP/s a rank with {SIZES[device].tokens} tokens each, forward and "
        f"backward; expected {expected:.4g}, the kernel alone {alone:.4g}"
    )
    if 3 * measured > expected:
        return Finding("speed", "ok", text)
    return Finding("speed", "note", text, _SLOW[device])


def _of_parity(parity: Parity, nproc: int) -> Finding:
    text = f"worst relative error {parity.error:.1e} of results and gradients, {parity.dtype}"
    subject = f"{parity.kernel}, {parity.transport}, {nproc} ranks"
    if parity.right:
        return Finding(subject, "ok", text)
    advice = f"at most {parity.allowed:.0e} is allowed: take another kernel=, and report this"
    return Finding(subject, "bad", text, advice)


def _say(finding: Finding) -> None:
    sign, colour = _SIGNS[finding.status]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        sign = f"\033[{colour}m{sign}\033[0m"
    subject = f"{finding.subject}: " if finding.subject else ""
    print(f"{sign}  {subject}{finding.text}", flush=True)
    if finding.advice:
        print(f"      -> {finding.advice}", flush=True)


def _say_nothing(finding: Finding) -> None:
    del finding


def _demo(args: argparse.Namespace) -> int:
    length = 12 * args.nproc
    print(f"{args.nproc} processes share {length} tokens; which token is whose:\n")
    for layout in LAYOUTS:
        owners = [""] * length
        for rank, segments in enumerate(all_segments(layout, args.nproc, length)):
            for start, stride, count in segments:
                for number in range(count):
                    owners[start + stride * number] = f"{rank:x}"[-1]
        print(f"  {layout:11} {''.join(owners)}")
    print("\nEach computes its part of causal attention, forward and backward:\n")
    found = try_out("cpu", "gloo", args.nproc).parities
    for each in found:
        _say(_of_parity(each, args.nproc))
    return 0 if all(each.right for each in found) else 1


def _explain(args: argparse.Namespace) -> int:
    heads, key_heads = args.heads
    if heads % key_heads:
        print(f"--heads: {key_heads} key heads must divide {heads} query heads", file=sys.stderr)
        return 2
    told = explained(
        args.tokens, (heads, key_heads), args.width, args.ranks, args.layout, not args.no_mask,
        min(args.machines, args.ranks),
    )  # fmt: skip
    print("\n\n".join(told))
    return 0
