"""torch.compile on GPUs: inductor, and CUDA graphs of whole steps, over NCCL and shared memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ring_attention_pytorch import RingPlan, RingTransformer, ring_attn, shard_sequence
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.reference import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
STEPS = 6  # with CUDA graphs: as ever, recorded, replayed


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def drawn(n: int, seed: int) -> list[Tensor]:
    draw = torch.Generator(device()).manual_seed(seed)
    shapes = [(1, n, h, 64) for h in (8, 2, 2, 8)]
    kinds = dict(device=device(), dtype=torch.bfloat16, generator=draw)
    return [torch.randn(shape, **kinds) for shape in shapes]


def results(run: Any, plan: RingPlan, seed: int) -> list[Tensor]:
    *given, dout = drawn(256, seed)
    leaves = [t.requires_grad_() for t in given]
    torch.compiler.cudagraph_mark_step_begin()
    out, lse = run(*leaves, plan)
    grads = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
    return [t.detach().clone() for t in (out, lse, *grads)]


def calls(mode: str, transport: str | None, grows: bool, **options: Any) -> dict[str, Any]:
    """Compare compiled steps with eager ones, with two plans in turn; `grows`: memory does too."""
    torch._dynamo.reset()
    counters.clear()
    q, k, v, _ = (t.requires_grad_() for t in drawn(256, 0))
    options = dict(causal=True, layout="zigzag", transport=transport) | options
    plans = [RingPlan.make(q, k, v, **options), RingPlan.make(q, k, v, **options, window=100)]

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> tuple[Tensor, Tensor]:
        out, lse = ring_attn(q * 2, k, v, plan=plan, return_lse=True)
        return out + 1, lse

    run, worst = torch.compile(attend, mode=mode, fullgraph=True), 0.0
    for step in range(2 * STEPS):
        if grows and step == STEPS:
            larger = drawn(4096, 0)[:3]
            ring_attn(*larger, causal=True, layout="zigzag", transport=transport)
        plan = plans[step % 2]
        want = results(attend, plan, step)
        got = results(run, plan, step)
        worst = max(worst, *(relative_error(a.double(), b.double()) for a, b in zip(got, want)))
    skips = counters["inductor"]["cudagraph_skips"]
    return {"worst": worst, "skips": skips, "capturable": plans[0].capturable}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("transport", ["gather", "ring"])
def test_compiled_calls_are_eager_ones(nccl, size, mode, transport):
    for found in nccl(size).run(calls, mode, transport, False):
        assert found["worst"] < 2e-2
        assert found["capturable"] == (size == 1 or transport == "gather")
        assert found["skips"] == 0  # messages are but left out of the graph


def test_graphs_stay_right_as_shared_memory_grows(nccl):
    for found in nccl(2).run(calls, "reduce-overhead", "gather", True):
        assert found["worst"] < 2e-2


def test_heads_are_swapped_in_compiled_calls(nccl):
    options = dict(ulysses=2)
    for found in nccl(2).run(ulysses_calls, options):
        assert found["worst"] < 2e-2


def ulysses_calls(options: dict[str, Any]) -> dict[str, Any]:
    return calls("reduce-overhead", "gather", False, **options)


def losses(mode: str) -> tuple[list[float], list[float]]:
    """Train a small model with documents for some steps, eagerly and compiled."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = RingTransformer(
            num_tokens=64, dim=128, depth=2, dim_head=64, heads=4, causal=True, ring_attn=True,
            auto_shard_seq=False, layout="zigzag",
        ).to(device())  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(model, mode=mode, fullgraph=True) if compiled else model
        each = []
        for number in range(STEPS):
            draw = torch.Generator().manual_seed(number)
            ids = torch.randint(0, 64, (1, 512), generator=draw)
            documents = (torch.arange(512) // (100 + 10 * (number % 2)))[None]
            mine = [shard_sequence(t, layout="zigzag").to(device()) for t in (ids, documents)]
            plans = model.plans(mine[0], documents=mine[1])
            torch.compiler.cudagraph_mark_step_begin()
            loss = step(mine[0], labels=mine[0], plans=plans)
            loss.backward()
            for p in model.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= Ring().size
            optimizer.step()
            optimizer.zero_grad()
            each.append(loss.item())
        found.append(each)
    return found[0], found[1]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_has_the_losses_of_an_eager_one(nccl, mode):
    for eager, compiled in nccl(2).run(losses, mode):
        assert compiled == pytest.approx(eager, rel=2e-3)
