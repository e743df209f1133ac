"""Ten steps of each trainer that can be spread: over rings, and by its own package in one process.

    python -m tests.support.trainers            the table of docs/guide/trainers.md
    python -m tests.support.trainers --write

Models are tiny and random, in float64. Compared are the losses of steps and evaluations, all that
trainers log of them, and the parameters at the end. Sequences are of unequal length, and the last
batch of an epoch is smaller than others.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attention_pytorch.integrations.transformers import RingTrainerMixin, register
from tests.support import hf
from tests.support.reference import relative_error

STEPS, BATCH, WORDS = 10, 4, 31
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "trainers.md"
_UNLIKE = ("runtime", "per_second", "epoch", "step", "preparation_time", "step_time")
_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
_SIZES = dict(hidden_size=32, intermediate_size=24, num_hidden_layers=2, vocab_size=WORDS)


class Told(NamedTuple):
    """A trainer's log, by its names, in order; parameters at the end."""

    log: dict[str, list[float]]
    parameters: list[Tensor]


class Trains(NamedTuple):
    """One row of the table: how a trainer, its arguments, model and data are made."""

    trainer: Callable[[], type]
    arguments: Callable[[], type]
    model: Callable[[str], nn.Module]
    samples: Callable[[int], list[dict[str, Any]]]
    more: Callable[[str], dict[str, Any]] = lambda attention: {}
    options: Mapping[str, Any] = MappingProxyType({})


def causal(attention: str) -> nn.Module:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(_SIZES, **_HEADS, pad_token_id=0, eos_token_id=2, bos_token_id=None)
    config = LlamaConfig(**sizes, attn_implementation=attention)
    return hf.filled(LlamaForCausalLM(config)).double()


def scoring(attention: str) -> nn.Module:
    """A Llama that scores sequences."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = dict(_SIZES, **_HEADS, pad_token_id=0, num_labels=1)
    config = LlamaConfig(**sizes, attn_implementation=attention)
    return hf.filled(LlamaForSequenceClassification(config)).double()


def masked(attention: str) -> nn.Module:
    """A ModernBERT that predicts what is masked."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        **_SIZES, num_attention_heads=4, local_attention=8, global_attn_every_n_layers=2,
        pad_token_id=0, eos_token_id=2, bos_token_id=2, cls_token_id=2, sep_token_id=2,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.filled(ModernBertForMaskedLM(config)).double()


def _words(draw: torch.Generator, least: int, most: int) -> list[int]:
    n = int(torch.randint(least, most, (), generator=draw))
    return torch.randint(3, WORDS, (n,), generator=draw).tolist()


def _drawn(count: int, **ranges: tuple[int, int]) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    return [{name: _words(draw, *of) for name, of in ranges.items()} for _ in range(count)]


def texts(count: int) -> list[dict[str, Any]]:
    """Sequences padded at the right."""
    found = []
    for sample in _drawn(count, input_ids=(9, 29)):
        ids = torch.tensor(sample["input_ids"] + [0] * (29 - len(sample["input_ids"])))
        real = torch.arange(29) < len(sample["input_ids"])
        found.append(
            dict(input_ids=ids, labels=ids.masked_fill(~real, -100), attention_mask=real.long())
        )
    return found


def masked_texts(count: int) -> list[dict[str, Any]]:
    """Make masked samples, with labels for every fourth token."""
    found = texts(count)
    for sample in found:
        hidden = torch.arange(29) % 4 == 1
        sample["labels"] = sample["labels"].masked_fill(~hidden, -100)
        sample["input_ids"] = sample["input_ids"].masked_fill(hidden, 1)
    return found


def pairs(count: int) -> list[dict[str, Any]]:
    """Two sequences, the first one preferred."""
    return _drawn(count, chosen_ids=(7, 23), rejected_ids=(7, 23))


def preferences(count: int) -> list[dict[str, Any]]:
    """Two completions of a prompt."""
    return _drawn(count, prompt_ids=(3, 9), chosen_ids=(5, 17), rejected_ids=(5, 17))


def judged(count: int) -> list[dict[str, Any]]:
    """A completion, and one that belongs to another prompt."""
    found = _drawn(count, prompt_ids=(3, 9), completion_ids=(5, 17), KL_completion_ids=(5, 17))
    return [{**sample, "label": i % 2 == 0} for i, sample in enumerate(found)]


def prompts(count: int) -> list[dict[str, Any]]:
    """Prompts of letters."""
    return [{"prompt": " ".join(map(chr, ids))} for ids in _letters(count)]


def _letters(count: int) -> list[list[int]]:
    return [[97 + word % 26 for word in each["ids"]] for each in _drawn(count, ids=(3, 6))]


