"""Reinforcement learning after generation: TRL's GRPO with sequences that are spread.

    torchrun --nproc-per-node 4 -m examples.grpo
    python -m examples.grpo --plain

The first rank of a ring generates, as many tokens at a time as there are samples. The loss needs
log-probabilities of whole sequences: these are spread. Both commands print the same losses; the
second one runs nothing of this library.

The model is tiny and random; it is rewarded for small letters.
"""

import os
import tempfile
from typing import Any

import click
import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ring_attention_pytorch import ring_token_logprobs, shard_batch
from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.transformers import register, ring_forward

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;?"
GENERATES = "sdpa"  # the attention that generates


class RingGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer whose log-probabilities are those of spread sequences."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        place = self.accelerator.process_index // (1 if self._ring is None else self._ring.size())
        set_seed(self.args.seed + place)  # ranks of a ring shuffle alike

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        if unknown := [n for n, v in more.items() if v is not None and not _is_idle(n)]:
            raise ValueError(f"{', '.join(unknown)} can't be spread")
        whole = {"input_ids": input_ids, "labels": input_ids, "attention_mask": attention_mask}
        batch = shard_batch(whole, group=self._ring)
        with ring_forward(batch, labels=False) as inputs:
            logits = model(**inputs).logits / self.temperature
            found = ring_token_logprobs(logits, batch)
            entropies = batch.unshard(torch.distributions.Categorical(logits=logits).entropy())
        kept = slice(-logits_to_keep - 1, -1)  # a token predicts the next one
        return found[:, kept], entropies[:, kept] if more.get("compute_entropy") else None, None

    def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        model.set_attn_implementation(GENERATES)
        found = [super()._generate_single_turn(*given, **more)]
        model.set_attn_implementation("ring")
        if self._ring is not None:  # all ranks of a ring need the same completions
            dist.broadcast_object_list(found, group=self._ring.get_group(), group_src=0)
        return found[0]

    @property
    def _ring(self) -> Any:
        mesh = self.accelerator.torch_device_mesh
        return None if mesh is None else mesh["cp"]


def _is_idle(name: str) -> bool:
    return name in ("batch_size", "compute_entropy", "compute_aux_loss")


def train(plain: bool, steps: int) -> list[dict[str, float]]:
    """Train, and return what was logged of each step."""
    register()
    words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, "?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=";", eos_token=".")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation=GENERATES if plain else "ring",
    )  # fmt: skip
    prompts = [{"prompt": LETTERS[i : i + 3 + i % 4]} for i in range(8 * steps)]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = dict(parallelism_config=RingParallelismConfig(cp_size=size)) if size > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=8,
            num_generations=4, max_completion_length=21, max_steps=steps, learning_rate=3e-3,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=1,
            shuffle_dataset=False, gradient_checkpointing=False, dataloader_pin_memory=False,
            **mesh,
        )  # fmt: skip
        kind = GRPOTrainer if plain else RingGRPOTrainer
        trainer = kind(
            LlamaForCausalLM(config), small_letters, args=args,
            train_dataset=Dataset.from_list(prompts), processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def small_letters(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of small letters."""
    return [sum(letter.islower() for letter in text) / max(1, len(text)) for text in completions]


@click.command(help=__doc__)
@click.option("--plain", is_flag=True, help="by TRL alone, in one process")
@click.option("--steps", default=5, show_default=True)
def main(plain: bool, steps: int) -> None:
    """Train, and tell losses and rewards."""
    for number, entry in enumerate(train(plain, steps), 1):
        if int(os.environ.get("RANK", "0")) == 0:
            told = "  ".join(f"{name} {entry[name]:.6f}" for name in ("loss", "reward", "entropy"))
            print(f"step {number}  {told}  grad {entry['grad_norm']:.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
