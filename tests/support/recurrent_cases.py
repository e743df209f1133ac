"""Cases of recurrent layers: random documents and data, the same on every rank."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.balance import balanced
from ring_attention_pytorch.geometry.documents import of_borders
from ring_attention_pytorch.geometry.layouts import Layout, positions
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent import RunPlan, ring_mamba2
from tests.support import threads
from tests.support.recurrent_reference import sequential
from tests.support.reference import relative_error

KEY_HEADS, HEADS, D_K, D_V = 2, 4, 3, 5


def borders_of(draw: random.Random, length: int) -> list[int]:
    """Return borders of random documents, many of them at multiples of a few tokens."""
    cuts = {draw.randrange(0, length + 1) for _ in range(draw.randrange(0, 5))}
    cuts |= {length * part // 4 for part in range(5) if draw.random() < 0.3}
    return [*sorted({0, length, *cuts})]


@dataclass(frozen=True)
class Spread:
    """A sequence that is spread over a ring, with documents or one."""

    size: int
    length: int
    batch: int
    layout: Layout
    borders: list[list[int]] | None

    @classmethod
    def drawn(cls, seed: int) -> "Spread":
        draw = random.Random(seed)
        size, batch = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2])
        length = draw.randrange(1, 45)
        borders = [borders_of(draw, length) for _ in range(batch)] if draw.random() < 0.7 else None
        layout: Layout = draw.choice(["contiguous", "zigzag"])
        if borders and draw.random() < 0.4:
            layout = balanced(borders, size)
        return cls(size, length, batch, layout, borders)

    @property
    def documents(self) -> Tensor:
        """The number of each token's document, `[b, n]`."""
        if self.borders is None:
            return torch.zeros(self.batch, self.length, dtype=torch.long)
        rows = []
        for borders in self.borders:
            sizes = torch.tensor(borders).diff()
            rows.append(torch.arange(len(sizes)).repeat_interleave(sizes))
        return torch.stack(rows)

    @property
    def begins(self) -> Tensor:
        return self.documents.diff(dim=1, prepend=torch.full((self.batch, 1), -1)) != 0

    def held(self, rank: int) -> Tensor:
        return positions(self.layout, rank=rank, ring_size=self.size, length=self.length)

    def plan(self, ring: Ring) -> RunPlan:
        like = torch.empty(self.batch, len(self.held(ring.rank)))
        given: dict[str, Any] = dict(layout=self.layout, group=ring)
        if self.borders is not None and len(self.borders) == 1:
            given["cu_seqlens"] = self.borders[0]
        elif self.borders is not None:
            given["documents"] = tuple(map(of_borders, self.borders))
        return RunPlan.make(like, **given)


Results = dict[str, Tensor]
# results by name, of tensors by name; those that begin with "last" are the same on all ranks
Compute = Callable[..., Results]


def loss_of(results: Results, share: float, tokens: int, at: Tensor | None = None) -> Tensor:
    """A random functional of results of whole sequences with so many tokens, or of those `at`.

    Of the last states, which all ranks have, it is a share.
    """
    total = torch.zeros((), dtype=torch.float64)
    for number, (name, t) in enumerate(results.items()):
        draw = torch.Generator().manual_seed(number)
        last = name.startswith("last")
        shape = t.shape if last else (t.shape[0], tokens, *t.shape[2:])
        weights = torch.randn(shape, generator=draw, dtype=torch.float64)
        if last:
            weights = weights * share
        elif at is not None:
            weights = weights[:, at]
        total = total + (t.double() * weights).sum()
    return total


