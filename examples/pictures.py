"""Ring attention drawn with characters: every function returns a string and prints nothing.

`paint(text, rank)` colours what belongs to a rank; the default leaves text as it is.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import einx
import torch

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments, count, positions
from ring_attention_pytorch.geometry.tiles import (
    Mask,
    Tile,
    band,
    needed_distances,
    tiles,
    visible_pairs,
)

Paint = Callable[[str, int], str]

_COLOURS = (39, 214, 77, 205, 141, 203, 44, 186)  # of the terminal's 256
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_BAR = 8  # characters
_HALVES = "·▀▄█"  # none, the upper, the lower, both of two scores


def plain(text: str, rank: int) -> str:
    """No colour."""
    return text


def colour(text: str, rank: int) -> str:
    """In the rank's colour, by an escape sequence of the terminal."""
    return f"\x1b[38;5;{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"


def layouts(length: int, ring_size: int, paint: Paint = plain) -> str:
    """Return which rank holds which token, a line for each layout.

    >>> print(layouts(length=16, ring_size=2))
      contiguous  0000000011111111
      striped     0101010101010101
      zigzag      0000111111110000
    """
    return "\n".join(
        f"  {name:<10}  {''.join(paint(str(r), r) for r in _holders(name, length, ring_size))}"
        for name in LAYOUTS
    )


def score_matrices(length: int, ring_size: int, paint: Paint = plain) -> str:
    """The causal scores of each layout: the digit is the hop at which a score is computed.

    Before each row stands the rank that computes it; colours tell whose the keys are.

    >>> print(score_matrices(length=4, ring_size=2))
         contiguous      striped         zigzag
      0  0            0  0            0  0
      0  00           1  10           1  10
      1  110          0  010          1  100
      1  1100         1  1010         0  0110
    """
    columns = [_score_matrix(name, length, ring_size, paint) for name in LAYOUTS]
    names = "".join(f"     {name:<{max(length, 10) + 1}}" for name in LAYOUTS).rstrip()
    return "\n".join([names, *("".join(row).rstrip() for row in zip(*columns))])


def _score_matrix(layout: str, length: int, ring_size: int, paint: Paint) -> list[str]:
    holder = torch.tensor(_holders(layout, length, ring_size))
    hops = einx.subtract("i, j -> i j", holder, holder) % ring_size
    owners = holder.tolist()
    lines = []
    for i, row in enumerate(hops.tolist()):
        seen = "".join(paint(str(hop), owners[j]) for j, hop in enumerate(row[: i + 1]))
        hidden = " " * (max(length, 10) - i)
        lines.append(f"  {paint(str(owners[i]), owners[i])}  {seen}{hidden}")
    return lines


def _holders(layout: str, length: int, ring_size: int) -> list[int]:
    """The rank of each token."""
    holder = [0] * length
    for rank in range(ring_size):
        for at in positions(layout, rank=rank, ring_size=ring_size, length=length).tolist():
            holder[at] = rank
    return holder


