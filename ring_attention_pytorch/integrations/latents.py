"""Layers of transformers with latent keys: ranks exchange latents, and caches hold them.

DeepSeek V2 and V3, Kimi and other families expand latents by their method `expand_kv`, and pass the
result to the attention interface. In a block it returns latents as they are, and remembers that;
our attention function gets them, and ranks expand what they receive. A family whose method does
something else, or a projection that is not a plain one, has its expanded keys sent, as any model's.

With a `RingHFCache` layers expand new tokens' latents, too. These are left: the cache has got the
latents, and attention is computed in their space, as by `mla_attn_with_cache`.
"""

import ast
import inspect
import logging
import textwrap
from collections.abc import Sequence
from functools import lru_cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ring_attention_pytorch.attention import attention
from ring_attention_pytorch.integrations.calls import names
from ring_attention_pytorch.latent.calls import Encoded, make_plan
from ring_attention_pytorch.latent.codecs import LatentKeys
from ring_attention_pytorch.plan.checks import autocast
from ring_attention_pytorch.plan.placement import current
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.plan.ring_plan import RingPlan

logger = logging.getLogger("ring_attention_pytorch")

# what `LatentKeys` decodes: the statements of `expand_kv` in all families of transformers 5.24
_KNOWN = """
batch_size, _, seq_length, _ = kv_nope.shape
key_shape = (batch_size, seq_length, -1, self.qk_nope_head_dim + self.v_head_dim)
kv_nope = self.kv_b_proj(kv_nope).view(key_shape).transpose(1, 2)
k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)
key_states = kv_nope.new_empty(
    *kv_nope.shape[:-1], self.qk_nope_head_dim + self.qk_rope_head_dim
)
key_states[..., : self.qk_nope_head_dim].copy_(k_nope)
key_states[..., self.qk_nope_head_dim :].copy_(k_rot)
return key_states, value_states
"""
Pair = tuple[Tensor, Tensor]
given: "WeakKeyDictionary[nn.Module, Pair]" = WeakKeyDictionary()  # by layers that will attend


def prepare(modules: Sequence[nn.Module]) -> None:
    """Make the classes of layers with latent keys return latents in blocks of `ring_forward`."""
    for kind in {type(module) for module in modules}:
        theirs = getattr(kind, "expand_kv", None)
        if theirs is not None and not hasattr(theirs, "of_ring"):
            _replace(kind, theirs)


def _replace(kind: Any, theirs: Any) -> None:
    if not is_known(theirs):
        logger.warning(
            "%s expands latents in a way that is not known: ranks exchange its expanded keys",
            kind.__name__,
        )
        return

    @wraps(theirs)
    def expand_kv(layer: Any, latent: Tensor, k_rope: Tensor, *args: Any, **more: Any) -> Any:
        whole = is_compiling() or args or more or current() is None
        if whole or layer.config._attn_implementation not in names or refusal(layer):
            return theirs(layer, latent, k_rope, *args, **more)
        given[layer] = latent, k_rope
        return latent, k_rope

    expand_kv.of_ring = True  # type: ignore[attr-defined]
    kind.expand_kv = expand_kv


def refusal(layer: Any) -> str | None:
    """Return why only a layer itself can expand its latents; None if others can, too."""
    up = layer.kv_b_proj
    hooked = up._forward_hooks or up._forward_pre_hooks
    plain = type(up) is nn.Linear and up.bias is None and not hooked
    if not plain or type(up.weight) not in (nn.Parameter, Tensor) or not up.weight.numel():
        return f"{type(layer).__name__}: kv_b_proj is no plain projection"
    return None


