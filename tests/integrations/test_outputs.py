"""Models use attention's results for whole sequences, or all ranks get an error."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch import ring_cross_entropy, shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import hf, hf_kinds
from tests.support.hf import raised, ring_of
from tests.support.hf_kinds import LENGTH, WORDS, make

EXACT = 1e-5  # transformers' own attention computes its softmax in float32


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    """The worst relative error; a bias of keys has a gradient of nothing but rounding."""
    pairs = [*zip((got[0], *got[1]), (want[0], *want[1]), strict=True)]
    least = 1e-6 * max(float(b.norm()) for _, b in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), least) for a, b in pairs)


class Around(nn.Module):
    """A user's module around a model of transformers, which has a head of its own."""

    def __init__(self, head: Callable[[Tensor, Any], Any], **sizes: Any):
        super().__init__()
        self.inner, self.head = hf.model_of("Llama", "ring").model, head

    def forward(self, **inputs: Any) -> Any:
        return self.head(self.inner(**inputs).last_hidden_state, inputs)


def called(model: nn.Module, change: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a model's output in the block of a batch of this rank's ring."""
    register()
    ring = ring_of(2) if torch.distributed.is_initialized() else None
    batch = shard_batch(hf_kinds.whole("", False), group=ring)
    with ring_forward(batch, loss_group=ring, **options) as inputs:
        model(**{**inputs, **(change or {})})
        return "nothing is wrong"


def of(family: str, head: str, **sizes: Any) -> nn.Module:
    register()
    return make(family, head, {**hf_kinds._SIZES, "pad_token_id": 1, **sizes})


def head_of(head: Callable[[Tensor, Any], Any]) -> Any:
    register()
    return called(Around(head), labels=False)


def a_first_token_for_all() -> Any:
    return called(of("Bert", "ForSequenceClassification"), labels=False)


def a_pooler_beside_the_tokens() -> Any:
    return called(of("Bert", "Model"), labels=False)


def a_loss_of_the_shard() -> Any:
    def head(x: Tensor, inputs: Any) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), inputs["input_ids"].flatten())

    return head_of(head)


def embeddings_of_the_shard() -> Any:
    return head_of(lambda x, _: {"tokens": x, "embedding": x.mean(1)})


def as_many_tokens_as_columns() -> Any:
    register()
    ring = ring_of(2) if torch.distributed.is_initialized() else None
    size = 1 if ring is None else 2
    ids = torch.zeros(2, 32 * size, dtype=torch.long)  # a rank's tokens, and hidden_size
    with ring_forward(shard_batch({"input_ids": ids}, group=ring)) as inputs:
        return Around(lambda x, _: x.mean(1))(**inputs)


def the_last_logits() -> Any:
    return called(hf.model_of("Llama", "ring"), {"logits_to_keep": 1}, labels=False)


def logits_as_many_as_one_rank_has() -> Any:
    ring = ring_of(2) if torch.distributed.is_initialized() else None
    held = shard_batch(hf_kinds.whole("", False), group=ring).counts
    return called(hf.model_of("Llama", "ring"), {"logits_to_keep": held[-1]}, labels=False)


def smoothed_labels() -> Any:
    def head(x: Tensor, inputs: Any) -> Tensor:
        labels = inputs["input_ids"].flatten()
        return nn.CrossEntropyLoss(label_smoothing=0.1)(x.flatten(0, 1), labels)

    return head_of(head)


def a_loss_of_other_labels() -> Any:
    labels = {"labels": torch.tensor([1, 0])}
    return called(of("Bert", "ForSequenceClassification"), labels, labels=False)


def labels_of_a_question() -> Any:
    at = torch.tensor([3, 4])
    given = {"start_positions": at, "end_positions": at + 1}
    return called(of("Bert", "ForQuestionAnswering"), given, labels=False)


def a_term_of_its_own_logits() -> Any:
    sizes = dict(num_key_value_heads=2, attn_layer_indices=[0, 1], z_loss_coefficient=0.5)
    return called(of("Bamba", "ForCausalLM", **sizes, mamba_n_heads=4, mamba_d_head=16))


def temperature_by_place() -> Any:
    sizes = dict(
        intermediate_size_mlp=24, num_key_value_heads=2, head_dim=8, num_hidden_layers=4,
        num_local_experts=2, attention_chunk_size=None, experts_implementation="eager",
    )  # fmt: skip
    register()
    config = transformers.Llama4TextConfig(
        **(hf_kinds._SIZES | sizes), pad_token_id=1, attn_implementation="ring"
    )
    return called(transformers.Llama4ForCausalLM(config))


def three_words_side_by_side() -> Any:
    sizes = dict(embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32)
    return called(of("MobileBert", "ForMaskedLM", **sizes))


def positions_of_its_own() -> Any:
    register()
    sizes = dict(n_embd=32, dff=24, n_layer=1, n_head=4, vocab_size=WORDS)
    config = transformers.CTRLConfig(**sizes, attn_implementation="ring")
    return called(transformers.CTRLLMHeadModel(config))


def positions_left_out() -> Any:
    return called(of("Bert", "ForMaskedLM"), {"position_ids": None})


def a_mask_that_is_looked_into() -> Any:
    return called(of("Doge", "ForCausalLM", num_key_value_heads=2))


def an_encoder_beside_a_decoder() -> Any:
    """Bert's masks know no encoder and decoder; the model around both does."""
    register()
    config, sizes = transformers.BertConfig, {**hf_kinds._SIZES, "pad_token_id": 1}
    both = config(**sizes), config(**sizes, is_decoder=True, add_cross_attention=True)
    made = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*both)
    for each in (made, made.encoder, made.decoder):
        each._attn_implementation = "ring"
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    model = transformers.EncoderDecoderModel(made)
    return called(model, {"decoder_input_ids": ids}, labels=False)


