"""Tokens that all ranks hold, for a layer whose other tokens are sharded: registers, text, memory.

Their keys and values are the call's `shared_keys`, whose gradients are sums over ranks already. The
gradients of parameters and tokens will be summed over ranks, too. So each rank divides the former
by the number of ranks before it passes them on.
"""

from typing import Any

from torch import Tensor

from ring_attention_pytorch.nn.projections import HeadProjections
from ring_attention_pytorch.nn.sharding import check_mask
from ring_attention_pytorch.runtime.torch_func import needs_derivatives


def shared_options(
    layer: HeadProjections, tokens: Tensor | None, mask: Tensor | None, ranks: int
) -> dict[str, Any]:
    """Return the options of `ring_attn` for such tokens `[b, s, dim]`, over so many ranks."""
    if tokens is None:
        return {}
    _, k, v = layer.project(tokens[:, :0], tokens)  # of no queries
    if ranks > 1 and needs_derivatives((k, v)):
        for t in (k, v):
            t.register_hook(lambda grad: grad / ranks)
    return {"shared_keys": (k, v), "shared_key_mask": mask}


def check_shared_tokens(layer: Any, x: Tensor, tokens: Tensor | None, mask: Tensor | None) -> None:
    """Raise ValueError unless they fit the tokens x `[b, n, dim]`, and the layer takes them."""
    if tokens is None:
        if mask is not None:
            raise ValueError("shared_mask needs shared_tokens; leave it out")
        return
    if layer.spread.auto or layer.force_regular_attn or layer.summaries is not None:
        raise ValueError(
            "shared_tokens are for tokens that are sharded by hand, and for the ring's kernels: "
            "make the module without auto_shard_seq, force_regular_attn and attn_summaries"
        )
    shape, (b, _, dim) = [*tokens.shape], x.shape
    if tokens.ndim != 3 or [shape[0], shape[2]] != [b, dim] or tokens.dtype != x.dtype:
        raise ValueError(
            f"shared_tokens must be [{b}, tokens, {dim}] in {x.dtype} as x, got {shape} in "
            f"{tokens.dtype}"
        )
    if tokens.device != x.device:
        raise ValueError(f"shared_tokens must be on {x.device} as x is, got {tokens.device}")
    check_mask("shared_mask", mask, tokens)
