"""Which transport and which fabric: by what ranks share, by their budget, or refused."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ring_attention_pytorch.comm import symmetric_memory, transports
from ring_attention_pytorch.comm.fabric_copies import CopyEngines
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.fabric_messages import Messages
from ring_attention_pytorch.comm.transports import fabric_among, make_transport, owners_at_once
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.schedule import policy
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import KVShape, Workload
from tests.support import threads
from tests.support.cases import Attention, over_shared_memory
from tests.support.counted import Live

# --- memory ---


def most_bytes(case: Attention, size: int) -> int:
    """The most bytes of others' keys and gradients that the last rank held at once, in backward."""
    tensors, _, _, _ = case.data()

    def main(ring: Ring) -> int:
        at, _ = case.places(ring.rank, size)
        q, k, v = (t[:, at] for t in tensors)
        plan = RingPlan.make(
            q, k, v, causal=case.causal, layout=case.layout, group=ring,
            transport=case.transport, memory=case.memory,
        )  # fmt: skip
        own = GradAccumulator(k), GradAccumulator(v)
        held = [total.begin_update() for total in own]
        # one rank counts: PyTorch may crash where several threads look up a mode's rules
        live = Live()
        with live if ring.rank == size - 1 else nullcontext():
            for _, of_keys in plan.transport.stream_back(plan.keys(k, v), own):
                for total in of_keys:
                    total.begin_update()
        assert all(total.begin_update() is memory for total, memory in zip(own, held))
        return live.most

    return threads.run(size, main)[0][-1]


FEW = [
    (dict(causal=True), 32),
    (dict(), 64),
    (dict(causal=True, window=7), 8),
    (dict(window=7), 15),
    (dict(causal=True, cu_seqlens=[0, 16, 32, 48, 64]), 8.5),
]


@pytest.mark.parametrize(("shown", "most"), FEW)
def test_few_tokens_come_together(shown, most, monkeypatch):
    """Each of 64 tokens sees so many at most. CUDA graphs launch nothing one by one."""

    def main(ring: threads.ThreadRing) -> list[tuple[type | None, type]]:
        q = torch.empty(1, 16, 2, 4)
        plan = RingPlan.make(q, q, q, **shown, layout="zigzag", group=ring)
        made = [
            transports.make_transport(
                "gather", ring, plan.blocks, at_once, plan.chosen.shape, q.device
            )
            for at_once in (9, 1)
        ]
        few = (
            transports.make_one_stream(each, plan.blocks, plan.chosen.shape, q.device, machine)
            for each in made
        )
        return [
            (spares and type(spares.fabric), type(each.fabric)) for spares, each in zip(few, made)
        ]

    monkeypatch.setattr(transports, "shared_by", threads.shared_by)
    job = KVShape(1, 2, 2, 4, 4, itemsize=4)
    flops, copied = 16 * most * job.pair_flops, 16 * job.token_bytes
    of_both = 1 / H200.forward + 2.5 / H200.backward
    few, many = (OneStream, CopyEngines), (None, CopyEngines)
    for *bounds, found in (
        (flops, copied, few), (flops - 1, copied, many), (flops, copied - 1, many)
    ):  # fmt: skip
        machine = H200._replace(
            host=(bounds[0] + 0.5) * of_both, memory=(bounds[1] + 0.5) / policy._SOON_COPIED
        )
        assert threads.run(4, main)[0] == [[found, many]] * 4


def plans_know_their_own_transport() -> None:
    """How often it has the kernel called, and whether calls may overlap, whoever asked before."""

    def main(ring: threads.ThreadRing) -> list:
        q = torch.randn(1, 8, 2, 4)
        plan = RingPlan.make(q, q, q, causal=True, layout="contiguous", group=ring)
        many, few = (
            over_shared_memory(plan, [q] * 3, ring, 9, **how) for how in ({}, dict(together=True))
        )
        found = []
        for first, second in ((many, few), (few, many)):
            plans = [first.by(first.transport), first.by(first.transport).by(second.transport)]
            found.append([
                [p.calls(back) for back in (False, True)]
                + [p.tiles(p.blocks.keys[ring.rank])[0][1].concurrent]
                for p in plans
            ])  # fmt: skip
        assert found[0] == found[1][::-1]
        return found[0]

    own_alone, both = threads.run(2, main)[0]
    assert own_alone == [[1, 1, True], [1, 1, False]]
    assert both == [[2, 2, True], [1, 1, False]]


