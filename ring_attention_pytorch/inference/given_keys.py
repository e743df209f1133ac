"""Given keys in the form of a cache, for the same kernel: each sequence is one fixed page."""

import torch
from torch import Tensor

from ring_attention_pytorch.inference.decode_plan import Asked, DecodePlan
from ring_attention_pytorch.inference.page_table import Pages
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.inference.pools import Pools, Sizes
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.streams import capturing

_ENDLESS = 1 << 30  # tokens


class GivenKeys:
    """Attention from queries of one shape to keys that each call passes, with no causal mask.

    Heads precede tokens: k is `[b, h_kv, n, d]`, v `[b, h_kv, n, d_v]`, this rank's keys of each
    sequence.
    """

    def __init__(self, ring: Ring, q: Tensor, key_heads: int, value_dim: int) -> None:
        """Prepare for queries `[b, n, h, d]` like q."""
        b, device = q.shape[0], q.device
        sizes = Sizes(b, key_heads, q.shape[-1], value_dim, layers=1)
        with torch.inference_mode(False):
            pages = torch.arange(b, dtype=torch.int32, device=device).unsqueeze(1)
            zeros = torch.zeros(b, dtype=torch.int32, device=device)
            lineage = torch.zeros(1 + b, dtype=torch.int32, device=device)
            self._none = torch.zeros(16, dtype=q.dtype, device=device)
        self.pools: Pools = Pools(
            ring, device, q.dtype, sizes, Pages(_ENDLESS, 1), (0, 0), [self._none], [self._none],
            [zeros], [zeros], pages, [zeros], zeros, zeros, zeros, lineage,
        )  # fmt: skip
        scores = Scores(q.shape[-1] ** -0.5)
        asked = Asked(tuple(q.shape), False, False, scores, False, False, "triton", False)
        self._plan = DecodePlan(self.pools, asked)
        self._ran: set[tuple[int, bool]] = set()

    def attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, key_mask: Tensor | None, number: int
    ) -> Tensor:
        """Return attention of q `[b, n, h, d]` to all ranks' keys; None: this rank has none.

        `number` must be the same on all ranks.

        Raises:
            ValueError: a CUDA graph is being captured, and this call can't be.
        """
        self._take(k, v)
        mask, step = key_mask if self.pools.given else None, self.pools.step
        kind = step, mask is not None
        if kind not in self._ran:
            refuse_capture(q)
        if not self._plan.capturable:
            refuse_capture(q)
        out, _ = self._plan.run(q, None, None, 0, key_mask=mask, return_lse=False, number=number)
        self._ran.add(kind)
        self.pools.keys[0] = self.pools.values[0] = self._none  # don't keep the tensors alive
        return out

    def _take(self, k: Tensor | None, v: Tensor | None) -> None:
        if k is None or v is None or not k.shape[2]:
            self.pools.given = 0
            return
        if (laid := _rows(k)) is None or laid != _rows(v):
            k, v = (t.clone(memory_format=torch.contiguous_format) for t in (k, v))
            laid = _rows(k)
        assert laid is not None
        pools, (*rows, pools.step) = self.pools, laid
        pools.rows = rows[0], rows[1]
        pools.keys[0], pools.values[0] = k, v
        pools.given = k.shape[2]


def refuse_capture(q: Tensor) -> None:
    """Raise ValueError if a CUDA graph is being captured: this call can't be part of one."""
    if q.is_cuda and capturing(q.device):
        raise ValueError(
            "tree_attn_decode: a CUDA graph can't hold what is done when a call is new, nor the "
            "exchange of messages; run the same call once before it is captured, and where ranks "
            "share no memory, outside of graphs"
        )


def _rows(t: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of sequences, heads and tokens in rows; None if the kernel can't use them.

    >>> _rows(torch.empty(2, 3, 5, 8)), _rows(torch.empty(2, 5, 3, 8).transpose(1, 2))
    ((15, 5, 1), (15, 1, 3))
    """
    heads, d = t.shape[1], t.shape[3]
    between, among, step, one = (s if size > 1 else 0 for size, s in zip(t.shape, t.stride()))
    if one > 1 or between % d or among % d or step % d or t.data_ptr() % 16:
        return None
    step = step // d or 1
    return (between // d, among // d, step) if step in (1, heads) else None
