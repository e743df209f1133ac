"""`head_of` reads a head that makes the model's own logits; else it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch import ring_cross_entropy, ring_token_logprobs, shard_batch
from ring_attention_pytorch.integrations.heads import head_of
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support.families import widened
from tests.support.hf import ring_of
from tests.support.reference import relative_error
from tests.support.tiny_models import FIRST, WORDS, family_of, model_of

HEADS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "LlamaForCausalLM": ({}, {"head"}),
    "OPTForCausalLM": ({}, {"head"}),
    "Gemma2ForCausalLM": (dict(final_logit_softcapping=2.0), {"head", "softcap"}),
    "CohereForCausalLM": (dict(logit_scale=0.25), {"head", "scale"}),
    "GraniteForCausalLM": (dict(logits_scaling=8.0), {"head", "scale"}),
    "MiniCPM3ForCausalLM": ({}, {"head", "scale"}),
    "PhiForCausalLM": ({}, {"head", "bias"}),
}  # settings, and what is found
IDS = torch.randint(FIRST, WORDS, (2, 29), generator=torch.Generator().manual_seed(1))


def made(name: str, attention: str) -> nn.Module:
    return model_of(family_of(name), attention, **HEADS[name][0])


def logits_of(hidden: Tensor, found: dict[str, Any]) -> Tensor:
    """Make logits of hidden states, by the formula."""
    logits = hidden @ found["head"].T + found.get("bias", 0.0)
    logits = logits * found.get("scale", 1.0)
    cap = found.get("softcap")
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_makes_the_logits_that_its_model_makes(name):
    model = made(name, "eager")
    with torch.no_grad(), widened():
        want = model(IDS).logits
        hidden = model.base_model(IDS)[0]
    found = head_of(model)
    assert set(found) == HEADS[name][1]
    assert relative_error(logits_of(hidden, found), want) < 1e-12
    assert found["head"] is model.get_output_embeddings().weight
    assert "forward" not in vars(model.base_model)


def test_a_setting_that_is_changed_is_seen():
    model = made("CohereForCausalLM", "eager")
    assert head_of(model)["scale"] == 0.25
    model.config.logit_scale = model.logit_scale = 0.5
    assert head_of(model)["scale"] == 0.5


class Squared(transformers.LlamaForCausalLM):
    """A head that nothing tells of."""

    def forward(self, *args: Any, **given: Any) -> Any:
        made = super().forward(*args, **given)
        made.logits = made.logits.abs()
        return made


class Adapted(nn.Linear):
    """A head with an adapter, which does nothing yet."""

    def __init__(self, inner: nn.Linear):
        super().__init__(inner.in_features, inner.out_features, bias=False)
        self.weight = inner.weight
        self.adapter = nn.Parameter(torch.zeros(3))


def test_heads_that_do_something_else_are_refused():
    for name in ("BertLMHeadModel", "RobertaForCausalLM", "DistilBertForMaskedLM"):
        with pytest.raises(ValueError, match="more than one layer between hidden states"):
            head_of(model_of(family_of(name), "eager"))
    llama = made("LlamaForCausalLM", "eager")
    with pytest.raises(ValueError, match="in another way than by a weight"):
        head_of(Squared(llama.config))
    llama.lm_head = Adapted(llama.lm_head)
    with pytest.raises(ValueError, match="adapter"):
        head_of(llama)
    with pytest.raises(ValueError, match="with a head, got LlamaModel"):
        head_of(llama.model)
    with pytest.raises(ValueError, match="with a head, got Linear"):
        head_of(nn.Linear(2, 2))


def losses_by_heads(size: int) -> dict[str, float]:
    """For a pool: the worst error of loss and log-probabilities by hidden states and head."""
    register()
    found, ring = {}, ring_of(size)
    for name in HEADS:
        alone = made(name, "eager")
        with torch.no_grad(), widened():
            want = alone(IDS, labels=IDS).loss
            each = alone(IDS).logits.log_softmax(-1)[:, :-1].gather(2, IDS[:, 1:, None])
        model = made(name, "ring")
        batch = shard_batch({"input_ids": IDS, "labels": IDS}, group=ring)
        with widened(), ring_forward(batch, loss_group=ring, labels=False) as inputs:
            hidden, head = model.base_model(**inputs)[0], head_of(model)
            loss = ring_cross_entropy(hidden, batch.labels, group=ring, **head)
            logprobs = ring_token_logprobs(hidden, batch, **head)[:, :-1]
        found[name] = max(relative_error(loss, want), relative_error(logprobs, each[..., 0]))
    return found


def test_losses_by_a_head_are_those_of_the_model(pools):
    for found in pools(4).run(losses_by_heads, 3):
        assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("name", HEADS)
def test_a_weight_without_the_other_terms_of_its_model_is_refused(name):
    register()
    model, labels = made(name, "ring"), torch.zeros(1, 3, dtype=torch.long)
    terms = head_of(model)
    hidden = torch.randn(1, 3, terms["head"].shape[1], dtype=terms["head"].dtype)
    ring_cross_entropy(hidden, labels, **terms)
    batch = shard_batch({"input_ids": labels + FIRST, "labels": labels})
    for missing in {"softcap", "scale", "bias"} & {*terms}:
        given = {key: value for key, value in terms.items() if key != missing}
        with pytest.raises(ValueError, match=f"logits also have {missing}"):
            ring_cross_entropy(hidden, labels, **given)
        with pytest.raises(ValueError, match=f"logits also have {missing}"):
            ring_token_logprobs(hidden, batch, **given)
        if missing == "scale":  # hidden states that are scaled already
            ring_cross_entropy(hidden, labels, **given, scale=1.0)


def test_a_weight_of_no_known_head_needs_no_other_terms():
    register()
    gemma, bert = made("Gemma2ForCausalLM", "ring"), model_of(family_of("BertForMaskedLM"), "ring")
    decoder, labels = bert.get_output_embeddings(), torch.zeros(1, 3, dtype=torch.long)
    for weight in (gemma.lm_head.weight.detach().clone(), decoder.weight):
        hidden = torch.randn(1, 3, weight.shape[1], dtype=weight.dtype)
        ring_cross_entropy(hidden, labels, head=weight)
