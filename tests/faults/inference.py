"""Faults planted into caches and attention to them, and a battery that must find each."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("INFERENCE")
ANSWERS_FOR = ("inference/", "nn/", "routing/", "summaries/cache.py", "summaries/generation.py")


def battery() -> Iterable[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    import pytest
    import torch

    from ring_attention_pytorch import tree_attn_decode
    from ring_attention_pytorch.ranks.ring import Ring
    from tests.faults.attention import patched
    from tests.inference import test_attention as attention
    from tests.inference import test_page_table as tables
    from tests.inference import test_prefill as prefill
    from tests.inference import test_programs as programs
    from tests.support import threads
    from tests.support.cache_stories import Story, Teller
    from tests.support.generation_cases import CASES, ROUTED, Case

    torch.set_num_threads(1)
    yield from _states()
    yield from _in_step()
    yield partial(tables.test_owners_and_places_are_the_same_said_otherwise, 2, 3)
    yield partial(tables.test_ranks_hold_what_they_own_and_all_of_it, 2, 3)
    yield from (
        programs.test_programs_at_once_fill_a_gpu_or_there_are_many,
        programs.test_small_blocks_of_keys_have_twice_the_programs,
        attention.test_calls_are_refused_after_others_were_right,
        tables.test_full_pages_are_shared_and_others_copied,
    )
    for seed in range(4):
        yield partial(tables.test_every_sequence_reads_what_was_appended_to_it, seed)

    def tell(size: int, story: Story) -> None:
        errors, _ = threads.run(size, lambda ring: Teller(story, ring).tell())
        assert max(errors) < 1e-12, story

    decoding = Story(deeds=("attend",), given=("sinks",), steps=12)
    yield partial(tell, 2, decoding)
    yield partial(tell, 1, Story(deeds=("attend",), options={"window": 3}))
    for seed in range(3):
        yield partial(tell, 2, Story(seed, sequences=3, given=("starts",), steps=30))
    chunks = ("prefill", "attend", "rollback")
    yield partial(tell, 3, Story(deeds=chunks, steps=30))
    windowed = Story(deeds=chunks, given=("sinks",), steps=12, options={"window": 4})
    yield partial(tell, 3, windowed)
    for size, story in _small_caches():
        yield partial(tell, size, story)

    def other_ways(ring: Ring) -> None:
        q, use_triton = torch.ones(1, 1, 1, 4), None if ring.rank else False
        with pytest.raises(ValueError, match="use_triton must be the same"):
            tree_attn_decode(q, q, q, shard_kv_seq=False, use_triton=use_triton, group=ring)

    yield partial(threads.run, 2, other_ways)

    yield prefill.test_chunks_that_are_alike_on_one_rank_only_are_told_apart
    yield prefill.test_chunks_and_layers_that_are_alike_compare_notes_once_each
    yield prefill.test_a_chunk_without_room_is_refused_before_anything_is_sent
    yield patched(prefill.test_however_short_a_chunk_the_fastest_kernel_attends_to_the_cache)
    yield partial(prefill.test_what_is_sent_is_what_was_said, 2)
    yield partial(prefill.test_left_padding_before_the_window_changes_nothing, 5, 5)

    def generate(size: int, case: Case) -> None:
        found, _ = threads.run(size, case.over)
        assert all(case.same(got, case.anew()) for got in found), case

    for size, number in ((2, 0), (1, 1), (2, 2), (1, 3), (2, 4), (2, 7)):
        yield partial(generate, size, CASES[number])
    for case in ROUTED:
        yield partial(generate, 1, case)
    yield from _generation()


def _generation() -> Iterable[Callable[[], object]]:
    """Tokens that are drawn of logits, and logits of which none is."""
    import torch

    from tests.inference import test_model_cache as kept
    from tests.nn import test_generation as tests

    yield tests.test_keys_that_are_kept_in_fewer_bits_are_close
    for case in kept.KEPT:
        yield partial(kept.test_a_layer_keeps_its_window_where_that_is_less, *case)
    yield tests.test_a_token_is_drawn_among_the_largest
    yield tests.test_temperatures_that_no_float32_has_are_refused
    yield partial(tests.test_the_coldest_draw_is_the_largest, 1.3e-38, 1e35)
    for row in ([1.0, torch.nan], [torch.inf, 1.0], [-torch.inf] * 2):
        yield partial(tests.test_a_row_without_numbers_has_no_token, row, 1.0)
    for break_it in (tests.broken, tests.broken_after_its_end):
        yield partial(tests.test_logits_that_are_no_numbers_are_told, break_it, 0)
    yield partial(tests.test_one_process_generates_by_its_weights, tests.CASES[4])


def _states() -> Iterable[Callable[[], object]]:
    """States that a cache takes, and others."""
    from tests.faults.attention import patched
    from tests.inference import test_states as states

    for name in states.OTHERS:
        yield partial(states.test_states_of_other_caches_are_refused, name)
    for name in states.BROKEN:
        yield partial(states.test_states_that_are_none_are_refused, name)
    for given in ((11, (1, 4), 0), (20, (4, 4), 1), (20, (1, 1), 2)):
        yield partial(states.test_of_a_window_as_much_can_be_rolled_back_as_before, *given)
    yield states.test_what_does_not_fit_is_refused
    yield states.test_old_padding_does_not_stay
    yield states.test_pages_that_were_shared_are_not_when_other_tokens_come
    yield patched(states.test_where_there_is_no_memory_nothing_is_forgotten)


def _in_step() -> Iterable[Callable[[], object]]:
    """Ranks whose caches are alike, and others; and what is asked of caches that can't be."""
    from tests.inference import test_attention as attention
    from tests.inference import test_cache as refusals
    from tests.inference import test_lineage as lineage
    from tests.stories import test_caches_in_step as steps

    yield lineage.test_new_tokens_add_up_to_what_is_counted_anew
    yield lineage.test_what_was_forked_is_told_apart
    yield steps.test_a_call_s_number_is_one_of_what_the_cache_holds
    yield steps.test_a_new_plan_is_of_caches_that_are_alike
    yield refusals.test_who_is_alone_is_told_too
    yield refusals.test_what_has_no_capacity_is_told_no_largest_token
    yield attention.test_queries_and_scores_that_can_not_be_are_refused


def _small_caches() -> list[tuple[int, Any]]:
    """Stories of caches in 8 bits, and of layers with a window, on so many ranks."""
    import torch

    from tests.support.cache_stories import Story

    rolling = Story(5, sequences=3, page=1, steps=20, windows=(2,))
    chunks, much = ("prefill", "attend", "rollback"), ("rollback", "reorder")
    return [
        (2, Story(1, sequences=3, steps=30, kept=torch.float8_e4m3fn)),
        (2, Story(deeds=chunks, steps=8, kept=torch.float8_e4m3fn)),
        (2, replace(rolling, deeds=(*Story.deeds, "prefill"))),
        (1, replace(rolling, deeds=(*chunks, *much))),
        (1, Story(1, sequences=3, windows=(3,), deeds=("attend", "reorder"), steps=20, tied=True)),
    ]


if __name__ == "__main__":
    hunt.main("tests.faults.inference")