def test_plans_know_their_own_transport():
    plans_know_their_own_transport()


def test_ranks_of_one_machine_gather_and_swap_out_of_shared_memory(monkeypatch):
    """As those of GPUs are put together; what they share is stood in for."""

    class Group:
        """A stand-in for the group of a workspace."""

    wanted, group = [], Group()
    space = SimpleNamespace(reserve=lambda group, **room: wanted.append({group, *room}))
    monkeypatch.setattr(symmetric_memory, "_spaces", {group: space})
    ring = SimpleNamespace(rank=1, size=2, machines=(0, 0), shared=lambda: (group, (4, 6)))
    everyone, device = all_segments("zigzag", 2, 16), torch.device("cuda", 0)
    blocks, job = Workload(everyone, everyone, Mask()), KVShape(1, 2, 1, 2, 3, itemsize=2)
    gather = make_transport("gather", ring, blocks, 1, job, device).fabric
    assert isinstance(gather, CopyEngines)
    assert (gather.space, gather.ranks) == (space, (4, 6))
    swap = fabric_among(ring, 100, device)
    assert (swap.space, swap.ranks) == (space, (4, 6))
    assert wanted == [{group, "keys", "grads"}, {group, "swaps"}]
    for length, late in ((64, True), (1 << 22, False)):
        four = Workload(*[all_segments("zigzag", 4, length)] * 2, Mask(causal=True))
        among = SimpleNamespace(rank=1, size=4, machines=(0,) * 4, shared=lambda: (group, range(4)))
        made = make_transport("gather", among, four, 3, job, device)
        assert (len(made.schedule.forward.blocks[1].stages) == 2) == late
    for other in (
        make_transport("gather", ring, blocks, 1, job, torch.device("cpu")),
        make_transport("ring", ring, blocks, 1, job, device),
    ):
        assert isinstance(other.fabric, Messages)
    assert isinstance(fabric_among(ring, 100, torch.device("cpu")), Messages)
    monkeypatch.setattr(symmetric_memory, "_spaces", {group: None})
    of_machine = symmetric_memory.PeerGroup(space, group, (1, 2))
    for near in (None, of_machine):
        monkeypatch.setattr(transports, "near_by", lambda *_, near=near: near)
        swap = fabric_among(ring, 100, device)
        assert isinstance(swap, Messages if near is None else OneStream)
    assert swap.ranks == (1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_the_memory_of_a_gather_is_bounded_by_its_budget(causal):
    size, n, d = 8, 16, 64
    case = Attention(n * size, "zigzag", causal=causal, batch=1, d=d, d_v=d, transport="gather")
    shard_bytes, before = n * case.key_heads * 2 * d * 8, 0
    for at_once in (1, 2, 4):
        memory = shard_bytes * (5 + 7 * at_once)
        blocks = Workload(*[all_segments("zigzag", size, n * size)] * 2, Mask(causal))
        assert owners_at_once(memory, blocks, KVShape(1, 4, case.key_heads, d, d, 8)) == at_once
        taken = most_bytes(replace(case, memory=memory), size)
        assert before < taken <= memory
        before = taken
    assert before < most_bytes(case, size)


# --- asking for one ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            dict(transport="pigeon"),
            r"transport must be None or one of 'ring', 'gather', got 'pigeo",
        ),
        (dict(memory=-1), "memory must be None or at least 0 bytes, got -1"),
        (dict(transport="ring", memory=5), r"always takes the least memory"),
    ],
)
def test_what_can_t_be_is_refused(options, said):
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=said):
        ring_attn(q, q, q, **options)


@pytest.mark.parametrize("name", ["transport", "ulysses", "memory"])
def test_ranks_that_ask_for_different_ways_are_told(name):
    other = {"transport": "gather", "ulysses": 2, "memory": 100}[name]

    def main(ring: Ring) -> str:
        q = torch.randn(1, 4, 2, 8)
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank") as error:
            ring_attn(q, q, q, group=ring, **({name: other} if ring.rank == 1 else {}))
        return str(error.value)

    said, hub = threads.run(2, main)
    assert len(set(said)) == 1
    assert hub.exchanges == [0, 0]
