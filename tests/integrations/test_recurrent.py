"""Recurrent layers of transformers' models over rings, against transformers in one process."""

import inspect
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.models.qwen3_next import modeling_qwen3_next

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.recurrent import check_calls, recurrent_layers
from ring_attention_pytorch.integrations.transformers import (
    RingHFCache,
    register,
    ring_forward,
)
from tests.support import families
from tests.support.hf import raised
from tests.support.reference import relative_error
from tests.support.tiny_models import family_of, model_of

FAMILIES: dict[str, dict[str, Any]] = {
    "KimiLinearForCausalLM": {},
    "NemotronHForCausalLM": dict(layers_block_type=["mamba", "attention", "mlp"]),
    "BambaForCausalLM": dict(attn_layer_indices=[1]),
    "GraniteMoeHybridForCausalLM": dict(layer_types=["mamba", "attention"]),
}


def examined(name: str, given: dict[str, Any]) -> families.Found:
    """For a pool: a family with other settings, whose layers may know no positions."""
    with (
        mock.patch.object(families, "model_of", partial(model_of, **given)),
        mock.patch.object(families, "ring_forward", partial(ring_forward, check_positions=False)),
    ):
        return families.examined(family_of(name))


@pytest.mark.parametrize("name", [*FAMILIES])
def test_loss_outputs_and_gradients_are_those_of_one_process(pools, name) -> None:
    found = families.together(pools(3).answers(examined, name, FAMILIES[name]))
    assert families.verdict(found) == "equal", found


def tiny(attention: str = "ring") -> nn.Module:
    register()
    return model_of(family_of("Qwen3NextForCausalLM"), attention)


def step(model: nn.Module, *, inside: bool = True, **batch: Any) -> list[torch.Tensor]:
    """The gradients of a step in a ring of one."""
    ids = torch.arange(24).view(2, 12) % 7 + 3
    model.zero_grad()
    with ring_forward(shard_batch({"input_ids": ids, "labels": ids, **batch})) as inputs:
        loss = model(**inputs).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_spread_again_and_only_in_their_block(reentrant) -> None:
    model = tiny()
    want = [t.clone() for t in step(model)]
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for got, expected in zip(step(model), want, strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="recomputed in backward outside of the block"):
        step(model, inside=False)


def test_elsewhere_the_functions_are_those_of_transformers() -> None:
    step(tiny())
    conv = modeling_qwen3_next.causal_conv1d_fn
    assert hasattr(conv, "of_ring")
    assert recurrent_layers({}) == []
    recurrent_layers(dict(tiny().named_modules()))
    assert modeling_qwen3_next.causal_conv1d_fn is conv  # wrapped once
    x, weight = torch.randn(1, 3, 9), torch.randn(3, 4)
    want = nn.functional.conv1d(x, weight[:, None], padding=3, groups=3)[:, :, :9]
    torch.testing.assert_close(conv(x, weight), want)


def test_a_layer_that_computes_by_other_functions_is_refused(monkeypatch) -> None:
    model = tiny()
    step(model)
    own = modeling_qwen3_next.torch_chunk_gated_delta_rule.__wrapped__
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", own)
    own.of_ring = True
    assert "did not compute its states by the functions that are spread" in raised(
        lambda: step(model)
    )
    del own.of_ring


@pytest.mark.parametrize("calls", [[], ["causal_conv1d_fn"], ["mamba2_chunk_scan"] * 2])
def test_what_a_layer_must_have_called(calls) -> None:
    with pytest.raises(ValueError, match="can't be spread so"):
        check_calls(nn.Linear(1, 1), calls)
    check_calls(nn.Linear(1, 1), ["causal_conv1d_fn", "mamba2_chunk_scan"])


def test_documents_and_states_of_their_own_are_refused() -> None:
    ids = torch.arange(12)[None]
    x, weight = torch.zeros(1, 3, 12), torch.zeros(3, 4)
    step(tiny())
    conv = modeling_qwen3_next.causal_conv1d_fn
    scan = modeling_qwen3_next.torch_chunk_gated_delta_rule
    q, g = torch.zeros(1, 12, 1, 2), torch.zeros(1, 12, 1)

    def act(function, *args: Any, **given: Any) -> str:
        def call() -> None:
            with ring_forward(shard_batch({"input_ids": ids})):
                function(*args, **given)

        return raised(call)

    assert "seq_idx was given beside the documents" in act(conv, x, weight, seq_idx=ids)
    text = act(scan, q, q, q, g, g, output_final_state=True)
    assert "was given output_final_state: ring_forward is for whole sequences" in text


