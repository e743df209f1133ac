"""The page of results says figures of the pages that it names, and no others."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_figures_of_results_are_on_the_pages_that_have_their_commands() -> None:
    text, found = (DOCS / "results.md").read_text().partition("## Which option")[0], 0
    for row in re.findall(r"^\|.+\]\([\w/-]+\.md\)\) \|$", text, re.MULTILINE):
        (page,) = re.findall(r"\(([\w/-]+\.md)\)", row)
        for figure in re.findall(r"(?<![\w.])\d[\d.,]*\d(?!\d|[kM] tokens|[kM]? keys)", row):
            found += 1
            assert figure in (DOCS / page).read_text(), (page, figure)
    assert found >= 6


def test_shares_of_kernels_are_those_measured() -> None:
    rows = (DOCS / "performance.md").read_text()
    of = dict(re.findall(r"^\| flash-attn 4 \| (\w+) \| (.+) \|$", rows, re.MULTILINE))
    cudnn = dict(re.findall(r"^\| cuDNN \| (\w+) \| (.+) \|$", rows, re.MULTILINE))
    table = re.findall(r"^\| (\d+k) \| (.+) \|$", (DOCS / "results.md").read_text(), re.MULTILINE)
    assert len(table) == 5
    for tokens, cells in table:
        for kernel, share in zip((of, cudnn), cells.split(" | ")):
            assert f"({share})" in kernel[tokens].split(" | ")[3]
