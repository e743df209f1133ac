"""Keys that were given, as our kernel sees a cache: a sequence is one page, which nobody grows."""

import torch
from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.inference.decode_plan import Asked, DecodePlan, HeldKeys
from ring_attention_pytorch.inference.pages import Pages

_ENDLESS = 1 << 30  # tokens


class GivenKeys(HeldKeys):
    """This rank's keys of some sequences, others at each call: all are seen, whatever their order.

    Heads come before tokens: k is `[b, h_kv, n, d]`, v `[b, h_kv, n, d_v]`.
    """

    lengths: Tensor
    pages, scales, fixed, has_starts = Pages(_ENDLESS, 1), 0, True, False

    def __init__(self, ring: Ring, like: Tensor, key_heads: int, value_dim: int) -> None:
        self.ring, self.device, self.dtype = ring, like.device, like.dtype
        self.sequences, self.key_heads, self.value_dim = like.shape[0], key_heads, value_dim
        self.rows, self.step = (0, 0), 1
        b = self.sequences
        with torch.inference_mode(False):
            self.tables = torch.arange(b, dtype=torch.int32, device=self.device).unsqueeze(1)
            self.lengths = torch.zeros(b, dtype=torch.int32, device=self.device)
        self.starts = self.rooms = self.overflown = self.lengths
        self.layer_lengths = [self.lengths]
        self._plans: dict[tuple[Asked, int], DecodePlan] = {}
        self.keys = self.values = [like]
        self.key_scales = self.value_scales = [self.lengths]  # which nobody reads

    def take(self, k: Tensor | None, v: Tensor | None) -> None:
        """Use these keys from now on; None are no keys."""
        if k is None or v is None or not k.shape[2]:
            self.lengths.zero_()
            return
        if (laid := _rows(k)) is None or laid != _rows(v):
            k, v = (t.clone(memory_format=torch.contiguous_format) for t in (k, v))
            laid = _rows(k)
        assert laid is not None
        between, among, self.step = laid
        self.rows = between, among
        self.keys, self.values = [k], [v]
        self.lengths.fill_(k.shape[2])

    def plan(self, asked: Asked) -> DecodePlan:
        """Return the plan for such queries."""
        kind = asked, self.step
        if kind not in self._plans:
            self._plans[kind] = DecodePlan(self, asked)
        return self._plans[kind]


def _rows(t: Tensor) -> tuple[int, int, int] | None:
    """Return how far sequences, heads and tokens are apart, in rows; None if they aren't.

    >>> _rows(torch.empty(2, 3, 5, 8)), _rows(torch.empty(2, 5, 3, 8).transpose(1, 2))
    ((15, 5, 1), (15, 1, 3))
    """
    heads, d = t.shape[1], t.shape[3]
    strides = [stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride())]
    if strides[3] not in (0, 1) or any(stride % d for stride in strides[:3]) or t.data_ptr() % 16:
        return None
    between, among, step = (stride // d for stride in strides[:3])
    step = step or 1
    return (between, among, step) if step in (1, heads) else None
