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

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.case import errors
from tests.support.cases import asked_of_a_rank, of_dense
from tests.support.features import Feature, Problem, drawn
from tests.support.random_draw import LEARNED
from tests.support.reference import dense_attention

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
        self.problem, self.dtype = Problem(feature, dtype), dtype
        whole = self.problem.case.tensors()
        leaves = {name: whole[name].double() for name in LEARNED if name in whole}
        self.along = {n: drawn(*t.shape, seed=20 + i) for i, (n, t) in enumerate(leaves.items())}
        wide = {n: t.double() if t.is_floating_point() else t for n, t in whole.items()}
        given = of_dense(self.problem.case, wide)

        def attend(*given_leaves: Tensor) -> tuple[Tensor, Tensor]:
            return dense_attention(**dict(zip(leaves, given_leaves)), **given)

        found = derivatives(
            attend,
            [t.clone().requires_grad_() for t in leaves.values()],
            list(self.along.values()),
            (wide["dout"], wide["dlse"]),
        )
        self.want = dict(zip(self.kinds, found))

    @property
    def kinds(self) -> dict[str, str]:
        """A result or a leaf that lies along tokens as each derivative does."""
        return {
            "tout": "out",
            "tlse": "lse",
            **{f"td{n}": n for n in self.along},
            **{f"dd{n}": n for n in self.along},
            "ddout": "out",
            "ddlse": "lse",
        }

    def shard(self, ring: Ring, layout: str, **more: Any) -> list[Tensor]:
        """One rank's."""
        case = self.problem.by(layout, "eager", **more)
        leaves, mine, options = asked_of_a_rank(case, ring)
        along = case.part(self.along, ring)

        def attend(*given: Tensor) -> tuple[Tensor, Tensor]:
            return ring_attn(**dict(zip(leaves, given)), **options, return_lse=True)

        return derivatives(
            attend,
            list(leaves.values()),
            [along[name].to(self.dtype) for name in leaves],
            (mine["dout"], mine["dlse"]),
        )

    def errors(
        self, size: int, layout: str, machines: Sequence[int] = (), **more: Any
    ) -> dict[str, float]:
        """The worst relative error of each over a ring of threads, of so many machines."""
        with shared_level():
            got, _ = threads.run(size, lambda ring: self.shard(ring, layout, **more), machines)
        return self.compared(got, layout)

    def compared(self, got: list[list[Tensor]], layout: str) -> dict[str, float]:
        case, kinds = self.problem.by(layout, None), self.kinds
        found: dict[str, float] = {}
        by_rank = [dict(zip(kinds, each)) for each in got]
        each = errors(by_rank, self.want, lambda n, rank: case.tokens(kinds[n], rank, len(got)))
        for (name, _), error in each.items():
            found[name] = max(found.get(name, 0.0), error)
        return found
