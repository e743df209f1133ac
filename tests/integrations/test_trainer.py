"""Trainers over spread sequences take the steps that they take alone in one process."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import ParallelismConfig
from transformers import Seq2SeqTrainer, Trainer

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.known_trainers import AFTER_GENERATION, SCORES, TOKENS
from ring_attention_pytorch.integrations.transformers import RingTrainerMixin, register
from tests.support import hf, trainers
from tests.support.hf import model_of, raised
from tests.support.reference import relative_error
from tests.support.sampling import grid
from tests.support.small_trainers import (
    EXACT,
    HAS_TRL,
    RingTrainer,
    arguments,
    check,
    of_trl,
    sequences,
    start,
)
from tests.support.trainers import TRAINERS, as_launched

Losses = dict[str, list[float]]


def trained(
    kind: str, ring: int = 0, name: str = "Qwen3", change: Callable[[Any], Any] | None = None,
    **more: Any,
) -> tuple[Losses, list[Tensor]]:  # fmt: skip
    """Losses of steps and evaluations, and parameters at the end; 0 is transformers alone."""
    register()
    many = dist.get_world_size() if ring and dist.is_initialized() else 1
    with as_launched(), hf.in_double(), tempfile.TemporaryDirectory() as folder:
        if many > 1:
            more["parallelism_config"] = RingParallelismConfig(
                cp_size=ring, dp_shard_size=many // ring
            )
        data, model = sequences(kind), model_of(name, "ring" if ring else "sdpa")
        if change is not None:
            model = change(model)
        args = arguments(folder, 4 // (many // (ring or 1)), **more)
        trainer = (RingTrainer if ring else Trainer)(
            model, args, train_dataset=data, eval_dataset=data[: 3 if kind == "packed" else 4]
        )
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
        trainer.train()
    log = trainer.state.log_history
    losses = {
        kind: [entry[kind] for entry in log if kind in entry] for kind in ("loss", "eval_loss")
    }
    return losses, [p.detach() for p in model.parameters()]


def difference(got: tuple[Losses, list[Tensor]], want: tuple[Losses, list[Tensor]]) -> float:
    """The worst of parameters and losses. Trainers add the losses of steps in float32."""
    assert all(want[0].values())
    assert got[0]["loss"] == pytest.approx(want[0]["loss"], rel=1e-6)
    pairs = list(zip(got[1], want[1], strict=True))
    pairs.append((torch.tensor(got[0]["eval_loss"]), torch.tensor(want[0]["eval_loss"])))
    return max(relative_error(a, b) for a, b in pairs)


def test_trainer_alone_and_as_a_ring_of_one():
    assert difference(trained("padded", 1), trained("padded")) < EXACT


@pytest.mark.parametrize(("kind", "ring"), [("padded", 2), ("packed", 4)])
def test_trainer_over_four_processes_takes_the_steps_of_one(kind, ring, pools):
    want = trained(kind)
    for got in pools(4).run(trained, kind, ring):
        assert difference(got, want) < EXACT


def with_checkpoints(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).double()


def evaluated_first(kind: str, ring: int) -> tuple[Losses, list[Tensor]]:
    """As `trained`, by a trainer that evaluates twice before it trains."""

    class Evaluating(RingTrainer):
        def train(self, *given: Any, **more: Any) -> Any:
            before = [self.evaluate()["eval_loss"] for _ in range(2)]
            self.state.log_history.clear()
            assert before[0] == before[1]
            return super().train(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "RingTrainer", Evaluating)
        return trained(kind, ring)


def test_an_evaluation_before_training_changes_no_step(pools):
    """accelerate takes a model that was prepared to evaluate for one that averages gradients."""
    want = trained("padded")
    for got in pools(2).run(evaluated_first, "padded", 2):
        assert difference(got, want) < EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("change", [with_checkpoints, with_lora])
def test_checkpoints_and_adapters_change_nothing(change, pools):
    if change is with_lora:
        pytest.importorskip("peft")
    want = trained("packed", 0, "Llama", change)
    for got in pools(4).run(trained, "packed", 4, "Llama", change):
        assert difference(got, want) < EXACT


NAMES = [name if name.startswith("Trainer") else of_trl(name) for name in TRAINERS]


@grid("name", NAMES, always=3, drawn=2)
def test_trainers_by_the_list_take_the_steps_of_one_process(name, pools):
    """With a smaller last batch in training and evaluation, and all that is logged."""
    want = trainers.trained(name, 0, 4)
    for got in pools(4).run(trainers.trained, name, 4, 4):
        check(trainers.difference(got, want))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_two_rings_take_the_steps_of_one_process(name, pools):
    sizes = (16, 8)  # accelerate fills up smaller batches, and TRL's metrics count what it adds
    run = partial(trainers.trained, name, steps=trainers.STEPS, sizes=sizes, **by_prompt(name))
    want = run(0)
    for got in pools(4).run(run, 2):
        check(difference_of_rings(got, want, 2))


def by_prompt(name: str) -> dict[str, bool]:
    """Each ring draws completions with a seed of its own: for others to draw the same."""
    return {"by_prompt": True} if "GRPO" in name else {}


def difference_of_rings(got: Any, want: Any, rings: int) -> dict[str, float]:
    """The worst errors; each ring pads to the longest of its sequences, which total_flos count."""
    for told in (got, want) if rings > 1 else ():
        told.log.pop("total_flos", None)
    return trainers.difference(got, want)


ADAPTED = [
    (name, adapter, ring)
    for name in ("DPOTrainer", "KTOTrainer", "RingGRPOTrainer", "RewardTrainer", "SFTTrainer")
    for adapter in ("asked", "given")
    for ring in (4, 2)
]


@pytest.mark.skipif(not HAS_TRL, reason="needs TRL")
@grid("name, adapter, ring", ADAPTED, always=1, drawn=1)
def test_adapters_take_the_steps_of_one_process(name, adapter, ring, pools):
    """With the model without its adapter as the reference, or a copy of the adapter."""
    pytest.importorskip("peft")
    more = by_prompt(name) if ring == 2 else {}
    run = partial(trainers.trained, name, steps=4, sizes=(16, 8), adapter=adapter, **more)
    want = run(0)
    for got in pools(4).run(run, ring):
        check(difference_of_rings(got, want, 4 // ring))


def in_4_bits(model_folder: str, ring: int) -> list[float]:
    """Losses of SFT with an adapter on a base in 4 bits; 0 is TRL alone."""
    import peft
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig

    register()
    mesh = {"parallelism_config": RingParallelismConfig(cp_size=ring)} if ring else {}
    with as_launched(), tempfile.TemporaryDirectory() as folder:
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(
            model_folder, quantization_config=bits, attn_implementation="ring" if ring else "sdpa",
            device_map={"": "cpu"}, dtype=torch.float32,
        )  # fmt: skip
        args = SFTConfig(
            folder, use_cpu=True, max_steps=8, learning_rate=0.05, per_device_train_batch_size=2,
            logging_steps=1, report_to=[], disable_tqdm=True, bf16=False, save_strategy="no",
            dataloader_pin_memory=False, prediction_loss_only=True, **mesh,
        )  # fmt: skip
        trainer = trainers.trainer_class("SFTTrainer", ring > 0)(
            model=model, args=args, processing_class=trainers.tokenizer(),
            train_dataset=Dataset.from_list(trainers.TRAINERS["SFTTrainer"].samples(16)),
            peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )  # fmt: skip
        for p in trainer.model.parameters():
            if p.requires_grad:
                assert p.dtype == torch.bfloat16  # TRL's choice, in which sums of ranks round
                p.data = p.data.float()
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TRL, reason="needs TRL")
def test_adapters_on_a_base_in_4_bits_take_the_steps_of_one_process(pools, tmp_path):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    trainers.causal("sdpa").float().save_pretrained(tmp_path)
    want = in_4_bits(str(tmp_path), 0)
    assert len(want) == 8
    for got in pools(2).run(in_4_bits, str(tmp_path), 2):
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.skipif(not HAS_TRL, reason="needs TRL")
def test_sequences_that_accelerate_adds_to_a_row_do_not_count(pools):
    """The last batch of two rings has one of four sequences too many, all of a ring in one row."""
    flat = partial(trainers.trained, "SFTTrainer", padding_free=True, max_length=None)
    want = flat(0, 2, (8, 7))
    for got in pools(4).run(flat, 2, 2, (8, 7)):
        check(trainers.difference(got, want))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [of_trl("RewardTrainer"), of_trl("DPOTrainer"), NAMES[-1]])
def test_two_rings_log_what_two_processes_of_ddp_do(name, pools):
    """Both count sequences that accelerate adds, and draw completions with the same seeds."""
    want = pools(2).run(trainers.trained, name, 0, 4, (16, 5))[0]
    for got in pools(4).run(trainers.trained, name, 2, 4, (16, 5)):
        check(trainers.difference(got, want))


@pytest.mark.parametrize(
    "name", ["Trainer, masked tokens", of_trl("RewardTrainer"), of_trl("DPOTrainer")]
)
def test_trainers_by_the_list_as_a_ring_of_one(name):
    check(trainers.difference(trainers.trained(name, 1, 2), trainers.trained(name, 0, 2)))


def nothing(*_: Any, **__: Any) -> Any:
    return {}


def refusals() -> dict[str, str]:
    """For a pool: what a trainer that can't be right says."""
    register()
    ring = dict(parallelism_config=RingParallelismConfig(cp_size=dist.get_world_size()))
    return {
        "no ring": raised(start),
        "label smoothing": raised(lambda: start(label_smoothing_factor=0.1, **ring)),
        "a loss of one's own": raised(lambda: start(compute_loss_func=nothing, **ring)),
        "local means": raised(lambda: start(average_tokens_across_devices=False, **ring)),
        "metrics": raised(lambda: start(act="evaluate", compute_metrics=nothing, **ring)),
        "other attention": raised(lambda: start(model="sdpa", **ring)),
        "no mixin": raised(lambda: start(kind=Trainer, **ring)),
        "another mesh": raised(lambda: start(parallelism_config=RingParallelismConfig(cp_size=3))),
        "NEFTune": raised(lambda: start(neftune_noise_alpha=5.0, **ring)),
        "parts of batches": raised(
            lambda: start(accelerator_config={"dispatch_batches": True}, **ring)
        ),
        "a stream": raised(lambda: start(stream=True, max_steps=1, **ring)),
        "launched": launched_with(dist.get_world_size()),
    }