def attention_of_its_own() -> Any:
    register()
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=WORDS)
    config._attn_implementation = "ring"
    return transformers.BloomForCausalLM(config)


def attention_by_a_name() -> Any:
    register()
    config = transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, vocab_size=WORDS)
    config._attn_implementation = "ring"
    return transformers.FalconForCausalLM(config)


REFUSED: dict[Callable[[], Any], str] = {
    a_first_token_for_all: "BertForSequenceClassification returns logits [2, 2], which should be",
    a_pooler_beside_the_tokens: "BertModel returns pooler_output [2, 32], which should be",
    a_loss_of_the_shard: "LlamaModel has computed a loss by itself",
    embeddings_of_the_shard: "LlamaModel returns embedding [2, 32], which should be",
    as_many_tokens_as_columns: "nobody can tell of which these are",
    the_last_logits: "LlamaForCausalLM was given logits_to_keep",
    logits_as_many_as_one_rank_has: "LlamaForCausalLM was given logits_to_keep",
    smoothed_labels: "LlamaModel computes a cross entropy by itself",
    a_loss_of_other_labels: "BertForSequenceClassification computes a cross entropy by itself",
    labels_of_a_question: "BertForQuestionAnswering computes a cross entropy by itself",
    a_term_of_its_own_logits: "BambaForCausalLM adds to its loss a mean over its own tokens",
    temperature_by_place: "scale queries by a token's number",
    three_words_side_by_side: "embeddings are of three tokens side by side",
    positions_of_its_own: "the model gives position_ids to no embedding or layer that is known",
    a_mask_that_is_looked_into: "the model looks into its mask",
    attention_of_its_own: "BloomForCausalLM computes attention by itself",
    attention_by_a_name: "FalconForCausalLM computes attention by itself",
    an_encoder_beside_a_decoder: "the model has an encoder and a decoder, two sequences",
    positions_left_out: "Embedding uses others, or makes its own",  # right in one process
}


def all_refused() -> dict[str, str]:
    with hf.losses_as_they_were():
        return {act.__name__: raised(act) for act in REFUSED}


def test_what_is_of_a_shard_alone_raises_on_all_ranks_alike(pools):
    told = pools(4).run(all_refused)
    for act, text in REFUSED.items():
        assert text in told[0][act.__name__], (act.__name__, told[0][act.__name__])
        assert told[0][act.__name__] == told[1][act.__name__]


@pytest.mark.parametrize("act", [*REFUSED][:-1], ids=lambda act: act.__name__)
def test_so_it_does_in_one_process(act):
    assert REFUSED[act] in raised(act)


