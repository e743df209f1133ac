"""Faults planted into `doctor/`, and into what it asks."""

from tests.faults.mutant import Mutant

DOCTOR = [
    Mutant(
        "an older package of the name is not seen", "doctor/findings.py:_package",
        "if version != facts.ours", "if version == ''",
    ),
    Mutant(
        "libraries that lack are a package that lacks", "kernels/__init__.py:package_problem",
        'if lacks and f"{package.module}.".startswith(f"{lacks}."):', "if lacks:",
    ),
    Mutant(
        "what is broken is only a note", "doctor/findings.py:_packages",
        'elif "can\'t be imported" in why:', "elif False:",
    ),
    Mutant(
        "a backend moves tensors of any device", "doctor/findings.py:_backend",
        "if backend != right:", "if False:",
    ),
    Mutant(
        "torchrun is not seen", "doctor/findings.py:_processes",
        "if facts.launched > 1:", "if False:",
    ),
    Mutant(
        "GPUs share their memory", "doctor/findings.py:_gpus", "if facts.apart:", "if False:",
    ),
    Mutant(
        "only the output is compared", "doctor/trials.py:_error",
        "zip(got, want)", "zip(got[:1], want)",
    ),
    Mutant(
        "NaN is less than any error", "doctor/trials.py:_or_infinite",
        'float("inf") if error != error else error', "error",
    ),
    Mutant(
        "the first rank speaks for all", "doctor/trials.py:worst",
        "max(each, key=_error_of)", "each[0]",
    ),
    Mutant(
        "the doctor is well whatever it sees", "doctor/commands.py:_doctor",
        "and all(p.right for p in parity)", "",
    ),
]  # fmt: skip