def tokenizer() -> Any:
    """A tokenizer of words; the first ones are special, then there are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<mask>", "<end>", *map(chr, range(97, 97 + WORDS - 3))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<mask>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<mask>"
    )


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def _of(package: str, name: str) -> Callable[[], type]:
    def load() -> type:
        return getattr(__import__(package, fromlist=[name]), name)

    return load


_PLAIN = dict(bf16=False, gradient_checkpointing=False)
_TRL = dict(processing_class=tokenizer)
_GENERATED = dict(
    _PLAIN, num_generations=2, max_completion_length=7, shuffle_dataset=False, temperature=1.0,
)  # fmt: skip
TRAINERS = {
    "Trainer": Trains(
        _of("transformers", "Trainer"), _of("transformers", "TrainingArguments"), causal, texts,
        options=dict(gradient_accumulation_steps=2, include_num_input_tokens_seen="non_padding"),
    ),
    "Trainer, masked tokens": Trains(
        _of("transformers", "Trainer"), _of("transformers", "TrainingArguments"), masked,
        masked_texts, options=dict(gradient_accumulation_steps=2),
    ),
    "SFTTrainer": Trains(
        _of("trl", "SFTTrainer"), _of("trl", "SFTConfig"), causal,
        lambda count: _drawn(count, input_ids=(9, 29)),
        lambda _: {name: make() for name, make in _TRL.items()},
        dict(_PLAIN, gradient_accumulation_steps=2),
    ),
    "RewardTrainer": Trains(
        _of("trl", "RewardTrainer"), _of("trl", "RewardConfig"), scoring, pairs,
        lambda _: {name: make() for name, make in _TRL.items()},
        dict(_PLAIN, center_rewards_coefficient=0.1, include_num_input_tokens_seen="non_padding"),
    ),
    "DPOTrainer": Trains(
        _of("trl", "DPOTrainer"), _of("trl", "DPOConfig"), causal, preferences,
        lambda attention: dict(processing_class=tokenizer(), ref_model=_other(causal(attention))),
        dict(_PLAIN, include_num_input_tokens_seen="non_padding"),
    ),
    "KTOTrainer": Trains(
        _of("trl", "KTOTrainer"), _of("trl", "KTOConfig"), causal, judged,
        lambda attention: dict(processing_class=tokenizer(), ref_model=_other(causal(attention))),
        _PLAIN,
    ),
    "RingGRPOTrainer": Trains(
        _of("trl", "GRPOTrainer"), _of("trl", "GRPOConfig"), causal, prompts,
        lambda _: dict(processing_class=tokenizer(), reward_funcs=vowels),
        _GENERATED,
    ),
}  # fmt: skip


def _other(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    return model


def _with_lora(model: nn.Module, adapter: str) -> tuple[nn.Module, dict[str, Any]]:
    import peft

    task = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=task)
    if adapter == "asked":
        return model, {"peft_config": config}
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).double(), {}


def trainer_class(name: str, spread: bool, **own: Any) -> type:
    """Return a trainer's class, which takes samples in their order and as they are.

    own are attributes of the mixin.
    """
    whole = TRAINERS[name].trainer()

    class InOrder:
        """Samples come in order, and are tokens already."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    if "GRPO" in name:
        from ring_attention_pytorch.integrations.grpo import RingGRPOTrainer

        return type("RingGRPOTrainer", (RingGRPOTrainer,), own) if spread else whole
    bases = (InOrder, RingTrainerMixin, whole) if spread else (InOrder, whole)
    # ModernBERT gives its attention no positions
    if "masked" in name:
        own["ring_options"] = {"check_positions": False}
    return type(f"{'Ring' if spread else ''}{whole.__name__}", bases, own)


@contextmanager
def drawn_by_prompt() -> Iterator[None]:
    """Inside it TRL draws each completion with a seed of its prompt, on whichever rank.

    Otherwise rings and processes have seeds of their own, and draw other completions.
    """
    from trl import GRPOTrainer

    whole = GRPOTrainer._generate_single_turn

    def each(trainer: Any, prompts: list[list[int]], *given: Any, **more: Any) -> Any:
        found = []
        for place, ids in enumerate(prompts):
            again = prompts[:place].count(ids)  # completions of a group differ
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(crc32(repr((ids, again)).encode()))
                found += whole(trainer, [ids], *given, **more)[0]
        return found, None

    with mock.patch.object(GRPOTrainer, "_generate_single_turn", each):
        yield


