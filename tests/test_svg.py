"""Pictures: valid XML, and readable on light and on dark pages."""

import re
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ring_attention_pytorch.svg import _DARK, COLOURS, FAINT, INK, PALE, box, line, page, text

DOCS = Path(__file__).parents[1] / "docs"
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#0d1117"


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminances, https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_on_both_pages() -> None:
    light, dark = (INK, LIGHT_PAGE, PALE), (_DARK[INK], DARK_PAGE, _DARK[PALE])
    for ink, *grounds in (light, dark):
        assert min(contrast(ink, ground) for ground in grounds) > 4.5


@pytest.mark.parametrize("colour", COLOURS)
def test_a_series_is_seen_on_both_pages(colour: str) -> None:
    assert min(contrast(colour, other) for other in (LIGHT_PAGE, DARK_PAGE)) > 1.8


def test_a_grid_is_fainter_than_text_and_is_seen() -> None:
    for page_colour, faint, ink in (
        (LIGHT_PAGE, FAINT, INK),
        (DARK_PAGE, _DARK[FAINT], _DARK[INK]),
    ):
        assert 1.2 < contrast(faint, page_colour) < contrast(ink, page_colour)


def test_a_picture_is_xml_with_a_rule_for_dark_pages() -> None:
    drawn = page(80, 40, text(1, 12, "a < b & c"), box(0, 20, 8, 8, PALE), line([(0, 0)], FAINT))
    root = ElementTree.fromstring(drawn)
    assert root.get("viewBox") == "0 0 80 40"
    assert "a < b & c" in [each.text for each in root]
    for light, dark in _DARK.items():
        for what in ("fill", "stroke"):
            assert f'[{what}="{light}"]{{{what}:{dark}}}' in drawn


@pytest.mark.parametrize("file", sorted(DOCS.rglob("*.svg")), ids=lambda file: file.stem)
def test_pictures_of_the_pages_have_no_ground_and_only_text_that_both_pages_show(
    file: Path,
) -> None:
    drawn = file.read_text()
    assert "prefers-color-scheme" in drawn
    texts = re.findall(r"<text [^>]*>", drawn)
    inks = set(chain.from_iterable(re.findall(r'fill="([^"]*)"', each) for each in texts))
    assert all("fill=" in each for each in texts)  # black by default
    assert inks <= {INK, "white", *COLOURS}  # white stands on bars
    assert 'fill="white"/>' not in drawn
