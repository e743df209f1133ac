"""Faults planted into `doctor/`, and into what it asks."""

from tests.faults.mutant import Mutant

DOCTOR = [
    Mutant(
        "only the output is compared", "doctor/trials.py:_error",
        "zip(got, want)", "zip(got[:1], want)",
    ),
    Mutant(
        "dropout is right by chance", "doctor/mistakes.py:_dropout",
        "and module.training and", "and not module.training and",
    ),
]  # fmt: skip
