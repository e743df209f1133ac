"""Tensors whose memory does not hold their values, and NaN where no query sees: on GPUs.

By every kernel and transport, in 16 and in 32 bits, one call after the other and from tapes,
against dense attention in float64.

    python -m tests.gpu.test_memory_gpu                                        a table, one GPU
    torchrun --standalone --nproc-per-node 2 -m tests.gpu.test_memory_gpu      and of rings
"""

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from ring_attention_pytorch import RingCache, ring_attn, ring_attn_with_cache
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.ranks.ring import Ring
from tests.gpu.memory import poison
from tests.support.gpu_rings import plan_for
from tests.support.lazy import LAZY
from tests.support.ranks import gpu_ranks
from tests.support.reference import dense_attention, relative_error
from tests.support.torchrun import join_ranks
from tests.support.unseen import SEEN, cached, rows_of_nan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAMED = [name for name in KERNELS if name != "sdpa"]
KINDS = (*LAZY, "masked", "out of reach")
HOW = ("one by one", "taped")
WAYS: dict[str, dict[str, Any]] = {
    "ring": dict(transport="ring"),
    "gather, messages": dict(transport="gather", apart=True),
    "gather, shared memory": dict(transport="gather"),
    "gather, few tokens": dict(transport="gather", few=True),
    "own keys apart": dict(transport="gather", few=True, own_apart=True),
    "ulysses, ring": dict(transport="ring", ulysses=2),
    "ulysses, gather": dict(transport="gather", ulysses=2),
}
CALLS = 5  # of which a tape, or a graph, does the last
KEYS = 640


class Trial(NamedTuple):
    """A trial: what is odd about tensors, and how attention is computed."""

    kind: str
    kernel: str | None
    dtype: torch.dtype
    how: str = "one by one"
    way: str | None = None  # None is one GPU


class Case(NamedTuple):
    """Tensors of a rank, and what is right."""

    given: dict[str, Tensor]  # q, k, v, sinks, dout, dlse
    options: dict[str, Any]
    want: list[Tensor]  # out, lse, dq, dk, dv; and dsinks, of all ranks


def drawn(trial: Trial, ring: Ring) -> Case:
    """A causal attention in zigzag; or one whose window does not reach the first and last keys."""
    draw = torch.Generator().manual_seed(7)
    reaching = trial.kind == "out of reach"
    n, heads, groups = (192 if reaching else KEYS), 4, 2
    shapes = dict(q=(2, n, heads, 64), k=(2, KEYS, groups, 64), v=(2, KEYS, groups, 64))
    shapes |= dict(sinks=(heads,), dout=(2, n, heads, 64), dlse=(2, heads, n))
    whole = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    whole = {name: t.cuda().to(trial.dtype) for name, t in whole.items()}
    whole["dlse"] = whole["dlse"].float()
    options: dict[str, Any] = dict(causal=True)
    if trial.kernel == "triton":
        options["alibi_slopes"] = torch.rand(heads, generator=draw).cuda() * 0.1
    dense, mine = dict(options), dict(options)
    if reaching:
        at = torch.arange(n) + 300, torch.arange(KEYS)
        rows, cols = (torch.arange(len(each)).tensor_split(ring.size)[ring.rank] for each in at)
        dense |= dict(window=70, positions=tuple(each.cuda() for each in at))
        mine |= dict(window=70, query_positions=at[0][rows], key_positions=at[1][cols])
        hidden = (at[1] < 300 - 70) | (at[1] >= 300 + n)
        hidden = hidden.expand(2, -1)
    else:
        rows = cols = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=KEYS)
        mine["layout"] = "zigzag"
        hidden = torch.zeros(2, KEYS, dtype=torch.bool)
    if trial.kind == "masked":
        hidden = (torch.arange(KEYS) % 7 < 2) | (torch.arange(KEYS) > torch.tensor([[600], [333]]))
        dense["key_mask"], mine["key_mask"] = ~hidden.cuda(), ~hidden[:, cols].cuda()
    exact = [whole[name].double().requires_grad_() for name in ("q", "k", "v", "sinks")]
    with torch.device("cuda"):
        out, lse = dense_attention(*exact[:3], sinks=exact[3], **dense)
    through = whole["dout"].double(), whole["dlse"].double()
    want = [out, lse, *torch.autograd.grad((out, lse), exact, through)]
    rows, cols = rows.cuda(), cols.cuda()
    held = [rows, rows, rows, cols, cols]
    want = [t[..., at] if i == 1 else t[:, at] for i, (t, at) in enumerate(zip(want, held))] + [
        want[5]
    ]
    if trial.kind in ("masked", "out of reach"):
        for name in "kv":
            whole[name] = whole[name].masked_fill(hidden.cuda()[..., None, None], torch.nan)
    own = dict(q=rows, k=cols, v=cols, dout=rows)
    given = {name: t[:, own[name]] if name in own else t for name, t in whole.items()}
    given["dlse"] = given["dlse"][..., rows]
    return Case(given, mine, [t.detach() for t in want])


