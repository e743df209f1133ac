"""Faults are found in their sources, planted, and hunted as they should be, in made-up packages."""

import ast
import importlib
import sys
import textwrap
import time
from functools import partial
from multiprocessing import active_children

import pytest

from tests.faults.cases import cases_of
from tests.faults.generated import generated
from tests.faults.hunt import Learnt, Verdict, forked, judge, learn, places
from tests.faults.mutant import Misplaced, Mutant, Sources
from tests.faults.planting import Planter

BAND = """
    def band(rows, cols):
        '''What is seen.'''
        return [r - c for r in rows for c in cols]  # offsets
"""
FAULT = Mutant("band", "layouts.py:band", "[r - c for r in rows", "[c - r for r in rows")


def sources(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return Sources(folder)


def test_a_function_is_found_where_it_is(tmp_path):
    found = sources(tmp_path, layouts=BAND, others=BAND).changed(FAULT)
    assert found == textwrap.dedent(BAND).replace("r - c", "c - r")


def test_a_function_that_has_moved_is_found(tmp_path):
    """In a file of another name, of the same class."""
    text = f"class Layout:\n{BAND}"
    fault = FAULT._replace(where="layouts.py:Layout.band")
    assert "[c - r for" in sources(tmp_path, tiles=text, others=BAND).changed(fault)


def test_a_function_that_was_formatted_anew_is_found(tmp_path):
    text = """
    def band(rows, cols):
        return [  # offsets
            r
            - c,
        ] if rows else call(
            rows,
        )
    """
    found = sources(tmp_path, layouts=text)
    for old, new in (("[r - c]", "[c]"), ("call(rows) ", "call(cols)"), ("rows,)", "cols,)")):
        changed = found.changed(Mutant("band", "layouts.py:band", old, new))
        compile(changed, "layouts.py", "exec")
        assert changed != found.texts["layouts.py"]


@pytest.mark.parametrize("new", ["", "pass", "first(); pass"])
def test_statements_may_go_or_come(tmp_path, new):
    text = """
    def run():
        first()
        second()
        return third()
    """
    fault = Mutant("run", "a.py:run", "second() return third()", f"{new} return third()")
    changed = sources(tmp_path, a=text).changed(fault)
    assert changed.replace(" ", "") == text.replace("second()", new).replace(" ", "")
    compile(textwrap.dedent(changed), "a.py", "exec")


@pytest.mark.parametrize(
    ("where", "old", "said"),
    [
        ("layouts.py:band", "in", "2 times"),
        ("layouts.py:band", "r + c", "0 times"),
        ("layouts.py:band", "rows, cols", "0 times"),  # which stand in its head only
        ("layouts.py:bands", "r - c", "no file"),
        ("b.py:twice", "1", "layouts.py, others.py"),
    ],
)
def test_what_can_t_be_planted_is_said(tmp_path, where, old, said):
    more = "def twice():\n    return 1\n"
    found = sources(tmp_path, layouts=textwrap.dedent(BAND) + more, others=more)
    with pytest.raises(Misplaced, match=said):
        found.changed(Mutant("", where, old, "0"))


# --- planting ---

MODULE = """
    from functools import lru_cache, wraps

    LIMIT = (1, 2)

    def twice(function):
        @wraps(function)
        def run(*given):
            return 2 * function(*given)

        return run

    @lru_cache
    def kept(x):
        return x + LIMIT[0]

    @twice
    def doubled(x):
        return x + 1

    class Thing:
        @staticmethod
        def still(x):
            return x + 1

        @property
        def held(self):
            def inner():
                return 1

            return inner()

        def __repr__(self):
            return super().__repr__() + "!"
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A package that was imported, and what plants into it."""
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    found = sources(folder, a=MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("made_up.a"), Planter(found)
    for name in ("made_up", "made_up.a"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "old", "new", "call", "before", "after"),
    [
        ("kept", "x + LIMIT", "x - LIMIT", lambda a: a.kept(5), 6, 4),
        ("LIMIT", "1", "3", lambda a: a.kept(5), 6, 8),
        ("doubled", "x + 1", "x", lambda a: a.doubled(5), 12, 10),
        ("twice", "2 *", "3 *", lambda a: a.doubled(5), 12, 18),
        ("Thing.still", "x + 1", "x", lambda a: a.Thing.still(5), 6, 5),
        ("Thing.held", "return 1", "return 2", lambda a: a.Thing().held, 1, 2),
        ("Thing.__repr__", '"!"', '"?"', lambda a: repr(a.Thing())[-1], "!", "?"),
    ],
)
def test_whoever_holds_a_function_has_the_fault(made, name, old, new, call, before, after):
    module, planter = made
    assert call(module) == before
    planter.plant(Mutant("", f"a.py:{name}", old, new))
    planter.forget()
    assert call(module) == after


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("Thing.__repr__", "super().__repr__()", '""', "what encloses it"),
        ("twice", "def run", "def ran", "0 functions"),
        ("kept", "return", "return )", "no longer Python"),
    ],
)
def test_a_fault_that_has_no_room_says_so(made, name, old, new, said):
    with pytest.raises(Misplaced, match=said):
        made[1].plant(Mutant("", f"a.py:{name}", old, new))


