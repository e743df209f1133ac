"""One case of ring attention against the oracle, for threads and for processes alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.transports import by_copy_engines, on_one_stream
from ring_attention_pytorch.comm.ulysses import most_bytes
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.random_memory import laid, uniform
from tests.support.ranks import Pool
from tests.support.reference import dense_attention, relative_error

NAMES = ("out", "lse", "dq", "dk", "dv")
CPU_KERNELS = ("eager", "sdpa")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass
class Figures:
    """What the suite measured, for the summary at its end."""

    worst: dict[str, dict[str, float]] = field(default_factory=dict)  # by dtype and result
    seconds_to_error: float = 0.0
    planted: int = 0  # mutants, and how many of them were killed
    killed: int = 0

    def note(self, dtype: torch.dtype, errors: dict[str, float]) -> None:
        worst = self.worst.setdefault(str(dtype).removeprefix("torch."), dict.fromkeys(NAMES, 0.0))
        for name, error in errors.items():
            worst[name] = max(worst[name], error)

    def merge(self, other: "Figures") -> None:
        """Add what another process measured."""
        for name, errors in other.worst.items():
            self.note(getattr(torch, name), errors)
        self.seconds_to_error = max(self.seconds_to_error, other.seconds_to_error)
        self.planted, self.killed = self.planted + other.planted, self.killed + other.killed


FIGURES = Figures()


@dataclass(frozen=True)
class Attention:
    """What to compute. Data is drawn from the seed, the same on every rank."""

    length: int = 13
    layout: str = "contiguous"
    causal: bool = False
    window: int | None = None
    masked: bool = False
    softclamp: float | None = None
    scale: float | None = None
    kernel: str | None = None
    transport: str | None = None
    ulysses: int = 1
    memory: int | None = None
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    d: int = 8
    d_v: int = 8
    dtype: torch.dtype = torch.float64
    query_lengths: tuple[int, ...] | None = None  # cross attention: what lies on the ranks,
    key_lengths: tuple[int, ...] | None = None  # queries (None is as the layout says) and keys
    ids: tuple[tuple[int, ...], ...] | None = None  # the documents of each sample
    borders: bool = False  # which are given as cu_seqlens
    bucket_size: int = 4
    seed: int = 0
    logits: float = 1.0
    strides: str = "contiguous"  # of q, k, v and cotangents, by `random_memory`

    def options(self) -> dict[str, Any]:
        return dict(
            causal=self.causal, window=self.window, softclamp=self.softclamp, scale=self.scale
        )

    def data(self) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor]:
        """Whole (q, k, v), key mask, and the cotangents of out and lse."""
        draw = torch.Generator().manual_seed(self.seed)
        m = self.length if self.key_lengths is None else sum(self.key_lengths)

        def normal(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)
            return uniform(drawn, self.strides)

        q = normal(self.batch, self.length, self.heads, self.d) * self.logits
        k = normal(self.batch, m, self.key_heads, self.d)
        v = normal(self.batch, m, self.key_heads, self.d_v)
        dout = normal(self.batch, self.length, self.heads, self.d_v)
        dlse = normal(self.batch, self.heads, self.length).to(
            torch.promote_types(self.dtype, torch.float32)
        )
        mask = None
        if self.masked:
            mask = torch.rand((self.batch, m), generator=draw) < 0.6
            mask[0, : m // 2] = False  # the first queries of a causal sample see nothing at all
        return [q, k, v], mask, dout, dlse

    def documents(self) -> Tensor | None:
        """int [batch, length], for the oracle."""
        if self.ids is None:
            return None
        return torch.tensor(self.ids, dtype=torch.long).expand(self.batch, -1)

    def packed(self, at: Tensor) -> dict[str, Any]:
        """The documents of some tokens, as `ring_attn` takes them."""
        if self.ids is None or not self.borders:
            return {} if self.ids is None else {"documents": self.documents()[:, at]}
        return {"cu_seqlens": [borders(row) for row in self.ids]}

    def places(self, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Which queries and which keys a rank holds."""
        queries = positions(self.layout, rank=rank, ring_size=size, length=self.length)
        if self.query_lengths is not None:
            queries = torch.arange(self.length).split(self.query_lengths)[rank]
        if self.key_lengths is None:
            return queries, queries
        return queries, torch.arange(sum(self.key_lengths)).split(self.key_lengths)[rank]


