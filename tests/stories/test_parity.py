"""`check_parity`: right programs are right, and each mistake is named and no other."""

import pytest

pytest.importorskip("transformers")
from tests.support.parity_cases import CASES, reports


@pytest.fixture(scope="module")
def of_ranks(pools):
    return pools(2).run(reports, [*CASES])


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_named(name, of_ranks):
    report, other = (found[name] for found in of_ranks)
    assert report == other, "ranks are told the same"
    case = CASES[name]
    said = [(m.name, m.seen) for m in report.mistakes]
    if case.mistake is None:
        assert report.right, report
        return
    assert not report.right
    assert [name for name, _ in said] == [case.mistake], report
    assert case.words in said[0][1]
