"""A picture of a step as SVG: the schedule as predicted, and below it as measured."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.observe import COMPUTE, WAIT, Record
from ring_attention_pytorch.schedule.timeline import (
    ALL,
    GRADS_GO,
    KEYS_COME,
    OTHERS,
    OWN,
    Bar,
    Timeline,
    of_part,
    of_transfer,
    predicted,
)
from ring_attention_pytorch.svg import COLOURS as SERIES
from ring_attention_pytorch.svg import FAINT, box, page, text

LEFT, HIGH, GAP, PANEL = 92, 20, 5, 98
WIDTH = 900  # of the bars of a panel
COLOURS = {
    OWN: SERIES[0], OTHERS: SERIES[5], ALL: SERIES[4], KEYS_COME: SERIES[3], GRADS_GO: SERIES[2],
}  # fmt: skip
_LEGEND_AT = (0, 175, 295, 420, 510)


class Panel(NamedTuple):
    """A step in bars: its title, and timelines of its directions by name."""

    title: str
    directions: dict[str, Timeline]


def picture(plan: RingPlan) -> str:
    """Return the drawing of this rank's step, forward and backward."""
    _, forward, backward = plan.schedule
    place, shape = plan.place, plan.chosen.shape
    machine = plan.chosen.machine
    near = machine.every(plan.degree)
    directions = {
        "forward": predicted(forward, place, shape, near, back=False),
        "backward": predicted(backward, place, shape, near, back=True),
    }
    title = f"{plan.chosen.name}, predicted by speeds of {machine.device}s"
    panels = [Panel(title, directions)]
    if plan.records:
        title = f"measured in the last observed call, on {plan.device.type}"
        records = sorted(plan.records.items(), reverse=True)  # forward first
        panels.append(Panel(title, {name: measured(record) for name, record in records}))
    case = f"rank {plan.ring.rank} of {plan.ring.size}, {plan.layout}, kernel {plan.kernel.name}"
    notes = [
        f"{case}; each panel to a scale of its own",
        "-1: keys, or gradients, of the owner one place behind",
    ]
    return drawing(panels, notes)


def measured(record: Record) -> Timeline:
    """Return the bars of recorded calls.

    A transfer is drawn until its wait is over: its arrival was not recorded.
    """
    program, parts = record.program, record.program.parts
    computed: list[Bar] = []
    under_way: list[Bar] = []
    begun: dict[int, float] = {}
    for what, number, start, stop in record.spans:
        first, last = (record.seconds(record.start, mark) for mark in (start, stop))
        if what == COMPUTE:
            computed.append(Bar(first, last, *of_part(program, parts[number])))
        elif what == WAIT:
            label = of_transfer(program, program.transfers[number])
            under_way.append(Bar(begun[number], last, *label))
        else:
            begun[number] = first
    return Timeline(computed, under_way)


def drawing(panels: Iterable[Panel], notes: Iterable[str], scale: float | None = None) -> str:
    """Draw panels below one another; `scale` is pixels of a second, None fits each by itself."""
    parts, y, right = list(_legend()), 52, float(LEFT + _LEGEND_AT[-1] + 130)
    for panel in panels:
        parts.append(text(LEFT, y, panel.title, weight="bold"))
        x = float(LEFT)
        total = sum(timeline.end for timeline in panel.directions.values())
        pixels = scale or WIDTH / max(total, 1e-9)
        for name, timeline in panel.directions.items():
            form = ".1f" if scale else ".3g"
            title = f"{name}, {1e3 * timeline.end:{form}} ms"
            parts.append(text(x, y + 18, title))
            for row, (bars, label) in enumerate(zip(timeline, ("computes", "under way"))):
                top = y + 24 + row * (HIGH + GAP)
                if x == LEFT:
                    parts.append(text(LEFT - 8, top + 14, label, anchor="end"))
                parts.append(box(x, top, timeline.end * pixels, HIGH, FAINT))
                for bar in bars:
                    parts += _drawn(bar, x, top, pixels)
            x += timeline.end * pixels + 30
        right, y = max(right, x), y + PANEL
    for number, note in enumerate(notes):
        parts.append(text(LEFT, y - 4 + 18 * number, note))
    return page(right, y + 28, *parts)


def _legend() -> Iterator[str]:
    for x, (words, colour) in zip(_LEGEND_AT, COLOURS.items()):
        yield box(LEFT + x, 12, 12, 12, colour)
        yield text(LEFT + x + 18, 22, words)


def _drawn(bar: Bar, x: float, top: float, pixels: float) -> list[str]:
    wide = (bar.stop - bar.start) * pixels
    left = x + bar.start * pixels
    parts = [box(left, top, max(wide - 1, 1), HIGH, COLOURS[bar.kind])]
    if bar.words and wide > 7 * len(bar.words):
        parts.append(text(left + 4, top + 14, bar.words, "white"))
    return parts
