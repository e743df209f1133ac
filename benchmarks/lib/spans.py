"""Split the time of a GPU into attention, what it waits for, and what is left."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

ATTENTION, TRANSFER, OTHER = "attention", "transfer", "other"
MARK = "spin_kernel"  # what `torch.cuda._sleep` launches
# parts of the names of GPU work; what is neither is elementwise, copies and the like
KINDS = {
    TRANSFER: ("nccl", "ptop", "pull_kernel", "take_kernel", "barrier_kernel", "sum_kernel",
               "write_kernel"),
    ATTENTION: ("sdpa", "fmha", "flash", "attention", "forward_kernel", "keys_kernel",
                "queries_kernel", "cudnn"),
}  # fmt: skip


class Span(NamedTuple):
    """Say when work ran on the GPU, in microseconds, and under which name."""

    start: float
    stop: float
    name: str

    @property
    def kind(self) -> str:
        """Return the kind that the name tells.

        >>> Span(0, 1, "ncclDevKernel_SendRecv").kind, Span(0, 1, "Memcpy DtoD").kind
        ('transfer', 'other')
        """
        low = self.name.lower()
        for kind, parts in KINDS.items():
            if any(part in low for part in parts):
                return kind
        return OTHER


class Parts(NamedTuple):
    """Hold microseconds: the first four sum to `whole`."""

    attention: float  # any attention runs
    transfer: float  # nothing but transfers
    other: float  # neither attention nor a transfer, but something
    idle: float  # nothing at all
    whole: float  # from the first start to the last end


def covered(spans: Iterable[Span]) -> float:
    """Return the time in which any of them runs.

    >>> covered([Span(0, 4, ""), Span(2, 5, ""), Span(7, 8, "")])
    6.0
    """
    total, end = 0.0, float("-inf")
    for start, stop, _ in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def split(spans: list[Span]) -> Parts:
    """Split the time between the first start and the last end.

    >>> work = [Span(0, 4, "flash_fprop"), Span(3, 6, "ncclKernel"), Span(7, 8, "vector_add")]
    >>> split(work)
    Parts(attention=4.0, transfer=2.0, other=1.0, idle=1.0, whole=8.0)
    """
    by_kind = {kind: [s for s in spans if s.kind == kind] for kind in (*KINDS, OTHER)}
    attention = covered(by_kind[ATTENTION])
    with_transfers = covered([*by_kind[ATTENTION], *by_kind[TRANSFER]])
    busy = covered(spans)
    whole = float(max(s.stop for s in spans) - min(s.start for s in spans))
    transfer, other = with_transfers - attention, busy - with_transfers
    return Parts(attention, transfer, other, whole - busy, whole)


def recorded(run: Callable[[], object], calls: int, barrier: Callable[[], object]) -> list[Span]:
    """Profile calls on this GPU; return all that ran in them.

    One more call comes first, and then a `barrier` of all ranks: a profiler takes its time to
    start, and others would wait for it in what is measured.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
        barrier()
        torch.cuda._sleep(1000)  # a mark: what is before does not count
        torch.cuda.synchronize()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Span(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in kinds
    ]
    return after_mark(found)


def after_mark(spans: list[Span]) -> list[Span]:
    """Return what starts after the last mark.

    >>> after_mark([Span(0, 1, "a"), Span(2, 3, "spin_kernel(long)"), Span(4, 5, "b")])
    [Span(start=4, stop=5, name='b')]
    """
    mark = max((s.stop for s in spans if MARK in s.name), default=float("-inf"))
    return [s for s in spans if s.start >= mark]


def longest(spans: list[Span], most: int = 6) -> list[str]:
    """Name the work that takes most of each kind, with its time.

    >>> longest([Span(0, 2, "nccl"), Span(3, 4, "nccl"), Span(0, 1, "add")])
    ['transfer 3 us in 2: nccl', 'other 1 us in 1: add']
    """
    found: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        found.setdefault((span.kind, span.name), []).append(span.stop - span.start)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        f"{kind} {sum(each):.0f} us in {len(each)}: {name[:90]}" for (kind, name), each in ordered
    ]
