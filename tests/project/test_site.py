"""The parts of the site. `make site` builds it strictly, with all links and anchors checked."""

import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest

import ring_attention_pytorch
from docs.check_widths import BROWSERS, too_wide
from docs.site_links import on_page_markdown

ROOT = Path(__file__).parents[2]
OLD = {"ring_flash_attn_", "ring_flash_attn_cuda", "ring_flash_attn_cuda_"}  # names of one function


def test_the_reference_has_every_public_name_and_nothing_that_is_gone():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    paths = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    assert len(paths) == len(set(paths))
    for path in paths:
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name).__doc__, path
    told = {path.rpartition(".")[2] for path in paths}
    assert told >= {*ring_attention_pytorch.__all__} - OLD


class Page:
    """A page of the site, as a hook sees it."""

    def __init__(self, path: str) -> None:
        self.file, self.src_uri = self, path


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("guide/sharding.md", "(training.md)", "[here](training.md)"),
        ("guide/sharding.md", "(../layouts.svg)", "[here](../layouts.svg)"),
        ("guide/meshes.md", "(../../examples/meshes.py)", "[here](R/blob/main/examples/meshes.py)"),
        ("index.md", "(guide/sharding.md)", "[here](guide/sharding.md)"),
        ("index.md", "(CONTRIBUTING.md)", "[here](R/blob/main/CONTRIBUTING.md)"),
        ("index.md", "(https://arxiv.org/abs/1)", "[here](https://arxiv.org/abs/1)"),
    ],
)
def test_links_out_of_the_docs_lead_to_the_repository(page, link, becomes):
    given = f"see [here]{link}."
    assert on_page_markdown(given, Page(page), {"repo_url": "R/"}, None) == f"see {becomes}."
    alone = on_page_markdown(given, Page(page), {"repo_url": None}, None)
    wanted = f"`{becomes.rpartition('main/')[2][:-1]}`" if "R/" in becomes else becomes
    assert alone == f"see {wanted}."


def test_a_picture_leads_to_itself():
    given = "![which rank](../layouts.svg)\nand"
    found = on_page_markdown(given, Page("guide/sharding.md"), {"repo_url": None}, None)
    assert found == "[![which rank](../layouts.svg)](../layouts.svg)\nand"


def test_a_link_out_of_the_docs_that_leads_nowhere_is_an_error():
    with pytest.raises(ValueError, match=r"guide: ../../gone\.py leads nowhere"):
        on_page_markdown("[x](../../gone.py)", Page("guide/meshes.md"), {"repo_url": None}, None)


@pytest.mark.thorough
def test_a_browser_finds_what_is_too_wide(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser is installed")
    row = "<tr>" + "<td>0.123456789</td>" * 10 + "</tr>"
    for name, table in {"wide": row * 2, "narrow": "<tr><td>1</td></tr>"}.items():
        style = "<style>table { display: inline-block; max-width: 100%; overflow: auto }</style>"
        body = f"<header></header><details class=md-typeset><table>{table}</table></details>"
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(f"<!doctype html>{style}{body}")
    found = too_wide(tmp_path, browser)
    assert [each[:3] for each in found] == [("/wide/index.html", 390, "table")]
