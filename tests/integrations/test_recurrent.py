"""Recurrent layers of transformers' models over rings, against transformers in one process."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers.models.qwen3_next import modeling_qwen3_next

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.recurrent import check_calls, recurrent_layers
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import families
from tests.support.hf import raised
from tests.support.tiny_models import family_of, model_of

FAMILIES: dict[str, dict[str, Any]] = {
    "KimiLinearForCausalLM": {},
    "NemotronHForCausalLM": dict(layers_block_type=["mamba", "attention", "mlp"]),
    "BambaForCausalLM": dict(attn_layer_indices=[1]),
    "GraniteMoeHybridForCausalLM": dict(layer_types=["mamba", "attention"]),
    "JambaForCausalLM": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_period=2),
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