def launched_with(ring: int) -> str:
    """Train by the settings of `accelerate launch`, which come in the environment."""
    told = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": str(ring)}
    try:
        return raised(lambda: start(told=told, max_steps=1))
    finally:
        for name in told:
            os.environ.pop(name, None)


REFUSED = {
    "no ring": "nothing says which ranks share a sequence",
    "label smoothing": "label_smoothing_factor",
    "a loss of one's own": "compute_loss_func",
    "local means": "average_tokens_across_devices must be True",
    "metrics": "metrics need whole",
    "other attention": 'attn_implementation="ring"',
    "no mixin": "call it in the block",
    "another mesh": "there are 4 processes",
    "NEFTune": "neftune_noise_alpha=None",
    "parts of batches": '"dispatch_batches": False',
    "a stream": "no error, but TrainOutput(global_step=1",
    "launched": "no error, but TrainOutput(global_step=1",
}


def test_a_trainer_that_would_be_wrong_raises(pools):
    for found in pools(4).run(refusals):
        for what, text in REFUSED.items():
            assert text in found[what], (what, found[what])


@pytest.mark.parametrize("name", ["shift_labels", "loss_weights"])
def test_what_a_trainer_would_leave_out_of_its_loss_is_refused(name):
    with pytest.raises(ValueError, match=name):
        RingTrainerMixin()._shard({"input_ids": torch.zeros(1, 3), name: torch.zeros(1, 3)})