def miscounted(case: Attention, size: int) -> list[tuple[Any, tuple[int, int]]]:
    """Of each rank whose plan counts other calls of its kernel than there are: both counts."""

    def main(ring: Ring) -> tuple[Any, tuple[int, int]]:
        (q, k, v), _, dout, _ = case.data()
        at, _ = case.places(ring.rank, size)
        leaves = [t[:, at].requires_grad_() for t in (q, k, v)]
        plan = RingPlan.make(
            *leaves, causal=case.causal, window=case.window, layout=case.layout, group=ring,
            transport=case.transport, memory=case.memory, kernel="eager", **case.packed(at),
        )  # fmt: skip
        made = [0, 0]

        def counted(direction: int) -> Callable[..., None]:
            def run(*given: Any) -> None:
                made[direction] += bool(given[2])
                plan.kernel[1 + direction](*given)

            return run

        told = replace(plan, kernel=plan.kernel._replace(forward=counted(0), backward=counted(1)))
        ring_attn(*leaves, plan=told).backward(dout[:, at])
        return tuple(map(plan.calls, (False, True))), tuple(made)

    return [both for both in threads.run(size, main)[0] if both[0] != both[1]]


def borders(ids: tuple[int, ...]) -> list[int]:
    """Where documents start, with each number that none has as an empty one, and the end."""
    last = max(ids, default=-1)
    return [sum(i < number for i in ids) for number in range(last + 2)]


