"""Faults planted into `doctor/`, and into what it asks."""

from tests.faults.mutant import Mutant

DOCTOR = [
    Mutant(
        "an older package of the name is not seen", "doctor/findings.py:_package",
        "if version != facts.ours", "if version == ''",
    ),
    Mutant(
        "libraries that lack are a package that lacks", "kernels/__init__.py:package_refusal",
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
    Mutant(
        "the whole x on each rank is not seen", "doctor/mistakes.py:_whole_sequences",
        "if not torch.equal(case.mine, case.tokens):", "if True:",
    ),
    Mutant(
        "attention may have another layout than tokens", "doctor/mistakes.py:_layout",
        "if p.layout != case.held.layout", "if False",
    ),
    Mutant(
        "heads may come first", "doctor/mistakes.py:_heads_first",
        "if shape[1] == n or shape[2] != n:", "if True:",
    ),
    Mutant(
        "positions of a rank begin at 0 unseen", "doctor/mistakes.py:_positions",
        "if not torch.equal(right, got) and torch.equal(local, got):", "if False:",
    ),
    Mutant(
        "positions that are computed inside are not seen", "doctor/mistakes.py:_rotated",
        "if of_v > case.close or max(of_q, of_k) <= case.close:", "if True:",
    ),
    Mutant(
        "labels moved on each rank are any labels", "doctor/mistakes.py:_labels",
        "if torch.equal(got, local):", "if False:",
    ),
    Mutant(
        "labels of the last token must be there", "doctor/mistakes.py:_labels_of",
        "if len(flat) == rows * (n - 1):", "if False:",
    ),
    Mutant(
        "a mean of means is no mistake", "doctor/mistakes.py:_mean_of_means",
        "case.alike(got, total / counted) or", "True or",
    ),
    Mutant(
        "gradients may be twice as large", "doctor/mistakes.py:_gradients",
        "if size > 1 and", "if size > 2 and",
    ),
    Mutant(
        "padding may be lost", "doctor/mistakes.py:_mask",
        "if p.key_mask is None and", "if False and",
    ),
    Mutant(
        "padding after all tokens is seen", "doctor/mistakes.py:_mask",
        "and not bool((real & after).any())", "and False",
    ),
    Mutant(
        "documents may be lost", "doctor/mistakes.py:_documents",
        "if p.packing is None and", "if False and",
    ),
    Mutant(
        "a window of transformers is ours", "doctor/mistakes.py:_window",
        "if asked in windows and asked - 1 not in windows:", "if False:",
    ),
    Mutant(
        "a lost window is none", "doctor/mistakes.py:_window",
        "if windows == {None} and", "if False and",
    ),
    Mutant(
        "DDP may average over any ranks", "doctor/mistakes.py:_averaged",
        "if not set(case.ring.ranks) <= set(over):", "if False:",
    ),
    Mutant(
        "dropout is right by chance", "doctor/mistakes.py:_dropout",
        "and module.training and", "and not module.training and",
    ),
    Mutant(
        "only one rank's gradients are compared", "doctor/parity.py:_gradients",
        "if ring.size > 1:", "if False:",
    ),
    Mutant(
        "NaN in a gradient is right", "doctor/parity.py:ParityReport.same",
        "all(error <= self.allowed for error in errors)",
        "not any(error > self.allowed for error in errors)",
    ),
    Mutant(
        "what is computed in one process shares the sequence", "ranks/ring.py:as_ring",
        "if in_one_process:", "if False:",
    ),
]  # fmt: skip