def test_labels_of_sequences_name_the_trainer_to_take():
    whole = {"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2)}
    with pytest.raises(ValueError, match="RewardTrainer"):
        RingTrainerMixin()._shard(whole)


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "pixel_values_videos"])
def test_images_are_refused_with_the_way_that_spreads_them(name):
    with pytest.raises(ValueError, match=rf"{name} are of whole images.*merged\(model, batch\)"):
        RingTrainerMixin()._shard({"input_ids": torch.zeros(1, 3), name: torch.zeros(2, 3)})


def test_accelerates_own_context_parallelism_is_refused():
    class Mixed(RingTrainerMixin):
        """A trainer whose mesh is accelerate's own."""

        _ring = "the ring"
        accelerator = SimpleNamespace(
            num_processes=2, parallelism_config=ParallelismConfig(cp_size=2)
        )

    with pytest.raises(ValueError, match="would drop masks"):
        Mixed()._check_trainer()


class Scaled(Trainer):
    """Somebody's trainer, with a loss of its own."""

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*given, **more)


def test_trainers_with_losses_of_their_own_are_refused():
    for kind, own in ((Scaled, "compute_loss"), (Seq2SeqTrainer, "prediction_step")):
        mixed = type("Mixed", (RingTrainerMixin, kind), {})
        with pytest.raises(ValueError, match=f"{kind.__name__} has a {own} of its own"):
            mixed(model_of("Llama", "ring"))


