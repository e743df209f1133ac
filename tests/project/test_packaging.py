"""Packaging agrees with the package, the changelog and the files that git tracks."""

import re
import shutil
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from ring_attention_pytorch import __version__
from ring_attention_pytorch.doctor import commands
from ring_attention_pytorch.kernels import KERNELS
from tests.support.check_install import NOT_IN_SDIST, REQUIRED, ROOT, look_at, pinned, tracked

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
HEADS = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)
RELEASES = [head for head in HEADS if head != "Unreleased"]
EXTRA = "ring-attention-pytorch" + "["  # pip would bring the older package of that name


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where setup.py has written what it knows."""
    folder = tmp_path_factory.mktemp("listed")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder],
        cwd=ROOT, check=True, capture_output=True, timeout=900,
    )  # fmt: skip
    return folder / "ring_attention_pytorch.egg-info"


@pytest.fixture
def metadata(listed: Path) -> Message:
    return message_from_string((listed / "PKG-INFO").read_text())


@pytest.fixture(scope="module")
def files() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    return tracked()


def test_the_description_names_files_where_the_readme_links_to_them(metadata: Message) -> None:
    body = metadata.get_payload()
    assert "sharding (`docs/guide/sharding.md`)" in body
    assert "`docs/kernels.md`" in body
    assert "![" not in body


def test_what_setup_says_is_right(metadata: Message) -> None:
    look_at(metadata)


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    assert RELEASES[0] == __version__


def test_the_citation_is_of_this_version() -> None:
    (version,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert version == __version__


def test_the_newest_release_has_one_date_everywhere() -> None:
    dates = re.findall(r"^## .+\n\nReleased (\d{4}-\d\d-\d\d)\.$", CHANGELOG, re.MULTILINE)
    cited = re.findall(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == dates[:1]
    assert cited


def test_issue_templates_ask_for_what_a_command_prints(files: set[str]) -> None:
    templates = {name for name in files if name.startswith(".github/ISSUE_TEMPLATE/")}
    texts = "".join((ROOT / name).read_text() for name in templates)
    asked = re.findall(r'python -m ring_attention_pytorch (.+)"', texts)
    assert asked == ["doctor --json"] * 2
    for words in asked:
        commands.parser().parse_args(words.split())  # or it exits


def test_the_hooks_run_the_tested_ruff() -> None:
    (tested,) = re.findall(r"^ruff==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert f"rev: v{tested}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_releases_of_the_changelog_have_entries_and_come_newest_first() -> None:
    assert HEADS[1:] == RELEASES if HEADS[0] == "Unreleased" else HEADS == RELEASES
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", release) for release in RELEASES)
    numbers = [tuple(map(int, release.split("."))) for release in RELEASES]
    assert numbers == sorted(set(numbers), reverse=True)
    for section in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        assert re.search(r"^- \S", section, re.MULTILINE), section


def test_nothing_that_git_tracks_is_left_out_of_the_sdist(listed: Path, files: set[str]) -> None:
    packed = set((listed / "SOURCES.txt").read_text().splitlines())
    assert {name for name in files - packed if not name.startswith(NOT_IN_SDIST)} == set()


UNTRACKED = (
    "docs/.env", "docs/.drafts.md", "docs/keys.pem", "benchmarks/results/core.1", "tests/run.json",
    "ring_attention_pytorch/.netrc", "ring_attention_pytorch/weights.bin", "examples/run.log",
)  # fmt: skip


def test_what_lies_about_in_a_checkout_stays_out_of_the_sdist(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    known = {"ring_attention_pytorch/__init__.py", "docs/speed.svg", "benchmarks/results/cpu.json"}
    for name in (*known, *UNTRACKED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "ring_attention_pytorch" / "__init__.py", tmp_path / name)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info"],
        cwd=tmp_path, check=True, capture_output=True, timeout=900,
    )  # fmt: skip
    info = tmp_path / "ring_attention_pytorch.egg-info"
    packed = set((info / "SOURCES.txt").read_text().splitlines())
    assert packed & {*UNTRACKED} == set()
    assert known <= packed


def test_an_extra_asks_for_the_version_that_its_kernel_asks_for(metadata: Message) -> None:
    optional = [r.partition(";")[0] for r in metadata.get_all("Requires-Dist") if "extra" in r]
    for package in {kernel.CAN.package for kernel in KERNELS.values()} - {None}:
        assert f"{package.name}>={package.min_version}" in optional


def test_what_the_package_requires_has_a_tested_version() -> None:
    assert {line.split("==")[0] for line in pinned(*REQUIRED)} == set(REQUIRED)


def test_no_file_recommends_the_older_package_of_the_same_name(files: set[str]) -> None:
    texts = {n for n in files if Path(n).suffix in (".py", ".md", ".txt", ".toml", "")}
    assert [n for n in sorted(texts) if EXTRA in (ROOT / n).read_text()] == []
