"""Second derivatives and tangents of a feature, on the ring and by the oracle.

For a direction `along` of q, k, v and whatever else is learned, and cotangents (dout, dlse):

    tout, tlse          how results change along it
    tdq, tdk, ...       how gradients do, by forward mode over reverse mode
    ddq, ddk, ...       the same by reverse mode over reverse mode: the gradients, by q, k and so
                        on, of the product of the first gradients with `along`
    ddout, ddlse        and by the cotangents
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.func import grad, jvp

from ring_attention_pytorch import balanced, ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.features import BORDERS, Feature, N, Problem, drawn
from tests.support.reference import dense_attention, relative_error

Attend = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def shared_level() -> Iterator[None]:
    """Forward mode counts its levels for the whole process: threads share one that stays open."""
    with forward_ad.dual_level(), mock.patch.object(eager_transforms, "JVP_NESTING", 100):
        yield


def seeing(attend: Attend) -> Attend:
    """With lse 0 where a query sees nothing, so that it can be differentiated everywhere."""

    def finite(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(*leaves)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return finite


def derivatives(
    attend: Attend,
    leaves: Sequence[Tensor],
    along: Sequence[Tensor],
    cotangents: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """All that is listed above, one after another."""
    attend, plain = seeing(attend), tuple(t.detach() for t in leaves)
    tangents = jvp(attend, plain, tuple(along))[1]

    def loss(*given: Tensor) -> Tensor:
        return sum((a.sin() * b).sum() for a, b in zip(attend(*given), cotangents))

    moved = jvp(grad(loss, tuple(range(len(plain)))), plain, tuple(along))[1]
    both = [t.clone().requires_grad_() for t in cotangents]
    first = torch.autograd.grad(attend(*leaves), leaves, both, create_graph=True)
    return [*tangents, *moved, *torch.autograd.grad(first, (*leaves, *both), along)]


class Second:
    """A feature's second order, whole by the oracle and in parts by the ring."""

    def __init__(self, feature: Feature, dtype: torch.dtype = torch.float64):
        self.problem = Problem(feature, dtype)
        learned = feature.varied | feature.learned
        self.names = [*"qkv", *learned]
        leaves = dict(zip(self.names, (*self.problem.qkv, *learned.values())))
        self.along = {n: drawn(*t.shape, seed=20 + i) for i, (n, t) in enumerate(leaves.items())}
        self.dlse = drawn(*self.problem.dlse.shape, seed=8)
        given = feature.shared | feature.sharded | feature.oracle

        def attend(*given_leaves: Tensor) -> tuple[Tensor, Tensor]:
            return dense_attention(**dict(zip(leaves, given_leaves)), **given)

        self.want = derivatives(
            attend,
            [t.clone().requires_grad_() for t in leaves.values()],
            list(self.along.values()),
            (self.problem.dout, self.dlse),
        )

    @property
    def kinds(self) -> dict[str, str]:
        """What each derivative lies along: tokens, lse's tokens, or the same on every rank."""
        learned = self.problem.feature.learned
        of_leaves = {n: "learned" if n in learned else "tokens" for n in self.names}
        return {
            "tout": "tokens",
            "tlse": "lse",
            **{f"td{n}": kind for n, kind in of_leaves.items()},
            **{f"dd{n}": kind for n, kind in of_leaves.items()},
            "ddout": "tokens",
            "ddlse": "lse",
        }

    def shard(self, ring: Ring, layout: str, **more: Any) -> list[Tensor]:
        """One rank's."""
        at, leaves, options = self.problem.part(ring, layout)
        dtype, learned = self.problem.dtype, self.problem.feature.learned
        along = [(t if n in learned else t[:, at]).to(dtype) for n, t in self.along.items()]

        def attend(*given: Tensor) -> tuple[Tensor, Tensor]:
            named = dict(zip(leaves, given))
            return ring_attn(**named, **options, **dict(kernel="eager") | more)

        wide = torch.promote_types(dtype, torch.float32)
        cotangents = self.problem.dout[:, at].to(dtype), self.dlse[..., at].to(wide)
        return derivatives(attend, list(leaves.values()), along, cotangents)

    def errors(
        self, size: int, layout: str, machines: Sequence[int] = (), **more: Any
    ) -> dict[str, float]:
        """The worst relative error of each over a ring of threads, of so many machines."""
        with shared_level():
            got, _ = threads.run(size, lambda ring: self.shard(ring, layout, **more), machines)
        return self.compared(got, layout)

    def compared(self, got: list[list[Tensor]], layout: str) -> dict[str, float]:
        dealt = balanced(BORDERS, len(got)) if layout == "balanced" else layout
        places = [positions(dealt, rank=r, ring_size=len(got), length=N) for r in range(len(got))]
        found = {}
        for (name, kind), want, *mine in zip(self.kinds.items(), self.want, *got):
            if kind == "learned":
                found[name] = relative_error(sum(mine), want)
                continue
            dim = 2 if kind == "lse" else 1
            found[name] = max(
                relative_error(t, want.index_select(dim, at)) for t, at in zip(mine, places)
            )
        return found
