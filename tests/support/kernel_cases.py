"""One case of a kernel against dense attention, on any device and in any process."""

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile, band, trim
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KernelRequest,
    KVBlock,
    Residuals,
    ScoreMods,
)
from tests.support.case import Case, axis, drawn
from tests.support.random_memory import laid
from tests.support.reference import relative_error

NAMES = ("out", "lse", "dq", "dk", "dv")
Band = tuple[int, int, int, int, int | None, int | None]  # rows, columns, left, right


def _some_tiles(draw: random.Random, case: "KernelCase") -> tuple[Band, ...]:
    """One to four tiles that share no pair: beside one another in a grid of cuts."""
    n, m = case.n, case.m
    cut_n, cut_m = draw.randint(0, n), draw.randint(0, m)
    found: list[Band] = []
    for rows in ((0, cut_n), (cut_n, n)):
        for cols in ((0, cut_m), (cut_m, m)):
            if rows[0] == rows[1] or cols[0] == cols[1] or draw.random() < 0.25:
                continue
            left, right = (
                draw.choice([None, None, 0, draw.randint(-longest, longest)])
                for longest in (rows[1] - rows[0], cols[1] - cols[0])
            )
            tile = trim(slice(*rows), slice(*cols), left, right)
            if tile is not None:
                found.append(
                    (tile.rows.start, tile.rows.stop, tile.cols.start, tile.cols.stop, *tile[2:])
                )
    return tuple(found) or _some_tiles(draw, case)


