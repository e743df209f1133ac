"""Right calls of what there is for Hugging Face's packages."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn

import ring_attention_pytorch as R
from ring_attention_pytorch.integrations.heads import head_of
from ring_attention_pytorch.integrations.multimodal import merged, text_states
from ring_attention_pytorch.integrations.transformers import RingHFCache, register, ring_forward
from tests.support.surface import Call

IDS = torch.tensor([[4, 5, 6, 7]])
HEADS = dict(num_attention_heads=2, num_hidden_layers=1)
SIZES = dict(hidden_size=8, intermediate_size=8, **HEADS)
TEXT = dict(vocab_size=9, num_key_value_heads=1, pad_token_id=0, **SIZES)


@cache
def llama() -> nn.Module:
    register()
    config = transformers.LlamaConfig(**TEXT, attn_implementation="ring")
    return transformers.LlamaForCausalLM(config)


@cache
def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=4, patch_size=2)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=vision
    )
    return transformers.LlavaForConditionalGeneration(config)


def _prefill() -> Call:
    made = RingHFCache(llama().config)
    return Call(made.prefill, dict(model=llama(), input_ids=IDS))


def _merged() -> dict[str, Any]:
    return merged(llava(), {"input_ids": IDS})


CALLS: dict[str, Callable[[], Call]] = {
    "register": lambda: Call(register, {}),
    "ring_forward": lambda: Call(ring_forward, dict(batch=R.shard_batch({"input_ids": IDS}))),
    "RingHFCache": lambda: Call(RingHFCache, dict(config=llama().config)),
    "RingHFCache.prefill": _prefill,
    "head_of": lambda: Call(head_of, dict(model=llama())),
    "merged": lambda: Call(merged, dict(model=llava(), batch={"input_ids": IDS})),
    "text_states": lambda: Call(text_states, dict(model=llava(), inputs=_merged())),
}
