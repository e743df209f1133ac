"""Models of transformers generate from a spread cache what they generate in one process."""

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import RingHFCache, register
from tests.support.hf import WORDS, model_of, raised, ring_of
from tests.support.reference import relative_error
from tests.support.sampling import grid

MODELS = ["Llama", "Qwen3", "Mistral", "Gemma2", "GptOss"]
LENGTH, NEW, EOS = 41, 8, 7
# the argument's name, which has changed
CACHE = "past_key_values"
if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
    CACHE = "cache"
Generated = tuple[list[list[int]], Tensor]  # tokens, and logits of all steps


def prompt(samples: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(samples)
    return torch.randint(8, WORDS, (samples, LENGTH), generator=draw)


def padded() -> dict[str, Tensor]:
    mask = (torch.arange(LENGTH) >= torch.tensor([[9], [0]])).long()
    return dict(input_ids=prompt() * mask, attention_mask=mask)


def exact(module, q, k, v, mask, *, scaling, softcap=None, s_aux=None, **_) -> tuple[Tensor, None]:
    """Attention in one process: dense, in the tensors' own dtype throughout."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(mask[..., : k.shape[2]] < 0, -torch.inf)
    sinks = torch.full_like(scores[..., :1], -torch.inf)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand_as(sinks)
    p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].nan_to_num()
    return torch.einsum("bhij,bhjd->bihd", p, v), None


AttentionInterface.register("exact", exact)
AttentionMaskInterface.register("exact", eager_mask)


@cache
def drafter(name: str) -> nn.Module:
    """Almost the same model, so that some of its drafts are taken."""
    model, draw = model_of(name, "exact"), torch.Generator().manual_seed(4)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        p.data += 0.1 * noise * p.data.std()
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


# where each token depends on all probabilities; the largest is often the same
DRAWN = dict(do_sample=True, temperature=2.0)
MODES: dict[str, Callable[[str], dict[str, Any]]] = {
    "greedy": lambda _: dict(input_ids=prompt()),
    "sampling": lambda _: dict(input_ids=prompt(), do_sample=True, top_p=0.9, temperature=1.5),
    "beams": lambda _: dict(input_ids=prompt(), num_beams=3),
    "assisted": lambda name: dict(input_ids=prompt(1), assistant_model=drafter(name)),
    "lookup": lambda _: dict(input_ids=prompt(1) % 3 + 8, prompt_lookup_num_tokens=3),
    "in chunks": lambda _: dict(input_ids=prompt(), prefill_chunk_size=7, **DRAWN),
    "padded": lambda _: dict(padded(), **DRAWN),
    "padded, in chunks": lambda _: dict(padded(), prefill_chunk_size=4, **DRAWN),
    "padded beams": lambda _: dict(padded(), num_beams=2, **DRAWN),
}
AHEAD = ("greedy", "sampling", "in chunks", "padded", "padded, in chunks")


def generated(name: str, mode: str, cached: RingHFCache | None = None, **more: Any) -> Generated:
    """The tokens of one process by transformers itself, or of all ranks by a cache of ours."""
    model = model_of(name, "exact" if cached is None else "ring").eval()
    given = MODES[mode](name) | more
    if cached is not None:
        given[CACHE] = cached
    torch.manual_seed(0)
    given |= dict(return_dict_in_generate=True, output_logits=True)
    found = model.generate(**given, max_new_tokens=NEW, eos_token_id=EOS, pad_token_id=0)
    return found.sequences.tolist(), torch.stack(found.logits)


def same(got: list[Generated], want: list[Generated]) -> bool:
    """True if tokens are the same, and logits but for float32, to which transformers rounds."""
    return all(
        mine[0] == right[0] and relative_error(mine[1], right[1]) < 1e-5
        for mine, right in zip(got, want, strict=True)
    )


def spread(
    cases: list[tuple[str, str]], size: int, page: int, dtype: torch.dtype | None = None
) -> list[Generated]:
    """For a pool: the same in rings of a size; also with the prompt computed ahead.

    Layers with a window of five tokens keep 21, of a prompt of 41.
    """
    register()
    found = []
    for name, mode in cases:
        ring: dict[str, Any] = dict(spare=8, dtype=dtype)
        if dist.is_initialized():
            ring |= dict(group=ring_of(size), page=page)
        config = model_of(name, "ring").config
        found.append(generated(name, mode, RingHFCache(config, **ring)))
        if mode not in AHEAD:
            continue
        cached, given = RingHFCache(config, **ring), MODES[mode](name)
        mask = given.get("attention_mask")
        cached.prefill(model_of(name, "ring").eval(), given["input_ids"], mask, chunk_size=19)
        assert cached.get_seq_length() == LENGTH - 1
        found.append(generated(name, mode, cached, prefill_chunk_size=None))
    return found


def wanted(cases: list[tuple[str, str]]) -> list[Generated]:
    found = []
    for name, mode in cases:
        found += [generated(name, mode)] * (2 if mode in AHEAD else 1)
    return found


@grid("size, page", [(1, 64), (2, 4), (3, 1), (4, 2)], always=2, drawn=1)
def test_tokens_are_those_of_one_process(size, page, pools):
    """Each model in some ways, others in each ring."""
    modes = [*MODES]
    cases = [(name, modes[(2 * i + 3 * size) % len(modes)]) for i, name in enumerate(MODELS)]
    want = wanted(cases)
    for found in pools(4).run(spread, cases, size, page):
        assert same(found, want), cases


def test_in_8_bits_tokens_are_close_and_chunks_change_nothing(pools):
    cases = [("Gemma2", "greedy")]
    (_, want), _ = wanted(cases)
    for found in pools(2).run(spread, cases, 2, 4, torch.float8_e4m3fn):
        at_once, ahead = found
        assert same([at_once], [ahead])
        assert 1e-3 < relative_error(at_once[1][0], want[0]) < 0.1


def test_layers_with_a_window_keep_no_more():
    register()
    cached = RingHFCache(model_of("Gemma2", "ring").config, page=4, spare=4)
    called("Gemma2", cached=cached)
    sliding, full = (len(pool) * 4 // 2 for pool in cached.keys.keys)
    assert (sliding, full) == (12, 44)
    assert cached.keys.nbytes < 0.7 * 4 * full * 2 * 2 * 8 * 8  # as if all were kept


def other_random_numbers() -> Any:
    cached = RingHFCache(model_of("Llama", "ring").config, group=ring_of(2))
    torch.manual_seed(dist.get_rank() % 2)
    model = model_of("Llama", "ring").eval()
    given = dict(do_sample=True, temperature=9.0, pad_token_id=0, eos_token_id=None)
    return model.generate(prompt(), max_new_tokens=NEW, **given, **{CACHE: cached})


def other_prompts_ahead() -> Any:
    cached, ids = RingHFCache(model_of("Llama", "ring").config, group=ring_of(2)), prompt()
    ids[0, 3] = dist.get_rank() % 2
    return cached.prefill(model_of("Llama", "ring"), ids)


def apart() -> list[str]:
    register()
    return [raised(other_random_numbers), raised(other_prompts_ahead)]


def questions(attention: str) -> list[Generated]:
    """Continue one prompt in two ways, each with a copy of its cache."""
    register()
    model, found = model_of("Gemma2", attention).eval(), []
    cached = None
    if attention == "ring":
        cached = RingHFCache(model.config, page=4, spare=8, group=ring_of(2))
        cached.prefill(model, prompt())
    for word in (9, 10):
        ids = torch.cat((prompt(), torch.full((2, 3), word)), dim=1)
        found.append(generated("Gemma2", "greedy", copy.deepcopy(cached), input_ids=ids))
    assert cached is None or cached.get_seq_length() == LENGTH - 1
    return found


def test_questions_about_one_prompt_go_on_from_copies(pools):
    want = questions("exact")
    for found in pools(4).run(questions, "ring"):
        assert same(found, want)


def test_ranks_that_have_other_tokens_are_told(pools):
    first, second, *_ = pools(4).run(apart)
    assert first == second
    assert "seed all ranks alike" in first[0]
    assert "values of input_ids must be the same" in first[1]


def called(name: str = "Llama", attention: str = "ring", **given: Any) -> Any:
    """Call a model with a cache of ours."""
    register()
    model = model_of(name, attention).eval()
    cached = given.pop("cached", None) or RingHFCache(model_of(name, "ring").config)
    given = {"input_ids": prompt(), CACHE: cached} | given
    with torch.no_grad():
        return model(**given)


def cache_of_another_attention() -> Any:
    return RingHFCache(model_of("Llama", "sdpa").config)


def another_attention_later() -> Any:
    register()
    model = model_of("Llama", "ring").eval()
    cached = RingHFCache(model.config)
    model.set_attn_implementation("sdpa")
    return model(input_ids=prompt(), **{CACHE: cached})


def a_model_of_another_attention() -> Any:
    return called(attention="exact")


def padding_on_the_right() -> Any:
    return called(attention_mask=torch.arange(LENGTH).expand(2, -1) < 30)


def mask_of_new_tokens_only() -> Any:
    cached = RingHFCache(model_of("Llama", "ring").config)
    called(cached=cached)
    return called(cached=cached, attention_mask=torch.ones(2, LENGTH))


def gradients() -> Any:
    register()
    model = model_of("Llama", "ring")
    return model(input_ids=prompt(), **{CACHE: RingHFCache(model.config)})


def dropout() -> Any:
    register()
    model = model_of("Llama", "ring").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad():
        return model(input_ids=prompt(), **{CACHE: RingHFCache(model.config)})


def other_sequences() -> Any:
    register()
    model = model_of("Llama", "ring").eval()
    cached = RingHFCache(model.config)
    cached.prefill(model, prompt())
    return model.generate(prompt(), **{CACHE: cached}, num_beams=2, max_new_tokens=2)


def assisted_after_a_prompt() -> Any:
    register()
    model = model_of("Llama", "ring").eval()
    cached = RingHFCache(model.config)
    cached.prefill(model, prompt(1))
    return model.generate(**MODES["assisted"]("Llama"), **{CACHE: cached}, max_new_tokens=2)


def in_a_batch_s_block() -> Any:
    with shard_batch({"input_ids": prompt()}):
        return called()


def after_a_call_that_failed_half_way() -> Any:
    model = model_of("Llama", "ring").eval()
    cached = RingHFCache(model.config)
    called(cached=cached)
    broken = mock.patch.object(type(model.model.layers[0].mlp), "forward", side_effect=MemoryError)
    with broken, pytest.raises(MemoryError):
        called(cached=cached)
    return called(cached=cached)


def beyond_its_capacity() -> Any:
    cached = RingHFCache(model_of("Llama", "ring").config, capacity=30, page=1)
    return called(cached=cached)


def forgotten_too_far() -> Any:
    cached = RingHFCache(model_of("Mistral", "ring").config, page=1, spare=2)
    called("Mistral", cached=cached)
    cached.crop(-2)
    return cached.crop(-1)


def windows_that_the_model_has_not() -> Any:
    return called(cached=RingHFCache(model_of("Mistral", "ring").config))


def cropped_to_a_length() -> Any:
    cached = RingHFCache(model_of("Llama", "ring").config)
    return cached.crop(5)


TRAPS: dict[Callable[[], Any], str] = {
    cache_of_another_attention: 'attn_implementation="sdpa"',
    another_attention_later: 'attn_implementation="sdpa"',
    a_model_of_another_attention: "keys of layer 0 were left out",
    padding_on_the_right: "with padding on the left only",
    mask_of_new_tokens_only: "attention_mask must be of all 82 tokens",
    gradients: "there are no gradients with a cache",
    dropout: "there is no dropout with a cache",
    other_sequences: "it holds 2 sequences, and the model brings 4",
    assisted_after_a_prompt: "RingHFCache: ",  # of positions, or of the mask
    in_a_batch_s_block: "in the block of a batch",
    after_a_call_that_failed_half_way: "layers have different lengths, [[82, 82], [41, 41]]",
    beyond_its_capacity: "more than the capacity of 30",
    forgotten_too_far: "larger `spare`",
    windows_that_the_model_has_not: "with spare=None all tokens of it are kept",
    cropped_to_a_length: "crop takes minus the tokens",
}


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_what_cannot_be_honoured_raises(trap):
    register()
    assert TRAPS[trap] in raised(trap)


def test_a_cache_can_be_used_again():
    register()
    cached = RingHFCache(model_of("Llama", "ring").config)
    first = generated("Llama", "padded", cached)
    cached.reset()
    assert cached.get_seq_length() == 0
    assert same([generated("Llama", "padded", cached)], [first])


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "page"), [(2, 4), (3, 1), (4, 2)])
def test_every_model_generates_in_every_way(size, page, pools):
    """Each model in each way, in every second ring."""
    cases = [(name, mode) for name in MODELS for mode in MODES][size % 2 :: 2]
    want = wanted(cases)
    for found in pools(4).run(spread, cases, size, page):
        assert same(found, want), cases