@lru_cache(maxsize=64)
def is_known(method: Any) -> bool:
    """Return whether a method has the statements of `expand_kv`, whatever their layout."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError, SyntaxError):
        return False
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    known = ast.parse(_KNOWN).body
    return [*map(ast.dump, body)] == [*map(ast.dump, known)]


def taken(layer: nn.Module, key: Tensor, value: Tensor) -> bool:
    """Return whether a layer's key and value, as passed to attention, are latents.

    Raises:
        ValueError: the layer has changed them since it would have expanded them.
    """
    latents = given.pop(layer, None)
    if latents is None:
        return False
    if latents[0] is not key or latents[1] is not value:
        raise ValueError(
            f"{type(layer).__name__} changes keys after it expanded them, which can't be done to "
            "latents; report this model"
        )
    return True


def attend(
    layer: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    plans: PlanCache[RingPlan],
    sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Compute attention of q `[b, n, h, d]` to latents and rotated keys `[b, n, 1, w]`."""
    q, latent, k_rope = map(autocast, qkv)
    weight = layer.kv_b_proj.weight
    up = autocast(weight).view(q.shape[2], -1, latent.shape[-1])
    d_rope = k_rope.shape[-1]
    d_nope = q.shape[-1] - d_rope
    codec = LatentKeys(latent.shape[-1], d_nope, d_rope, up.shape[1] - d_nope)
    learns = up.requires_grad and torch.is_grad_enabled()
    kind = (codec, learns, q.shape, latent.shape, q.dtype, q.device, sinks is None, *[
        options[name] for name in sorted(options) if name != "group"
    ])  # fmt: skip
    call = Encoded(q, (latent, k_rope), codec, {"kv_b_proj": up})
    plan = plans.of(kind, partial(make_plan, call, dict(options, sinks=sinks)))
    plan = plan.for_layer(getattr(layer, "layer_idx", None) or 0)
    out, _ = attention(plan, q, latent, k_rope, sinks, up, codec=codec)
    return out.contiguous()


def check_expanded(
    layer: Any, qkv: tuple[Tensor, Tensor, Tensor], latents: Pair, new: bool
) -> None:
    """Raise ValueError if a layer's keys and values are not known to be expanded from latents.

    Args:
        qkv: as passed to attention, `[b, h, n, d]`.
        latents: as passed to a cache, `[b, 1, n, rank]` and `[b, 1, n, d_rope]`.
        new: compare values, too.
    """
    theirs = type(layer).expand_kv
    plain = getattr(theirs, "__wrapped__", theirs)
    problem = refusal(layer)
    if not is_known(plain):
        problem = f"{type(layer).__name__}: expand_kv does something that is not known"
    elif problem is None and new:
        pairs = zip(plain(layer, *latents), qkv[1:], strict=True)
        if any(a.shape != b.shape or (a - b).norm() > 0.01 * a.norm() for a, b in pairs):
            problem = f"{type(layer).__name__} changes keys after it expanded them"
    if problem is not None:
        raise ValueError(f"{problem}, and the cache would hold latents that are not its keys")


def absorb(layer: Any, q: Tensor, latents: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Return q `[b, h, n, rank + d_rope]`, k and v of one head, in the latents' space."""
    up_k, _ = _ups(layer, q.dtype)
    nope, rotated = q.split((up_k.shape[1], q.shape[-1] - up_k.shape[1]), dim=-1)
    with torch.autocast(q.device.type, enabled=False):
        q = torch.cat((torch.einsum("bhnd,hdr->bhnr", nope, up_k), rotated), dim=-1)
    return q, torch.cat(latents, dim=-1), latents[0]


def expand(layer: Any, out: Tensor) -> Tensor:
    """Return a result `[b, n, h, rank]` in the latents' space as values `[b, n, h, d_v]`."""
    _, up_v = _ups(layer, out.dtype)
    with torch.autocast(out.device.type, enabled=False):
        return torch.einsum("bnhr,hvr->bnhv", out, up_v)


def _ups(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the up-projections of keys and of values, `[h, d, rank]`."""
    sizes, weight = (layer.qk_nope_head_dim, layer.v_head_dim), layer.kv_b_proj.weight.to(dtype)
    up_k, up_v = weight.view(-1, sum(sizes), weight.shape[1]).split(sizes, dim=1)
    return up_k, up_v
