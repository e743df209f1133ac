"""Tiny models with random weights of every text class that the installed transformers has.

A config is its class's own, made small by the names of its fields: a width is 32 wherever it is
called `hidden_size`, a vocabulary has 64 words. Of layers of several kinds one of each kind stays.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WORDS, PAD, FIRST = 64, 1, 8  # words, the one that pads, and the first that is no special one

KINDS = {
    "causal": ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"],
    "masked": ["MODEL_FOR_MASKED_LM_MAPPING_NAMES"],
    "sequence": ["MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"],
    "token": ["MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"],
    "question": ["MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"],
    "choice": ["MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"],
    "base": ["MODEL_MAPPING_NAMES"],
    "multimodal": [
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    ],
    "encoder-decoder": ["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"],
}  # a class that is of several is of the first
# in a table of encoders with decoders, though it reads one sequence
ONE_SEQUENCE = ("AudioFlamingo3ForConditionalGeneration", "MusicFlamingoForConditionalGeneration")


class Family(NamedTuple):
    """One class of models: of which kind, and by which of transformers' types of models."""

    kind: str
    model_type: str
    name: str


def families() -> list[Family]:
    """Return each class once."""
    found: dict[str, Family] = {}
    text = {t for kind in KINDS if kind not in ("base", "multimodal") for t in _classes(kind)}
    for kind in KINDS:
        for model_type, names in _classes(kind).items():
            if kind == "base" and model_type not in text:
                continue
            for name in [names] if isinstance(names, str) else names:
                one = "multimodal" if name in ONE_SEQUENCE else kind
                found.setdefault(name, Family(one, model_type, name))
    return list(found.values())


def family_of(name: str) -> Family:
    """Return the family of a class."""
    return next(family for family in families() if family.name == name)


def _classes(kind: str) -> dict[str, Any]:
    """Return classes by type of model; a config of the same name as a class's comes first."""
    found: dict[str, Any] = {}
    for table in KINDS[kind]:
        found |= getattr(auto, table)
    return dict(sorted(found.items(), key=lambda each: not _is_own(*each)))


def _is_own(model_type: str, names: Any) -> bool:
    """Tell whether a class is named for this type, and not lent to it by another one."""
    name = names if isinstance(names, str) else names[0]
    return name.lower().startswith(model_type.replace("-", "").replace("_", ""))


