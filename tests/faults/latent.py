"""Faults planted into attention to encoded keys, and a battery that must find each."""

from collections.abc import Callable, Iterable

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("LATENT")
ANSWERS_FOR = ("latent/", "runtime/codec.py")


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong."""
    import torch

    from tests.latent import test_attention, test_decoding

    torch.set_num_threads(1)
    yield lambda: test_decoding.test_generation_equals_attention_to_expanded_keys(2, True)
    yield lambda: test_attention.test_swapped_heads_and_shared_memory_and_groups_of_heads(
        tied=False, memory="copies"
    )
    yield test_attention.test_terms_that_count_heads_get_all_of_them_in_one_group
    for seed in range(16):
        yield (
            lambda seed=seed: (
                test_attention.test_random_cases_equal_dense_attention_to_expanded_keys(seed)
            )
        )


if __name__ == "__main__":
    hunt.main("tests.faults.latent")
