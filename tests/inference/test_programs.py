"""Programs of attention to a cache fill a GPU, however many sequences and heads there are."""

from itertools import product

import pytest

from ring_attention_pytorch.inference.programs import Cut, Tuning
from ring_attention_pytorch.runtime.processors import Processors

H100 = Processors(132, 232448)


def cut(sequences: int, new: bool = True, itemsize: int = 2, d: int = 128, tokens: int = 1) -> Cut:
    """Return the cut for 32 query and 8 key heads."""
    return Cut.of((sequences, tokens, 32, d), (8, d, itemsize), new, H100, Tuning())


def test_programs_at_once_fill_a_gpu_or_there_are_many() -> None:
    for sequences, new in product(range(1, 100), (False, True)):
        programs = 8 * sequences * (cut(sequences, new).splits - new)
        if programs > H100.number:
            assert programs > (5 if new else 1) * H100.number or programs == 8 * sequences
        else:
            assert programs >= 0.7 * H100.number


def test_small_blocks_of_keys_have_twice_the_programs() -> None:
    """They are in 8 bits, or of small heads."""
    assert cut(1).splits == 17
    assert cut(1, itemsize=1).splits == cut(1, d=64).splits == 34


@pytest.mark.parametrize("new", [False, True])
def test_new_tokens_are_a_split_of_their_own(new: bool) -> None:
    assert cut(8, new).splits == 2 + new


@pytest.mark.parametrize(("tokens", "rows", "blocks"), [(1, 16, 1), (5, 32, 1), (100, 64, 7)])
def test_rows_are_tokens_times_heads_of_a_group(tokens: int, rows: int, blocks: int) -> None:
    assert cut(1, tokens=tokens)[2:4] == (rows, blocks)


def test_blocks_of_keys_fit_into_shared_memory() -> None:
    for d, itemsize in product((64, 128, 256), (1, 2, 4)):
        found = Cut.of((1, 1, 8, d), (8, d, itemsize), True, Processors(20, 101376), Tuning())
        on_their_way = (found.stages - 1) * found.cols * 2 * d * itemsize
        assert found.stages == 2 or on_their_way < 101376


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_queries_and_blocks_of_latents_fit_shared_memory_together(heads: int) -> None:
    """For DeepSeek V3 with 64 rows at once Triton 3.6 asked for 278,528 bytes, and got none."""
    cut = Cut.of((1, 1, heads, 576), (1, 512, 2), True, H100, Tuning())
    queries, block = cut.rows * 1024 * 2, cut.cols * (1024 + 512) * 2
    assert queries + cut.stages * block <= H100.shared
    assert cut.rows * cut.blocks == heads
