"""Codecs of keys and values that travel in fewer bytes: latents, and keys that are values.

    LatentKeys   [latent, rotated key]   DeepSeek V2 and V3, Kimi K2: 576 numbers a token, any heads
    TiedKeys     [key]                   keys that are the values, too: half as many

DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attention_pytorch.runtime.codec import Pair, Tensors


@dataclass(frozen=True)
class LatentKeys:
    """Keys and values of all heads as one latent and one rotated key: `[b, m, 1, w]` each.

    Its parameter is the up-projection `[h, d_nope + d_v, rank]`: of each head first the rows of the
    key's part without rotation, then those of the value.

        k = [up_k c ; p]        dc = sum over heads of up_k^T dk + up_v^T dv     d(up_k) = dk c^T
        v =  up_v c             dp = sum over heads of dk's last columns         d(up_v) = dv c^T
    """

    rank: int  # of the latent
    d_nope: int
    d_rope: int
    d_v: int

    by_heads = True

    @property
    def widths(self) -> tuple[int, int]:
        return self.rank, self.d_rope

    def check(self, q: Tensor, encoded: Pair) -> None:
        d, g = self.d_nope + self.d_rope, encoded[0].shape[2]
        if q.shape[-1] != d or g != 1:
            raise ValueError(
                f"latents need q of head size {d} and one head of keys, got {q.shape[-1]} and {g}"
            )

    def decode(self, encoded: Pair, params: Tensors) -> Pair:
        (latent, rotated), (up,) = encoded, params
        kv = self._expanded(latent, up)
        b, m, h, _ = kv.shape
        k = kv.new_empty((b, m, h, self.d_nope + self.d_rope))
        k[..., : self.d_nope] = kv[..., : self.d_nope]
        k[..., self.d_nope :] = rotated
        return k, kv[..., self.d_nope :]

    def pull_back(self, encoded: Pair, params: Tensors, grads: Pair) -> tuple[Pair, Tensors]:
        (latent, _), (up,), (dk, dv) = encoded, params, grads
        b, m, *_ = dk.shape
        d_kv = torch.cat((dk[..., : self.d_nope], dv), dim=-1).view(b * m, up.shape[:2].numel())
        latent = latent.reshape(b * m, self.rank).to(d_kv.dtype)
        d_latent = (d_kv @ up.reshape(-1, self.rank).to(d_kv.dtype)).view(b, m, 1, self.rank)
        d_up = (d_kv.T @ latent).view(up.shape)
        d_rotated = dk[..., self.d_nope :].sum(dim=2, keepdim=True)
        return (d_latent, d_rotated), (d_up,)

    def _expanded(self, latent: Tensor, up: Tensor) -> Tensor:
        """Return `[b, m, h, d_nope + d_v]`."""
        b, m, *_ = latent.shape
        flat = latent.reshape(b * m, self.rank) @ up.reshape(-1, self.rank).T
        return flat.view(b, m, *up.shape[:2])


@dataclass(frozen=True)
class TiedKeys:
    """Keys that are the values, too: sent once, in two halves `[b, m, h_kv, d_v / 2]`."""

    d_v: int

    by_heads = False

    @property
    def widths(self) -> tuple[int, int]:
        return self.d_v // 2, self.d_v - self.d_v // 2

    def check(self, q: Tensor, encoded: Pair) -> None:
        h, g = q.shape[2], encoded[0].shape[2]
        if q.shape[-1] != self.d_v or not g or h % g:
            raise ValueError(
                f"q must have the head size {self.d_v} of keys that are values, and a multiple of "
                f"their {g} heads, got head size {q.shape[-1]} and {h} heads"
            )

    def decode(self, encoded: Pair, params: Tensors) -> Pair:
        both = torch.cat(encoded, dim=-1)
        return both, both

    def pull_back(self, encoded: Pair, params: Tensors, grads: Pair) -> tuple[Pair, Tensors]:
        first, second = (grads[0] + grads[1]).split(self.widths, dim=-1)
        return (first, second), ()

    def encode(self, both: Tensor) -> Pair:
        """Return the two halves of keys `[b, m, h_kv, d_v]`."""
        first, second = both.split(self.widths, dim=-1)
        return first, second