class Gathering(RingTrainerMixin):
    """A trainer at the end of a loader: two rings of two ranks, of which this is the last one."""

    _ring = SimpleNamespace(size=lambda: 2)
    accelerator = SimpleNamespace(
        num_processes=4, process_index=3,
        gather=lambda t: torch.cat([torch.atleast_1d(t) + 10 * rank for rank in range(4)]),
        gradient_state=SimpleNamespace(end_of_dataloader=True, remainder=3),
    )  # fmt: skip

    def get_tp_size(self) -> int:
        return 1


def test_what_a_ring_has_counts_once_in_metrics():
    gathered = Gathering()._gather_for_metrics(torch.tensor([0, 1]))
    assert gathered.tolist() == [0, 1, 20]  # three samples remain
    assert Gathering()._gather_for_metrics(torch.tensor(5)).tolist() == [5, 25]
    with mock.patch.object(Gathering.accelerator.gradient_state, "remainder", 1):
        assert Gathering()._gather_for_metrics(torch.tensor(5)).tolist() == [5]  # as accelerate


class Counts:
    """A trainer whose count of tokens is that of a batch on each of four ranks."""

    def _track_num_input_tokens(self, inputs: dict[str, int]) -> None:
        self.state.num_input_tokens_seen += 4 * inputs["tokens"]


@pytest.mark.parametrize(("of", "ring", "want"), [(TOKENS, 2, 24), (SCORES, 2, 12), (SCORES, 4, 6)])
def test_tokens_of_whole_batches_count_once_a_ring(of, ring, want):
    """Shards count on every rank, and batches that all ranks of a ring have count once."""
    made = type("Made", (RingTrainerMixin, Counts), {"_alike": ring})()
    made._loss_is_of, made.state = of, SimpleNamespace(num_input_tokens_seen=0)
    for tokens in (5, 1):
        made._track_num_input_tokens({"tokens": tokens})
    assert made.state.num_input_tokens_seen == want


def test_sequences_that_fill_up_a_batch_have_no_labels():
    labels = torch.arange(6).reshape(2, 3)
    found = Gathering()._without_added({"labels": labels})["labels"]
    assert found.tolist() == [[0, 1, 2], [-100] * 3]
    labels, lengths = torch.arange(5)[None], torch.tensor([3, 2])
    row = {"labels": labels, "lengths_in_row": lengths, "position_ids": torch.arange(5)[None] % 3}
    found = Gathering()._without_added(row)
    assert found["labels"].tolist() == [[0, 1, 2, -100, -100]]
    assert found.keys() == {"labels", "position_ids"}
    with pytest.raises(ValueError, match="would count"):
        Gathering()._without_added(row | {"position_ids": torch.arange(5)[None]})


@pytest.mark.skipif(not HAS_TRL, reason="needs TRL")
def test_settings_that_would_be_wrong_are_refused():
    from trl import GRPOTrainer

    from ring_attention_pytorch.integrations.grpo import RingGRPOTrainer

    bare = type("Bare", (RingTrainerMixin, GRPOTrainer), {})
    for kind, wrong, text in (
        (bare, {}, "take RingGRPOTrainer"),
        (bare, dict(_generates=True, neftune_noise_alpha=5.0), "neftune_noise_alpha=None"),
        (bare, dict(_generates=True, dispatches=True), '"dispatch_batches": False'),
        (RingGRPOTrainer, dict(num_generations=4), "groups don't reach over rings"),
        (RingGRPOTrainer, dict(scale_rewards="batch"), "rewards would be scaled"),
    ):
        with pytest.raises(ValueError, match=text):
            kind._check_trainer(_checked(kind, **wrong))


def _checked(kind: type, dispatches: bool = False, **own: Any) -> Any:
    """A trainer of a ring of two that has been made as far as it is looked at."""
    made = object.__new__(type("Made", (kind,), {"_ring": SimpleNamespace(size=lambda: 2)}))
    made._loss_is_of = AFTER_GENERATION
    made.accelerator = SimpleNamespace(
        num_processes=2,
        parallelism_config=RingParallelismConfig(cp_size=2),
        dispatch_batches=dispatches,
    )
    made.args = SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=1)
    vars(made).update(
        neftune_noise_alpha=None, num_generations=2, scale_rewards="group",
        multi_objective_aggregation="sum_then_normalize",
    )  # fmt: skip
    vars(made).update(own)
    return made
