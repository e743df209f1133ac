"""Batches of packed documents that tests share."""

from hypothesis import strategies as st

Ids = tuple[int, ...]
N = 29


def in_runs(*lengths: int) -> Ids:
    """Ids of contiguous documents; one of no length leaves its number out."""
    return tuple(number for number, n in enumerate(lengths) for _ in range(n))


PACKED: dict[str, tuple[Ids, ...]] = {
    "one": (in_runs(29),),
    "none empty": (in_runs(3, 1, 17, 8),),
    "some empty": (in_runs(0, 0, 5, 0, 24, 0),),
    "single tokens": (in_runs(*[1] * 29),),
    "one long among short": (in_runs(1, 2, 1, 20, 2, 1, 2),),
    "other samples, others": (in_runs(14, 15), in_runs(2, 25, 2)),
    "scattered": (tuple(i * 7 % 5 for i in range(29)), tuple(i // 4 % 3 for i in range(29))),
}


ids_of_any_kind = st.integers(0, 33).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 6), min_size=n, max_size=n).map(tuple), min_size=1, max_size=2
    )
)
