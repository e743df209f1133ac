"""Rotary position embedding (Su et al. 2021, "RoFormer") by global positions."""

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.geometry.layouts import Layout, positions, resolve_layout
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring

THETA = 10000  # default of rotary embedding


class Angles:
    """Angles that a model gives its layers, as no tensor: FSDP in mixed precision casts tensors.

    In 16 bits the angles of far tokens would collide.
    """

    def __init__(self, values: Tensor) -> None:
        self.values: Tensor = values


class RingRotaryEmbedding(nn.Module):
    """A module that computes the rotary angles of the tokens that a rank holds.

    Args:
        dim: head size, even.
        ring: a length passed to `forward` is this rank's share of a sequence over the group.
        striped: the same as layout="striped".
        buckets: must be 1; stripes here are single tokens.
        theta: upper bound of the wavelengths, divided by 2 pi.
        layout: which tokens a rank holds; None is "striped" if striped=True, or "contiguous".
        group: the ring; None is the default group.

    Raises:
        ValueError: dim is odd, theta is not positive, buckets is not 1, or the layout is unknown
            or contradicts striped or ring.

    >>> RingRotaryEmbedding(4)(3)[2].tolist()  # position 2: angles 2 and 2 / 100, twice
    [2.0, 0.019999999552965164, 2.0, 0.019999999552965164]
    """

    inv_freq: Tensor

    @checked
    def __init__(
        self,
        dim: int,
        ring: bool = False,
        striped: bool = False,
        buckets: int = 1,
        theta: int | float = THETA,
        *,
        layout: Layout | None = None,
        group: Group = None,
    ):
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"rotary embedding needs an even dim, got {dim}")
        if not 0 < theta < math.inf:
            raise ValueError(f"theta must be positive and finite, got {theta}")
        if buckets != 1:
            raise ValueError(
                f"buckets must be 1, got {buckets}: striped layouts here deal single tokens, "
                "whatever the tile length"
            )
        self.ring: bool = ring
        self.layout: Layout | None = resolve_layout(layout, striped)
        self.group: Group = group
        if self.layout is not None and not ring:
            raise ValueError(f"layout={self.layout!r} needs ring=True")
        self.theta: int | float = theta
        # a buffer because checkpoints contain it; `_apply` keeps it in float32
        self.register_buffer("inv_freq", _frequencies(dim, theta))
        self.register_load_state_dict_pre_hook(_load_exact)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:
        """Move with the module, but stay float32: in bfloat16 positions would collide."""
        exact = self.inv_freq
        super()._apply(fn, *args, **kwargs)
        if self.inv_freq.dtype != exact.dtype:
            self.inv_freq = exact.to(device=self.inv_freq.device)
        return self

    @checked
    def forward(self, seq: int | Tensor) -> Tensor:
        """Return the angles, float32 `[n, dim]`, for positions `[n]` or for this rank's n tokens.

        Positions `[b, n]`, for samples with different documents, give `[b, n, dim]`. Pass an int n
        only if every rank of the ring holds n tokens, and positions otherwise.
        """
        if self.inv_freq.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"inv_freq must stay in float32, got {self.inv_freq.dtype}: far tokens would get "
                "wrong angles; in FSDP's or DDP's MixedPrecision leave buffer_dtype out"
            )
        if isinstance(seq, int):
            ring = as_ring(self.group) if self.ring else Ring.alone()
            layout = self.layout or "contiguous"
            total = seq * ring.size
            seq = positions(layout, rank=ring.rank, ring_size=ring.size, length=total)
        seq = seq.to(device=self.inv_freq.device, dtype=torch.float32)
        angles = seq.unsqueeze(-1) * self.inv_freq.float()
        return torch.cat((angles, angles), dim=-1)


def _frequencies(dim: int, theta: float) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2).float() / dim)


def _load_exact(
    module: RingRotaryEmbedding, state: dict[str, Any], prefix: str, *more: Any
) -> None:
    """Load exact frequencies in place of the same ones that were saved in 16 bits."""
    saved = state.get(key := f"{prefix}inv_freq")
    if saved is None or saved.ndim != 1 or saved.dtype not in (torch.bfloat16, torch.float16):
        return
    exact, unit = _frequencies(2 * len(saved), module.theta), torch.finfo(saved.dtype)
    if saved.is_meta or saved.float().cpu().allclose(exact, unit.eps, unit.tiny * unit.eps):
        state[key] = exact.to(saved.device)
        return
    more[-1].append(
        f"{key} was saved in {saved.dtype}, of another theta than {module.theta}: far tokens would "
        "get wrong angles; make the module with that theta, or save it in float32"
    )


@checked
def apply_rotary_pos_emb(pos: Tensor, t: Tensor, head_dim_first: bool = False) -> Tensor:
    """Rotate each pair (t[i], t[i + d / 2]) of a head by its angle.

    Args:
        pos: angles `[n, d]`, or `[b, n, d]`.
        t: queries or keys `[b, n, h, d]`, or `[b, h, n, d]` with head_dim_first.

    Returns:
        A tensor of t's shape and dtype; computed in float32 at least.

    Raises:
        ValueError: the angles are of another shape, or d is odd.

    >>> apply_rotary_pos_emb(torch.zeros(3, 8), torch.ones(1, 3, 2, 8)).dtype
    torch.float32
    """
    d = t.shape[-1]
    n = t.shape[-2 if head_dim_first else -3]
    shape = list(pos.shape)
    if d % 2 or shape not in ([n, d], [t.shape[0], n, d]):
        raise ValueError(f"angles must be [{n}, {d}] and that last even, got {shape}")
    pos = pos.unsqueeze(-3 if head_dim_first else -2)
    dtype = torch.promote_types(t.dtype, torch.float32)
    wide = t.to(dtype)
    first_half, second_half = wide.chunk(2, dim=-1)
    turned = torch.cat((-second_half, first_half), dim=-1)
    rotated = wide * pos.cos() + turned * pos.sin()
    return rotated.to(t.dtype)
