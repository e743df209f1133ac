"""Random cases of all features, memory, dtypes and transports over rings of threads.

    python -m tests.support.random_cases --cases 10000 --first 0 --processes 2
    python -m tests.support.random_cases --cases 1000 --machines # ranks are on several machines
    python -m tests.support.random_cases --seed 1234             # one of them, each error
    python -m tests.support.random_cases --seed 1234 --smallest  # what is left of it

A result is off by so many eps of its magnitude, which is what it would be if nothing cancelled:
see `random_oracle.magnitudes`. So few bounds serve all results, however small gradients are.
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, balanced, ring_attn, tree_attn_decode
from ring_attention_pytorch.geometry.layouts import Layout, positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import over_shared_memory
from tests.support.lazy import LAZY, kernels_by_address
from tests.support.random_draw import PREDICATES, Case, draw, features, held, refused
from tests.support.random_memory import laid
from tests.support.random_oracle import Asked, magnitudes, solve, visible
from tests.support.random_smaller import smallest

BOUND = 16.0  # eps of a result's magnitude
COARSE_LSE = 32.0  # times float32's eps, in 16 bits: PyTorch's kernel for CPUs has exp of 20 bits
IN_MEMORY = ("shared", "together", "own_apart")  # gathers in memory that ranks share
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks", "dkey_bias", "dshared_k", "dshared_v")
Results = dict[str, Tensor]


# --- what lies where ---


@cache
def layout_of(case: Case) -> Layout:
    return balanced(case.dealt, case.size) if case.layout == "balanced" else case.layout


def tokens(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Which queries and which keys a rank holds."""
    if case.two:
        queries, keys = (torch.arange(sum(n)).split(n)[rank] for n in (case.queries, case.keys))
        if case.counted:
            queries = held(case.layout, sum(case.queries), rank, case.size)
        return queries, keys
    if case.layout == "balanced":
        mine = positions(layout_of(case), rank=rank, ring_size=case.size, length=case.length)
    else:
        mine = held(case.layout, case.length, rank, case.size)
    return mine, mine