def errors_of(
    spread: Spread, sharded: Results, same: Results, ours: Compute, reference: Compute
) -> dict[str, float]:
    """The worst relative errors on any rank, of results and of "gradient of ..." each tensor.

    `ours` gets tensors of one rank and `plan`, `reference` whole ones and the case.
    """

    def leaves(tensors: Results) -> Results:
        return {name: t.clone().requires_grad_() for name, t in tensors.items()}

    whole = leaves(sharded | same)
    want = reference(**whole, spread=spread)
    wanted = torch.autograd.grad(
        loss_of(want, 1.0, spread.length), [*whole.values()], materialize_grads=True
    )
    gradients = dict(zip(whole, wanted))

    def main(ring: Ring) -> tuple[dict[str, float], Results]:
        at, errors = spread.held(ring.rank), {}
        mine = leaves({name: t[:, at] for name, t in sharded.items()} | same)
        got = ours(**mine, plan=spread.plan(ring))
        for name, t in got.items():
            expected = want[name] if name.startswith("last") else want[name][:, at]
            errors[name] = relative_error(t, expected)
        found = torch.autograd.grad(
            loss_of(got, 1 / ring.size, spread.length, at), [*mine.values()]
        )
        for name, t in zip(mine, found):
            if name in sharded:
                errors[f"gradient of {name}"] = relative_error(t, gradients[name][:, at])
        return errors, {name: t for name, t in zip(mine, found) if name in same}

    of_ranks, _ = threads.run(spread.size, main)
    worst = {name: max(errors[name] for errors, _ in of_ranks) for name in of_ranks[0][0]}
    for name in same:
        total = sum(each[name] for _, each in of_ranks)
        worst[f"gradient of {name}"] = relative_error(total, gradients[name])
    return worst


def check(
    spread: Spread, sharded: Results, same: Results, ours: Compute, reference: Compute, most: float
) -> None:
    """Compare results and all gradients with the reference, on every rank."""
    errors = errors_of(spread, sharded, same, ours, reference)
    assert all(error < most for error in errors.values()), errors


def data(spread: Spread, channels: bool, seed: int):
    """Inputs with gates at 0 and 1, keys of different norms."""
    draw = torch.Generator().manual_seed(seed)
    shape = spread.batch, spread.length

    normal = partial(torch.randn, generator=draw, dtype=torch.float64)
    gate = normal(*shape, HEADS, *(D_K,) * channels).sigmoid() ** 0.3
    chance = torch.rand(gate.shape, generator=draw)
    gate[chance < 0.03], gate[chance > 0.97] = 0.0, 1.0
    beta = normal(*shape, HEADS).sigmoid()
    beta[(chance.amax(-1) if channels else chance) > 0.95] = 1.0
    q, k = normal(*shape, KEY_HEADS, D_K), normal(*shape, KEY_HEADS, D_K)
    return dict(q=q, k=k, v=normal(*shape, HEADS, D_V), g=gate.log(), beta=beta), normal


def delta(rule, normalize):
    def ours(*, plan, initial=None, **given):
        out, last = rule(**given, plan=plan, normalize=normalize, initial=initial, final=True)
        return {"out": out, "last": last}

    def reference(*, spread, initial=None, q, k, v, g, beta):
        if normalize:
            q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        out, last = sequential(q / D_K**0.5, k, v, g, beta, spread.begins, initial)
        return {"out": out, "last": last}

    return ours, reference


def mamba_2(spread: Spread, seed: int) -> tuple[Results, Results, Compute, Compute]:
    """Inputs of Mamba 2, sharded ones and the same on all ranks, the layer and the loop."""
    shape = spread.batch, spread.length
    draw = torch.Generator().manual_seed(seed)

    normal = partial(torch.randn, generator=draw, dtype=torch.float64)
    dt = normal(*shape, HEADS).exp()
    dt[torch.rand(dt.shape, generator=draw) < 0.1] = 0.0
    sharded = dict(
        x=normal(*shape, HEADS, D_V), dt=dt, b=normal(*shape, KEY_HEADS, D_K),
        c=normal(*shape, KEY_HEADS, D_K),
    )  # fmt: skip
    same = dict(a=-normal(HEADS).exp(), skip=normal(HEADS))
    if seed % 2:
        same["initial"] = normal(spread.batch, HEADS, D_V, D_K)

    def ours(*, plan, **given):
        out, last = ring_mamba2(**given, plan=plan, final=True)
        return {"out": out, "last": last}

    def reference(*, spread, x, dt, a, b, c, skip, initial=None):
        state = None if initial is None else initial.mT
        out, last = sequential(c, b, x * dt[..., None], dt * a, None, spread.begins, state)
        return {"out": out + x * skip[:, None], "last": last.mT}

    return sharded, same, ours, reference
