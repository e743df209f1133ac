"""GRPO over rings: each ring's rewards once, prompts once, and attention as it was."""

import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl")

from trl import GRPOTrainer

from ring_attention_pytorch.integrations.grpo import RingGRPOTrainer, completions_of


def trainer(ring: int, **own: Any) -> Any:
    """One of four processes, in rings of so many, that has been made as far as it is looked at."""
    made = object.__new__(type("Made", (RingGRPOTrainer,), {"_alike": ring, "_ring": None}))
    made.accelerator = SimpleNamespace(num_processes=4, unwrap_model=lambda model: model)
    vars(made).update(own)
    return made


@pytest.mark.parametrize(("ring", "firsts"), [(1, [0, 1, 2, 3]), (2, [0, 0, 2, 2]), (4, [0] * 4)])
def test_a_ring_has_the_rewards_of_its_first_rank(ring: int, firsts: list[int]) -> None:
    rewards = torch.arange(4 * 3 * 2.0).view(12, 2)  # three samples of each rank, two functions
    made = trainer(ring)
    with mock.patch.object(GRPOTrainer, "_calculate_rewards", return_value=rewards):
        found = made._calculate_rewards()
    by_rank = rewards.view(4, 3, 2)
    assert torch.equal(found, torch.cat([by_rank[first] for first in firsts]))
    once = torch.cat([by_rank[first] for first in dict.fromkeys(firsts)])
    assert torch.equal(made._rewards_of_rings, once)


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_each_rings_entropies_count_once_in_a_quantile(ring: int) -> None:
    """A quantile of values that are there twice, or four times, is another one."""
    entropies = torch.rand(4 // ring, 1, 9, generator=torch.Generator().manual_seed(0))
    kept = [q / 20 for q in range(1, 20)]
    right = [entropies >= torch.quantile(entropies, q) for q in kept]
    gathered = entropies.repeat_interleave(ring, 0).flatten()
    made, own = trainer(ring), entropies[-1]  # as of the last rank
    made.accelerator.gather = lambda _: gathered
    made.accelerator.pad_across_processes = lambda t, **_: t
    for q, want in zip(kept, right, strict=True):
        assert torch.equal(made.get_high_entropy_mask(own, torch.ones_like(own), q), want[-1]), q
    assert made.accelerator.gather(own) is gathered


def test_the_sampler_gives_each_ring_its_batches_once() -> None:
    made = trainer(2, args=SimpleNamespace(generation_batch_size=8))
    seen = []

    def sampler(self: Any, dataset: Any) -> str:
        seen.append(self.args.generation_batch_size)
        if dataset is None:
            raise RuntimeError("no data")
        return "sampler"

    with mock.patch.object(GRPOTrainer, "_get_train_sampler", sampler):
        assert made._get_train_sampler([1]) == "sampler"
        with pytest.raises(RuntimeError):
            made._get_train_sampler()
    assert seen == [4, 4]
    assert made.args.generation_batch_size == 8


def test_models_generate_by_their_own_attention_and_go_on_with_ours_even_after_an_error() -> None:
    config = SimpleNamespace(_attn_implementation="ring")
    model = SimpleNamespace(config=config)
    model.set_attn_implementation = lambda name: vars(config).update(_attn_implementation=name)
    made, seen = trainer(1, model=model), []

    def generate(_: Any, prompts: Any) -> Any:
        seen.append(config._attn_implementation)
        return prompts[::-1], None

    with mock.patch.object(GRPOTrainer, "_generate_single_turn", generate):
        assert made._generate_single_turn([[1], [2]]) == ([[2], [1]], None)
        assert config._attn_implementation == "ring"
        with pytest.raises(TypeError):
            made._generate_single_turn(None)
    assert seen == ["sdpa", "sdpa"]
    assert config._attn_implementation == "ring"


@pytest.mark.parametrize("logprobs", [None, [[-0.1, -1e-300], [float("-inf")]]])
def test_completions_travel_as_they_are(logprobs: Any) -> None:
    found = [[3, 2**40], [7]], logprobs
    made = trainer(1)
    made.model = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation="ring"), set_attn_implementation=lambda _: None
    )
    with mock.patch.object(GRPOTrainer, "_generate_single_turn", return_value=found):
        assert made._generate_single_turn() == found


class Executed:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a note was executed",)


@pytest.mark.parametrize(
    "note", [pickle.dumps(Executed()), b"\xff", b"[1]", b"[[[0.5]], null]", b'[[["a"]], null]',
             b"[[1], null]", b"[[[1]], 3]"],
)  # fmt: skip
def test_a_note_that_is_no_completions_is_refused(note: bytes) -> None:
    with pytest.raises(ValueError, match="RingGRPOTrainer: the note of rank 0 can't be read"):
        completions_of(note)
