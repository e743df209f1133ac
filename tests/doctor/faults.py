"""Faults planted into `doctor/`, and into what it asks."""

from tests.faults.mutant import Mutant

DOCTOR = [
    Mutant(
        "an older package of the name is not seen", "doctor/findings.py:_package",
        "if version != facts.ours", "if version == ''",
    ),
    Mutant(
        "only the output is compared", "doctor/trials.py:_error",
        "zip(got, want)", "zip(got[:1], want)",
    ),
    Mutant(
        "the first rank speaks for all", "doctor/trials.py:worst",
        "max(each, key=_error_of)", "each[0]",
    ),
    Mutant(
        "attention may have another layout than tokens", "doctor/mistakes.py:_layout",
        "if p.layout != case.held.layout", "if False",
    ),
    Mutant(
        "padding may be lost", "doctor/mistakes.py:_mask",
        "if p.key_mask is None and", "if False and",
    ),
    Mutant(
        "documents may be lost", "doctor/mistakes.py:_documents",
        "if p.packing is None and", "if False and",
    ),
    Mutant(
        "dropout is right by chance", "doctor/mistakes.py:_dropout",
        "and module.training and", "and not module.training and",
    ),
    Mutant(
        "NaN in a gradient is right", "doctor/parity.py:ParityReport.same",
        "all(error <= self.allowed for error in errors)",
        "not any(error > self.allowed for error in errors)",
    ),
]  # fmt: skip
