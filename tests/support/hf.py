"""Small models of transformers, and one step of them: spread, or in one process by dense attention.

In float64 throughout: what the models themselves compute in float32 they compute in float64 here.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_sliding_window_causal_mask

from ring_attention_pytorch import balanced, shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.ranks.ring import Ring, as_ring
from tests.support.reference import dense_attention
from tests.support.training import averaged

WORDS, LENGTH = 31, 41
_SMALL = dict(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, vocab_size=WORDS, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None,
)  # fmt: skip
_BOTH = ["sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3": ("Qwen3", {}),
    "Mistral": ("Mistral", dict(sliding_window=6)),
    "Gemma2": ("Gemma2", dict(
        sliding_window=5, layer_types=_BOTH, attn_logit_softcapping=2.0, query_pre_attn_scalar=5,
        final_logit_softcapping=3.0,
    )),
    "Gemma3": ("Gemma3", dict(sliding_window=7, layer_types=_BOTH, query_pre_attn_scalar=6)),
    "GptOss": ("GptOss", dict(
        sliding_window=4, layer_types=_BOTH, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        experts_implementation="eager",
    )),
    "windows by layer": ("Qwen3", dict(
        use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention"] * 2,
    )),
}  # fmt: skip
WINDOWS_BY_LAYER = (4, 11)
KINDS = ["plain", "padded left", "packed"]
_PACKED = (0, 7, 8, 29)  # where documents begin


@contextmanager
def in_double() -> Iterator[None]:
    """Inside it what models ask for in float32 is float64; in backward, too."""
    to = Tensor.to

    def wide(t: Tensor, *args: Any, **given: Any) -> Tensor:
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        given = {name: torch.float64 if a is torch.float32 else a for name, a in given.items()}
        return to(t, *args, **given)

    with mock.patch.multiple(Tensor, to=wide, float=Tensor.double):
        yield


def model_of(name: str, attention: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model with random weights, the same for each attention."""
    family, options = MODELS[name]
    kind = f"{family}Text" if family == "Gemma3" else family
    package = importlib.import_module("transformers")
    sizes = {**_SMALL, **options}
    config = getattr(package, f"{kind}Config")(**sizes, attn_implementation=attention)
    model = getattr(package, f"{family}ForCausalLM")(config)
    filled(model)
    if name == "windows by layer":
        _give_windows(model)
    return model.to(dtype)


def filled(model: nn.Module) -> nn.Module:
    """Draw the model's weights, the same for each attention."""
    draw = torch.Generator().manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3 if p.ndim == 1 else p.shape[-1] ** -0.5, generator=draw)
    return model


def _give_windows(model: nn.Module) -> None:
    """Give each layer a window of its own, and the mask that goes with it."""
    for layer, window in zip(model.model.layers, WINDOWS_BY_LAYER, strict=True):
        config = copy.copy(model.config)
        config.sliding_window = layer.self_attn.sliding_window = window

        def hook(_: nn.Module, args: Any, given: dict[str, Any], config: Any = config) -> Any:
            mask = create_sliding_window_causal_mask(config, args[0], None, None)
            return args, {**given, "attention_mask": mask}

        layer.register_forward_pre_hook(hook, with_kwargs=True)


def batch_of(kind: str, length: int = LENGTH) -> dict[str, Any]:
    """Whole sequences of one kind, two samples."""
    ids = torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids, "labels": ids.clone()}
    at = torch.arange(length)
    if kind == "padded left":
        batch["attention_mask"] = (at >= torch.tensor([[9], [0]])).long()
    elif kind == "packed":
        starts = torch.zeros(length, dtype=torch.long)
        starts[list(_PACKED)] = torch.tensor(_PACKED)
        batch["position_ids"] = (at - starts.cummax(0).values).expand(2, -1)
    return batch


def whole_labels(kind: str, length: int = LENGTH) -> Tensor:
    """Return the label that each token predicts, -100 where there is none."""
    batch = batch_of(kind, length)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    if kind == "packed":
        labels[:, [start - 1 for start in _PACKED[1:]]] = -100
    if kind == "padded left":
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
        labels[0, 8] = batch["labels"][0, 9]  # padding before the first token predicts it
    return labels


def documents_of(kind: str, length: int = LENGTH) -> Tensor:
    at = torch.arange(length)
    borders = torch.tensor(_PACKED[1:] if kind == "packed" else ())
    return torch.bucketize(at, borders, right=True).expand(2, -1)


def dense(name: str, kind: str, length: int = LENGTH) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of one process: dense attention and cross entropy in float64."""
    batch, documents = batch_of(kind, length), documents_of(kind, length)
    mask = batch.get("attention_mask")

    def attend(module, q, k, v, _, *, scaling, sliding_window=None, softcap=None, s_aux=None, **__):
        out, _lse = dense_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), causal=True, documents=documents,
            key_mask=None if mask is None else mask.bool(), scale=scaling, softclamp=softcap,
            window=None if sliding_window is None else sliding_window - 1, sinks=s_aux,
        )  # fmt: skip
        return out, None

    AttentionInterface.register("dense", attend)
    AttentionMaskInterface.register("dense", lambda **_: None)
    model, labels = model_of(name, "dense"), whole_labels(kind, length)
    positions = batch.get("position_ids", torch.arange(length).expand(2, -1))
    with in_double():
        logits = model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@cache
def dense_once(name: str, kind: str) -> tuple[Tensor, list[Tensor]]:
    """Return the dense results, computed once in this process."""
    return dense(name, kind)


def spread(
    name: str,
    kind: str,
    group: Ring | None = None,
    layout: str = "auto",
    checkpointed: bool | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of the same step over the ranks of a group.

    `checkpointed` is None, or whether its checkpoints are reentrant.
    """
    register()
    model = model_of(name, "ring", dtype)
    if checkpointed is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointed})
    if layout == "balanced":
        layout = balanced([*_PACKED, LENGTH], as_ring(group).size)
    batch = shard_batch(batch_of(kind), group=group, layout=layout)
    with in_double(), ring_forward(batch, loss_group=group, **options) as inputs:
        loss = model(**inputs).loss
        loss.backward()
    if dist.is_initialized():
        return loss.detach(), averaged(model, group)
    return loss.detach(), [p.grad for p in model.parameters()]


@cache
def ring_of(size: int) -> Ring:
    """This rank's ring of so many; ranks that are left over have one of their own."""
    everybody = dist.get_world_size()
    starts = range(0, everybody, size)
    groups = [dist.new_group(list(range(at, min(at + size, everybody)))) for at in starts]
    return as_ring(groups[dist.get_rank() // size])


@contextmanager
def losses_as_they_were() -> Iterator[None]:
    """Check that transformers' own losses are back at the end."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    before = dict(LOSS_MAPPING)
    yield
    assert before == LOSS_MAPPING


def raised(act: Callable[[], Any]) -> str:
    """The text of the ValueError that this rank raises; in vain, what came instead."""
    try:
        return f"no error, but {act()}"
    except ValueError as error:
        return str(error)