def gathered(hidden: Tensor, batch: Any) -> Tensor:
    return batch.unshard(hidden)[:, -1]


def own_loss(hidden: Tensor, batch: Any, group: Any = None) -> Tensor:
    return ring_cross_entropy(hidden, batch.labels, group=group)


def modules_that_know() -> str:
    """Modules that gather, or compute our loss, know that tokens are spread."""
    register()
    ring = ring_of(2)
    batch = shard_batch(hf_kinds.whole("", False), group=ring)
    for head in (lambda x, _: gathered(x, batch), lambda x, _: own_loss(x, batch, ring)):
        with ring_forward(batch, labels=False) as inputs:
            Around(head)(**inputs)
    return "taken"


def test_a_module_that_gathers_is_taken(pools):
    assert set(pools(4).run(modules_that_know)) == {"taken"}


def too_few_tokens() -> str:
    register()
    batch = shard_batch({"input_ids": torch.ones(2, 3, dtype=torch.long)}, group=ring_of(4))
    return raised(lambda: ring_forward(batch))


def test_each_rank_must_have_a_token(pools):
    for text in pools(4).run(too_few_tokens):
        assert "3 tokens put [1, 1, 1, 0] on the ranks" in text


def masks_in_another_order() -> float:
    """Ranks with other seeds of hashes go through sets of kinds of layers in other orders."""
    ring = ring_of(2)
    module = sys.modules[transformers.MiMoV2FlashForCausalLM.__module__]

    def in_order(kinds: Any) -> list[str]:
        return sorted(dict.fromkeys(kinds), reverse=ring.rank == 1)

    with mock.patch.object(module, "set", in_order, create=True):
        got = hf_kinds.step("masks in any order", False, ring)
    return errors(got, hf_kinds.alone("masks in any order", False))


def test_masks_may_be_made_in_any_order(pools):
    assert max(pools(2).run(masks_in_another_order)) < EXACT


def wrapped(how: str) -> tuple[float, str]:
    """(error of the loss, what is said of a pooled output) of a wrapped model."""
    register()
    ring = ring_of(2)
    model, pooled = hf.model_of("Llama", "ring"), of("Bert", "ForSequenceClassification")
    around: Any = {
        "DDP": lambda m: DistributedDataParallel(m, process_group=ring.group),
        "compile": lambda m: torch.compile(m, backend="eager"),
        "PEFT": _lora,
    }[how]
    batch = shard_batch(hf.batch_of("padded left"), group=ring)
    with hf.in_double(), ring_forward(batch, loss_group=ring) as inputs:
        loss = around(model)(**inputs).loss.detach()
    want = hf.dense("Llama", "padded left")[0]
    told = raised(lambda: called(around(pooled), labels=False))
    return float((loss - want).abs()), told


def _lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = ["q_proj"] if hasattr(model, "lm_head") else ["query"]
    return get_peft_model(model, LoraConfig(target_modules=names))


@pytest.mark.parametrize(
    "how", ["DDP", *(pytest.param(how, marks=pytest.mark.thorough) for how in ("compile", "PEFT"))]
)
def test_wrappers_hide_nothing(how, pools):
    if how == "PEFT":
        pytest.importorskip("peft")
    for error, told in pools(2).run(wrapped, how):
        assert error < 1e-10
        assert "returns logits [2, 2], which should be" in told


_WITH_SEEDS = """
import os, sys
from tests.support import hf_kinds
from tests.integrations.test_outputs import errors
from ring_attention_pytorch.ranks.ring import as_ring
from ring_attention_pytorch.launch import torchrun_group

with torchrun_group("gloo"):
    found = errors(
        hf_kinds.step("masks in any order", False, as_ring(None)),
        hf_kinds.alone("masks in any order", False),
    )
    assert found < 1e-6, found
"""


@pytest.mark.thorough
def test_ranks_may_have_other_seeds_of_hashes():
    """As torchrun starts them: each rank with a seed of its own."""
    root = Path(__file__).parents[2]
    run = f'PYTHONHASHSEED=$((RANK + 1)) exec {sys.executable} -c "$PROGRAM"'
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--no-python", "bash", "-c", run],
        env=os.environ | {"PROGRAM": _WITH_SEEDS, "PYTHONPATH": str(root)},
        cwd=root, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
