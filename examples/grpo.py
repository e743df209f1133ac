"""Reinforcement learning after generation: TRL's GRPO with sequences that are spread.

    torchrun --nproc-per-node 4 -m examples.grpo
    python -m examples.grpo --plain

Each rank generates, and takes what the first one has. The loss needs log-probabilities of whole
sequences: these are spread. Both commands print the same losses; the second one runs nothing of
this library.

The model is tiny and random; it is rewarded for small letters.
"""

import os
import tempfile
from typing import Any

import click
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.grpo import RingGRPOTrainer
from ring_attention_pytorch.integrations.transformers import register

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;?"


def train(plain: bool, steps: int) -> list[dict[str, float]]:
    """Train, and return what was logged of each step."""
    register()
    words = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, "?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=";", eos_token=".")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation="sdpa" if plain else "ring",
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
