"""Faults planted into recurrent layers, and a battery that must find each."""

from collections.abc import Callable, Iterable
from typing import Any

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("RECURRENT")
ANSWERS_FOR = ("recurrent/",)


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong."""
    import pytest
    import torch

    from ring_attention_pytorch.recurrent import ring_gated_delta_rule
    from tests.recurrent import (
        test_cuts,
        test_fla_passes,
        test_halo,
        test_layers,
        test_pieces,
        test_runs,
        test_scan,
    )

    def patched(test: Callable[..., None], *args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch, *args)

    torch.set_num_threads(1)
    for seed in range(3):
        yield lambda seed=seed: test_runs.test_runs_are_the_tokens_of_each_document_in_order(seed)
    yield lambda: test_layers.test_without_final_states(3, "zigzag")
    yield lambda: patched(test_fla_passes.test_without_final_states, 2, False)
    yield test_cuts.test_a_rank_has_about_four_pieces_of_whole_chunks
    yield lambda: patched(test_scan.test_by_doubling, "channels", 3)
    yield lambda: patched(test_scan.test_second_derivatives_exchange_on_all_ranks_alike, False)
    for count in (1, 3):
        yield lambda count=count: patched(
            test_pieces.test_maps_of_runs_and_states_and_gradients_of_pieces, count, "zigzag", 0
        )
    for seed in range(8):
        yield lambda seed=seed: test_scan.test_states_before_runs_and_their_gradients("full", seed)
        yield lambda seed=seed: patched(test_scan.test_by_doubling, "full", seed)
        yield lambda seed=seed: patched(
            test_fla_passes.test_two_passes_equal_one_process, ring_gated_delta_rule, seed
        )
        yield lambda seed=seed: test_halo.test_convolutions_equal_one_process(seed)
        yield lambda seed=seed: test_layers.test_the_delta_rule_equals_one_process(
            ring_gated_delta_rule, seed
        )
        yield lambda seed=seed: test_layers.test_mamba_2_equals_one_process(seed)


if __name__ == "__main__":
    hunt.main("tests.faults.recurrent")