def hops(
    layout: str,
    length: int,
    ring_size: int,
    visible: Mask,
    *,
    shown: int | None = None,
    paint: Paint = plain,
) -> str:
    """Whose keys every rank has at each hop, and what its queries see of them.

    A block has a row for each query of the rank and a column for each key that is here; two
    rows fit on a line of text. With `shown` only so many hops are drawn.
    """
    segments = all_segments(layout, ring_size, length)
    needed = needed_distances(segments, segments, visible)
    sizes = [count(s) for s in segments]
    height = max(3, -(-max(sizes) // 2))
    columns = [_column("", [[paint(f"rank {r}", r)] for r in range(ring_size)], height, 8)]
    for hop in range(ring_size if shown is None else shown):
        blocks = []
        for rank in range(ring_size):
            owner = (rank - hop) % ring_size
            found = tiles(segments[rank], segments[owner], visible)
            block = _block(found, sizes[rank], sizes[owner], owner, paint)
            blocks.append(block if hop in needed else [f"{'':{sizes[owner]}} not sent"])
        heading = f"hop {hop}" if hop in needed else f"hop {hop} left out"
        columns.append(_column(heading, blocks, height, max(sizes) + 10))
    columns += [[""] * len(columns[0])] * (ring_size + 1 - len(columns))
    shares = _shares(pairs_by_hop(layout, length, ring_size, visible), shown, paint)
    columns.append(_column("work", shares, height, 0))
    widths = [8, *[max(sizes) + 10] * ring_size, 0]
    return _side_by_side(columns, widths)


def pairs_by_hop(layout: str, length: int, ring_size: int, visible: Mask) -> list[list[int]]:
    """Return how many scores each rank computes at each hop, a list for each rank."""
    held = all_segments(layout, ring_size, length)
    return [
        [
            visible_pairs(tiles(held[rank], held[(rank - hop) % ring_size], visible))
            for hop in range(ring_size)
        ]
        for rank in range(ring_size)
    ]


def imbalance(layout: str, length: int, ring_size: int, visible: Mask) -> float:
    """The work of the busiest rank over the average; 1 is perfect.

    >>> imbalance("zigzag", 1024, 4, Mask(causal=True))
    1.0
    """
    work = [sum(row) for row in pairs_by_hop(layout, length, ring_size, visible)]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


def block_state(found: Sequence[Tile], rows: int, columns: int) -> str:
    """Return how much of a block of scores is visible, in a word.

    >>> block_state([Tile(slice(0, 4), slice(0, 4), None, 0)], 4, 4)
    'triangle'
    """
    pairs = visible_pairs(found)
    if pairs in (0, rows * columns):
        return "all" if pairs else "skipped"
    # a diagonal that is hidden leaves out the first row
    diagonal = found[0][2:] == (None, 0) and found[0].rows.stop - found[0].rows.start >= rows - 1
    return "triangle" if len(found) == 1 and diagonal else "part"


def _block(found: Sequence[Tile], n: int, m: int, owner: int, paint: Paint) -> list[str]:
    """The scores that are visible, and whose keys they are, in words beside them."""
    seen = torch.zeros(n + n % 2, m, dtype=torch.bool)
    for tile in found:
        seen[tile.rows, tile.cols] |= band(tile, seen.device)
    two = (seen[0::2] + 2 * seen[1::2]).tolist()
    lines = [paint("".join(_HALVES[s] for s in line), owner) for line in two]
    share = visible_pairs(found) / max(1, n * m)
    words = [f"keys {owner}", block_state(found, n, m), f"{share:.0%}" if 0 < share < 1 else ""]
    lines += [" " * m] * (len(words) - len(lines))
    words += [""] * (len(lines) - len(words))
    return [f"{line} {word}" for line, word in zip(lines, words)]


def _shares(work: list[list[int]], shown: int | None, paint: Paint) -> list[list[str]]:
    """Each rank's part of all work, as far as it is done, in figures and as a bar."""
    done = [sum(row[:shown]) for row in work]
    total, busiest = (max(1, f(map(sum, work))) for f in (sum, max))
    return [
        [f"{d / total:.1%}", paint("█" * round(_BAR * d / busiest), rank)]
        for rank, d in enumerate(done)
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be.

    >>> print(table(["hops", "sent"], [["3", "96.0 KiB"], ["1", "0 B"]]))
      hops  sent
      3     96.0 KiB
      1     0 B
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*lines)]
    return _side_by_side([["", *[""] * len(rows)], *zip(*lines)], [2, *widths])


def curves(lines: Mapping[str, Sequence[float]], width: int = 64, height: int = 10) -> str:
    """Up to three curves in a frame, marked `●`, `○` and `×`; `◉` where several go through."""
    marks = {0: " ", 1: "●", 2: "○", 4: "×"}
    values = [v for line in lines.values() for v in line]
    low, high, steps = min(values), max(values), max(map(len, lines.values()))
    width = min(width, steps)
    grid = torch.zeros(height, width, dtype=torch.long)
    for number, line in enumerate(lines.values()):
        for column in range(width):
            step = round(column * (steps - 1) / max(1, width - 1))
            if step < len(line):
                row = round((high - line[step]) / max(high - low, 1e-9) * (height - 1))
                grid[row, column] |= 1 << number
    axis = [f"{high:7.2f}", *[" " * 7] * (height - 2), f"{low:7.2f}"]
    drawn = [
        f"{y} │{''.join(marks.get(cell, '◉') for cell in row)}".rstrip()
        for y, row in zip(axis, grid.tolist())
    ]
    names = "   ".join(f"{marks[1 << i]} {name}" for i, name in enumerate(lines))
    both = {1: "", 2: "   ◉ both"}.get(len(lines), "   ◉ several")
    return "\n".join([*drawn, f"{'':7} └{'─' * width}", f"{'':9}{names}{both}"])


def size(count_of_bytes: float) -> str:
    """
    >>> size(512), size(98304)
    ('512 B', '96.0 KiB')
    """
    if count_of_bytes < 1024:
        return f"{count_of_bytes:.0f} B"
    kib = count_of_bytes / 1024
    return f"{kib:.1f} KiB" if kib < 1024 else f"{kib / 1024:.1f} MiB"


def _column(heading: str, blocks: list[list[str]], height: int, width: int) -> list[str]:
    """The blocks one above another, a blank line before each."""
    lines = [heading[:width] if width else heading]
    for block in blocks:
        lines += ["", *block, *[""] * (height - len(block))]
    return lines


def _side_by_side(columns: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """Columns of lines beside one another; escape sequences take no room."""
    return "\n".join(
        "".join(
            text + " " * (width - len(_ESCAPE.sub("", text))) for text, width in zip(row, widths)
        ).rstrip()
        for row in zip(*columns)
    )