def worst(trial: Trial, ring: Ring | None = None) -> float:
    """The largest relative error of any result on this rank; None is the ring of all ranks.

    Raises:
        ValueError: the kernel, or this way, has none of that.
    """
    ring = Ring() if ring is None else ring
    case, make = drawn(trial, ring), LAZY.get(trial.kind, Tensor.clone)
    plan = None
    if trial.how != "one by one" or trial.way is not None:
        way = {} if trial.way is None else WAYS[trial.way]
        like = {name: case.given[name].nan_to_num() for name in ("q", "k", "v", "sinks")}
        like = {name: t.requires_grad_() for name, t in like.items()}
        sinks = like.pop("sinks")
        options = case.options | dict(kernel=trial.kernel, group=ring, sinks=sinks)
        plan = plan_for(*like.values(), **way, **options)
    held, error = [], 0.0
    for _ in range(1 if plan is None else CALLS):
        poison()
        given = {name: make(t) for name, t in case.given.items()}
        held.append(given)  # so that the next ones are elsewhere
        leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "sinks")]
        how = dict(plan=plan) if plan else case.options | dict(kernel=trial.kernel, group=ring)
        found = ring_attn(*leaves[:3], sinks=leaves[3], return_lse=True, **how)
        grads = torch.autograd.grad(found, leaves, (given["dout"], given["dlse"]))
        got = [*found, *grads[:3], grads[3].double()]
        if ring.size > 1:
            dist.all_reduce(got[5])
        errors = [relative_error(a, b) for a, b in zip(got, case.want)]
        error = max(error, *(e if e == e else torch.inf for e in errors))
    return error


def unsupported(error: ValueError) -> bool:
    """True if an error says that a kernel has none of what is asked."""
    return "leave kernel=None" in str(error)


def attempts(trials: list[Trial], ring: Ring | None = None) -> list[float | str]:
    """The worst error of each trial on this rank, or why it can't be."""
    found: list[float | str] = []
    for trial in trials:
        try:
            found.append(worst(trial, ring))
        except ValueError as error:
            if not unsupported(error):
                raise
            found.append(str(error))
    return found


def alone() -> Iterator[Trial]:
    """Trials on one GPU."""
    for kind, kernel, dtype in product(KINDS, (None, *NAMED), BOUNDS):
        yield Trial(kind, kernel, dtype)
    for kind, how, kernel in product(KINDS, HOW[1:], (None, *NAMED)):
        yield Trial(kind, kernel, torch.bfloat16, how)


def together() -> Iterator[Trial]:
    """Trials over ranks: each kernel by the default way, each way by two kernels."""
    for kind, kernel, dtype in product(KINDS, (None, *NAMED), BOUNDS):
        yield Trial(kind, kernel, dtype, way="gather, shared memory")
    for kind, way, kernel, how in product(KINDS, WAYS, ("triton", None), HOW):
        yield Trial(kind, kernel, torch.bfloat16, how, way)


def check(trials: list[Trial], by_rank: list[list[float | str]]) -> None:
    found = [(trial, errors) for trial, errors in zip(trials, zip(*by_rank))]
    done = [(t, e) for t, e in found if not isinstance(e[0], str)]
    if not done:
        pytest.skip(str(found[0][1][0]))
    assert not [(t, e) for t, e in done if not max(e) < BOUNDS[t.dtype]]


@pytest.mark.parametrize("kernel", [None, *NAMED])
@pytest.mark.parametrize("kind", KINDS)
def test_on_one_gpu(kind: str, kernel: str | None) -> None:
    trials = [t for t in alone() if (t.kind, t.kernel) == (kind, kernel)]
    check(trials, [attempts(trials, Ring.alone())])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", [None, *NAMED])
def test_every_kernel_over_nccl(nccl: Callable, kind: str, kernel: str | None) -> None:
    trials = [t for t in together() if (t.kind, t.kernel) == (kind, kernel)]
    trials = [t for t in trials if t.dtype != torch.bfloat16 or t.how == HOW[0]][:3]
    check(trials, nccl(gpu_ranks()).run(attempts, trials))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_transport_over_nccl(nccl: Callable, kind: str, way: str) -> None:
    trials = [t for t in together() if (t.kind, t.way) == (kind, way)]
    trials = [t for t in trials if t.dtype == torch.bfloat16 and t.kernel in ("triton", None)]
    check(trials, nccl(gpu_ranks()).run(attempts, trials))


# --- collectives, caches, NaN that is seen ---


def by_collectives(kernel: str | None) -> float:
    """The worst error of attention of what a functional collective returns, not waited for."""
    ring, draw = Ring(), torch.Generator().manual_seed(3)
    whole = [torch.randn(1, 256 * ring.size, h, 64, generator=draw) for h in (4, 2, 2)]
    want = dense_attention(*(t.double() for t in whole))[0].chunk(ring.size, dim=1)[ring.rank]
    everyone, error = dist.group.WORLD, 0.0
    for _ in range(CALLS):
        brought = [torch.stack(t.half().cuda().chunk(ring.size, dim=1)) for t in whole]
        given = [collectives.all_reduce(t / ring.size, "sum", everyone)[ring.rank] for t in brought]
        assert all(isinstance(t, collectives.AsyncCollectiveTensor) for t in given)
        out = ring_attn(*given, kernel=kernel)
        assert type(out) is Tensor
        error = max(error, relative_error(out.cpu(), want))
    return error


