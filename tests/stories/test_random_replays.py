"""Random series of calls give the same whether tapes replay them or not."""

from tests.support.random_replays import Series
from tests.support.sampling import grid


@grid("seed", range(60), always=4, drawn=4)
def test_series_are_equal_to_the_bit(seed: int) -> None:
    series = Series(seed, "cpu", (None, "eager")[seed % 2])
    assert series.run(20) == []
    assert series.replayed()
