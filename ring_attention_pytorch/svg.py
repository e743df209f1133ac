"""Pictures as SVG, readable on a light and on a dark page.

    drawing = page(120, 40, text(10, 16, "work"), box(10, 24, 100, 8, COLOURS[0]))

The colours of text, grids and grounds have a second value for readers who prefer dark pages: a
style in the file says it, so that the same file serves README, site and an image viewer.
https://www.w3.org/TR/mediaqueries-5/#prefers-color-scheme
"""

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, FAINT, PALE = "#57606a", "#d8dee4", "#f3f4f6"  # text; grids; background
COLOURS = ("#4269d0", "#efb118", "#d0503c", "#3ca951", "#7a5195", "#b07d00")  # in both themes
_DARK = {INK: "#c9d1d9", FAINT: "#3d444d", PALE: "#21262d"}


def page(width: float, height: float, *parts: str) -> str:
    """Return the picture of these parts, as wide as the page at most.

    >>> page(60, 20, text(0, 14, "one"))[:60]
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 60 20" '
    """
    rules = "".join(
        f'[{what}="{light}"]{{{what}:{dark}}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" font-family="system-ui, sans-serif" font-size="13">'
        f"<style>svg{{max-width:100%}}@media(prefers-color-scheme:dark){{{rules}}}</style>"
        f"{''.join(parts)}</svg>\n"
    )


def text(
    x: float,
    y: float,
    words: str,
    colour: str = INK,
    *,
    size: int = 13,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    """Return words on a line through y; `anchor` is start, middle or end.

    >>> text(1, 2, "a < b")
    '<text x="1.0" y="2.0" fill="#57606a">a &lt; b</text>'
    """
    usual = {"font-size": (size, 13), "font-weight": (weight, "normal")}
    usual["text-anchor"] = anchor, "start"
    style = "".join(f' {name}="{a}"' for name, (a, default) in usual.items() if a != default)
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return a filled rectangle.

    >>> box(0, 1, 2, 3, COLOURS[0])
    '<rect x="0.0" y="1.0" width="2.0" height="3.0" fill="#4269d0"/>'
    """
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"/>'


def line(
    points: Iterable[tuple[float, float]], colour: str, width: float = 2, dashes: str = ""
) -> str:
    """Return a line through points; `dashes` are lengths drawn and left out, in turn.

    >>> line([(0, 0), (1, 2)], FAINT)
    '<polyline points="0.0,0.0 1.0,2.0" fill="none" stroke="#d8dee4" stroke-width="2"/>'
    """
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    style = f'fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}'
    return f'<polyline points="{path}" {style}/>'
