"""Hybrids of transformers generate from a spread cache what they generate in one process."""

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch.integrations.transformers import RingHFCache, register
from tests.support.hf import raised
from tests.support.reference import relative_error
from tests.support.tiny_models import family_of, model_of

# the argument's name, which has changed
CACHE = "past_key_values"
if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
    CACHE = "cache"
CACHED: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {},
    "FalconH1ForCausalLM": {},
    "NemotronHForCausalLM": dict(layers_block_type=["mamba", "attention", "mlp"]),
    "JambaForCausalLM": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_period=2),
}
PROMPT, NEW = 23, 5


def generated(name: str, ahead: int | None, padding: int, *, ring: bool = True) -> Any:
    """Tokens and logits of one process by transformers, or by a cache of ours over the ring.

    With a prompt computed `ahead` in chunks of so many tokens.
    """
    register()
    model = model_of(family_of(name), "ring" if ring else "sdpa", **CACHED[name]).eval()
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(8, 60, (2, PROMPT), generator=draw)
    mask = (torch.arange(PROMPT) >= torch.tensor([[padding], [0]])).long()
    given: dict[str, Any] = dict(input_ids=ids * mask + (1 - mask), attention_mask=mask)
    if ring:
        given[CACHE] = RingHFCache(model.config, page=2)
    if ahead is not None:
        given[CACHE].prefill(model, given["input_ids"], mask, chunk_size=ahead)
        assert given[CACHE].get_seq_length() == PROMPT - 1 - (padding == PROMPT - 1)
    found = model.generate(
        **given, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=1,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return found.sequences.tolist(), torch.stack(found.logits)


def all_ways(cases: list[tuple[str, int | None, int]]) -> list[Any]:
    return [generated(*case) for case in cases]


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_hybrids_generate_what_they_do_in_one_process(pools, others: bool) -> None:
    """Each in every second way, padded and not, and `others`.

    Of chunks of 5 each rank computes all, of 12 a part, from the states of the chunk before.
    """
    cases = [
        (name, ahead, padding)
        for name in CACHED
        for ahead in ((None, 5, 12, 40) if name != "JambaForCausalLM" else (None, 40))
        for padding in (0, 9)
    ]
    cases = [case for i, case in enumerate(cases) if (i // 2 + i) % 2 == others]
    want = {(n, p): generated(n, None, p, ring=False) for n in CACHED for p in (0, 9)}
    for found in pools(3).run(all_ways, cases):
        for (name, ahead, padding), (tokens, logits) in zip(cases, found, strict=True):
            assert tokens == want[name, padding][0], (name, ahead, padding)
            assert relative_error(logits, want[name, padding][1]) < 1e-5, (name, ahead, padding)


def in_parts(sizes: list[int | None]) -> list[str]:
    """Errors of prompts that Jamba reads by parts, over the ring; wrong tokens if there is none."""
    found = []
    name = "JambaForCausalLM"
    for size in sizes:
        try:
            tokens, _ = generated(name, size, 0)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append(f"right: {tokens == generated(name, None, 0, ring=False)[0]}")
    return found


def test_parts_without_the_state_before_are_refused_however_short_they_are(pools) -> None:
    """Of 22 tokens; a rank's part has at least two, or all ranks compute the whole chunk."""
    for large, small, short, single, but_one, whole in pools(2).run(
        in_parts, [12, 2, 3, 1, 21, None]
    ):
        for text in (large, small, short):
            assert "Mamba 1 has no state at the start of a prompt's later parts" in text
        assert {single, but_one, whole} == {"right: True"}


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM"])
def test_padding_of_a_chunk_of_one_token_enters_no_state(name: str) -> None:
    """Of 22 tokens ahead chunks of 7 leave one, for which transformers has no mask."""
    tokens, logits = generated(name, 7, PROMPT - 1)
    want, wanted = generated(name, None, PROMPT - 1, ring=False)
    assert tokens == want
    assert relative_error(logits, wanted) < 1e-5
    assert "chunk_size must be at least 2" in raised(lambda: generated(name, 1, 9))
    generated(name, 1, 0)


def test_what_states_in_a_cache_cannot_do() -> None:
    register()
    model = model_of(family_of("Qwen3NextForCausalLM"), "ring").eval()
    cached = RingHFCache(model.config)
    ids = torch.arange(3, 12)[None]
    cached.prefill(model, ids)
    assert "so none can be removed" in raised(lambda: cached.crop(-1))
    cached.reset()
    assert cached.get_seq_length() == 0
    lookup = dict(prompt_lookup_num_tokens=3, max_new_tokens=9, **{CACHE: cached})
    assert "not supported with stateful models" in raised(lambda: model.generate(ids, **lookup))
    jamba = model_of(family_of("JambaForCausalLM"), "ring", **CACHED["JambaForCausalLM"]).eval()
    for size in (4, 2):  # spread, or too few tokens for that
        cached = RingHFCache(jamba.config)
        text = raised(lambda: cached.prefill(jamba, ids, chunk_size=size))  # noqa: B023 - called now
        assert "leave chunk_size out" in text
        assert cached.read == 0
    alone = model_of(family_of("BambaForCausalLM"), "ring")
    assert "the model has no attention" in raised(lambda: RingHFCache(alone.config))
