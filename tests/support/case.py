"""One language of cases: fields say what to compute, a number draws them, and ranks are compared.

A domain derives a frozen dataclass from `Case`. A field made by `axis` is drawn, too: how, and when
it applies, is in its declaration, so one line adds an option. Each field and each tensor is drawn
from the seed and its own name: one more changes no other.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.ranks import Pool
from tests.support.reference import relative_error

Results = dict[str, Tensor]
Tokens = tuple[int, Tensor] | None  # a dimension and a rank's part of it; None is the same on all


class Axis(NamedTuple):
    """How a field is drawn: one of some values, or by a function of a generator and the case."""

    values: tuple[Any, ...] | Callable[[random.Random, Any], Any]
    share: float  # of the cases in which it applies
    when: Callable[[Any], Any]  # whether it does, by the fields before


def axis(
    usual: Any,
    values: tuple[Any, ...] | Callable[[random.Random, Any], Any],
    share: float = 1.0,
    when: Callable[[Any], Any] = lambda case: True,
    **more: Any,
) -> Any:
    """Declare a field that is drawn, and is as usual else."""
    return field(default=usual, metadata={"axis": Axis(values, share, when)}, **more)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case as data: the same on every rank, and equal to what its text says."""

    limit: ClassVar[float] = 1e-12  # of relative errors
    seed: int = 0

    def __str__(self) -> str:
        changed = {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default
        }
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in changed.items())})"

    def drawing(self, name: str) -> torch.Generator:
        """Return the generator of what has this name."""
        return torch.Generator().manual_seed(self.seed + 1000003 * (crc32(name.encode()) % 1009))

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.drawing(name), dtype=torch.float64)

    def marks(self, name: str, *shape: int, share: float) -> Tensor:
        """Return booleans of which this share is True."""
        return torch.rand(shape, generator=self.drawing(name)) < share

    # --- for domains of rings ---

    def tokens(self, name: str, rank: int, size: int) -> Tokens:
        """Say where a rank's part of a tensor or a result is."""
        raise NotImplementedError

    def part(self, tensors: Results, ring: Ring) -> Results:
        """Return one rank's part of whole tensors."""
        found = {}
        for name, t in tensors.items():
            at = self.tokens(name, ring.rank, ring.size)
            found[name] = t if at is None else t.index_select(at[0], at[1].to(t.device))
        return found

    def noted(self, errors: dict[str, float]) -> None:
        """Keep the worst errors for a summary; most domains have none."""

    def anywhere(self) -> Self:
        """Return the case without what the oracle does not know of."""
        return replace(self, layout="contiguous")

    def whole(self) -> Results:
        """Return what the oracle makes of it."""
        raise NotImplementedError

    def shard(self, ring: Ring) -> Results:
        """Return what one rank of a ring makes of it."""
        raise NotImplementedError


C = TypeVar("C", bound=Case)


def drawn(kind: type[C], seed: int, **known: Any) -> C:
    """Draw a case by a number; known fields are as they are given."""
    case, r = kind(seed=seed, **known), random.Random()
    for each in fields(kind):
        how = each.metadata.get("axis")
        if how is None or each.name in known or not how.when(case):
            continue
        r.seed(f"{seed} {each.name}")
        if r.random() < how.share:
            value = how.values(r, case) if callable(how.values) else r.choice(how.values)
            object.__setattr__(case, each.name, value)
    return case


def gradients(out: Results, leaves: Results, along: Results) -> Results:
    """Return results and the gradient of each leaf; zeros where there is none."""
    found = {name: t.detach() for name, t in out.items()}
    if leaves:
        grads = torch.autograd.grad(
            [out[name] for name in along], [*leaves.values()], [*along.values()],
            materialize_grads=True, allow_unused=True,
        )  # fmt: skip
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads)}
    return found


def errors(
    by_rank: Sequence[Results], want: Results, tokens: Callable[[str, int], Tokens]
) -> dict[tuple[str, int], float]:
    """Compare each result of each rank, relatively; of what all ranks share their sum."""
    found = {}
    for name, whole in want.items():
        for rank, mine in enumerate(by_rank):
            if (at := tokens(name, rank)) is not None:
                found[name, rank] = relative_error(mine[name], whole.index_select(*at))
            elif rank == 0:
                found[name, rank] = relative_error(sum(each[name] for each in by_rank), whole)
    return found


@lru_cache(maxsize=512)
def _oracle(case: Case) -> Results:
    return case.whole()


def oracle(case: Case) -> Results:
    """Return what the oracle makes of a case, worked out once for all rings."""
    return _oracle(case.anywhere())


def worst(case: Case, by_rank: Sequence[Results], want: Results | None = None) -> dict[str, float]:
    """Return the largest error of each result."""
    size = len(by_rank)
    found: dict[str, float] = {}
    want = oracle(case) if want is None else want
    each = errors(by_rank, want, lambda name, rank: case.tokens(name, rank, size))
    for (name, _), error in each.items():
        found[name] = max(found.get(name, 0.0), error)
    return found


def check(case: Case, by_rank: Sequence[Results]) -> None:
    """Compare every result of every rank with the oracle's."""
    case.noted(found := worst(case, by_rank))
    bad = {name: e for name, e in found.items() if not e < case.limit}
    assert not bad, f"{len(by_rank)} ranks: {bad} in {case}"


def check_in_threads(case: Case, size: int, machines: Sequence[int] = ()) -> threads.Hub:
    """Check a case over a ring of threads, of so many machines."""
    got, hub = threads.run(size, case.shard, machines)
    check(case, got)
    return hub


def process_case(cases: Iterable[Case]) -> list[Results]:
    """For a pool: return this rank's results of each case."""
    return [case.shard(Ring()) for case in cases]


def check_in_processes(cases: Sequence[Case], pool: Pool) -> None:
    """Check cases over a ring of processes."""
    for case, *by_rank in zip(cases, *pool.run(process_case, cases)):
        check(case, by_rank)