_WIDTH, _HEADS, _HEAD = 32, 4, 8
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embed_dim", "embedding_size",
            "projection_dim", "out_hidden_size", "output_dim", "text_hidden_size", "hidden_dim",
            "ffn_dim", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff",
            "moe_intermediate_size", "ffn_hidden_size", "n_inner", "mlp_dim", "feed_forward_size",
            "shared_expert_intermediate_size", "hidden_size_per_layer_input", "d_inner",
            "intermediate_size_mlp", "expert_ffn_hidden_size", "projector_hidden_size",
            "shared_intermediate_size", "dense_intermediate_size", "moe_hidden_size",
            "moe_shared_expert_intermediate_size", "input_embedding_size", "encoder_hidden_size",
            "output_embedding_size", "share_expert_dim", "lru_width", "backbone_hidden_size",
            "projector_input_dim", "projector_output_dim", "vision_output_dim", "entity_emb_size",
            "attention_hidden_size", "image_text_hidden_size", "hidden_size_global", "dim_ff",
            "output_proj_dims", "adapter_out_dim", "prediction_head_size", "router_hidden_size",
            "decoder_hidden_size", "d_latents", "embedding_dim", "embedding_rank", "rank",
            "moe_shared_intermediate_size", "dense_ffn_hidden_size", "ffn_size",
        ), _WIDTH,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
            "decoder_layers", "depth", "num_encoder_layers", "num_decoder_layers", "layers",
        ), 2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads", "attention_heads", "num_encoder_attention_heads",
            "num_decoder_attention_heads", "swa_num_attention_heads", "linear_num_value_heads",
            "mamba_n_heads", "mamba_num_heads", "index_n_heads", "linear_num_heads",
            "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
            "num_self_attention_heads", "num_cross_attention_heads", "encoder_num_attention_heads",
            "swa_num_key_value_heads_full",
        ), _HEADS,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads", "swa_num_key_value_heads", "num_experts_per_tok", "moe_topk",
            "moe_k", "n_group", "linear_num_key_heads", "multi_query_groups", "num_kv_heads",
            "num_attention_groups", "n_groups", "mamba_n_groups", "mamba_ngroups",
        ), 2,
    ),
    **dict.fromkeys(
        (
            "head_dim", "swa_head_dim", "d_kv", "global_head_dim", "qk_nope_head_dim", "v_head_dim",
            "kv_lora_rank", "q_lora_rank", "index_head_dim", "linear_key_head_dim", "kv_channels",
            "linear_value_head_dim", "linear_head_dim", "attention_head_size", "d_rel",
            "attention_head_dim", "swa_v_head_dim", "dim_head",
        ), _HEAD,
    ),
    **dict.fromkeys(
        ("vocab_size", "entity_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"),
        WORDS,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length",
            "seq_length", "max_target_positions", "context_length",
            "max_encoder_position_embeddings", "max_decoder_position_embeddings",
        ), 128,
    ),
    **dict.fromkeys(
        ("sliding_window", "local_attention", "sliding_window_size", "attention_window_size",
         "window_size"), 6,
    ),
    **dict.fromkeys(("base_channels", "num_embeddings", "codebook_size", "latent_channels"), 32),
    "qk_rope_head_dim": 4, "rotary_dim": 4, "topk_group": 1, "num_shared_experts": 1,
    "n_shared_experts": 1, "index_topk": 4, "pretraining_tp": 1,
}  # fmt: skip
_TOKENS = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
# what the names of fields do not tell
FAMILIES: dict[str, dict[str, Any]] = {
    "EsmConfig": dict(vocab_size=WORDS, mask_token_id=4),
    "EsmcConfig": dict(num_key_value_heads=4),
    "GPTNeoConfig": dict(attention_types=[[["global", "local"], 1]], window_size=6),
    "Gemma3nTextConfig": dict(
        num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0], laurel_rank=4,
    ),
    "Mistral4Config": dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=64,
        partial_rotary_factor=1 / 3, llama_4_scaling_beta=0.1)),
    "Glm4vMoeTextConfig": dict(rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1], partial_rotary_factor=1.0)),
    "Step3p7TextConfig": dict(sliding_window=6),
    "DeepseekOcr2TextConfig": dict(mlp_layer_types=["dense", "sparse"]),
    "DiffusionGemmaTextConfig": dict(
        num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "VibeVoiceAcousticTokenizerEncoderConfig": dict(num_filters=4, depths=[1] * 7),
    "Mamba2Config": dict(num_heads=8, head_dim=8),
    "ReformerConfig": dict(
        is_decoder=True, axial_pos_embds_dim=(16, 16), axial_pos_shape=(8, 16),
        attn_layers=["local", "lsh"], local_attn_chunk_length=8, lsh_attn_chunk_length=8,
    ),
    "ZayaConfig": dict(num_experts_per_tok=1),
    "CohereCompassTextConfig": dict(
        layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2,
        rope_parameters={
            "full_attention": None,
            "sliding_attention": dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
        },
    ),
    "DbrxConfig": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0)),
    "DbrxFFNConfig": dict(hidden_size=32, ffn_hidden_size=32),
    "Dots3NoteVisionConfig": dict(adapter_in_dim=_WIDTH),
    "Dots3NoteAudioConfig": dict(adapter_input_size=_WIDTH),
    "MusicgenDecoderConfig": dict(num_codebooks=1),
    "MusicgenMelodyDecoderConfig": dict(num_codebooks=1),
    "XmodConfig": dict(default_language="en_XX"),
    "Qwen3VLVisionConfig": dict(deepstack_visual_indexes=[0, 1]),
    "Qwen3VLMoeVisionConfig": dict(deepstack_visual_indexes=[0, 1]),
    "Qwen2_5_VLVisionConfig": dict(window_size=56, fullatt_block_indexes=[1]),
    "LayoutLMv3Config": dict(coordinate_size=4, shape_size=8),
    "T5Config": dict(decoder_start_token_id=2),
    "PaddleOCRTextConfig": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
    ),
    "MimiConfig": dict(upsample_groups=_WIDTH),
    "NeoMMEConfig": dict(head_dim=16),
    "Dots1Config": dict(n_shared_experts=1, num_experts_per_tok=2),
    "NemotronConfig": dict(num_key_value_heads=2),
    "Lfm2MoeConfig": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "ZambaConfig": dict(
        layers_block_type=["linear_attention"] * 2 + ["hybrid", "linear_attention", "hybrid"],
        num_hidden_layers=5, attention_head_dim=16, attention_hidden_size=64,
    ),
    "BltConfig": dict(encoder_hash_byte_group_vocab=64),
    "Molmo2AdapterConfig": dict(vision_feature_layer=[1, 0]),
    "FunAsrNanoAdaptorConfig": dict(intermediate_size=8),
    "ChameleonConfig": dict(vocabulary_map={"<image>": 4}),
    "Emu3Config": dict(vocabulary_map={"<image>": 4}),
    "Granite4VisionConfig": dict(deepstack_layer_map=[(0, 0)]),
    "NemotronH_Omni_Reasoning_V3_Config": dict(vision_config=dict(video_temporal_patch_size=2)),
    "WavTokenizerConfig": dict(codebook_dim=32),
    "HYV4VLTextConfig": dict(qk_rope_head_dim=8),
    "RoCBertConfig": dict(pronunciation_vocab_size=64, shape_vocab_size=64,
                          pronunciation_embed_dim=16, shape_embed_dim=16),
    "MarkupLMConfig": dict(max_xpath_tag_unit_embeddings=32, max_xpath_subs_unit_embeddings=32,
                           tag_pad_id=30, subs_pad_id=30, xpath_unit_hidden_size=4, max_depth=5),
    "Glm5NextTextConfig": dict(num_key_value_heads=4, index_kpool=2),
    "Ernie4_5_VLMoeTextConfig": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])),
    "KyutaiSpeechToTextConfig": dict(num_codebooks=4),
    "Qwen4ExpTextConfig": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
        indexer_compress_ratio=2, ngram_vocab_size_base=32, split_ngram_parts=2,
        make_ngram_vocab_size_divisible_by=8, heads_per_ngram=2,
    ),
}  # fmt: skip


