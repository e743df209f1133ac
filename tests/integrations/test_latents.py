"""Layers of transformers with latent keys: equal to one process, and ranks send latents."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.kimi_linear import modeling_kimi_linear

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations import latents
from ring_attention_pytorch.integrations.transformers import RingHFCache, register, ring_forward
from tests.support import families
from tests.support.hf import ring_of
from tests.support.reference import relative_error
from tests.support.tiny_models import FIRST, PAD, WORDS, family_of, model_of

KINDS = [
    modeling_deepseek_v2.DeepseekV2Attention,
    modeling_deepseek_v3.DeepseekV3Attention,
    modeling_kimi_linear.KimiLinearAttention,
]


@pytest.mark.parametrize("kind", KINDS)
def test_families_expand_latents_as_the_codec_decodes_them(kind):
    theirs = kind.expand_kv
    assert latents.is_known(getattr(theirs, "__wrapped__", theirs))
    assert not latents.is_known(kind.forward)
    assert not latents.is_known(len)


def counted(names: list[str]) -> dict[str, Any]:
    """For a pool: what families compute, and how often attention was to latents."""
    found = {}
    for name in names:
        with mock.patch.object(latents, "attend", wraps=latents.attend) as attend:
            found[name] = families.examined(family_of(name)), attend.call_count > 0
    return found


def right(pools, names: list[str]) -> None:
    found = pools(3).answers(counted, names)
    for name in names:
        cells = families.together([(kind, each[name][0]) for kind, each in found])
        assert families.verdict(cells) == "equal", (name, cells)
        assert all(each[name][1] for _, each in found), name


def test_deepseek_v3_equals_one_process_and_attends_to_latents(pools):
    right(pools, ["DeepseekV3ForCausalLM"])


@pytest.mark.thorough
def test_so_do_others(pools):
    right(pools, ["DeepseekV2ForCausalLM", "MiniCPM3ForCausalLM", "Glm4MoeLiteForCausalLM"])


def of_kimi_linear() -> dict[str, Any]:
    """For a pool: it has recurrent layers beside, and knows no positions."""
    unchecked = partial(ring_forward, check_positions=False)
    with mock.patch.object(families, "ring_forward", unchecked):
        return counted(["KimiLinearForCausalLM"])


@pytest.mark.thorough
def test_so_does_kimi_linear(pools):
    found = pools(3).answers(of_kimi_linear)
    cells = [(kind, each["KimiLinearForCausalLM"]) for kind, each in found]
    assert families.verdict(families.together([(kind, each[0]) for kind, each in cells])) == "equal"
    assert all(attended for _, (_, attended) in cells)


def step(model: nn.Module, checkpoint: bool = False) -> list[torch.Tensor]:
    """The loss of a step in a ring of one, and the gradients."""
    ids = torch.arange(24).view(2, 12) % 7 + 3
    model.zero_grad()
    if checkpoint:
        model.train().gradient_checkpointing_enable()
    with ring_forward(shard_batch({"input_ids": ids, "labels": ids})) as inputs:
        loss = model(**inputs).loss
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def tiny() -> nn.Module:
    register()
    return model_of(family_of("DeepseekV3ForCausalLM"), "ring")


def test_checkpoints_recompute_attention_to_latents():
    model = tiny()
    with mock.patch.object(latents, "attend", wraps=latents.attend) as attend:
        plain, calls = step(model.train()), attend.call_count
        again = step(model, checkpoint=True)
        assert attend.call_count == 3 * calls > 0
    torch.testing.assert_close(again, plain)


def test_a_projection_that_is_not_plain_is_expanded_by_the_model():
    model = tiny()
    plain = step(model)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            assert latents.refusal(module) is None
            module.kv_b_proj.register_forward_hook(lambda *_: None)
            assert "no plain projection" in latents.refusal(module)
    with mock.patch.object(latents, "attend", wraps=latents.attend) as attend:
        torch.testing.assert_close(step(model), plain)
        assert not attend.called


def test_a_layer_that_changes_latents_is_an_error():
    layer, t = nn.Linear(1, 1), torch.zeros(1)
    assert not latents.taken(layer, t, t)
    latents.given[layer] = t, t
    with pytest.raises(ValueError, match="Linear changes keys"):
        latents.taken(layer, t + 1, t)
    assert not latents.taken(layer, t, t)


def test_a_method_that_is_not_known_is_left_alone_and_said(caplog):
    class Other(nn.Module):
        def expand_kv(self, kv_nope, k_rot):
            return kv_nope, k_rot

    theirs = Other.expand_kv
    latents.prepare([Other()])
    assert Other.expand_kv is theirs
    assert "Other expands latents in a way that is not known" in caplog.text


Generated = tuple[list[list[int]], torch.Tensor]  # tokens, and logits of all steps


def generated(model: nn.Module, padded: bool, cache: RingHFCache | None = None) -> Generated:
    """Six tokens after a prompt, by transformers' cache or by ours."""
    ids = torch.randint(FIRST, WORDS, (2, 41), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(41) >= torch.tensor([[9], [0]])).long() if padded else None
    given = dict(input_ids=ids if mask is None else ids.where(mask > 0, PAD), attention_mask=mask)
    if cache is not None:
        cache.prefill(model, **given, chunk_size=19)
        given |= {"past_key_values": cache}
    given |= dict(max_new_tokens=6, eos_token_id=None, pad_token_id=PAD, output_logits=True)
    with families.widened():
        found = model.generate(**given, return_dict_in_generate=True)
    return found.sequences.tolist(), torch.stack(found.logits)


