"""Random series of calls, one rank of which leaves out or swaps something.

    python -m tests.support.random_series --series 500

Each call has numbers of its own. A series ends with an error on some rank, or it was silent. "late"
are those with an error in which a rank had wrong numbers before it: ranks that make equal calls
with other data, which no number tells apart until one call is missing, or until a backward.
"""

import argparse
import random
from collections import Counter
from threading import BrokenBarrierError
from unittest import mock

import torch

from ring_attention_pytorch import RingError
from ring_attention_pytorch.ranks.agreement import agree
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.exchanging import EXCHANGING, WITHOUT_BACKWARD

Deed = tuple[str, int]  # "forward" or "backward", and which forward
_SLOW = ["selected cells"]
_EVEN = ["ring_attn, Ulysses"]  # only of an even number of ranks


def is_late(error: AssertionError) -> bool:
    """True if a rank was still at work when its time was over."""
    return "hangs" in str(error)


def drawn(draw: random.Random, size: int) -> tuple[list[str], list[Deed], list[Deed]]:
    """Return the function of each forward, a series, and the series of the rank out of step."""
    left_out = [*WITHOUT_BACKWARD, *_SLOW, *(_EVEN if size % 2 else [])]
    few = draw.sample([name for name in EXCHANGING if name not in left_out], 2)
    names = [draw.choice(few) for _ in range(draw.randint(2, 4))]
    series: list[Deed] = [("forward", i) for i in range(len(names))]
    for i in range(len(names)):
        series.insert(draw.randint(series.index(("forward", i)) + 1, len(series)), ("backward", i))
    while True:
        other = [*series]
        at = draw.randrange(len(series))
        if draw.random() < 0.5:
            way, which = other.pop(at)
            if way == "forward":
                other.remove(("backward", which))
        else:
            to = draw.randrange(len(series))
            other[at], other[to] = other[to], other[at]
        if other != series and all(
            other.index(("forward", i)) < other.index((way, i))
            for way, i in other
            if way != "forward"
        ):
            return names, series, other


def end_of(size: int, names: list[str], series: list[Deed], other: list[Deed]) -> str:
    """Return "right away" or "late", by when an error came, or "silent"."""
    for patience in (0.3, 3.0, 30.0):
        ready: list[int] = []
        wrong: list[Deed] = []

        def rank_main(ring: Ring, ready: list[int] = ready, wrong: list[Deed] = wrong) -> None:
            calls = {name: EXCHANGING[name](ring) for name in dict.fromkeys(names)}
            right = []
            for number, name in enumerate(names):
                found, backward = calls[name](1 + number / 8)
                right.append((found, backward()))
            agree(ring, "all are ready", {})
            ready.append(ring.rank)
            backwards = {}
            for way, which in other if ring.rank == size - 1 else series:
                if way == "forward":
                    found, backwards[which] = calls[names[which]](1 + which / 8)
                else:
                    found = backwards[which]()
                if not all(map(torch.equal, found, right[which][way == "backward"])):
                    wrong.append((way, which))
            agree(ring, "all are done", {})

        with mock.patch.object(threads, "PATIENCE", patience):
            try:
                threads.run(size, rank_main)
            except (
                ValueError,
                RingError,
                TimeoutError,
                BrokenBarrierError,
                AssertionError,
            ) as error:
                if isinstance(error, AssertionError) and not is_late(error):
                    raise
                if isinstance(error, ValueError) and not ready:
                    raise
                if len(ready) == size:
                    return "late" if wrong else "right away"
            else:
                return "silent"
    raise AssertionError("they never came so far")


def count(series: int, size: int, seed: int) -> Counter[str]:
    """Return how many of so many series ended how."""
    draw, ends = random.Random(f"{seed} {size}"), Counter[str]()
    for _ in range(series):
        case = drawn(draw, size)
        end = end_of(size, *case)
        ends[end] += 1
        if end == "silent":
            print("silent:", *case, sep="\n    ")
    return ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for ranks in (2, 3):
        ends = count(given.series // 2, ranks, given.seed)
        print(f"{ranks} ranks: {given.series // 2} series, {ends['silent']} silent: {dict(ends)}")
