"""Small models of other kinds than decoders, and a step of each by transformers in one process."""

from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import hf

WORDS, LENGTH, PADDING = 31, 29, 6
_SIZES = dict(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, vocab_size=WORDS,
    num_attention_heads=4, max_position_embeddings=64,
)  # fmt: skip
_GROUPS = _SIZES | dict(num_key_value_heads=2)
_SPECIAL = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a loss of its own": ("Bert", "ForMaskedLM", dict(_SIZES, pad_token_id=0)),
    "labels in place": ("ModernBert", "ForMaskedLM", dict(
        _SIZES, **_SPECIAL, local_attention=8, global_attn_every_n_layers=2,
    )),
    "labels of tokens": ("Qwen3", "ForTokenClassification", dict(
        _GROUPS, num_labels=3, head_dim=8, classifier_dropout=0.0,
    )),
    "positions behind padding": ("Roberta", "ForMaskedLM", dict(_SIZES, pad_token_id=1)),
    "positions of real tokens": ("OPT", "ForCausalLM", dict(
        hidden_size=32, ffn_dim=24, num_hidden_layers=2, vocab_size=WORDS, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32,
    )),
    "the last token": ("Llama", "ForSequenceClassification", dict(
        _GROUPS, num_labels=3, pad_token_id=1,
    )),
    "routers": ("Mixtral", "ForCausalLM", dict(
        _GROUPS, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=1.0, experts_implementation="eager", sliding_window=None,
    )),
    "views of attention": ("JetMoe", "ForCausalLM", dict(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, vocab_size=WORDS, kv_channels=8,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        experts_implementation="eager",
    )),
    "masks in any order": ("MiMoV2Flash", "ForCausalLM", dict(
        _GROUPS, head_dim=8, v_head_dim=8, sliding_window=8, experts_implementation="eager",
        layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
    )),
}  # fmt: skip


def make(family: str, head: str, sizes: dict[str, Any], attention: str = "ring") -> nn.Module:
    """A model with random weights, the same for each attention."""
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation=attention)
    model = getattr(transformers, family + head)(config).eval()
    return hf.filled(model).double()


def whole(name: str, padded: bool) -> dict[str, Tensor]:
    """Whole sequences as a user has them: two samples, the first padded on its left."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=draw)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if name == "labels of tokens":
        batch["labels"] %= 3
    elif "labels" in name or name.startswith(("a loss", "positions behind")):
        batch["labels"][:, ::3] = -100  # of masked words
    if padded:
        real = torch.arange(LENGTH) >= torch.tensor([[PADDING], [0]])
        batch["input_ids"] = ids.masked_fill(~real, 1)
        batch["attention_mask"] = real.long()
        batch["labels"] = batch["labels"].masked_fill(~real, -100)
        batch["labels"][0, PADDING] = -100  # nothing that is seen predicts it
    if name == "the last token":
        batch["labels"] = torch.tensor([2, 0])
    return batch


def _wide(name: str) -> Any:
    return nullcontext() if name == "routers" else hf.in_double()  # their sums are of float32


def step(name: str, padded: bool, ring: Ring | None = None) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) over a ring."""
    register()
    model, batch = make(*OTHERS[name]), whole(name, padded)
    of_sample = {"labels": batch.pop("labels")} if name == "the last token" else {}
    spread = shard_batch(batch, group=ring)
    with _wide(name), ring_forward(spread, loss_group=ring) as inputs:
        loss = model(**inputs, **of_sample).loss
        loss.backward()
    if ring is None:
        return loss.detach(), [p.grad for p in model.parameters()]
    return loss.detach(), hf.averaged(model, ring)


def alone(name: str, padded: bool) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) by transformers alone, in one process."""
    model = make(*OTHERS[name], attention="eager" if "order" in name else "sdpa")
    with _wide(name):
        loss = model(**whole(name, padded)).loss
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]
