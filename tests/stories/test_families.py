"""Some classes are right or refused; all are tried by `python -m tests.support.families`."""

import pytest

pytest.importorskip("transformers")

from tests.support import families
from tests.support.families import examined, together, verdict
from tests.support.tiny_models import family_of

SAMPLE = {
    "Qwen3ForCausalLM": "equal",
    "Gemma2ForCausalLM": "equal",
    "Qwen3NextForCausalLM": "equal",
    "BertForMaskedLM": "equal",
    "ModernBertForTokenClassification": "equal",
    "T5ForConditionalGeneration": "refused",
    "BertForMultipleChoice": "refused",
    "MambaForCausalLM": "refused",
    "SplinterForQuestionAnswering": "refused",
}


def of_sample(names: list[str]) -> dict[str, families.Found]:
    """For a pool."""
    return {name: examined(family_of(name)) for name in names}


def test_a_sample_of_all_classes_is_right_or_refused(pools):
    found = pools(3).answers(of_sample, [*SAMPLE])
    for name, want in SAMPLE.items():
        cells = together([(kind, each[name] if kind == "ok" else each) for kind, each in found])
        assert verdict(cells) == want, (name, cells)


def test_what_ranks_find_is_told_as_one():
    alike = together([("ok", {"a": "", "b": "refused: no"}), ("ok", {"a": "", "b": "refused: no"})])
    assert alike == {"a": "equal", "b": "refused: no"}
    assert verdict(alike) == "both"
    one = together([("ok", {"a": ""}), ("ok", {"a": "refused: no"})])
    assert verdict(one) == "fault"  # a rank that goes on alone
    assert verdict(together([("ok", {"a": "loss wrong by 1e-3"})] * 2)) == "fault"
    assert verdict(together([("ok", {"a": ""}), ("error", "the process died")])) == "fault"


def test_every_class_is_of_one_kind():
    every = families.families()
    assert len({family.name for family in every}) == len(every) > 800
    assert {family.kind for family in every} == set(families.KINDS)
