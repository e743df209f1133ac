"""Everything public refuses what is wrong: by ValueError, in the house's words, nothing raw.

What is public follows from `__all__`, the pages of reference and the names of 0.5.20. A function
that is new, or a method, needs a right call in `tests/support/surface_calls.py`.
"""

import inspect
import os
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ring_attention_pytorch as R
from ring_attention_pytorch import ring
from ring_attention_pytorch.ranks.failures import Disagreement
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import surface
from tests.support.original import NAMES
from tests.support.surface_calls import CALLS, RESULTS, RIGHT, SAID, WITHIN

PACKAGE = Path(R.__file__).parent


def test_everything_public_has_a_right_call() -> None:
    """Or is a result, of which nobody makes one, or a method that only this package calls."""
    found = surface.public(NAMES)
    of_results = {name for name in found if name.split(".")[0] in RESULTS}
    within = {name for name in found if name.rpartition(".")[2] in WITHIN and "." in name}
    classes = {name for name, value in found.items() if inspect.isclass(value)}
    made_otherwise = {
        "RingPlan",
        "RunPlan",
        "SummaryPlan",
        "RoutingPlan",
        "ShardedBatch",
        "Workers",
    }
    inherited = {
        name
        for name, value in found.items()
        if "." in name
        and any(getattr(found[other], "__wrapped__", 0) is getattr(value, "__wrapped__", 1)
                for other in CALLS if other in found and "." in other)
    }  # fmt: skip
    left = {*found} - {*CALLS} - of_results - within - made_otherwise - inherited
    assert not left, f"write a right call of each into CALLS, by which wrong ones are made: {left}"
    assert {*CALLS} <= {*found}
    assert made_otherwise <= classes


@pytest.mark.parametrize("name", CALLS)
def test_what_is_wrong_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for what is written where an argument says
    all_wrong_is_refused(name)


def all_wrong_is_refused(name: str) -> None:
    call = CALLS[name]()
    if call.alone:
        call.function(**call.right)
    bad = [found for found in surface.verdicts(name, call, RIGHT, SAID) if not found.good]
    assert not bad, "\n".join(f"{each.name} = {each.what}: {each.said}" for each in bad)


def test_the_walk_is_as_long_as_it_was() -> None:
    """Wrong calls are made of signatures: where these can't be read, there would be fewer."""
    total = sum(1 for make in CALLS.values() for _ in surface.wrong(make()))
    assert total > 6000


def test_arguments_are_checked_in_one_place() -> None:
    others = {"arguments.py", "ranks/agreement.py", "compat/tensor_typing.py"}
    for path in PACKAGE.rglob("*.py"):
        if "beartype" in path.read_text():
            assert str(path.relative_to(PACKAGE)) in others


def test_a_bias_is_finite() -> None:
    bias = torch.tensor([[0.0, 1.0, -torch.inf, 0.0]])
    for function in (R.ring_attn, R.RingPlan.make, R.ulysses_attn):
        with pytest.raises(ValueError, match="key_bias must be finite"):
            function(Q, Q, Q, key_bias=bias)


SIZES: dict[str, Any] = dict(dim=16, dim_head=8, heads=2, ring_attn=True)
ONE, IDS = torch.zeros(1, 4, 16), torch.arange(4)[None]
Q = torch.zeros(1, 4, 2, 8)
SLIPS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "attention": (lambda **a: R.RingAttention(**SIZES)(**a), {"x": ONE}, {"maks": None}),
    "plan": (lambda **a: R.RingAttention(**SIZES).plan(**a), {"x": ONE}, {"x": None}),
    "transformer": (
        lambda **a: R.RingTransformer(num_tokens=9, depth=1, causal=True, **SIZES)(**a),
        {"x": IDS}, {"masks": None},
    ),
    "plans": (
        lambda **a: R.RingTransformer(num_tokens=9, depth=1, auto_shard_seq=False, **SIZES)
        .plans(**a),
        {"x": IDS}, {"ring_size": True},
    ),
    "generate": (
        lambda **a: R.RingTransformer(num_tokens=9, depth=1, causal=True, **SIZES).generate(**a),
        {"ids": IDS, "max_new_tokens": 1}, {"max_new_token": 1},
    ),
    "router": (
        lambda **a: R.CoordinateDescentRouter(16, ring_attn=True)(**a),
        {"x": ONE, "num_tokens": 2}, {"num_token": 2},
    ),
    "ulysses": (R.ulysses_attn, dict(q=Q, k=Q, v=Q), {"ulysses": 2}),
    "group": (R.ring_attn, dict(q=Q, k=Q, v=Q), {"group": "cp"}),
    "window": (R.ring_attn, dict(q=Q, k=Q, v=Q), {"window": True}),
    "routing plan": (R.RoutingPlan.make, {"x": ONE}, {"layuot": "zigzag"}),
    "batch": (R.shard_batch, {"batch": {"input_ids": IDS}}, {"ring_size": 0}),
    "0.5.20": (ring.ring_pass, dict(num_ring_passes=1, x=ONE), {"num_ring_passes": 1.5}),
    "0.5.20's names": (
        lambda **a: [*ring.all_ring_pass(ONE, **a)], {}, {"max_iter": 1},
    ),
    "0.5.20's function": (
        R.ring_flash_attn, dict(q=Q, k=Q, v=Q, ring_reduce_col=True), {"softclamp_value": -1},
    ),
}  # fmt: skip


