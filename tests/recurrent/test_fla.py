"""The kernels of fla-core by their interface: a loop stands for them here."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from ring_attention_pytorch.recurrent import fla, layers, ring_gated_delta_rule, ring_kda
from tests.support import threads
from tests.support.recurrent_cases import Spread
from tests.support.recurrent_reference import sequential
from tests.support.reference import relative_error


def loop(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
):
    """As `chunk_gated_delta_rule` and `chunk_kda` of fla-core 0.6.0, run by run."""
    assert len(v) == 1
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    assert initial_state.dtype == g.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int64
    assert len(initial_state) == len(cu_seqlens) - 1
    assert scale is not None
    assert output_final_state
    outs, states = [], []
    if use_qk_l2norm_in_kernel:
        q, k = (t * (t.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
    for run, (first, last) in enumerate(pairwise(cu_seqlens)):
        part = [t[:, first:last].float() for t in (q * scale, k, v, g, beta)]
        begins = torch.zeros(1, last - first, dtype=torch.bool)
        out, state = sequential(*part, begins, initial_state[run : run + 1])
        outs.append(out.to(v.dtype))
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


@pytest.fixture
def stand_in(monkeypatch):
    """Modules of fla-core whose kernels are loops, on any device."""
    for name, function in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function, loop)
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(layers, "fla_refusal", lambda *_: None)


@pytest.mark.parametrize("rule", [ring_gated_delta_rule, ring_kda])
@pytest.mark.usefixtures("stand_in")
def test_one_call_of_all_runs(rule) -> None:
    spread = Spread(3, 40, 2, "zigzag", [[0, 9, 40], [0, 20, 22, 40]])
    draw = torch.Generator().manual_seed(0)
    shape = 2, 40
    q, k = (torch.randn(*shape, 2, 4, generator=draw) for _ in range(2))
    v, beta = torch.randn(*shape, 4, 3, generator=draw), torch.rand(*shape, 4, generator=draw)
    g = -torch.rand(*shape, 4, *(4,) * (rule is ring_kda), generator=draw)
    given = [t.bfloat16() for t in (q, k, v)] + [g, beta.bfloat16()]
    q, k = (t.double() / t.double().norm(dim=-1, keepdim=True) for t in given[:2])
    want, last = sequential(
        q / 2, k, *(t.double() for t in given[2:]), spread.begins
    )  # fmt: skip

    def main(ring):
        at = spread.held(ring.rank)
        mine = [t[:, at].clone().requires_grad_() for t in given]
        out, state = rule(*mine, plan=spread.plan(ring), normalize=True, final=True)
        assert out.dtype == torch.bfloat16
        assert relative_error(out, want[:, at]) < 2e-2
        assert relative_error(state, last) < 2e-2
        out.float().square().sum().backward()
        assert all(t.grad is not None for t in mine)

    threads.run(3, main)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("refused", [False, True])
def test_where_fla_refuses_backward_another_of_its_kernels_computes_it(monkeypatch, refused):
    """By the names in fla that it asks itself."""
    flags = ModuleType("fla.ops.common.chunk_o")
    vars(flags).update(IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True)
    vars(flags).update(TRITON_ABOVE_3_7_1=not refused)
    common = ModuleType("fla.ops.common")
    common.chunk_o = flags
    monkeypatch.setitem(sys.modules, "fla.ops.common", common)
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", flags)
    called = []
    for name, function in (("gated_delta_rule", "chunk_gated_delta_rule"), ("kda", "chunk_kda")):

        def counted(*args, name=name, **given):
            called.append(name)
            return loop(*args, **given)

        monkeypatch.setattr(sys.modules[f"fla.ops.{name}"], function, counted)
    q, beta = torch.randn(1, 9, 2, 4).bfloat16(), torch.rand(1, 9, 2).bfloat16()
    g = -torch.rand(1, 9, 2)

    def main(ring):
        plan = Spread(1, 9, 1, "contiguous", None).plan(ring)
        found = []
        for leaf in (g, g.clone().requires_grad_()):
            out, _ = ring_gated_delta_rule(q, q, q, leaf, beta, plan=plan, normalize=True)
            found.append(out)
        found[1].float().sum().backward()
        assert leaf.grad.shape == g.shape
        torch.testing.assert_close(found[1], found[0])

    threads.run(1, main)
    assert called == ["gated_delta_rule", "kda" if refused else "gated_delta_rule"]


def test_refusals() -> None:
    plan = Spread(1, 4, 1, "contiguous", None)
    q, g = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1)

    def main(ring):
        ring_gated_delta_rule(q, q, q, g, g, plan=plan.plan(ring), kernel="fla")

    with pytest.raises(ValueError, match="kernel='fla': "):
        threads.run(1, main)


@pytest.mark.parametrize(
    ("dtype", "d_k", "why"),
    [(torch.float32, 8, "one dtype of 16 bits"), (torch.bfloat16, 8, "need CUDA")],
)
def test_why_a_call_is_refused(monkeypatch, dtype, d_k, why) -> None:
    monkeypatch.setattr(fla, "_installed", lambda _: True)
    t = torch.zeros(1, 1, 1, d_k, dtype=dtype)
    assert why in str(fla.fla_refusal(t, t, t))
