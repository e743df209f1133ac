"""Faults between models of transformers and their batches, and a battery that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("INTEGRATIONS")
ANSWERS_FOR = ("integrations/", "training/batches.py")


def battery() -> Iterator[Callable[[], object]]:
    """Steps of models in this process against dense attention, and mistakes that must raise."""
    from tests.integrations import (
        test_accelerate,
        test_cache,
        test_heads,
        test_known_trainers,
        test_layers,
        test_masks,
        test_models,
        test_multimodal,
        test_outputs,
        test_probe,
        test_trainer,
        test_whole,
    )
    from tests.stories import test_other_models
    from tests.support.hf import KINDS

    torch.set_num_threads(1)
    for number, name in enumerate(("Mistral", "Gemma2", "GptOss", "windows by layer")):
        yield partial(step_is_right, name, KINDS[number % 3])
    alike = ("forgotten_positions", "positions_of_the_shard", "mask_of_the_whole")  # alone
    for trap, text in test_models.TRAPS.items():
        if trap.__name__ not in alike:
            yield partial(raises, trap, text)
    ways = (
        ("Llama", "padded"),
        ("Qwen3", "assisted"),
        ("Mistral", "padded beams"),
        ("GptOss", "in chunks"),
    )
    for name, mode in ways:
        yield partial(generates, name, mode)
    for trap, text in test_cache.TRAPS.items():
        yield partial(raises, trap, text)
    for name in ("a loss of its own", "positions behind padding", "the last token", "routers"):
        yield partial(test_other_models.test_so_they_are_in_a_ring_of_one, name)
    for trap, text in [*test_outputs.REFUSED.items()][:-1]:
        yield partial(raises, trap, text)
    yield test_masks.test_masks_that_are_not_known_raise
    yield test_models.test_modules_may_be_replaced_and_a_model_is_gone_with_its_last_name
    for name in ("Gemma2ForCausalLM", "CohereForCausalLM", "PhiForCausalLM"):
        yield partial(test_heads.test_a_head_makes_the_logits_that_its_model_makes, name)
    yield test_layers.test_a_tower_that_picks_its_attention_from_a_table_keeps_transformers_own
    yield test_heads.test_a_setting_that_is_changed_is_seen
    yield test_heads.test_heads_that_do_something_else_are_refused
    yield test_multimodal.test_positions_of_rows_are_cut_along_the_tokens
    yield test_multimodal.test_tokens_of_several_choices_are_no_sequence
    yield test_multimodal.test_what_can_not_be_merged_is_refused
    yield test_trainer.test_trainer_alone_and_as_a_ring_of_one
    yield from (
        partial(test_trainer.test_trainers_by_the_list_as_a_ring_of_one, name)
        for name in ("Trainer, masked tokens", "DPOTrainer")
    )
    yield test_probe.test_a_probe_finds_a_wrong_loss_alone
    yield test_trainer.test_trainers_with_losses_of_their_own_are_refused
    yield test_known_trainers.test_a_subclass_of_both_may_have_a_loss_of_its_own
    yield test_trainer.test_what_a_ring_has_counts_once_in_metrics
    yield test_trainer.test_sequences_that_fill_up_a_batch_have_no_labels
    yield test_trainer.test_settings_that_would_be_wrong_are_refused
    yield test_whole.test_scores_of_a_ring_are_gathered
    yield test_trainer.test_accelerates_own_context_parallelism_is_refused
    yield test_accelerate.test_accelerate_is_told_of_a_mesh_and_of_no_context_parallelism


def step_is_right(name: str, kind: str) -> None:
    from tests.integrations.test_transformers import EXACT, errors
    from tests.support import hf

    with hf.losses_as_they_were():
        assert errors(hf.spread(name, kind), hf.dense(name, kind)) < EXACT


def generates(name: str, mode: str) -> None:
    from ring_attention_pytorch.integrations.transformers import register
    from tests.integrations import test_cache

    register()
    got, want = test_cache.spread([(name, mode)], 1, 2), test_cache.wanted([(name, mode)])
    assert test_cache.same(got, want)


def raises(trap: Callable[[], object], text: str) -> None:
    from tests.support.hf import raised

    assert text in raised(trap)


if __name__ == "__main__":
    hunt.main("tests.faults.integrations")