def results(
    tensors: list[Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor
) -> list[Tensor]:
    """out, lse and the gradient of each of q, k, v for random cotangents."""
    blind = lse == -torch.inf  # lse has no gradient there
    grads = torch.autograd.grad((out, lse), tensors, (dout, dlse.masked_fill(blind, 0.0)))
    return [out, lse, *grads]


def oracle(case: Attention) -> list[Tensor]:
    """`whole`, worked out once for all layouts, kernels and rings."""
    how = dict(kernel=None, transport=None, ulysses=1, memory=None, bucket_size=0)
    return _oracle(replace(case, layout="", query_lengths=None, borders=False, **how))


@lru_cache(maxsize=512)
def _oracle(case: Attention) -> list[Tensor]:
    return whole(case)


def whole(case: Attention) -> list[Tensor]:
    """The oracle's out, lse, dq, dk, dv in float64."""
    tensors, mask, dout, dlse = case.data()
    tensors = [t.double().requires_grad_() for t in tensors]
    out, lse = dense_attention(
        *tensors, **case.options(), key_mask=mask, documents=case.documents()
    )
    return results(tensors, out, lse, dout.double(), dlse.double())


def shard(case: Attention, ring: Ring, device: str = "cpu") -> list[Tensor]:
    """The same from one rank's shards."""
    (q, k, v), mask, dout, dlse = case.data()
    queries, keys = case.places(ring.rank, ring.size)
    parts = (t[:, at] for t, at in ((q, queries), (k, keys), (v, keys)))
    tensors = [laid(t, case.strides).to(device).requires_grad_() for t in parts]
    out, lse = ring_attn(
        *tensors, **case.options(), key_mask=None if mask is None else mask[:, keys].to(device),
        layout=case.layout, kernel=case.kernel, bucket_size=case.bucket_size, group=ring,
        transport=case.transport, ulysses=case.ulysses, memory=case.memory, return_lse=True,
        cross=case.key_lengths is not None, **case.packed(queries),
    )  # fmt: skip
    along = (laid(t, case.strides).to(device) for t in (dout[:, queries], dlse[..., queries]))
    return results(tensors, out, lse, *along)


def held(case: Attention, rank: int, size: int, results: list[Tensor]) -> list[Tensor]:
    """Of whole results one rank's."""
    queries, keys = case.places(rank, size)
    out, lse, dq, *of_keys = results
    return [out[:, queries], lse[..., queries], dq[:, queries], *(t[:, keys] for t in of_keys)]


def errors(
    case: Attention, rank: int, size: int, got: list[Tensor], want: list[Tensor]
) -> dict[str, float]:
    """The relative error of each result on one rank."""
    return dict(zip(NAMES, map(relative_error, got, held(case, rank, size, want))))


def check(case: Attention, size: int, found: Iterable[dict[str, float]]) -> None:
    """Each result, by itself and on every rank, as good as its dtype allows."""
    for rank, each in enumerate(found):
        FIGURES.note(case.dtype, each)
        bad = {n: e for n, e in each.items() if not e < TOLERANCES[case.dtype]}
        assert not bad, f"rank {rank} of {size}: {bad} in {case}"


def check_in_threads(case: Attention, size: int, machines: Sequence[int] = ()) -> threads.Hub:
    """The case over a ring of threads, of so many machines, against the oracle."""
    got, hub = threads.run(size, lambda ring: shard(case, ring), machines)
    check(case, size, (errors(case, r, size, mine, oracle(case)) for r, mine in enumerate(got)))
    return hub


def over_shared_memory(
    plan: RingPlan,
    tensors: list[Tensor],
    ring: threads.ThreadRing,
    at_once: int,
    by_copy_engine: bool | None = None,
    together: bool = False,
    own_apart: bool = False,
    **overlapping: bool,
) -> RingPlan:
    """A gather's plan for q, k and v of ranks that share memory; all of them make it together."""
    shared = threads.shared_by(ring)
    swap, over = plan.ulysses, ring
    if swap is not None:
        most = most_bytes((swap.queries, swap.keys), *tensors)
        shared.space.reserve(shared.group, swaps=most)
        among = OneStream(swap.together, shared.space, swap.together.places)
        swap, over = replace(swap, by=among), swap.ring
        shared = shared._replace(ranks=over.places)
    of = plan.blocks, plan.chosen.shape, shared
    if together or own_apart:
        transport = on_one_stream(over, *of, own_apart)
    else:
        transport = by_copy_engines(over, of[0], at_once, *of[1:], **overlapping)
    if by_copy_engine is not None:
        transport = replace(
            transport, fabric=replace(transport.fabric, by_copy_engine=by_copy_engine)
        )
    return replace(plan.by(transport), ulysses=swap)


def check_symmetric(case: Attention, size: int, at_once: int, **how: bool) -> None:
    """The case over a ring of threads that share memory, against the oracle."""

    def main(ring: threads.ThreadRing) -> list[Tensor]:
        (q, k, v), mask, dout, dlse = case.data()
        at, _ = case.places(ring.rank, ring.size)
        mine = [laid(t[:, at], case.strides).requires_grad_() for t in (q, k, v)]
        plan = RingPlan.make(
            *mine, **case.options(), key_mask=None if mask is None else mask[:, at], group=ring,
            layout=case.layout, kernel=case.kernel, ulysses=case.ulysses, **case.packed(at),
        )  # fmt: skip
        plan = over_shared_memory(plan, mine, ring, at_once, **how)
        out, lse = ring_attn(*mine, plan=plan, return_lse=True)
        along = (laid(t, case.strides) for t in (dout[:, at], dlse[..., at]))
        return results(mine, out, lse, *along)

    with threads.late():
        got, _ = threads.run(size, main)
    check(case, size, (errors(case, r, size, mine, oracle(case)) for r, mine in enumerate(got)))


def process_case(cases: list[Attention]) -> list[dict[str, float]]:
    """For a pool: the errors of each case on this rank."""
    ring = Ring()
    return [errors(c, ring.rank, ring.size, shard(c, ring), oracle(c)) for c in cases]


def check_in_processes(cases: list[Attention], pool: Pool) -> None:
    """The cases over a ring of processes against the oracle."""
    by_rank = pool.run(process_case, cases)
    for case, *found in zip(cases, *by_rank):
        check(case, pool.size, found)