# the argument's name, which has changed
CACHE = "past_key_values"
if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
    CACHE = "cache"
CACHED: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {},
    "FalconH1ForCausalLM": {},
    "NemotronHForCausalLM": FAMILIES["NemotronHForCausalLM"],
    "JambaForCausalLM": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_period=2),
}
PROMPT, NEW = 23, 5


def generated(name: str, ahead: int | None, padded: bool, *, ring: bool = True) -> Any:
    """Tokens and logits of one process by transformers, or by a cache of ours over the ring.

    With a prompt computed `ahead` in chunks of so many tokens.
    """
    register()
    model = model_of(family_of(name), "ring" if ring else "sdpa", **CACHED[name]).eval()
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(8, 60, (2, PROMPT), generator=draw)
    mask = (torch.arange(PROMPT) >= torch.tensor([[9], [0]]) * padded).long()
    given: dict[str, Any] = dict(input_ids=ids * mask + (1 - mask), attention_mask=mask)
    if ring:
        given[CACHE] = RingHFCache(model.config, page=2)
    if ahead is not None:
        given[CACHE].prefill(model, given["input_ids"], mask, chunk_size=ahead)
        assert given[CACHE].get_seq_length() == PROMPT - 1
    found = model.generate(
        **given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=1,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return found.sequences.tolist(), torch.stack(found.logits)


def all_ways(cases: list[tuple[str, int | None, bool]]) -> list[Any]:
    return [generated(*case) for case in cases]


def test_hybrids_generate_what_they_do_in_one_process(pools) -> None:
    cases = [
        (name, ahead, padded)
        for name in CACHED
        for ahead in ((None, 5, 40) if name != "JambaForCausalLM" else (None,))
        for padded in (False, True)
    ]
    want = {(n, p): generated(n, None, p, ring=False) for n in CACHED for p in (False, True)}
    for found in pools(3).run(all_ways, cases):
        for (name, ahead, padded), (tokens, logits) in zip(cases, found, strict=True):
            assert tokens == want[name, padded][0], (name, ahead, padded)
            assert relative_error(logits, want[name, padded][1]) < 1e-5, (name, ahead, padded)


def test_what_states_in_a_cache_cannot_do() -> None:
    model = tiny().eval()
    cached = RingHFCache(model.config)
    ids = torch.arange(3, 12)[None]
    cached.prefill(model, ids)
    assert "so none can be removed" in raised(lambda: cached.crop(-1))
    assert "no assisted decoding" in raised(cached.activate_past_recording)
    cached.reset()
    assert cached.get_seq_length() == 0
    jamba = model_of(family_of("JambaForCausalLM"), "ring", **CACHED["JambaForCausalLM"]).eval()
    cached = RingHFCache(jamba.config)
    assert "generate without prefill" in raised(lambda: cached.prefill(jamba, ids))
    alone = model_of(family_of("BambaForCausalLM"), "ring")
    assert "the model has no attention" in raised(lambda: RingHFCache(alone.config))


def one_token_each() -> str:
    register()
    mask = torch.tensor([[0, 1, 1]])
    batch = {"input_ids": torch.tensor([[1, 4, 5]]), "attention_mask": mask}
    model = tiny()

    def call() -> None:
        with ring_forward(shard_batch(batch, layout="contiguous")) as inputs:
            model(**inputs)

    return raised(call)


def test_a_mask_that_transformers_drops_is_refused(pools) -> None:
    found = pools(3).run(one_token_each)
    assert {"transformers drops the mask of one token" in text for text in found} == {True}


def striped() -> str:
    model = tiny()

    def call() -> None:
        batch = shard_batch({"input_ids": torch.arange(3, 15)[None]}, layout="striped")
        with ring_forward(batch) as inputs:
            model(**inputs)

    return raised(call)


def test_the_striped_layout_is_refused(pools) -> None:
    found = pools(3).run(striped)
    assert {"the striped layout has runs of one token" in text for text in found} == {True}
