"""The plan of recurrent layers: agreed by all ranks, or refused by all with the same text."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_attention_pytorch import RingPlan, RunPlan, shard_batch
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.recurrent import (
    plan,
    ring_gated_delta_rule,
    ring_mamba2,
    ring_short_conv,
)
from ring_attention_pytorch.recurrent.halo import last_tokens
from ring_attention_pytorch.runtime.uncopied import replaced
from tests.support import threads
from tests.support.recurrent_cases import Spread


def refused(size: int, make) -> str:
    """Return the error that every rank of a ring raises."""

    def main(ring):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - returned, and matched there
            make(ring)
        return str(error.value)

    texts, _ = threads.run(size, main)
    assert len({*texts}) == 1
    return texts[0]


def test_the_striped_layout_is_refused_in_a_sentence() -> None:
    def make(ring):
        RunPlan.make(torch.zeros(1, 4), layout="striped", group=ring)

    assert "the striped layout has runs of one token; use layout" in refused(2, make)
    q = torch.zeros(1, 4, 1, 8)

    def of(ring):
        RunPlan.of(RingPlan.make(q, q, q, causal=True, layout="striped", group=ring))

    assert "the striped layout has runs of one token" in refused(2, of)


@pytest.mark.parametrize(
    "new", [lambda plan: plan.agree_once("ring_scan", final=False), lambda plan: plan.route()]
)
def test_a_first_call_in_a_cuda_graph_is_refused(monkeypatch, new) -> None:
    def make(ring):
        made = Spread(2, 8, 1, "zigzag", None).plan(ring)
        made.agree_once("ring_scan", final=True)
        monkeypatch.setattr(plan, "capturing", lambda device: True)
        captured = replaced(made, device=torch.device("cuda"))
        captured._agreed.update(made._agreed)
        captured.agree_once("ring_scan", final=True)  # as before
        new(captured)

    assert "call it once before the capture" in refused(2, make)


@pytest.mark.parametrize(
    ("match", "given"),
    [
        (
            "layout must be the same on every rank",
            lambda r: {"layout": ["contiguous", "zigzag"][r]},
        ),
        ("puts \\[4, 3\\] of 7 tokens on the ranks, got \\[3, 4\\]", lambda r: {"n": 3 + r}),
        ("batch must be the same on every rank", lambda r: {"b": 1 + r}),
        ("must end with the length of the whole, 8, got 7", lambda _: {"cu_seqlens": [0, 2, 7]}),
        ("cu_seqlens must be the same", lambda r: {"cu_seqlens": [0, 1 + r, 8]}),
        ("layout must be one of", lambda r: {"layout": "spiral"} if r else {}),
        ("documents must be int \\[1, 4\\]", lambda _: {"documents": torch.zeros(1, 3).long()}),
        ("x must be \\[batch, tokens, ...\\]", lambda _: {"shape": [4]}),
    ],
)
def test_wrong_arguments_raise_on_all_ranks(match, given) -> None:
    def make(ring):
        options = given(ring.rank)
        shape = options.pop("b", 1), options.pop("n", 4)
        RunPlan.make(torch.zeros(options.pop("shape", shape)), group=ring, **options)

    assert re.search(match, refused(2, make))


def test_documents_by_ids_and_by_borders_are_the_same() -> None:
    borders = [0, 3, 4, 9]
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])

    def main(ring):
        at = positions("zigzag", rank=ring.rank, ring_size=2, length=9)
        x, layout = torch.zeros(2, len(at), 5), "zigzag"
        one = RunPlan.make(x, layout=layout, cu_seqlens=borders, group=ring)
        two = RunPlan.make(x, layout=layout, documents=ids[at].expand(2, -1), group=ring)
        q = torch.zeros(2, len(at), 1, 8)
        plan = RingPlan.make(
            q, q, q, causal=True, layout=layout, cu_seqlens=borders, group=ring
        )  # fmt: skip
        assert one.runs == two.runs == RunPlan.of(plan).runs

    threads.run(2, main)


def test_a_batch_says_where_its_tokens_are() -> None:
    batch = shard_batch({"input_ids": torch.arange(8)[None], "cu_seqlens": [0, 3, 8]})
    with batch:
        plan = RunPlan.make(torch.zeros(1, 8, 2))
        assert [run.length for run in plan.mine] == [3, 5]
        with pytest.raises(ValueError, match="cu_seqlens were given beside those of the batch"):
            RunPlan.make(torch.zeros(1, 8, 2), cu_seqlens=[0, 8])


@pytest.mark.parametrize("given", [{}, {"cu_seqlens": [0, 4, 8]}, {"layout": "zigzag"}])
def test_a_plan_of_other_runs_is_refused_in_the_block_of_a_batch(given) -> None:
    """As one of the batch before."""
    borders = None if "layout" in given else [0, 3, 8]

    def main(ring):
        ids = {"input_ids": torch.arange(8)[None], "cu_seqlens": borders}
        x, weight = torch.zeros(1, 4, 2), torch.ones(2, 3)
        other = RunPlan.make(x, group=ring, **given)
        alike = RunPlan.make(x, group=ring, cu_seqlens=borders)
        with shard_batch(ids, group=ring, layout="contiguous"):
            ring_short_conv(x, weight, plan=RunPlan.make(x))
            ring_short_conv(x, weight, plan=alike)
            with pytest.raises(ValueError, match="ring_short_conv: the plan is of another layout"):
                ring_short_conv(x, weight, plan=other)
        ring_short_conv(x, weight, plan=other)

    threads.run(2, main)


def test_queries_that_are_not_the_whole_sequence_are_refused() -> None:
    q = torch.zeros(1, 4, 1, 8)
    given = dict(query_positions=torch.arange(3, 7), key_positions=torch.arange(4))
    plan = RingPlan.make(q, q, q, causal=True, **given)
    with pytest.raises(ValueError, match="need all tokens of a sequence, each on one rank"):
        RunPlan.of(plan)


def test_a_plan_says_its_runs_and_what_is_sent() -> None:
    spread = Spread(2, 8, 1, "zigzag", [[0, 7, 8]])
    (first, second), _ = threads.run(2, lambda ring: spread.plan(ring).explain(2, 4, 4))
    assert first.splitlines() == [
        "rank 0 of 2: 4 tokens, runs of document 0: 0-1; document 0: 6-6; document 1: 0-0",
        "maps of runs: 1 of 2 are sent from here, 0.000256 MB each; all ranks store them all",
    ]
    assert "runs of document 0: 2-5" in second


@pytest.mark.parametrize("layer", ["delta", "mamba", "convolution", "last tokens"])
def test_what_inference_has_made_serves_training(layer) -> None:
    """Tensors that are made in inference mode can't be saved for backward."""
    spread = Spread(2, 12, 1, "zigzag", [[0, 5, 12]])

    def main(ring):
        plan = spread.plan(ring)
        q, v, g = (torch.ones(1, 6, *more) for more in ((1, 3), (2, 4), (2,)))

        def compute(x: torch.Tensor) -> torch.Tensor:
            if layer == "delta":
                return ring_gated_delta_rule(q, q, x, -g, g, plan=plan, final=True)[0]
            if layer == "mamba":
                return ring_mamba2(x, x[..., 0], -g[0, 0], q, q, plan=plan)[0]
            if layer == "convolution":
                return ring_short_conv(x.flatten(2), torch.ones(8, 3), plan=plan)
            return last_tokens(x, 3, plan=plan)

        with torch.inference_mode():
            want = compute(v)
        leaf = v.clone().requires_grad_()
        found = compute(leaf)
        found.sum().backward()
        assert torch.equal(found, want)
        assert leaf.grad is not None

    threads.run(2, main)


def test_tensors_without_values_are_refused() -> None:
    """The tables of a call's first kind would have none either, and stay."""
    made = RunPlan.make(torch.zeros(1, 4, 2))
    with FakeTensorMode():
        x = torch.zeros(1, 4, 2)
        with pytest.raises(ValueError, match="x must have values, got a FakeTensor on cpu"):
            made.check_tokens("a layer", x=x)