def generated_by_a_ring(
    name: str, size: int, padded: bool
) -> tuple[Generated, tuple[int, int, int]]:
    """For a pool: the same by our cache, and the sizes of its keys and values."""
    register()
    model = model_of(family_of(name), "ring")
    cache = RingHFCache(model.config, page=4, group=ring_of(size))
    found = generated(model, padded, cache)
    assert cache.keys is not None
    return found, (cache.keys.key_heads, cache.keys.head_dim, cache.keys.value_dim)


def generate_alike(pools, name: str, size: int, padded: bool) -> None:
    model = model_of(family_of(name), "eager")
    want, config = generated(model, padded), model.config
    for got, sizes in pools(4).run(generated_by_a_ring, name, size, padded):
        assert got[0] == want[0]
        assert relative_error(got[1], want[1]) < 1e-6
        assert sizes == (1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)


@pytest.mark.parametrize(("size", "padded"), [(3, False), (2, True)])
def test_a_cache_of_latents_generates_what_one_process_does(size, padded, pools):
    generate_alike(pools, "DeepseekV3ForCausalLM", size, padded)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "KimiLinearForCausalLM"])
def test_so_do_caches_of_others(name, pools):
    generate_alike(pools, name, 2, False)


def test_latents_are_not_cached_in_8_bits():
    model = tiny()
    with pytest.raises(ValueError, match="latents can't be kept in torch"):
        generated(model, False, RingHFCache(model.config, dtype=torch.float8_e4m3fn))


def changes(kind: Any) -> Any:
    """Make a layer's keys others than those of its latents."""
    theirs = kind.expand_kv

    def expand_kv(layer: nn.Module, *latents: torch.Tensor) -> Any:
        k, v = theirs(layer, *latents)
        return k * 2, v

    return mock.patch.object(kind, "expand_kv", expand_kv)


def test_a_cache_refuses_keys_that_are_not_those_of_its_latents():
    model, kind = tiny(), modeling_deepseek_v3.DeepseekV3Attention
    with changes(kind), pytest.raises(ValueError, match="something that is not known"):
        generated(model, False, RingHFCache(model.config))
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="no plain projection, and the cache"):
        generated(model, False, RingHFCache(model.config))