@dataclass(frozen=True)
class KernelCase(Case):
    """A case of a kernel: the keys come in so many pieces, merged one after another."""

    n: int = axis(37, lambda r, c: r.randint(1, c.longest))
    m: int = axis(45, lambda r, c: r.randint(1, c.longest))
    tiles: tuple[Band, ...] | None = axis(None, _some_tiles)  # None is one that shows all
    heads: tuple[int, int] = axis((4, 2), ((1, 1), (2, 2), (4, 2), (3, 1), (6, 2), (4, 1), (8, 2)))
    d: tuple[int, int] = axis(
        (16, 16), ((8, 8), (16, 16), (32, 32), (5, 3), (3, 20), (1, 1), (33, 16))
    )
    dtype: torch.dtype = torch.float32
    masked: bool = axis(False, (True,), 0.3)
    softclamp: float | None = axis(None, (0.7, 50.0), 0.4)
    scale: float | None = axis(None, (1.0, -0.7, 0.0), 0.4)
    laid: str = axis("plain", ("plain", "heads first", "columns", "sliced"))
    pieces: int = axis(1, (1, 1, 2, 3))
    batch: int = axis(1, (1, 2))
    longest: int = 40  # side, of a drawn case

    def whole(self) -> list[Tile]:
        given = self.tiles or ((0, self.n, 0, self.m, None, None),)
        return [Tile(slice(a, b), slice(c, d), left, right) for a, b, c, d, left, right in given]

    def cut(self) -> list[tuple[slice, list[Tile]]]:
        """The columns of each piece and its tiles, counted from its own first column."""
        ends = [self.m * i // self.pieces for i in range(self.pieces + 1)]
        return [
            (slice(a, b), [t for tile in self.whole() if (t := _within(tile, a, b)) is not None])
            for a, b in pairwise(ends)
        ]

    def terms(self) -> ScoreMods:
        return ScoreMods(
            self.d[0] ** -0.5 if self.scale is None else self.scale, self.softclamp, 1024
        )


class Data:
    """The tensors of a case, in float64 and as the kernel gets them."""

    def __init__(self, case: KernelCase, device: str) -> None:
        draw = torch.Generator().manual_seed(case.seed)
        (h, h_kv), (d, d_v), b = case.heads, case.d, case.batch
        shapes = [(b, case.n, h, d), (b, case.m, h_kv, d), (b, case.m, h_kv, d_v)]
        shapes.append((b, case.n, h, d_v))
        self.given = [
            _laid(torch.randn(s, generator=draw).to(device, case.dtype), case.laid) for s in shapes
        ]
        self.exact = [t.double() for t in self.given]
        self.dlse = torch.randn((b, h, case.n), generator=draw).to(device)
        self.mask = None
        if case.masked:
            self.mask = (torch.rand((b, case.m), generator=draw) < 0.5).to(device)
            self.mask[0, : case.m // 2] = False


def _within(tile: Tile, start: int, stop: int) -> Tile | None:
    first, last = max(tile.cols.start, start), min(tile.cols.stop, stop)
    if first >= last:
        return None
    off = first - tile.cols.start
    left = None if tile.left is None else tile.left + off
    right = None if tile.right is None else tile.right - off
    return trim(tile.rows, slice(first - start, last - start), left, right)


def _laid(t: Tensor, how: str) -> Tensor:
    """Copy the values to another layout in memory."""
    if how == "heads first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "columns":
        return t.transpose(1, 3).contiguous().transpose(1, 3)
    if how == "sliced":
        return torch.cat((t, t + 1), -1)[..., : t.shape[-1]]
    if how in FAR:
        return far(t, FAR[how])
    return t if how == "plain" else laid(t, how)


FAR = {"far rows": 1, "far heads": 2, "far columns": 3}


def far(t: Tensor, dim: int) -> Tensor:
    """Copy the values so that the last along that dimension is at 2 ** 31 elements or more.

    Most of that memory is never touched, so on a CPU it takes none.
    """
    if t.shape[dim] == 1:
        return t
    near = t.select(dim, 0)
    step = 16 * -(-max(near.numel(), 2**31 // (t.shape[dim] - 1)) // 16)
    strides = list(torch.empty_like(near, memory_format=torch.contiguous_format).stride())
    strides.insert(dim, step)
    memory = t.new_empty(near.numel() + step * (t.shape[dim] - 1))
    return memory.as_strided(t.shape, strides).copy_(t)


def dense(case: KernelCase, data: Data, dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain PyTorch in a dtype, its gradients from autograd."""
    q, k, v, dout = (t.to(dtype) for t in data.exact)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    k, v = (t.repeat_interleave(case.heads[0] // case.heads[1], dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * case.terms().scale
    if (c := case.softclamp) is not None:
        scores = c * torch.tanh(scores / c)
    shown = torch.zeros(case.batch, case.n, case.m, dtype=torch.bool, device=q.device)
    for tile in case.whole():
        shown[:, tile.rows, tile.cols] |= band(tile, q.device)
    if data.mask is not None:
        shown &= data.mask[:, None]
    shown = shown[:, None]
    blind = ~shown.any(-1, keepdim=True)
    scores = scores.masked_fill(~shown, -torch.inf).masked_fill(blind, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).masked_fill(blind, 0.0), v)
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    dlse = data.dlse.to(dtype).masked_fill(blind[..., 0], 0.0)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads)))


def results(case: KernelCase, data: Data, kernel: str) -> dict[str, Tensor]:
    """Return the kernel's results. Only out is rounded at the end, because backward reads it."""
    impl, terms = KERNELS[kernel], case.terms()
    q, k, v, dout = data.given

    def keys(cols: slice) -> KVBlock:
        mask = None if data.mask is None else data.mask[:, cols]
        return KVBlock(k[:, cols], v[:, cols], mask, ())

    calls = sum(bool(tiles) for _, tiles in case.cut())
    result = OutputAccumulator(q, v.shape[-1], calls)
    for cols, tiles in case.cut():
        impl.forward(q, keys(cols), tiles, terms, result)
    rounded, lse = result.finalize()
    dlse = data.dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    saved = Residuals(q, rounded, lse, dout, dlse)
    dq, dk, dv = GradAccumulator(q, calls), torch.zeros_like(k), torch.zeros_like(v)
    for cols, tiles in case.cut():
        grads = Grads(dq, *(GradAccumulator(t[:, cols], calls=1) for t in (k, v)))
        impl.backward(saved, keys(cols), tiles, terms, grads)
        dk[:, cols], dv[:, cols] = grads.dk.finalize(), grads.dv.finalize()
    return dict(zip(NAMES, (rounded, lse, dq.finalize(), dk, dv)))


def worst(got: Tensor, want: Tensor) -> float:
    return (got.double() - want.double()).abs().max().item() if got.isfinite().all() else torch.inf


def faults(case: KernelCase, kernel: str, device: str) -> dict[str, str]:
    """List results worse than their dtype allows: 1e-5 in float32, plain PyTorch in 16 bits."""
    data = Data(case, device)
    got, exact = results(case, data, kernel), dense(case, data, torch.float64)
    found = {}
    if case.dtype in (torch.float64, torch.float32):
        bound = 1e-12 if case.dtype == torch.float64 else 1e-5
        for name in NAMES:
            if not (error := relative_error(got[name], exact[name])) < bound:
                found[name] = f"{error:.1e} > {bound}"
        return found
    plain = dense(case, data, case.dtype)
    for name, times in zip(NAMES, (2, None, 3, 3, 3)):
        if times is None:
            continue
        # plain PyTorch may be exact by luck; the rounding of the result is always allowed
        rounding = torch.finfo(case.dtype).eps * exact[name].abs().max().item()
        bound = max(times * worst(plain[name], exact[name]), rounding)
        if not (error := worst(got[name], exact[name])) <= bound:
            found[name] = f"{error:.1e} > {bound:.1e}"
    if not relative_error(got["lse"], exact["lse"]) < 1e-4:
        found["lse"] = "beyond 1e-4"
    return found


def unrepeated(case: KernelCase, kernel: str, device: str, times: int = 2) -> list[str]:
    """The results that differ, in any bit, from one run to another."""
    data = Data(case, device)
    first = results(case, data, kernel)
    found = set()
    for _ in range(times - 1):
        again = results(case, data, kernel)
        found |= {name for name in NAMES if not torch.equal(first[name], again[name])}
    return sorted(found)


def disturbed(case: KernelCase, kernel: str, device: str) -> list[str]:
    """List what changed of a running result and gradients where nothing was seen."""
    data = Data(case, device)
    q, k, v, dout = data.given
    out, lse = (
        case.normal(f"running {name}", *t.shape).float().to(device)
        for name, t in (("out", dout), ("lse", data.dlse))
    )
    lse[:, :, ::3], out[:, ::3] = -torch.inf, 0.0
    result, grads = (
        OutputAccumulator(q, v.shape[-1]),
        Grads(GradAccumulator(q), GradAccumulator(k), GradAccumulator(v)),
    )
    result.add(slice(0, case.n), out, lse)
    for total, t in zip(grads, (q, k, v)):
        total.begin_update().copy_(case.normal("running", *t.shape))
    before = [t.clone() for t in (out, lse, *(total.begin_update() for total in grads))]
    keys = KVBlock(k, v, data.mask, ())
    KERNELS[kernel].forward(q, keys, case.whole(), case.terms(), result)
    out, lse = result.begin_update()
    saved = Residuals(q, out.to(q.dtype), lse, dout, data.dlse)
    KERNELS[kernel].backward(saved, keys, case.whole(), case.terms(), grads)
    after = [out, lse, *(total.begin_update() for total in grads)]
    shown = torch.zeros(case.batch, case.n, case.m, dtype=torch.bool, device=device)
    for tile in case.whole():
        shown[:, tile.rows, tile.cols] |= band(tile, shown.device)
    if data.mask is not None:
        shown &= data.mask[:, None]
    blind, unused = ~shown.any(2), ~shown.any(1)
    places = (blind, blind, blind, unused, unused)
    found = []
    for name, at, was, now in zip(NAMES, places, before, after):
        if name == "lse":
            was, now = was.transpose(1, 2), now.transpose(1, 2)
        if not torch.equal(was[at], now[at]) or now.isnan().any():
            found.append(name)
        if not at.all() and torch.equal(was[~at], now[~at]):
            found.append(f"{name} not at all")
    return found


CAUSAL = (None, 0)
CASES = [
    KernelCase(70, 70, ((0, 70, 0, 70, *CAUSAL),)),
    KernelCase(70, 130, heads=(3, 1), d=(32, 16)),
    KernelCase(70, 70, ((0, 70, 0, 70, 40, 0),), pieces=3, masked=True),
    KernelCase(81, 90, ((0, 81, 0, 90, 20, 25),), softclamp=1.5, pieces=2),
    # blocks of queries that lie in several tiles, and rows and keys that are in none
    KernelCase(90, 90, ((3, 23, 5, 25, *CAUSAL), (23, 60, 5, 80, None, None)), d=(5, 9)),
    KernelCase(66, 66, ((0, 9, 0, 66, None, None), (9, 66, 0, 33, 12, 7), (40, 66, 50, 66, 9, 0))),
    KernelCase(
        50, 50, ((0, 20, 0, 20, *CAUSAL), (20, 50, 0, 50, *CAUSAL)), masked=True, pieces=2, batch=2
    ),
    KernelCase(33, 65, scale=-0.5, heads=(3, 1), laid="heads first"),
    KernelCase(33, 65, scale=0.0, laid="columns"),
    KernelCase(64, 64, ((0, 64, 0, 64, *CAUSAL),), d=(64, 32), laid="sliced", batch=2),
    KernelCase(1, 64, heads=(8, 1), d=(40, 40)),
    KernelCase(48, 1, d=(1, 256), heads=(1, 1)),
    KernelCase(17, 20, d=(256, 130), heads=(2, 1)),
    # packed documents: many tiles in a block of rows, and of columns
    KernelCase(90, 90, tuple((i, i + 9, i, i + 9, *CAUSAL) for i in range(0, 90, 9)), pieces=2),
]
# head sizes of which dk and dv take a launch each
WIDE = [
    KernelCase(12, 27, ((0, 12, 0, 27, None, 15),), d=(512, 512), heads=(2, 1)),
    KernelCase(37, 21, d=(40, 300), heads=(4, 1), masked=True, pieces=2),
    KernelCase(18, 30, d=(257, 64), softclamp=2.0, scale=-0.1, heads=(2, 2)),
]

STRIDED = [  # the last dimension by every second number, by heads, by one number for all
    KernelCase(70, 80, ((0, 70, 0, 80, None, 10),), d=(64, 64), laid=how, pieces=2, batch=2)
    for how in ("every other", "last two turned", "one number")
]
# what lies where 32 bits don't reach
FAR_CASES = [
    KernelCase(37, 45, heads=heads, d=(16, 16), dtype=torch.float16, laid=how)
    for how, heads in (*((how, (2, 2)) for how in FAR), ("far heads", (4, 1)))
]


def random_cases(count: int, dtype: torch.dtype) -> list[KernelCase]:
    """Any tiles, heads, sizes, masks and layouts in memory; the same in every process."""
    return [drawn(KernelCase, seed, dtype=dtype, longest=40) for seed in range(count)]


def asked(case: KernelCase) -> KernelRequest:
    """Return the request to a kernel on the current GPU."""
    return KernelRequest(
        "cuda", case.dtype, case.softclamp is not None, d=case.d[0], d_v=case.d[1],
        capability=torch.cuda.get_device_capability(),
        window=any(t.left is not None for t in case.whole()), key_mask=case.masked,
        unusual_scale=case.scale is not None and case.scale <= 0,
    )  # fmt: skip
