"""One block of scores, by any kernel, beside dense attention with the same pairs visible."""

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import Segment
from ring_attention_pytorch.geometry.tiles import Tile, band
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from tests.support.cases import FIGURES, NAMES, TOLERANCES
from tests.support.reference import relative_error

CPU = torch.device("cpu")


class Block:
    """Random tensors of one block, and what its tile and its key mask show."""

    def __init__(self, shape, tile=None, *, masked=False, softclamp=None, scale=None, **kinds):
        (self.n, self.m, h, h_kv, d, d_v), b = shape, 2
        dtype = kinds.get("dtype", torch.float64)
        self.q, self.dout = (torch.randn(b, self.n, h, x, dtype=dtype) for x in (d, d_v))
        self.k, self.v = (torch.randn(b, self.m, h_kv, x, dtype=dtype) for x in (d, d_v))
        self.dlse = torch.randn(b, h, self.n, dtype=accumulation_dtype(dtype))
        self.mask = torch.rand(b, self.m) < 0.5 if masked else None
        whole = Tile(slice(0, self.n), slice(0, self.m), None, None)
        self.tiles = [whole] if tile is None else [tile]
        self.terms = ScoreMods(
            d**-0.5 if scale is None else scale, softclamp, kinds.get("bucket_size", 1024)
        )

    def seen(self) -> Tensor:
        shown = torch.zeros(2, self.n, self.m, dtype=torch.bool)
        for tile in self.tiles:
            shown[:, tile.rows, tile.cols] = band(tile, CPU)
        return shown if self.mask is None else shown & self.mask[:, None]

    def run(self, kernel: str) -> dict[str, Tensor]:
        """Return the kernel's results, with the gradients for the random cotangents."""
        impl, segments = KERNELS[kernel], (Segment(0, 1, self.m),)
        keys = KVBlock(self.k, self.v, self.mask, segments)
        result = OutputAccumulator(self.q, self.v.shape[-1])
        impl.forward(self.q, keys, self.tiles, self.terms, result)
        out, lse = result.finalize()
        dlse = self.dlse.masked_fill(lse == -torch.inf, 0.0)
        grads = Grads(GradAccumulator(self.q), GradAccumulator(self.k), GradAccumulator(self.v))
        saved = Residuals(self.q, out, lse, self.dout, dlse)
        impl.backward(saved, keys, self.tiles, self.terms, grads)
        return dict(zip(NAMES, (out, lse, *(total.finalize() for total in grads))))

    def want(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Return the results of plain PyTorch in a dtype, from autograd."""
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (self.q, self.k, self.v)]
        q, k, v = leaves
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.terms.scale
        if (c := self.terms.softclamp) is not None:
            scores = c * torch.tanh(scores / c)
        seen = self.seen()[:, None]
        blind = ~seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
        p = scores.softmax(-1).masked_fill(blind, 0.0)
        lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", p, v)
        cotangents = (self.dout.to(dtype), self.dlse.to(dtype).masked_fill(blind[..., 0], 0.0))
        grads = torch.autograd.grad((out, lse), leaves, cotangents)
        return dict(zip(NAMES, (out, lse, *grads)))

    def assert_right(self, kernel: str) -> None:
        got, want = self.run(kernel), self.want()
        errors = {name: relative_error(got[name], want[name]) for name in NAMES}
        for name in ("dq", "dk"):  # differences of products as large as dv, which may cancel
            if size := _size(want[name]):
                errors[name] *= min(1.0, size / (1e-2 * _size(want["dv"])))
        FIGURES.note(self.q.dtype, errors)
        bad = {n: e for n, e in errors.items() if not e < TOLERANCES[self.q.dtype]}
        assert not bad, f"{kernel}: {bad} for {self.tiles}, {self.terms}"


def _size(t: Tensor) -> float:
    return t.double().norm().item()