def config_of(cls: type[PreTrainedConfig], **given: Any) -> Any:
    """Return a small config of a class; of its parts, too."""
    if cls.__name__ == "Gemma4AssistantConfig":  # it has no default of its own
        return _assistant(cls, **given)
    default = cls()
    fields = {each.name for each in dataclasses.fields(cls)}
    small: dict[str, Any] = {}
    for name, size in SIZES.items():
        value = _value(default, name) if name in fields else 0
        if (isinstance(value, int) and value > 0) or (value is None and name in _NEEDED):
            small[name] = size
    if "head_dim" in small and "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]  # of rotary embeddings alone
    if "num_key_value_heads" in small and "kv_lora_rank" in small:
        small["num_key_value_heads"] = _HEADS  # keys of all heads are made of one
    small |= dict(_tokens(default, fields))
    small |= _by_layer(default, fields, small)
    small |= _rotary(default, fields)
    for name in cls.sub_configs or {}:
        part = _value(default, name)
        if isinstance(part, PreTrainedConfig):
            small[name] = config_of(type(part))
    for name, value in (FAMILIES.get(cls.__name__, {}) | given).items():
        part = small.get(name)
        is_part = isinstance(part, PreTrainedConfig)
        small[name] = config_of(type(part), **value) if is_part else value
    return cls(**small)


