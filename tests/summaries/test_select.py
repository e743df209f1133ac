"""Selected cells, some queries at a time."""

from dataclasses import replace

from ring_attention_pytorch.summaries import select
from tests.support.summary_cases import CASES, check_in_threads


def test_cells_are_chosen_and_read_for_some_queries_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(select, "_NUMBERS", 300)
    check_in_threads(replace(CASES["selected of few"], layout="zigzag"), 2)