def slipped(name: str) -> str:
    """Return what this rank is told where rank 1 alone has given something wrong."""
    function, right, slip = SLIPS[name]
    given = right | (slip if dist.get_rank() == 1 else {})
    if slip == {"x": None} and dist.get_rank() == 1:
        del given["x"]
    try:
        function(**given)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_all_ranks_hear_of_a_slip_of_one(pools: Callable) -> None:
    for name in SLIPS:
        told = pools(2).run(slipped, name)
        assert len({*told}) == 1, (name, told)
        assert told[0].endswith("(on rank 1)"), (name, told)


# where a wrong argument of one rank is an error there alone, with a report for ranks that wait: why
_PLAN = "a call with a plan compares nothing before; each rank has its own"
_CACHE = "the ring is the cache's, and there is none"
ALONE: dict[str, str] = {
    "ring_attn.plan": _PLAN,
    "ulysses_attn.plan": _PLAN,
    "mla_ring_attn.plan": _PLAN,
    "tied_ring_attn.plan": _PLAN,
    "RingLatentAttention.forward": _PLAN,
    "GatedDeltaNet.forward": _PLAN,
    "GatedDeltaNet.read": _PLAN,
    "Mamba2.forward": _PLAN,
    "Mamba2.read": _PLAN,
    "ring_scan": _PLAN,
    "ring_halo": _PLAN,
    "ring_short_conv": _PLAN,
    "ring_gated_delta_rule": _PLAN,
    "ring_kda": _PLAN,
    "ring_mamba2": _PLAN,
    "summarize": _PLAN,
    "summary_attn": _PLAN,
    "mla_attn_with_cache.cache": _CACHE,
    "RingLatentAttention.decode.cache": _CACHE,
    "ring_attn_with_cache.cache": _CACHE,
    "tree_attn_decode": "ranks agree once on a head size, and not for each token",
    "shard_batch.rank": "with a rank ranks compare nothing before the batch's block",
}


class Told(list):
    """What this rank sends: of notes the subject, and its error; of other messages None twice."""

    def gather_notes(self, ring: Ring, subject: str, note: bytes, why: str | None = None) -> Any:
        if ring.group is not None:
            self.append((subject, why))
        return GATHER(ring, subject, note, why)

    def exchange(self, ring: Ring, *messages: Any) -> Any:
        if ring.group is not None:
            self.append((None, None))
        return EXCHANGE(ring, *messages)


GATHER, EXCHANGE = Ring.gather_notes, Ring.exchange


def sent_by(call: surface.Call, given: dict[str, Any]) -> tuple[Told, Exception | None]:
    """Return what a call has sent, and its error."""
    told = Told()
    gather = lambda *given: told.gather_notes(*given)  # noqa: E731
    exchange = lambda *given: told.exchange(*given)  # noqa: E731
    with (
        mock.patch.object(Ring, "gather_notes", gather),
        mock.patch.object(Ring, "exchange", exchange),
    ):
        try:
            found = call.function(**given)
            if inspect.isgenerator(found):
                list(found)
        except Exception as error:
            return told, error
    return told, None


def untold(names: list[str], every: bool) -> dict[str, list[str]]:
    """Return which wrong arguments of one rank others would not hear of, by function or parameter.

    All ranks make each wrong call, so that none waits. Others would hear of it if this rank's notes
    are those of the right call, as far as they go, and the last one has the error, or the error
    follows from notes of all.
    """
    os.chdir(tempfile.mkdtemp())
    found: dict[str, list[str]] = {}
    for name in names:
        call = CALLS[name]()
        right = sent_by(call, dict(call.right))[0] if call.alone else []
        if not right:
            continue  # nobody waits for it
        for parameter, _, given in islice(surface.wrong(call), None if every else 3):
            fresh = CALLS[name]()  # a call that is right after all leaves tokens in a cache
            own = [each for each, t in call.right.items() if given.get(each) is t]
            sent, error = sent_by(fresh, given | {each: fresh.right[each] for each in own})
            alike = [one for one, _ in sent] == [one for one, _ in right[: len(sent)]]
            if error is not None and not (alike and isinstance(error, Disagreement)):
                at = name if name in ALONE else f"{name}.{parameter}"
                found.setdefault(at, []).append(repr(error)[:200])
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_wrong_argument_of_one_rank_is_told_to_all_or_listed(
    every: bool, pools: Callable
) -> None:
    mine, theirs = pools(2).run(untold, [*CALLS], every)
    assert mine.keys() == theirs.keys()
    assert mine.keys() <= ALONE.keys(), {name: mine[name] for name in mine.keys() - ALONE.keys()}
    assert not every or mine.keys() == ALONE.keys()