def _assistant(cls: Any, **given: Any) -> Any:
    part = cls.sub_configs_defaults["text_config"]
    text = config_of(
        CONFIG_MAPPING[part.model_type], hidden_size_per_layer_input=0, num_kv_shared_layers=2,
        vocab_size_per_layer_input=0, use_double_wide_mlp=False, enable_moe_block=False,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return cls(text_config=text, backbone_hidden_size=_WIDTH, **given)


# of which some configs have no default
_NEEDED = {"num_experts_per_tok", "head_dim", "n_routed_experts"}


def _value(config: Any, name: str) -> Any:
    """Return a field; the first layer's, where layers have one each."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' own; a field of layers has none of the model
        return getattr(config.per_layer_config[0], name, None)


_DEPTHS = {name: size for name, size in SIZES.items() if "layer" in name or name == "depth"}


def _tokens(default: Any, fields: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield special words, each within the vocabulary."""
    next_ = 4
    for name in sorted(fields):
        value = _value(default, name)
        if name in _TOKENS:
            yield name, _TOKENS[name]
        elif _is_token(name) and isinstance(value, int) and value >= FIRST:
            yield name, min(next_, FIRST - 1)
            next_ += 1


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_index"))


def _by_layer(default: Any, fields: set[str], small: dict[str, Any]) -> dict[str, Any]:
    """Keep one layer of each kind, where a config says something of each layer."""
    depth = next((n for n in _DEPTHS if n in fields and n in small), None)
    if depth is None:
        return {}
    count = getattr(default, depth)
    lists = {
        name: value
        for name in sorted(fields)
        if isinstance(value := _value(default, name), (list, tuple)) and len(value) == count
        and count > 1
    }  # fmt: skip
    kept: dict[Any, int] = {}
    for at, row in enumerate(zip(*(map(repr, value) for value in lists.values()))):
        kept.setdefault(row, at)
    if not lists:
        return {}
    places = list(kept.values())[:4] if len(kept) > 1 else [0, 1]
    return {depth: len(places)} | {
        name: [value[at] for at in places] for name, value in lists.items()
    }


def _rotary(default: Any, fields: set[str]) -> dict[str, Any]:
    """Return rotary settings for heads of 8: three rows of positions have 2, 1 and 1 of 4 pairs."""
    rope = getattr(default, "rope_parameters", None) if "rope_parameters" in fields else None
    if not isinstance(rope, dict):
        return {}

    def changed(each: Any) -> Any:
        if not isinstance(each, dict):
            return each
        each = {name: changed(value) for name, value in each.items()}
        if each.get("mrope_section"):
            each["mrope_section"] = [2, 1, 1]
        if each.get("rope_type") == "longrope":
            return {"rope_type": "default", "rope_theta": each.get("rope_theta", 1e4)}
        return each

    found = changed(dict(rope))
    if "mrope_section" in (getattr(default, "ignore_keys_at_rope_validation", None) or ()):
        found.setdefault("mrope_section", [2, 1, 1])
    return {"rope_parameters": found}


def model_of(family: Family, attention: str, **given: Any) -> nn.Module:
    """Return a model of a class, float64, its weights random and the same for each attention."""
    cls, config_class = getattr(transformers, family.name), CONFIG_MAPPING[family.model_type]
    fields = {each.name for each in dataclasses.fields(config_class)}
    if "is_decoder" in fields:
        given = {"is_decoder": family.kind == "causal", **given}
    config = config_of(config_class, **given)
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        config = config_of(cls.config_class, **given)
    config._attn_implementation = attention
    for part in _parts(config):
        part._experts_implementation = "eager"
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=attention).eval()
    draw = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.is_floating_point():
            std = 0.3 if p.ndim < 2 else max(1, p.shape[-1]) ** -0.5
            nn.init.normal_(p, std=std, generator=draw)
    return model.to(torch.float64)


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs or {}:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from _parts(part)
