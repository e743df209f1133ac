"""Draws docs/trace.svg: `python docs/draw_trace.py TITLE=FILE.json ...`.

The files are what `python -m benchmarks ring --trace DIR` wrote, one forward and backward of one
rank each. A panel for each: what its GPU computes on the streams that attend, the first of them by
itself, and what it does beside them.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from ring_attention_pytorch.svg import COLOURS, FAINT, PALE, box, page, text

WIDTH, LEFT, LANE, PANEL, TOP = 960, 150, 30, 160, 44
ATTENTION, OTHER, COPY, WAIT = COLOURS[0], "#a5b4d4", COLOURS[1], FAINT
KINDS = {"attention": ATTENTION, "other kernels": OTHER, "keys and gradients move": COPY,
         "waits for other ranks": WAIT}  # fmt: skip


class Event(NamedTuple):
    start: float  # microseconds
    length: float
    stream: int
    kind: str


def kind_of(name: str, category: str) -> str:
    name = name.lower()
    if "barrier" in name:
        return "waits for other ranks"
    if "nccl" in name or (category == "gpu_memcpy" and "ptop" in name):
        return "keys and gradients move"
    if "preprocess" in name or "postprocess" in name:
        return "other kernels"
    attends = ("sdpa", "flash", "fmha_fprop", "forward_kernel", "keys_kernel", "queries_kernel")
    return "attention" if any(part in name for part in attends) else "other kernels"


def events_of(file: Path) -> list[Event]:
    """Return the events on the GPU, in order, from the first on."""
    kept = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Event(e["ts"], e["dur"], e["args"]["stream"], kind_of(e["name"], e["cat"]))
        for e in json.loads(file.read_text())["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in kept
    ]
    first = min(e.start for e in found)
    return sorted(e._replace(start=e.start - first) for e in found)


def drawing(traces: dict[str, list[Event]]) -> str:
    longest = max(e.start + e.length for events in traces.values() for e in events)
    scale = (WIDTH - LEFT - 20) / longest
    panels = [
        panel(title, events, TOP + PANEL * i, scale)
        for i, (title, events) in enumerate(traces.items())
    ]
    height = TOP + PANEL * len(traces)
    legend = [
        box(LEFT + 200 * i, 14, 12, 12, colour) + text(LEFT + 200 * i + 18, 25, kind)
        for i, (kind, colour) in enumerate(KINDS.items())
    ]
    return page(WIDTH, height, *legend, *panels)


def panel(title: str, events: list[Event], y: int, scale: float) -> str:
    """A lane for the first stream with attention, one for the others, and one for the rest."""
    first, *others = dict.fromkeys(e.stream for e in events if e.kind == "attention")
    lane_of = {first: "own keys" if others else "computes", **dict.fromkeys(others, "others' keys")}
    end = max(e.start + e.length for e in events)
    parts = [text(10, y + 14, f"{title}: {end / 1e3:.2f} ms", weight="bold")]
    for lane, name in enumerate(dict.fromkeys([*lane_of.values(), "beside it"])):
        top = y + 24 + (LANE + 6) * lane
        parts.append(text(10, top + LANE // 2 + 5, name))
        parts.append(box(LEFT, top, end * scale, LANE, PALE))
        mine = [e for e in events if _lane(e, lane_of) == name]
        # waiting lies behind what else goes on beside it
        for e in sorted(mine, key=lambda e: e.kind != "waits for other ranks"):
            parts.append(
                box(LEFT + e.start * scale, top, max(e.length * scale, 0.4), LANE, KINDS[e.kind])
            )
    return "".join(parts)


def _lane(event: Event, lane_of: dict[int, str]) -> str:
    """In a CUDA graph what moves and waits may share a stream with what computes."""
    computes = event.kind in ("attention", "other kernels")
    return lane_of.get(event.stream, "beside it") if computes else "beside it"


if __name__ == "__main__":
    given = [each.split("=", 1) for each in sys.argv[1:]]
    traces = {title: events_of(Path(file)) for title, file in given}
    (Path(__file__).parent / "trace.svg").write_text(drawing(traces))
