"""Plans: agreed on once, used for many calls, and refused where a call is another."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.plan import ring_plan
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.cases import Attention, check, errors, miscounted, oracle, results
from tests.support.reference import relative_error


def test_a_plan_made_under_autocast_fits_calls_under_autocast() -> None:
    q = torch.randn(1, 6, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = RingPlan.make(q, q, q, causal=True)
        assert ring_attn(q, q, q, plan=plan).dtype == torch.bfloat16


def test_a_plan_is_agreed_on_once_and_used_many_times():
    case = Attention(22, "zigzag", causal=True, window=8, masked=True)
    tensors, mask, dout, dlse = case.data()

    def main(ring: Ring) -> list[list[Tensor]]:
        at, _ = case.places(ring.rank, 3)
        mine = [t[:, at].requires_grad_() for t in tensors]
        plan = RingPlan.make(
            *mine, causal=True, window=8, key_mask=mask[:, at], layout="zigzag", group=ring
        )
        assert ring.hub.gathers[ring.rank] == 1
        found = []
        for _ in range(3):
            out, lse = ring_attn(*mine, plan=plan, return_lse=True)
            found.append(results(mine, out, lse, dout[:, at], dlse[..., at]))
        assert ring.hub.gathers[ring.rank] == 1
        assert torch.equal(plan.positions(), at)
        return found

    by_rank, _ = threads.run(3, main)
    for round_ in zip(*by_rank):
        check(case, 3, (errors(case, r, 3, got, oracle(case)) for r, got in enumerate(round_)))


@pytest.mark.parametrize(
    "option",
    [
        {"causal": True}, {"window": 3}, {"scale": 1.0}, {"softclamp": 2.0}, {"layout": "zigzag"},
        {"kernel": "eager"}, {"bucket_size": 7}, {"cross": True}, {"group": Ring.alone()},
        {"key_mask": torch.ones(2, 6, dtype=torch.bool)},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_a_plan_with_other_options_is_refused(option):
    q = torch.randn(2, 6, 4, 8)
    plan = RingPlan.make(q, q, q)
    with pytest.raises(ValueError, match=f"plan already decides {next(iter(option))}"):
        ring_attn(q, q, q, plan=plan, **option)


def test_ranks_that_wait_hear_of_what_is_given_beside_a_plan(monkeypatch):
    q, bias, heard = torch.randn(2, 6, 4, 8), torch.zeros(2, 6), []
    plan = RingPlan.make(q, q, q, key_bias=bias)
    monkeypatch.setattr(Ring, "report_failure", lambda _, error: heard.append(str(error)))
    for wrong, said in ((dict(window=3), "decides window"), (dict(key_bias=bias / 0), "finite")):
        with pytest.raises(ValueError, match=said):
            ring_attn(q, q, q, plan=plan, **wrong)
        assert said in heard.pop()


@pytest.mark.parametrize(
    "other",
    [(1, 6, 4, 8), (2, 7, 4, 8), (2, 6, 2, 8), (2, 6, 4, 4)],
    ids=["batch", "n", "heads", "d"],
)
def test_a_plan_for_other_shapes_is_refused(other):
    q = torch.randn(2, 6, 4, 8)
    plan = RingPlan.make(q, q, q)
    for wrong in (torch.randn(other), q.double()):
        with pytest.raises(ValueError, match=r"plan was made for batch=2, n=6.* got batch="):
            ring_attn(wrong, wrong, wrong, plan=plan)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plan_knows_how_often_its_kernel_is_called(transport, size):
    """So that a kernel which merges by itself rounds in the last call, and not before."""
    memory = 0 if transport == "gather" else None
    for case in (
        Attention(29, "zigzag", causal=True),
        Attention(29, "zigzag", causal=True, memory=memory),
        Attention(29, "contiguous", causal=True, window=3),
        Attention(2, "striped", causal=True),
        Attention(24, ids=((0,) * 6 + (1,) * 13 + (2,) * 5,), causal=True),
    ):
        assert not miscounted(replace(case, transport=transport), size)


def test_a_copy_of_a_plan_has_the_same_transport(pools) -> None:
    """Copied memory would be none that ranks share."""
    assert max(pools(2).run(copied)) < 1e-12


def copied() -> float:
    q = torch.randn(1, 4, 2, 4, dtype=torch.float64)
    plan = RingPlan.make(q, q, q, causal=True)
    other = copy.deepcopy(plan)
    assert other.transport is plan.transport
    return relative_error(ring_attn(q, q, q, plan=other), ring_attn(q, q, q, plan=plan))


def test_a_call_that_fails_leaves_no_work_on_side_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> tuple[()]:
        raise MemoryError

    forgotten: list[torch.device] = []
    monkeypatch.setattr(ring_plan, "reset_side_streams", forgotten.append)
    q = torch.randn(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q)
    with pytest.raises(MemoryError):
        plan.run("forward", fails, q, back_of=None)
    assert forgotten == [q.device]
