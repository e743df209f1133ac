"""Faults planted into caches and attention to them, and a battery that must find each."""

from collections.abc import Callable, Iterable
from functools import partial

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("INFERENCE")


def battery() -> Iterable[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    import pytest
    import torch

    from ring_attention_pytorch import tree_attn_decode
    from ring_attention_pytorch.comm.ring import Ring
    from tests.inference import test_page_table as tables
    from tests.inference import test_pages as pages
    from tests.inference import test_refusals as refusals
    from tests.inference.stories import Story, Teller
    from tests.nn import test_generation
    from tests.nn.generation_cases import CASES, ROUTED, Case
    from tests.support import threads

    torch.set_num_threads(1)
    threads.PATIENCE = 10.0
    yield partial(pages.test_owners_and_places_are_the_same_said_otherwise, 2, 3)
    yield partial(pages.test_ranks_hold_what_they_own_and_all_of_it, 2, 3)
    yield refusals.test_calls_are_refused_after_others_were_right
    yield tables.test_full_pages_are_shared_and_others_copied
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
    yield partial(tell, 3, Story(deeds=chunks, steps=12, options={"window": 4}))

    def other_ways(ring: Ring) -> None:
        q, use_triton = torch.ones(1, 1, 1, 4), None if ring.rank else False
        with pytest.raises(ValueError, match="use_triton must be the same"):
            tree_attn_decode(q, q, q, shard_kv_seq=False, use_triton=use_triton, group=ring)

    yield partial(threads.run, 2, other_ways)

    def generate(size: int, case: Case) -> None:
        found, _ = threads.run(size, case.over)
        assert all(case.same(got, case.anew()) for got in found), case

    for size, number in ((2, 0), (1, 1), (2, 2), (1, 3), (2, 4)):
        yield partial(generate, size, CASES[number])
    for case in ROUTED:
        yield partial(generate, 1, case)
    yield test_generation.test_a_token_is_drawn_among_the_largest


if __name__ == "__main__":
    hunt.main("tests.faults.inference")