@contextmanager
def as_launched() -> Iterator[None]:
    """Inside it accelerate finds the group of this pool, as torchrun would tell it."""
    from accelerate.state import AcceleratorState

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # nobody asks there
    before = dict(os.environ)
    if size > 1:
        os.environ |= {name: str(value) for name, value in told.items()}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def trained(
    name: str, ring: int = 0, steps: int = STEPS, sizes: tuple[int, int] = (14, 6),
    adapter: str = "", **options: Any,
) -> Told:  # fmt: skip
    """Train by a trainer; ring is how many ranks share a sequence, 0 is its package alone (DDP).

    Of its data so many samples are for training, so many for evaluation. An adapter is "given" with
    the model, or made by the trainer as it is "asked" to; it has no reference model beside it.
    Of `options` those with `ring_` are attributes of the mixin; `by_prompt` draws completions so.
    """
    from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig

    register()
    row, attention = TRAINERS[name], "ring" if ring else "sdpa"
    draws = drawn_by_prompt() if options.pop("by_prompt", False) else nullcontext()
    own = {n: options.pop(n) for n in [*options] if n.startswith("ring_")}
    kind = trainer_class(name, ring > 0, **own)
    places = (dist.get_world_size() if dist.is_initialized() else 1) // (ring or 1)
    options = {**row.options, **options}
    if adapter and "GRPO" in name:
        options["beta"] = 0.1  # else it has no reference
    if ring > 1:
        options["parallelism_config"] = RingParallelismConfig(cp_size=ring, dp_shard_size=places)
    with as_launched(), in_double(), draws, tempfile.TemporaryDirectory() as folder:
        args = row.arguments()(
            output_dir=folder, use_cpu=True, max_steps=steps, optim="sgd", learning_rate=0.5,
            per_device_train_batch_size=BATCH // places, per_device_eval_batch_size=BATCH // places,
            lr_scheduler_type="linear", max_grad_norm=0.0, save_strategy="no", logging_steps=1,
            eval_strategy="steps", eval_steps=steps // 2, disable_tqdm=True, report_to=[],
            dataloader_pin_memory=False, prediction_loss_only=True, **options,
        )  # fmt: skip
        train, held = (_dataset(name, row.samples(n)) for n in sizes)
        model, more = row.model(attention), row.more(attention)
        if adapter:
            model, added = _with_lora(model, adapter)
            more = {n: value for n, value in more.items() if n != "ref_model"} | added
        trainer = kind(model=model, args=args, train_dataset=train, eval_dataset=held, **more)
        trainer.train()
    log: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for key, value in entry.items():
            if not any(part in key for part in _UNLIKE):
                log.setdefault(key, []).append(float(value))
    return Told(log, [p.detach() for p in trainer.model.parameters()])


class _WideTorch:
    """torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double() -> Iterator[None]:
    """Inside it what models and TRL's fused head compute in float32 is float64."""
    with hf.in_double(), ExitStack() as block:
        if "trl" in sys.modules:
            from trl.kernels import chunked_logprob

            block.enter_context(mock.patch.object(chunked_logprob, "torch", _WideTorch()))
        yield


def _dataset(name: str, samples: list[dict[str, Any]]) -> Any:
    if name.startswith("Trainer"):
        return samples
    from datasets import Dataset  # TRL asks for it

    return Dataset.from_list(samples)


def difference(got: Told, want: Told) -> dict[str, float]:
    """The worst relative errors: of losses, of whatever else is logged, and of parameters."""
    assert got.log.keys() == want.log.keys(), got.log.keys() ^ want.log.keys()
    worst = {"losses": 0.0, "metrics": 0.0}
    for key, values in want.log.items():
        kind = "losses" if key.endswith("loss") else "metrics"
        worst[kind] = max(worst[kind], _error(got.log[key], values))
    pairs = zip(got.parameters, want.parameters, strict=True)
    return worst | {"parameters": max(relative_error(a, b) for a, b in pairs)}


def _error(got: list[float], want: list[float]) -> float:
    a, b = torch.tensor(got).double(), torch.tensor(want).double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


def table(processes: int = 4) -> list[str]:
    """Return the lines of the table, each trainer with its worst differences."""
    from tests.support.ranks import Pool

    lines = [
        f"| trainer | losses | other logged values | parameters after {STEPS} steps |",
        "| --- | --- | --- | --- |",
    ]
    pool = Pool(processes)
    for name in TRAINERS:
        alone = trained(name)
        found = [difference(got, alone) for got in pool.run(trained, name, processes)]
        worst = [max(each[kind] for each in found) for kind in found[0]]
        cells = [f"{error:.0e}" if error else "0" for error in worst]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    pool.stop()
    return lines


def main() -> None:
    """Print the table, or write it into its page."""
    lines = table()
    print("\n".join(lines))
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(lines[0])
        after = rest[rest.index("\n\n") :]
        PAGE.write_text(before + "\n".join(lines) + after)


if __name__ == "__main__":
    main()
