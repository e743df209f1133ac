"""Every example of the README and the docs runs, and pictures are what their scripts draw."""

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from docs import what_works
from ring_attention_pytorch import attention, default_attention, launch

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def prose(page: Path) -> str:
    """Return a page's text outside of blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def test_the_readme_can_be_read_in_two_minutes() -> None:
    page = ROOT / "README.md"
    assert len(page.read_text().splitlines()) <= 130
    assert len(prose(page).split()) <= 900
    assert len(re.findall(r"(?<![\w.])\d[\d.,]*", prose(page))) <= 40
    (snippet,) = blocks(page)
    assert len(snippet.splitlines()) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    words = [word for word in prose(page).split() if re.search(r"\w", word)]  # no bars of tables
    assert len(words) <= 1500


def test_the_readme_quotes_the_loop_as_it_stands_in_the_code() -> None:
    (quoted,) = blocks(ROOT / "README.md", "py")
    lines = inspect.getsource(attention.forward).splitlines(keepends=True)
    docstring = ast.parse("".join(lines)).body[0].body[0]
    assert isinstance(docstring.value.value, str)
    assert quoted == "".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path) -> None:
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_changes_that_a_page_shows_can_be_made(page: Path) -> None:
    """Each hunk's old lines stand in its file, one after another."""
    for change in re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL):
        for part in re.split(r"^--- a/", change, flags=re.MULTILINE)[1:]:
            file, *hunks = re.split(r"^@@.*\n", part, flags=re.MULTILINE)
            text = (ROOT / file.split("\n")[0]).read_text()
            for hunk in hunks:
                old = [line[1:] for line in hunk.splitlines() if line[:1] in " -"]
                assert "\n".join(old) in text, (page, hunk)


def test_a_group_that_an_example_starts_ends_with_it() -> None:
    for page in PAGES:
        for block in blocks(page):
            begins, ends = (block.count(f"{do}_process_group(") for do in ("init", "destroy"))
            assert begins == ends, (page, block)


def test_a_trace_is_drawn_with_computing_and_the_rest_side_by_side(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_trace.py"))
    ran = [
        ("kernel", 7, "sdpa_flash_fprop", 10.0, 50.0),
        ("kernel", 7, "_merge_kernel", 60.0, 5.0),
        ("gpu_memcpy", 9, "Memcpy PtoP", 20.0, 15.0),
        ("kernel", 9, "barrier_kernel", 40.0, 20.0),
    ]
    names = ("cat", "args", "name", "ts", "dur")
    told = [dict(zip(names, (c, dict(stream=s), *rest)), ph="X") for c, s, *rest in ran]
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps({"traceEvents": [*told, {"ph": "M", "name": "no event"}]}))
    events = script["events_of"](file)
    assert [e.kind for e in events] == [
        "attention", "keys and gradients move", "waits for other ranks", "other kernels",
    ]  # fmt: skip
    drawn = script["drawing"]({"gather": events})
    assert "gather: 0.06 ms" in drawn  # from the first to the end of the last
    for kind, colour in script["KINDS"].items():
        assert kind in drawn
        assert drawn.count(f'fill="{colour}"/>') == 2  # in the legend, and once


@pytest.mark.thorough
def test_the_readme_s_example_runs_under_torchrun_as_it_stands(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    sharded = "assert mine[0].shape[1] in (333, 334)\n"
    sharded += "assert not torch.distributed.is_initialized()\n"
    script.write_text(blocks(ROOT / "README.md")[0] + sharded)
    run = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "3", script],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def run_in_this_group(block: str, page: str) -> None:
    """Run an example in a process that has a group, as those that torchrun starts do."""
    with mock.patch.object(launch, "torchrun_group", return_value=nullcontext()):
        exec(compile(block, page, "exec"), {})


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_on_three_ranks(page: Path, pools) -> None:
    for block in blocks(page):
        if "with torchrun_group" in block:
            pools(3).run(run_in_this_group, block, str(page))


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), (page, link)


def test_files_named_in_the_pages_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:docs|tests|examples|benchmarks)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), (page, name)


def test_the_drawing_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "draw_layouts.py"))["drawing"]()
    assert drawn == (ROOT / "docs" / "layouts.svg").read_text()


def test_the_chart_of_speeds_is_what_its_script_draws_of_the_results() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_speed.py"))
    found = script["speeds"](script["rows"]())
    assert all(found[line.name] for line in script["LINES"])
    assert script["drawing"](found) == (ROOT / "docs" / "speed.svg").read_text()


def test_a_speed_is_the_median_of_runs_and_of_modes_the_fastest() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_speed.py"))
    run = dict(tokens=2048, mode="one by one", kernel="sdpa-cudnn")
    measured = [
        dict(run, subject="gather", tflops=100),
        dict(run, subject="gather", tflops=300),
        dict(run, subject="gather, Ulysses 2", tflops=900),
        dict(run, subject="gather", tflops=700, kernel="triton"),
        dict(run, subject="TransformerEngine p2p, cuDNN", tflops=60, kernel=None),
        dict(run, subject="TransformerEngine a2a, cuDNN", tflops=80, kernel=None),
    ]
    found = script["speeds"](measured)
    assert {name: line for name, line in found.items() if line} == {
        "cuDNN, gather, one by one": {2048: 200},
        "Triton, gather, one by one": {2048: 700},
        "TransformerEngine, cuDNN, best mode": {2048: 80},
    }


def test_the_summary_of_what_works_is_the_worst_of_each_layout() -> None:
    found = what_works.read(what_works.PAGE_AT.read_text())
    written = what_works.SUMMARY_AT.read_text()
    assert written == what_works.SUMMARY.format(table=what_works.summary(found))


def test_the_page_of_kernels_is_what_they_say_of_themselves() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "write_kernels.py"))["page"]()
    assert written == (ROOT / "docs" / "kernels.md").read_text()


@pytest.mark.thorough
def test_the_predictions_are_those_of_the_model() -> None:
    """docs/scaling.md and its plot are what their script makes of the model as it is."""
    script = runpy.run_path(str(ROOT / "docs" / "draw_scaling.py"))
    found = script["shares"]()
    assert script["page"](found) == (ROOT / "docs" / "scaling.md").read_text()
    assert script["drawing"](found) == (ROOT / "docs" / "scaling.svg").read_text()
    for transport, ranks, tokens, measured, predicted in script["checked"]():
        assert tokens < 4096 or abs(measured - predicted) < 0.1, (transport, ranks, tokens)


def test_regrouped_query_heads_do_what_the_old_order_did() -> None:
    """docs/guide/coming-from-0.5.md tells how to carry over a checkpoint with grouped heads."""
    known: dict = {}
    exec(blocks(ROOT / "docs" / "guide" / "coming-from-0.5.md")[1], known)
    heads, group, d = 6, 3, 4
    q = torch.randn(1, 5, heads, d)
    k = torch.randn(1, 5, heads // group, d)
    old = default_attention(q, *[k.repeat(1, 1, group, 1)] * 2)  # key head i % h_kv
    rows = known["regroup"](heads, group, d)
    new = default_attention(q.flatten(2)[..., rows].view_as(q), k, k)
    torch.testing.assert_close(new.flatten(2), old.flatten(2)[..., rows])
