"""Check a model's output: its tensors must be of this rank's tokens, its losses computed by us.

A model that pools, or computes a loss by itself, uses one rank's tokens only, and its output does
not show it. The outermost module that runs in a block is therefore watched (`watched.Outermost`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attention_pytorch.training.batches import ShardedBatch

_widths: "WeakKeyDictionary[nn.Module, frozenset[int]]" = WeakKeyDictionary()


def name_of(module: nn.Module) -> str:
    """Return the class name of the transformers model in a module, or of the module itself."""
    found = model_in(module)
    return type(module if found is None else found).__name__


def model_in(module: nn.Module) -> PreTrainedModel | None:
    """Return the transformers model in a module, such as DDP; None if there is none."""
    return next((m for m in module.modules() if isinstance(m, PreTrainedModel)), None)


def check_output(module: nn.Module, given: Any, batch: ShardedBatch, losses: int) -> None:
    """Raise ValueError if a tensor of a module's output is not of this rank's tokens.

    Args:
        given: the output: tensors, also in mappings, sequences, dataclasses.
        losses: the number of losses that the call computed over all ranks.
    """
    found = list(tensors_in("", given))
    scalars = [name for name, t in found if t.ndim == 0 or name.rpartition(".")[2] == "loss"]
    if len(scalars) > losses:
        raise ValueError(
            f"{name_of(module)} has computed {scalars[-1] or 'a loss'} by itself, of this rank's "
            "tokens alone; leave labels out, with ring_forward(batch, labels=False), and compute "
            "ring_cross_entropy(logits, batch.labels)"
        )
    for name, t in found:
        if name not in scalars:
            _check_tokens(module, name, t, batch)


def check_kept(module: nn.Module) -> None:
    """Raise ValueError: a model was given `logits_to_keep`, which would choose of each shard."""
    raise ValueError(
        f"{name_of(module)} was given logits_to_keep, which would count each rank's tokens, not "
        "the sequence's; leave it out, and compute the loss of hidden states by chunks: "
        "ring_cross_entropy(hidden, batch.labels, **head_of(model))"
    )


def _check_tokens(module: nn.Module, name: str, t: Tensor, batch: ShardedBatch) -> None:
    shape, (b, n) = tuple(t.shape), batch["position_ids"].shape[-2:]
    of_tokens = shape[:2] == (b, n)
    if of_tokens and (t.ndim > 2 or not _widths_of(module).intersection(batch.counts)):
        return
    if "router" in name and shape[0] == b * n and not of_tokens:
        return
    told = f"{name_of(module)} returns {name or 'a tensor'} {[*shape]}"
    if of_tokens:
        raise ValueError(
            f"{told}, and a parameter has a rank's number of tokens as its size, too: nobody can "
            "tell of which these are; return [batch, tokens, 1], or take another number of tokens"
        )
    raise ValueError(
        f"{told}, which should be [{b}, {n}, ...] of this rank's tokens: "
        "what is pooled is pooled of these alone; return hidden states or logits of all tokens "
        "(add_pooling_layer=False, no logits_to_keep), and pool what batch.unshard makes of them"
    )


def tensors_in(name: str, given: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output with their names."""
    if isinstance(given, Tensor):
        yield name, given
    elif isinstance(given, Mapping):
        for key, each in given.items():
            yield from tensors_in(f"{name}.{key}" if name else str(key), each)
    elif isinstance(given, list | tuple):
        for i, each in enumerate(given):
            yield from tensors_in(f"{name}[{i}]", each)
    elif is_dataclass(given):
        for field in fields(given):
            at = f"{name}.{field.name}" if name else field.name
            yield from tensors_in(at, getattr(given, field.name))


def _widths_of(module: nn.Module) -> frozenset[int]:
    """Return all sizes of a module's parameters; the width of a pooled output is one of them."""
    found = _widths.get(module)
    if found is None:
        found = frozenset(n for p in module.parameters() for n in p.shape)
        _widths[module] = found
    return found
