"""Read a transformers model's output head, so that a loss can compute logits by chunks.

    logits = softcap * tanh((hidden @ weight.T + bias) * scale / softcap)

The config lists possible softcaps and scales. Which ones apply is measured once per model: its own
forward runs on random hidden states in place of its layers' output.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.integrations.outputs import model_in, name_of
from ring_attention_pytorch.training.loss_inputs import heads_by

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


class _Score(NamedTuple):
    """Softcap and scale that a head applies to its linear layer's output."""

    softcap: float | None
    scale: float | None


_scores: "WeakKeyDictionary[nn.Module, tuple[Any, _Score]]" = WeakKeyDictionary()
models: "WeakSet[PreTrainedModel]" = WeakSet()  # those made with ring attention
_others: "WeakSet[PreTrainedModel]" = WeakSet()  # those that make logits in another way


@checked
def head_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's output head, as keyword arguments of `ring_cross_entropy`.

        loss = ring_cross_entropy(hidden, batch.labels, **head_of(model))

    The first call for a model measures its head with random hidden states.

    Args:
        model: a transformers model with a language model's head, also in DDP or with adapters.

    Returns:
        head `[classes, d]`, and softcap, scale and bias `[classes]` if the model has them.

    Raises:
        ValueError: the model has no such head, or computes logits in another way.

    >>> from transformers import CohereConfig, CohereForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    >>> heads = dict(num_attention_heads=2, num_key_value_heads=1, logit_scale=0.25)
    >>> found = head_of(CohereForCausalLM(CohereConfig(**sizes, **heads, pad_token_id=0)))
    >>> found["head"].shape, found["scale"]
    (torch.Size([9, 8]), 0.25)
    """
    inner = _unwrapped(model)
    head = _linear(inner)
    named = _named(inner.config)
    known, score = _scores.get(inner, (None, None))
    if known != named or score is None:
        score = _measured(inner, head, named)
        _scores[inner] = named, score
    found = {"head": head.weight, "softcap": score.softcap, "scale": score.scale, "bias": head.bias}
    return {name: value for name, value in found.items() if value is not None}


def _terms_of(weight: Tensor) -> dict[str, Any]:
    """Return the terms of the model with ring attention whose head has this weight, or none.

    None, too, if it makes logits in another way: x may then be the input of its last layer.
    """
    for model in models:
        if model in _others or _weight_of(model) is not weight:
            continue
        try:
            return head_of(model)
        except ValueError:
            _others.add(model)
    return {}


def _weight_of(model: PreTrainedModel) -> Any:
    """Return the weight of a model's head; None if there is none."""
    try:
        return getattr(model.get_output_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):  # it could not be made, and is not gone yet
        return None


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a module, such as DDP."""
    found = model_in(model)
    if found is None or not _bodies(found):
        got = name_of(model)
        raise ValueError(f"head_of: needs a model of transformers with a head, got {got}")
    return found


def _bodies(model: PreTrainedModel) -> list[nn.Module]:
    """List the transformers models inside a model, which compute its head's hidden states."""
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]


def _linear(model: PreTrainedModel) -> Any:
    """Return the linear layer that computes logits; raise ValueError if there are several."""
    head: Any = model.get_output_embeddings()
    name, weight = type(model).__name__, getattr(head, "weight", None)
    if isinstance(weight, DTensor):
        raise ValueError(
            f"head_of: the head's weight is a DTensor, as FSDP2 shards it; call {name} with "
            "labels, in whose forward it is whole"
        )
    if head is None or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"head_of: {name} has no layer that makes logits of hidden states")
    own = {id(p) for p in (weight, getattr(head, "bias", None)) if p is not None}
    of_layers = {id(p) for body in _bodies(model) for p in body.parameters()}
    more = [n for n, p in model.named_parameters() if id(p) not in own | of_layers]
    more += [n for n, p in head.named_parameters() if id(p) not in own]  # adapters
    if more:
        raise ValueError(
            f"head_of: {name} has more than one layer between hidden states and logits: "
            f"{', '.join(more[:3])}; give logits to ring_cross_entropy, without a head"
        )
    return head


def _named(config: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the softcaps and the scales in a config."""
    config = config.get_text_config()

    def values(names: tuple[str, ...]) -> Iterator[float]:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                yield float(value)

    scales = [*values(_SCALES)]
    if base := getattr(config, "dim_model_base", None):
        scales.append(base / config.hidden_size)
    return tuple(values(_SOFTCAPS)), tuple(scales)


def _measured(
    model: PreTrainedModel, head: Any, named: tuple[tuple[float, ...], tuple[float, ...]]
) -> _Score:
    """Return the softcap and scale that reproduce the model's own logits."""
    softcaps, scales = named
    several = (1.0, *scales, *(1 / scale for scale in scales))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4, head.weight.shape[1], generator=draw)
    hidden = hidden.to(head.weight.device, head.weight.dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        size = F.linear(hidden, head.weight).double().std() * min(several)
        hidden = hidden * (3 * max(softcaps, default=1.0) / size)  # so that a softcap shows
        plain = F.linear(hidden, head.weight, head.bias).double()
        got = _logits(model, hidden)
        tried = [
            _Score(softcap, None if scale == 1.0 else scale)
            for softcap, scale in product((None, *softcaps), several)
        ]
        best = min(tried, key=lambda score: _error(got, _made(plain, score)))
        if _error(got, _made(plain, best)) < max(1e-5, 8 * torch.finfo(hidden.dtype).eps):
            return best
    raise ValueError(
        f"head_of: {type(model).__name__} makes logits in another way than by a weight, a bias, a "
        "scale and a softcap; give logits to ring_cross_entropy, without a head"
    )


def _made(plain: Tensor, score: _Score) -> Tensor:
    logits = plain if score.scale is None else plain * score.scale
    return logits if score.softcap is None else score.softcap * (logits / score.softcap).tanh()


def _error(got: Tensor | None, want: Tensor) -> float:
    if got is None or got.shape != want.shape:
        return torch.inf
    return float((got.double() - want).norm() / want.norm())


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor | None:
    """Return the logits of the model's own forward for hidden states; None if it fails."""
    words = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    with ExitStack() as giving:
        for body in _bodies(model):
            giving.enter_context(_giving(body, hidden))
        try:
            return model.forward(input_ids=words).logits
        except Exception:  # a forward can need more of its layers than hidden states
            return None


class _Output(BaseModelOutputWithPast):
    """Hidden states as a model's output; every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _giving(layers: nn.Module, hidden: Tensor) -> Iterator[None]:
    """Make layers return these hidden states inside the block."""

    def forward(*_: Any, **__: Any) -> Mapping[str, Any]:
        return _Output(last_hidden_state=hidden)

    before = vars(layers).get("forward")
    layers.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del layers.forward
        else:
            layers.forward = before  # type: ignore[method-assign]


heads_by(_terms_of)