def part(name: str, t: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """A rank's of a tensor, or of a result."""
    if name in ("sinks", "alibi", "dsinks") or "shared" in name:
        return t
    if name in ("lse", "dlse"):
        return t[..., queries]
    return t[:, queries if name in ("q", "dq", "out", "dout", "documents") else keys]


# --- what the ring makes of it ---


def shard(case: Case, ring: Ring) -> Results:
    """One rank's results."""
    at, kinds = tokens(case, ring.rank), dict(case.strides)
    mine = {
        name: lazily(case, name, laid(part(name, t, *at), kinds.get(name, "contiguous")))
        for name, t in spoiled(case).items()
    }
    given = {
        name: mine[name].requires_grad_(name in case.learned)
        for name in Case.learned
        if name in mine
    }
    how = options(case, ring, mine, at)
    if case.plan or case.transport in IN_MEMORY:
        plan = planned(case, ring, given, how)
        step(case, {name: (0.5 * t).detach() for name, t in given.items()}, mine, dict(plan=plan))
        if case.plan == "replaced":
            plan = replace(plan, key_mask=how["key_mask"])
        how = dict(plan=plan)
    return step(case, given, mine, how)


def spoiled(case: Case) -> Results:
    """All tensors, but what no query sees of keys and values is what it must not be."""
    whole, spread = case.tensors(), dict(case.strides)
    if not case.unseen:
        return whole
    n, m = case.lengths
    asked = replace(asked_of(case, whole), mask_mod=None, shared_seen=None)
    seen = visible(asked, case.batch, case.heads, n, m).any(1).any(1)
    for name in "kv":
        if spread.get(name) != "one sample":
            whole[name] = whole[name].masked_fill(~seen[..., None, None], float(case.unseen))
    return whole


def lazily(case: Case, name: str, t: Tensor) -> Tensor:
    """A tensor, maybe with other values in its memory."""
    kind = dict(case.lazy).get(name)
    return t if kind is None else LAZY[kind](t)


def step(case: Case, given: Results, mine: Results, how: dict[str, Any]) -> Results:
    """Forward and backward."""
    given = {name: t.requires_grad_(name in case.learned) for name, t in given.items()}
    out = ring_attn(**by_name(given), **how, return_lse=bool(case.lse))
    found = dict(zip(("out", "lse"), out if case.lse else (out,)))
    if learned := {name: t for name, t in given.items() if t.requires_grad}:
        through = {"dout": found["out"]}
        if case.lse == "differentiated":
            through["dlse"] = found["lse"]
        grads = torch.autograd.grad(
            [*through.values()], [*learned.values()], [mine[name] for name in through]
        )
        found |= {f"d{name}": grad for name, grad in zip(learned, grads)}
    return {name: t.detach() for name, t in found.items()}


def by_name(given: Results) -> dict[str, Any]:
    """As the ring is given them."""
    if "shared_k" not in given:
        return dict(given)
    own = {name: t for name, t in given.items() if "shared" not in name}
    return own | dict(shared_keys=(given["shared_k"], given["shared_v"]))


def options(case: Case, ring: Ring, mine: Results, at: tuple[Tensor, Tensor]) -> dict[str, Any]:
    how = dict(
        group=ring, causal=case.causal, window=case.window, scale=case.scale,
        softclamp=case.softclamp, layout=layout_of(case), kernel=case.kernel,
        transport=None if case.transport in IN_MEMORY else case.transport,
        ulysses=case.ulysses, memory=case.memory, bucket_size=case.bucket_size, cross=case.cross,
        dropout=case.dropout, key_mask=mine.get("key_mask"), alibi_slopes=mine.get("alibi"),
    )  # fmt: skip
    if case.shared_masked:
        how["shared_key_mask"] = mine["shared_mask"]
    if case.dropout:
        how["dropout_seed"] = case.dropout_seed
    if case.modded:
        how["mask_mod"] = PREDICATES[case.mask_mod]
    if case.prefix:
        how["prefix"] = case.prefix[0] if len(case.prefix) == 1 else list(case.prefix)
    if case.ids:
        how["documents"] = mine["documents"].to(getattr(torch, case.ids_dtype))
    if case.borders:
        found = case.borders[0] if len(case.borders) == 1 else [*map(list, case.borders)]
        how["cu_seqlens"] = torch.tensor(found) if case.tensor_borders else list(found)
    if case.placed:
        whole = case.query_at, case.key_at
        own = [torch.tensor(each, dtype=torch.long)[i] for each, i in zip(whole, at)]
        how["query_positions"], how["key_positions"] = own
    return how


def planned(case: Case, ring: Ring, given: Results, how: dict[str, Any]) -> RingPlan:
    """A plan for calls like these, with another key mask if that will be replaced."""
    if case.plan == "replaced":
        how = how | dict(key_mask=how["key_mask"].logical_not())
    plan = RingPlan.make(**by_name(given), **how)
    if case.transport not in IN_MEMORY:
        return plan
    if case.transport in ("together", "own_apart"):
        kind = {case.transport: True}
    else:
        kind = dict(own_low_priority=case.own_low_priority, late=case.late)
    b, n, m, h, g, d, d_v, *_ = plan.signature  # q and k are wider if there is a bias
    like = [given["q"].new_empty(shape) for shape in ((b, n, h, d), (b, m, g, d), (b, m, g, d_v))]
    return over_shared_memory(plan, like, ring, case.at_once, **kind)


def decoded(case: Case) -> Results:
    """What `tree_attn_decode` makes of it."""
    kinds, whole = dict(case.strides), spoiled(case)
    q, k, v = (
        lazily(case, name, laid(whole[name].transpose(1, 2), kinds.get(name, "contiguous")))
        for name in "qkv"
    )
    mask = whole.get("key_mask")
    mask = None if mask is None else laid(mask, kinds.get("key_mask", "contiguous"))
    out = tree_attn_decode(
        q, k, v, key_mask=mask, group=Ring.alone(), shard_kv_seq=case.seed % 2 == 0
    )
    return dict(out=out.transpose(1, 2))


# --- what is right ---


def oracle(case: Case) -> tuple[Results, Results]:
    """All results in float64, and their magnitudes."""
    whole = case.tensors()
    given = {name: whole[name] for name in Case.learned if name in whole}
    dlse = whole["dlse"] if case.lse == "differentiated" else None
    how = given, asked_of(case, whole), whole["dout"], dlse
    return solve(*how), magnitudes(*how, getattr(torch, case.dtype))


def asked_of(case: Case, whole: Results) -> Asked:
    """What is asked of the oracle."""
    return Asked(
        causal=case.causal, window=case.window, key_mask=whole.get("key_mask"), scale=case.scale,
        softclamp=case.softclamp, documents=documents(case, whole),
        alibi=whole["alibi"].double() if case.alibi else None,
        mask_mod=PREDICATES[case.mask_mod] if case.modded else None,
        prefix=case.prefix * (case.batch if len(case.prefix) == 1 else 1) or None,
        query_at=torch.tensor(case.query_at, dtype=torch.long) if case.placed else None,
        key_at=torch.tensor(case.key_at, dtype=torch.long) if case.placed else None,
        dropout=case.dropout, dropout_seed=case.dropout_seed,
        shared_seen=shared_seen(case, whole),
    )  # fmt: skip


def shared_seen(case: Case, whole: Results) -> Tensor | None:
    """Of the keys that all ranks hold, bool [b, s]."""
    everything = torch.ones((case.batch, case.shared), dtype=torch.bool)
    return whole.get("shared_mask", everything) if case.shared else None


def documents(case: Case, whole: Results) -> Tensor | None:
    """The number of each token's, [b, n]."""
    if not case.borders:
        return whole.get("documents")
    rows = [[sum(z <= i for z in cuts[1:]) for i in range(case.length)] for cuts in case.borders]
    found = torch.tensor(rows, dtype=torch.long).view(len(rows), case.length)
    return found.expand(case.batch, -1)


def off(got: Tensor, want: Tensor, size: Tensor, dtype: torch.dtype) -> float:
    """The largest error in eps of the result's magnitude; inf for what is wrong altogether."""
    if got.shape != want.shape or got.dtype != dtype or not torch.equal(got.isinf(), want.isinf()):
        return torch.inf
    if not want.numel():
        return 0.0
    eps, least = torch.finfo(dtype).eps, min(torch.finfo(dtype).smallest_normal, 6e-8)
    error = (got.double() - want).abs().masked_fill(want.isinf(), 0.0)
    each = error / (eps * size + least)
    return torch.inf if each.isnan().any() else each.max().item()


def relative(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over that of what is wanted, or itself if that is 0."""
    if got.shape != want.shape:
        return torch.inf
    difference = (got.double() - want).masked_fill(want.isinf(), 0.0).norm().item()
    return difference / (want.masked_fill(want.isinf(), 0.0).norm().item() or 1.0)


# --- one case ---

Errors = dict[tuple[str, int], tuple[float, float]]  # by result and rank: in eps, and relative


def computed(case: Case, machines: Sequence[int] = ()) -> list[Results]:
    """Each rank's results, if they are on these machines."""
    with kernels_by_address() if case.lazy else nullcontext():
        return _computed(case, machines)


def machines_of(case: Case) -> list[int]:
    """Machines of a case's ranks: as many as may be, uneven, in any order."""
    return random.Random(case.seed).choices(range(max(2, case.size - 1)), k=case.size)


def _computed(case: Case, machines: Sequence[int]) -> list[Results]:
    if case.decode:
        return [decoded(case)]
    with threads.late() if case.transport in IN_MEMORY else nullcontext():
        return threads.run(case.size, lambda ring: shard(case, ring), machines)[0]


def errors(case: Case, got: list[Results]) -> Errors:
    """Of each result on each rank. That of sinks is the sum of all ranks'."""
    want, size = oracle(case)
    found = {}
    dtype = getattr(torch, case.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if "dsinks" in got[0]:
        parts = [mine.pop("dsinks") for mine in got]
        got[0]["dsinks"] = torch.stack(parts).double().sum(0).to(parts[0].dtype)
    for rank, mine in enumerate(got):
        at = tokens(case, rank)
        for name, t in mine.items():
            right, most = part(name, want[name], *at), part(name, size[name], *at)
            if name == "lse":
                most = most * (COARSE_LSE if wide != dtype else 1.0)
            found[name, rank] = (
                off(t, right, most, wide if name == "lse" else dtype),
                relative(t, right),
            )
    return found


def problem(case: Case, machines: bool = False) -> dict[str, str]:
    """What is wrong with the case, by the name of a result or of an exception; nothing if right.

    With `machines` its ranks are on several.
    """
    why = refused(case)
    if machines and case.transport is None:
        case = replace(case, transport="gather")
    try:
        got = computed(case, machines_of(case) if machines else ())
    except ValueError as error:
        return {} if why else {"ValueError": str(error)}
    except Exception as error:  # whatever it is, the other cases go on
        return {type(error).__name__: str(error)[:500]}
    if why:
        return {"not refused": why}
    bad = {}
    for (name, rank), (eps, by) in errors(case, got).items():
        if not eps < BOUND:
            bad.setdefault(
                name, f"rank {rank}: {eps:.3g} eps of its magnitude, relatively {by:.1e}"
            )
    return bad


# --- many cases ---


def by_itself() -> None:
    """This process on one core: the threads of a ring take turns anyway, and so twice as fast."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


def failures(seeds: range, machines: bool = False) -> list[str]:
    """What is wrong with the cases of these numbers."""
    found = []
    for seed in seeds:
        case = draw(seed)
        if bad := problem(case, machines):
            told = "\n".join(f"    {name}: {what}" for name, what in bad.items())
            found.append(f"seed {seed}: {case}\n{told}")
    return found


def run(first: int, cases: int, processes: int, step: int = 50, machines: bool = False) -> int:
    """Run so many cases; how many failed."""
    chunks = [
        range(start, min(start + step, first + cases))
        for start in range(first, first + cases, step)
    ]
    began, done, failed = time.monotonic(), 0, 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=by_itself) as pool:
        for chunk, found in zip(chunks, pool.map(partial(failures, machines=machines), chunks)):
            for each in found:
                print(each, flush=True)
            done, failed = done + len(chunk), failed + len(found)
            each_second = done / (time.monotonic() - began)
            print(f"\r{done} of {cases}, {each_second:.0f} a second", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(f"{cases - failed} passed, {failed} failed")
    return failed


def tell_features(first: int, cases: int) -> None:
    """How many of so many cases have each feature."""
    counts = Counter(f for seed in range(first, first + cases) for f in features(draw(seed)))
    for feature, count in sorted(counts.items()):
        print(f"{count:6} {feature}")


def replay(seed: int, reduce: bool) -> bool:
    """One case with all of its errors; whether it is wrong."""
    case = draw(seed)
    print(case)
    bad = problem(case)
    if reduce and bad:
        case = smallest(case, problem)
        print("smallest:", case, sep="\n")
        bad = problem(case)
    if refused(case) is not None:
        print("is to be refused:", refused(case))
    elif bad.keys() <= {*NAMES}:
        for (name, rank), (eps, by) in errors(case, computed(case)).items():
            print(f"{name:10} rank {rank}: {eps:8.3f} eps of its magnitude, relatively {by:.1e}")
    for name, what in bad.items():
        print(f"wrong: {name}: {what}")
    return bool(bad)


def main() -> int:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ask.add_argument("--cases", type=int, default=1000)
    ask.add_argument("--first", type=int, default=0, help="the first seed")
    ask.add_argument("--processes", type=int, default=1)
    ask.add_argument("--seed", type=int, help="one case, in detail")
    ask.add_argument("--smallest", action="store_true", help="make it smaller while it fails")
    ask.add_argument("--machines", action="store_true", help="ranks are on several machines")
    ask.add_argument("--features", action="store_true", help="count what is in the cases")
    asked = ask.parse_args()
    if asked.seed is not None:
        by_itself()
        return int(replay(asked.seed, asked.smallest))
    if asked.features:
        tell_features(asked.first, asked.cases)
        return 0
    failed = run(asked.first, asked.cases, asked.processes, machines=asked.machines)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