@pytest.mark.parametrize("kernel", [None, "triton", "eager"])
def test_collectives_over_nccl_are_waited_for(nccl: Callable, kernel: str | None) -> None:
    assert max(nccl(gpu_ranks()).run(by_collectives, kernel)) < 3e-3


def of_a_cache(kind: str, dtype: torch.dtype) -> float:
    """The largest difference by tensors of a kind from that by plain ones, appended and asked."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, 9, h, 64, device="cuda", dtype=dtype) for h in (4, 2, 2)]
    terms = dict(zip(("sinks", "alibi_slopes"), torch.randn(2, 4, device="cuda")))
    found = []
    for make in (Tensor.clone, LAZY[kind]):
        cache = RingCache(
            2, key_heads=2, head_dim=64, capacity=64, dtype=dtype, device="cuda", group=Ring.alone()
        )
        cache.append(*(make(t[:, :5]) for t in tensors[1:]))
        given = [make(t[:, 5:]) for t in tensors]
        of_heads = {name: make(t) for name, t in terms.items()}
        found.append(ring_attn_with_cache(*given, cache, **of_heads))
    return (found[0] - found[1]).abs().max().item()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", LAZY)
def test_a_cache_takes_and_is_asked_what_is_meant(kind: str, dtype: torch.dtype) -> None:
    assert of_a_cache(kind, dtype) == 0


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kernel", ["eager", "triton"])
def test_what_a_cache_hides_may_be_anything(kernel: str, window: int | None) -> None:
    with torch.device("cuda"):
        assert cached(kernel, window) < 1e-4


def spoiled(kernel: str, name: str, options: dict[str, Any], rows: range) -> str:
    """Which rows are NaN where one head's key, or value, is, of 16 bits: "seen" or "all", say."""
    with torch.device("cuda"):
        bad, other = rows_of_nan(kernel, name, options, torch.bfloat16, 64)
    seen = torch.tensor([row in rows for row in range(9)], device=bad.device)
    if other.any():
        return "of another head"
    if not bad[seen].all():
        return "some that see it are finite"
    return "seen" if torch.equal(bad, seen) else "all" if bad.all() else "more than seen"


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("kernel", NAMED)
def test_a_query_that_sees_nan_is_never_finite(kernel: str, name: str) -> None:
    for options, rows in SEEN:
        try:
            found = spoiled(kernel, name, options, rows)
        except ValueError as error:
            if not unsupported(error):
                raise
            continue
        assert found in ("seen", "all", "more than seen")


# --- a table ---


def told(error: float | str) -> str:
    return "-" if isinstance(error, str) else f"{error:.1e}"


def print_table(trials: list[Trial], errors: list[float | str], columns: str) -> None:
    """A line for each kind and way, a column for each kernel; the worst of all ways to call."""
    names = ["fastest" if name is None else name for name in (None, *NAMED)]
    print(f"{columns:60}" + "".join(f"{name:>13}" for name in names), flush=True)
    lines: dict[str, dict[str, list[float | str]]] = {}
    for trial, error in zip(trials, errors):
        kind = str(trial.dtype).removeprefix("torch.")
        line = f"{trial.kind}, {trial.way or 'alone'}, {kind}, {trial.how}"
        lines.setdefault(line, {}).setdefault(trial.kernel or "fastest", []).append(error)
    for line, found in lines.items():
        print(f"{line:60}" + "".join(f"{told(found.get(n, ['-'])[0]):>13}" for n in names))


def main() -> int:
    if "RANK" in os.environ:
        join_ranks()
        trials = [*together()]
        mine = attempts(trials)
        worst_of = torch.tensor([-1.0 if isinstance(e, str) else e for e in mine]).cuda()
        dist.all_reduce(worst_of, dist.ReduceOp.MAX)
        errors = [e if isinstance(e, str) else w for e, w in zip(mine, worst_of.tolist())]
        waited = {kernel: by_collectives(kernel) for kernel in (None, "triton", "eager")}
        if dist.get_rank() == 0:
            print_table(trials, errors, f"{dist.get_world_size()} GPUs")
            print("collectives that nobody waited for:", waited)
        dist.destroy_process_group()
    else:
        trials = [*alone()]
        errors = attempts(trials, Ring.alone())
        print_table(trials, errors, "one GPU")
        for kernel, name in product(NAMED, "kv"):
            found = []
            for options, rows in SEEN:
                try:
                    found.append(spoiled(kernel, name, options, rows))
                except ValueError:
                    found.append("-")
            print(f"rows that are NaN where a {name} is, {kernel}: {found}")
        for kind, dtype in product(LAZY, BOUNDS):
            print(f"a cache, {kind}, {dtype}: {of_a_cache(kind, dtype)}")
    wrong = [t for t, e in zip(trials, errors) if not isinstance(e, str) and e >= BOUNDS[t.dtype]]
    print(f"{len(trials)} trials, {len(wrong)} wrong", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
