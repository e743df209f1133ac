"""Smaller cases of the random test, for whoever looks for what is wrong with one."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.support.random_draw import Case, refused

SIZES = ("size", "batch", "length", "heads", "key_heads", "d", "d_v")
OTHERS = ("seed", "learned", "query_at", "key_at", "queries", "keys")  # that get simpler otherwise


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one thing."""
    plain = Case()
    for name, value in vars(case).items():
        usual = getattr(plain, name)
        if value != usual and name not in (*SIZES, *OTHERS):
            yield replace(case, **{name: usual})
    if case.two and not case.decode:
        yield replace(case, queries=(), keys=(), query_at=(), key_at=(), cross=None)
    yield replace(case, query_at=(), key_at=())
    for i in range(len(case.strides)):
        yield replace(case, strides=case.strides[:i] + case.strides[i + 1 :])
    for i in range(len(case.learned)):
        yield replace(case, learned=case.learned[:i] + case.learned[i + 1 :])
    for name in (*SIZES, "window"):
        for value in range(getattr(case, name) or 0):
            yield shortened(replace(case, **{name: value}))
    for name in ("queries", "keys"):
        at, lengths = {"queries": "query_at", "keys": "key_at"}[name], getattr(case, name)
        for i, n in enumerate(lengths):
            if n:
                fewer = replace(case, **{name: (*lengths[:i], n - 1, *lengths[i + 1 :])})
                yield replace(fewer, **{at: getattr(case, at)[:-1]})


def shortened(case: Case) -> Case:
    """With documents of as many samples and tokens as there are."""
    n, b = case.length, case.batch
    return replace(
        case,
        ids=tuple(row[:n] for row in case.ids[:b]),
        borders=tuple(tuple(min(at, n) for at in cuts[:-1]) + (n,) for cuts in case.borders[:b]),
        dealt=tuple(min(at, n) for at in case.dealt[:-1]) + (n,) * bool(case.dealt),
        queries=case.queries[: case.size],
        keys=case.keys[: case.size],
        prefix=case.prefix[:b],
    )


def smallest(case: Case, problem: Callable[[Case], dict[str, str]]) -> Case:
    """As simple as it can be and still wrong in one of the ways in which it is."""
    bad = {*problem(case)}
    while True:
        for less in smaller(case):
            try:
                same = less == case or less.size < 1 or refused(less)
                fails = not same and bad & {*problem(less)}
            except Exception:  # no case at all
                continue
            if fails:
                case = less
                break
        else:
            return case
