"""Losses, positions and pools of other models of transformers are those of one process."""

import pytest
from torch import Tensor

pytest.importorskip("transformers")

from tests.support import hf, hf_kinds
from tests.support.hf import ring_of
from tests.support.hf_kinds import OTHERS

EXACT = 1e-5  # transformers' own attention computes its softmax in float32


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    """The worst relative error; a bias of keys has a gradient of nothing but rounding."""
    pairs = [*zip((got[0], *got[1]), (want[0], *want[1]), strict=True)]
    least = 1e-6 * max(float(b.norm()) for _, b in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), least) for a, b in pairs)


def steps(names: list[str], size: int) -> dict[str, float]:
    """For a pool: the worst error of each model, with and without padding."""
    found = {}
    with hf.losses_as_they_were():
        for name in names:
            for padded in (False, True):
                want = hf_kinds.alone(name, padded)
                got = hf_kinds.step(name, padded, ring_of(size))
                found[f"{name}, {padded}"] = errors(got, want)
    return found


def test_losses_and_positions_of_other_models_are_those_of_one_process(pools):
    for found in pools(3).run(steps, list(OTHERS), 3):
        assert max(found.values()) < EXACT, found


@pytest.mark.parametrize("name", OTHERS)
def test_so_they_are_in_a_ring_of_one(name):
    assert errors(hf_kinds.step(name, True), hf_kinds.alone(name, True)) < EXACT
