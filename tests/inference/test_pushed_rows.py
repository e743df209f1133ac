"""Rows that ranks push into one another's memory, and what went wrong with them, in words."""

import torch

from ring_attention_pytorch.inference.pushed_rows import PushedRows, pushed_rows
from ring_attention_pytorch.ranks.ring import Ring


def rows(rank: int, memories: list[torch.Tensor]) -> PushedRows:
    return PushedRows(torch.device("cpu"), rank, memories, slot=8, patience=2.5)


def test_a_rank_that_fails_says_so_in_all_memories_and_only_in_its_words() -> None:
    ranks = 3
    memories = [
        torch.zeros(PushedRows.words_for(8, ranks), dtype=torch.int64) for _ in range(ranks)
    ]
    mine = rows(1, memories)
    mine.fail()
    for memory in memories:
        assert memory.nonzero().flatten().tolist() == [len(memory) - ranks + 1]
        assert memory[-2] == -1
    assert mine.explained(1, 0, -1) == "rank 1 has failed, while this one decoded"
    mine.reset()
    assert not memories[1].any()
    assert not mine.state[:3].any()
    assert memories[0].any()  # each rank's own alone


def test_who_is_late_and_who_is_out_of_step_are_told_apart() -> None:
    memories = [torch.zeros(PushedRows.words_for(8, 2), dtype=torch.int64) for _ in range(2)]
    mine = rows(0, memories)
    call, other = 7 << 32 | 5, 7 << 32 | 6
    assert "rank 1 did not come within 2.5 s" in mine.explained(1, call, 6 << 32 | 5)
    assert "rank 1 has called attention to a cache with other shapes" in mine.explained(
        1, call, other
    )


def test_who_is_alone_has_no_rows() -> None:
    assert pushed_rows(Ring.alone(), torch.device("cpu")) is None
