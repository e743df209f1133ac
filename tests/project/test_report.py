"""Tables of pages are what the results say, and results agree with themselves."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
START = r"(python|torchrun --nproc-per-node \d) -m (benchmarks |examples\.|tests\.gpu\.)\w"
EVERY = {"device", "date", "revision", "tokens", "mask", "subject"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_results_say_what_was_measured_when_and_how(file: Path) -> None:
    rows = json.loads(file.read_text())
    for row in rows:
        assert row.keys() >= EVERY, row
        assert re.fullmatch(r"2026-\d\d-\d\d", row["date"]), row
        assert re.fullmatch(r"((up to|before) )?[0-9a-f]{7}", row["revision"]), row
        command = row.get("command", "python -m benchmarks NAME" if "note" in row else "")
        assert re.match(START, command), row
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows), "rows that repeat"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_commands_of_results_exist(file: Path) -> None:
    for command in {row.get("command") for row in json.loads(file.read_text())} - {None}:
        ((folder, name),) = re.findall(r"-m (benchmarks|examples|tests\.gpu)[ .]([\w-]+)", command)
        assert (ROOT / folder.replace(".", "/") / f"{name}.py").exists(), command


def test_shares_are_of_the_kernel_alone_in_the_same_run() -> None:
    rows = [row for row in report.results("ring") if row["pass"] == "both" and "tflops" in row]

    def run(row: report.Row, mode: str) -> tuple[object, ...]:
        named = ("revision", "command", "tokens", "mask", "kernel", "load")
        return *(row.get(name) for name in named), mode

    alone = {run(row, row["mode"]): row["tflops"] for row in rows if row["subject"] == report.ALONE}
    compared = 0
    for row in rows:
        mode = report.ONE_BY_ONE if row["mode"] == report.ONE_BY_ONE else report.GRAPH
        whole = alone.get(run(row, mode))
        if "share" in row and whole is not None:
            compared += 1
            assert row["tflops"] / whole == pytest.approx(row["share"], abs=0.006), row
    assert compared > 200


def test_the_pages_have_the_tables_of_the_results() -> None:
    for file, tables in report.PAGES.items():
        assert file.read_text() == report.page(file.read_text(), tables)
    assert report.main(["--check"]) == 0


def test_a_page_with_another_figure_is_told_and_written_anew(tmp_path, monkeypatch) -> None:
    page = tmp_path / "performance.md"
    whole = PAGE.read_text()
    (line,) = re.findall(r"\| flash-attn 4 \| 32k \|.*\n", whole)
    page.write_text(whole.replace(line, line.replace("6", "7")))
    monkeypatch.setattr(report, "PAGES", {page: report.PAGES[PAGE]})
    assert report.main(["--check"]) == 1
    assert report.main([]) == 0
    assert page.read_text() == whole


def test_a_figure_that_changes_changes_the_page(monkeypatch) -> None:
    changed = [dict(row) for row in report.results("kernels")]
    row = next(row for row in changed if row["kernel"] == "triton" and row["tokens"] == 8192)
    row["tflops"] = 1.0
    kept = report.results
    monkeypatch.setattr(
        report, "results", lambda name: changed if name == "kernels" else kept(name)
    )
    whole = PAGE.read_text()
    assert report.page(whole, report.PAGES[PAGE]) != whole


def test_a_page_without_a_place_for_a_table_is_told() -> None:
    with pytest.raises(ValueError, match="has no <!-- four: begin -->"):
        report.page("# Performance\n", report.PAGES[PAGE])


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.stem)
def test_a_page_names_every_revision_that_it_quotes(page: Path) -> None:
    """Under each table stands each run that a figure of it is from."""
    for name, make in report.PAGES[page].items():
        lines, quoted = make()
        assert len(lines) > 2, name
        assert len({len(line) for line in lines}) == 1, name
        text = report.written((lines, quoted))
        for row in quoted:
            assert row["command"] in text
            assert f"{row['revision']} " in text
    assert len(report.PAGES[page]) <= 6
