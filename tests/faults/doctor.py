"""Faults planted into the doctor, and a battery that must find each."""

from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from unittest import mock

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("DOCTOR")
ANSWERS_FOR = ("doctor/", "kernels/__init__.py", "ranks/ring.py")


def battery() -> Iterator[Callable[[], object]]:
    """Broken installations, and attention that is wrong."""
    from tests.doctor import test_facts as facts
    from tests.doctor import test_findings as findings
    from tests.doctor import test_mistakes as mistakes
    from tests.doctor import test_trials as trials
    from tests.doctor.test_parity import (
        test_gradients_are_averaged_over_ranks as sums,
    )
    from tests.doctor.test_parity import (
        test_in_a_world_of_one_rings_are_alone as world_of_one,
    )
    from tests.doctor.test_parity import (
        test_nan_is_not_parity as nan,
    )

    yield findings.test_a_good_installation_is_well
    for broken in findings.BROKEN:
        yield partial(findings.test_what_is_broken_gets_its_diagnosis, *broken)
    for broken in facts.PACKAGES:
        yield partial(facts.test_broken_packages_get_their_diagnosis, *broken)
    for name in mistakes.CASES:
        yield partial(mistakes.test_a_mistake_leaves_its_trace_and_no_other, name)
    yield from (sums, nan, world_of_one)
    yield trials.test_nan_is_not_right
    yield a_wrong_gradient_is_seen
    yield it_is_not_well_then


def a_wrong_gradient_is_seen() -> None:
    from tests.doctor.test_trials import wrong

    assert {p.kernel for p in wrong("sdpa", 0).parities if not p.right} == {"sdpa"}


def it_is_not_well_then() -> None:
    from ring_attention_pytorch.doctor import commands
    from ring_attention_pytorch.doctor.trials import Parity, Trial

    found = Trial([Parity("eager", "ring", "torch.float64", 1.0, 1e-11)], None)
    silence = redirect_stdout(StringIO())
    with mock.patch.object(commands, "try_out", return_value=found), silence:
        assert commands.main(["doctor", "--device", "cpu", "--json"]) == 1


if __name__ == "__main__":
    hunt.main("tests.faults.doctor")
