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
from functools import partial

import torch
from torch import Tensor

from ring_attention_pytorch import tree_attn_decode
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.case import Results
from tests.support.cases import IN_MEMORY, asked_of, lazily, shard_of, unseen_spoiled
from tests.support.lazy import kernels_by_address
from tests.support.random_draw import LEARNED, Case, draw, features, refused
from tests.support.random_memory import laid
from tests.support.random_oracle import magnitudes, solve
from tests.support.random_smaller import smallest

BOUND = 16.0  # eps of a result's magnitude
COARSE_LSE = 32.0  # times float32's eps, in 16 bits: PyTorch's kernel for CPUs has exp of 20 bits
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks", "dkey_bias", "dshared_k", "dshared_v")


def decoded(case: Case) -> Results:
    """Return the results of `tree_attn_decode`."""
    kinds, whole = case.laid_as, unseen_spoiled(case)
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
    given = {name: whole[name] for name in LEARNED if name in whole}
    dlse = whole["dlse"] if case.lse == "differentiated" else None
    how = given, asked_of(case, whole), whole["dout"], dlse
    return solve(*how), magnitudes(*how, case.kind)


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
        return threads.run(case.size, lambda ring: shard_of(case, ring), machines)[0]


def errors(case: Case, got: list[Results]) -> Errors:
    """Return the error of each result on each rank; that of sinks is of the sum of all ranks'."""
    want, size = oracle(case)
    found = {}
    dtype = case.kind
    wide = torch.promote_types(dtype, torch.float32)
    if "dsinks" in got[0]:
        parts = [mine.pop("dsinks") for mine in got]
        got[0]["dsinks"] = torch.stack(parts).double().sum(0).to(parts[0].dtype)
    for rank, mine in enumerate(got):
        for name, t in mine.items():
            at = case.tokens(name, rank, case.size)
            right, most = want[name], size[name]
            if at is not None:
                right, most = right.index_select(*at), most.index_select(*at)
            if name == "lse":
                most = most * (COARSE_LSE if wide != dtype else 1.0)
            found[name, rank] = (
                off(t, right, most, wide if name == "lse" else dtype),
                relative(t, right),
            )
    return found


def problem(case: Case, machines: bool = False) -> dict[str, str]:
    """Name the result or exception that is wrong in the case; nothing if all is right.

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
    """Return what is wrong with the cases of these numbers."""
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
