"""Decoding against keys that are spread over ranks, beside softmax attention to all of them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch import tree_attn_decode
from tests.support.reference import dense_attention


@dataclass(frozen=True)
class Decoding:
    """`lengths` are the keys on each rank, None for a rank that has none to give."""

    lengths: tuple[int | None, ...]
    whole: bool = False
    masked: str = "no"  # or "some" or "all"
    heads: int = 4
    key_heads: int = 4
    tokens: int = 1
    d_v: int = 8
    dtype: torch.dtype = torch.float64
    large: float = 1.0
    device: str = "cpu"
    use_triton: bool | None = None

    def data(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        draw, n = torch.Generator().manual_seed(0), sum(m or 0 for m in self.lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)

        q = normal(2, self.heads, self.tokens, 8) * self.large
        k, v = normal(2, self.key_heads, n, 8), normal(2, self.key_heads, n, self.d_v)
        mask = None
        if self.masked != "no":
            mask = torch.rand((2, n), generator=draw) < 0.5
            mask[1] = False
            if self.masked == "all":
                mask[:] = False
        return q, k, v, mask

    def want(self) -> Tensor:
        q, k, v, mask = self.data()
        q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
        return dense_attention(q, k, v, key_mask=mask)[0].transpose(1, 2)

    def got(self, rank: int, group: Any = None) -> Tensor:
        q, k, v, mask = (t if t is None else t.to(self.device) for t in self.data())
        decode = partial(tree_attn_decode, q, use_triton=self.use_triton, group=group)
        if self.whole:
            return decode(k, v, key_mask=mask)
        if self.lengths[rank] is None:
            return decode(shard_kv_seq=False)
        lengths = [m or 0 for m in self.lengths]
        k, v = (t.split(lengths, dim=2)[rank] for t in (k, v))
        mask = None if mask is None else mask.split(lengths, dim=1)[rank]
        return decode(k, v, shard_kv_seq=False, key_mask=mask)