# --- generated ---

MADE = """
    def run(xs, size, *, deep=False):
        '''What is made: x + 1.'''
        if size < 0 and not deep:
            raise ValueError(f"size must be at least {0 + 1}, got {size}")
        check(xs, size)
        for x in xs[:size]:
            size = max(size - 1, x)
        return size == 2, sorted(xs, reverse=True)
"""
CHANGED = [
    ("never", "if False:"), ("always", "if True:"),
    ("condition dropped", "if not deep:"), ("condition dropped", "if size < 0:"),
    ("comparison", "if size <= 0 and (not deep):"), ("off by one", "if size < 1 and (not deep):"),
    ("not dropped", "if size < 0 and deep:"), ("call dropped", "pass"),
    ("swapped", "check(size, xs)"), ("off by one", "for x in xs[:size + 1]:"),
    ("assignment dropped", "pass"), ("other end", "size = min(size - 1, x)"),
    ("sign", "size = max(size + 1, x)"), ("right dropped", "size = max(size, x)"),
    ("off by one", "size = max(size - 2, x)"),
    ("comparison", "return (size != 2, sorted(xs, reverse=True))"),
    ("off by one", "return (size == 3, sorted(xs, reverse=True))"),
    ("default", "return (size == 2, sorted(xs))"), ("function dropped", "return (size == 2, xs)"),
    ("bool", "return (size == 2, sorted(xs, reverse=False))"),
]  # fmt: skip


def test_faults_are_made_of_what_stands_there_and_not_of_texts(tmp_path):
    found = sources(tmp_path, a=MADE)
    lines = ast.unparse(ast.parse(found.texts["a.py"])).split("\n")
    made = []
    for fault in generated(found):
        changed = ast.unparse(fault.tree(found)).split("\n")
        (line,) = (now for was, now in zip(lines, changed, strict=True) if was != now)
        made.append((fault.kind, line.strip()))
    assert made == CHANGED


def test_names_of_generated_faults_outlive_a_renaming_and_changes_elsewhere(tmp_path):
    before = [fault.name for fault in generated(sources(tmp_path, a=MADE))]
    other = BAND + MADE.replace("size", "length").replace("check", "look")
    after = [fault.name for fault in generated(sources(tmp_path, a=other))]
    assert [name for name in after if ":run:" in name] == before
    assert len({*after}) == len(after)


def test_cases_of_a_test_file_have_its_parameters_and_need_this_process_alone():
    cases = [case.args for case in cases_of("project/test_faults.py")]
    assert (test_a_function_is_found_where_it_is, {}, {"tmp_path"}) in cases
    given = [values for function, values, _ in cases if function is test_statements_may_go_or_come]
    assert given == [{"new": ""}, {"new": "pass"}, {"new": "first(); pass"}]
    assert all("made" not in wanted for *_, wanted in cases)


# --- hunting ---


def test_cases_that_reach_a_fault_come_first_and_all_others_after(made):
    module, planter = made
    ran = []

    def case(name, call, want):
        ran.append(name)
        begin = time.process_time()
        while name == "slow" and time.process_time() < begin + 0.02:
            pass
        assert call() == want

    cases = [
        partial(case, "kept", lambda: module.kept(5), 6),
        partial(case, "slow", lambda: module.doubled(5), 12),
        partial(case, "doubled", lambda: module.doubled(5) > 0, True),
    ]
    fault = Mutant("", "a.py:doubled", "x + 1", "x")
    both = fault, fault._replace(where="a.py:nowhere")
    with planter.marked(places(planter, both)) as now:
        learnt = learn(planter, cases, now)
    assert [len(reached) for reached in learnt.reached] == [0, 1, 1]
    ran.clear()
    assert judge(planter, cases, learnt, fault).found
    assert ran == ["doubled", "slow"]
    still = Mutant("", "a.py:Thing.still", "x + 1", "x")
    ran.clear()
    assert not judge(planter, [cases[0]] * 3, learnt, still).found
    assert ran == ["kept"] * 3


def test_a_case_that_fails_without_a_fault_is_told(made):
    learnt = learn(made[1], [lambda: 1 / 0], set())
    assert "ZeroDivisionError" in learnt.problem
    found, said = judge(made[1], [], learnt, Mutant("", "a.py:kept", "x", "0"))
    assert not found
    assert "ZeroDivisionError" in said


def test_a_fault_in_what_no_case_reaches_is_told(made):
    found, said = judge(made[1], [], Learnt("", [], [], []), Mutant("", "a.py:kept", "x", "0"))
    assert (found, said) == (False, "0 cases reach a.py:kept, and none fails")


def test_no_process_stays(monkeypatch):
    """Whether it answers, ends without an answer, or does not end."""
    monkeypatch.setattr("tests.faults.hunt.SECONDS", 1)
    monkeypatch.setattr("tests.faults.hunt.BUSY", 1)
    before = {process.pid for process in active_children()}
    jobs = [lambda: 1, partial(sys.exit, 1), partial(time.sleep, 60), lambda: 2]
    end = Verdict(True, "ended")
    assert forked(jobs, end) == [1, end, end, 2]
    assert {process.pid for process in active_children()} <= before
