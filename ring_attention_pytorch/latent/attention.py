"""`mla_ring_attn` and `tied_ring_attn`: ring attention whose keys travel in fewer numbers.

mla_ring_attn   ranks exchange latents, and expand them by blocks    DeepSeek V2 and V3, Kimi K2
tied_ring_attn  ranks exchange keys, which are the values, too       half the bytes
"""

from typing import Any, Literal, Unpack, overload

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.latent.calls import (
    CodedOptions,
    CodedPlanOptions,
    Encoded,
    attend,
    encoded,
    make_plan,
    report,
)
from ring_attention_pytorch.latent.codecs import LatentKeys, TiedKeys
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Group


@overload
def mla_ring_attn(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, w_up: Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[CodedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def mla_ring_attn(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, w_up: Tensor, *,
    return_lse: Literal[True], **options: Unpack[CodedOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@typed(report, apart=True)
def mla_ring_attn(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_up: Tensor,
    *,
    group: Group = None,
    plan: RingPlan | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute multi-head latent attention over a ring; ranks exchange latents.

    A key and a value of all heads are functions of one latent and one rotated key, which are sent
    in their place: 576 numbers a token for DeepSeek V3, instead of 40,960. Each rank expands the
    latents of a block before it computes on it, and once more in backward. Where all heads together
    would take more than 1 GiB, that is done by groups of heads.

    Args:
        q_nope: `[b, n, h, d_nope]`, this rank's queries, the part without rotation.
        q_rope: `[b, n, h, d_rope]`, the rotated part of the queries.
        latent: `[b, m, rank]`, this rank's latents, after their norm.
        k_rope: `[b, m, d_rope]`, this rank's rotated keys, which all heads share. Rotate them at
            their positions in the whole sequence.
        w_up: `[h, d_nope + d_v, rank]`: of each head the rows that make the key's part without
            rotation, then those of the value. In DeepSeek's models it is
            `kv_b_proj.weight.view(h, -1, rank)`.
        group: as for `ring_attn`.
        plan: from `mla_plan`; it replaces all options except return_lse and sinks.
        options: as for `ring_attn`, but no key_bias and no shared_keys; `scale` is by default
            `(d_nope + d_rope) ** -0.5`.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        `[b, n, h, d_v]`; with return_lse also lse `[b, h, n]`. Gradients of all five are exact. The
        one of `w_up` is of this rank's queries: summed over ranks, as data parallelism does, it is
        the whole sequence's.

    Raises:
        ValueError: as `ring_attn`; on all ranks, before any tensor is sent.
        NotImplementedError: forward mode over forward mode.

    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, section 2.1

    >>> q_nope, q_rope = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 4, 2)
    >>> latent, k_rope, w_up = torch.randn(1, 6, 5), torch.randn(1, 6, 2), torch.randn(4, 8 + 3, 5)
    >>> mla_ring_attn(q_nope, q_rope, latent, k_rope, w_up, causal=True).shape
    torch.Size([1, 6, 4, 3])
    """
    options |= dict(group=group, plan=plan, return_lse=return_lse)
    tensors = q_nope, q_rope, latent, k_rope, w_up
    return attend("mla_ring_attn", _latents, tensors, options)


@typed(report)
def mla_plan(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_up: Tensor,
    **options: Unpack[CodedPlanOptions],
) -> RingPlan:
    """Make the plan of `mla_ring_attn` for tensors like these; all ranks call this together.

    All layers of a batch can share it.

    Args:
        q_nope, q_rope, latent, k_rope, w_up, options: as for `mla_ring_attn`; values don't matter.

    Raises:
        ValueError: as `mla_ring_attn`.

    >>> q_nope, q_rope = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 4, 2)
    >>> latent, k_rope, w_up = torch.randn(1, 6, 5), torch.randn(1, 6, 2), torch.randn(4, 11, 5)
    >>> mla_plan(q_nope, q_rope, latent, k_rope, w_up, causal=True).codec
    LatentKeys(rank=5, d_nope=8, d_rope=2, d_v=3)
    """
    tensors = q_nope, q_rope, latent, k_rope, w_up
    return make_plan(encoded("mla_plan", _latents, tensors, dict(options)), dict(options))


@overload
def tied_ring_attn(
    q: Tensor, kv: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[CodedOptions]
) -> Tensor: ...
@overload
def tied_ring_attn(
    q: Tensor, kv: Tensor, *, return_lse: Literal[True], **options: Unpack[CodedOptions]
) -> tuple[Tensor, Tensor]: ...


@typed(report, apart=True)
def tied_ring_attn(
    q: Tensor,
    kv: Tensor,
    *,
    group: Group = None,
    plan: RingPlan | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `ring_attn(q, kv, kv)`, and send half as much: keys are the values, too.

    Args:
        q: `[b, n, h, d]`, this rank's queries.
        kv: `[b, m, h_kv, d]`, this rank's keys; d at least 2.
        group: as for `ring_attn`.
        plan: from `tied_plan`; it replaces all options except return_lse and sinks.
        options: as for `ring_attn`, but no key_bias and no shared_keys.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        As `ring_attn`.

    Raises:
        ValueError: as `ring_attn`; on all ranks, before any tensor is sent.
        NotImplementedError: forward mode over forward mode.

    >>> q, kv = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 1, 8)
    >>> tied_ring_attn(q, kv, causal=True).shape
    torch.Size([1, 6, 4, 8])
    """
    options |= dict(group=group, plan=plan, return_lse=return_lse)
    return attend("tied_ring_attn", _tied, (q, kv), options)


@typed(report)
def tied_plan(q: Tensor, kv: Tensor, **options: Unpack[CodedPlanOptions]) -> RingPlan:
    """Make the plan of `tied_ring_attn` for tensors like these; all ranks call this together.

    Args:
        q, kv, options: as for `tied_ring_attn`; values don't matter.

    Raises:
        ValueError: as `tied_ring_attn`.

    >>> tied_plan(torch.randn(1, 6, 4, 8), torch.randn(1, 6, 1, 8), causal=True).codec
    TiedKeys(d_v=8)
    """
    return make_plan(encoded("tied_plan", _tied, (q, kv), dict(options)), dict(options))


def check_latents(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, w_up: Tensor
) -> LatentKeys:
    """Return the codec of these tensors; raise ValueError if they don't fit one another."""
    named = dict(q_nope=q_nope, q_rope=q_rope, latent=latent, k_rope=k_rope, w_up=w_up)
    got = ", ".join(f"{name} {list(t.shape)}" for name, t in named.items())
    dims = tuple(t.ndim for t in named.values())
    d_nope = d_rope = rank = rows = 0
    fits = dims == (4, 4, 3, 3, 3) and q_nope.shape[:3] == q_rope.shape[:3]
    if fits:
        (h, rows, rank), d_nope, d_rope = w_up.shape, q_nope.shape[-1], q_rope.shape[-1]
        fits = latent.shape[:2] == k_rope.shape[:2] and latent.shape[0] == q_nope.shape[0]
        fits &= (latent.shape[2], k_rope.shape[2], h) == (rank, d_rope, q_nope.shape[2])
        fits &= min(d_nope, d_rope, rank) > 0 and rows > d_nope
    if not fits:
        raise ValueError(
            "q_nope [b, n, h, d_nope], q_rope [b, n, h, d_rope], latent [b, m, rank], k_rope "
            f"[b, m, d_rope] and w_up [h, d_nope + d_v, rank] must agree, got {got}"
        )
    kinds = {(t.dtype, t.device) for t in named.values()}
    if len(kinds) > 1:
        got_kinds = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"tensors must have one dtype and one device, got {got_kinds}")
    return LatentKeys(rank, d_nope, d_rope, rows - d_nope)


def _latents(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, w_up: Tensor
) -> Encoded:
    """Encode for `mla_ring_attn`; raise ValueError if shapes, dtypes or devices don't fit."""
    codec = check_latents(q_nope, q_rope, latent, k_rope, w_up)
    keys = rearrange(latent, "b m r -> b m 1 r"), rearrange(k_rope, "b m d -> b m 1 d")
    return Encoded(torch.cat((q_nope, q_rope), dim=-1), keys, codec, {"w_up": w_up})


def _tied(q: Tensor, kv: Tensor) -> Encoded:
    """Encode for `tied_ring_attn`; raise ValueError if shapes, dtypes or devices don't fit."""
    if kv.ndim != 4 or kv.shape[-1] < 2:
        raise ValueError(f"kv must be [b, m, h_kv, d] with d of at least 2, got {list(kv.shape)}")
    codec = TiedKeys(kv.shape[-1])
    return Encoded(q, codec.encode(kv), codec, {})
