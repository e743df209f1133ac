"""Recurrent layers on CUDA devices: the kernel that follows maps, and fla's kernels over a ring.

Without fla-core (package flash-linear-attention's kernels) only the scan and plain PyTorch run.
"""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.lib.imagined import Imagined
from benchmarks.lib.rings import captured
from ring_attention_pytorch import (
    RunPlan,
    positions,
    ring_gated_delta_rule,
    ring_kda,
    ring_mamba2,
    ring_scan,
    ring_short_conv,
)
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent import cuts, fla_passes
from tests.support import threads
from tests.support.recurrent_reference import sequential
from tests.support.reference import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
needs_fla = pytest.mark.skipif(find_spec("fla") is None, reason="fla-core is not installed")
N, CUTS, KEY_HEADS, HEADS, D = 320, [0, 100, 101, 210, 320], 2, 4, 64


def scanned() -> list[float]:
    """For a pool: errors of float32 by the kernel, of states and gradients."""
    ring, device = Ring(None), torch.device("cuda", torch.cuda.current_device())
    like = torch.empty(1, N // ring.size, device=device)
    plan = RunPlan.make(like, layout="zigzag")
    draw = torch.Generator(device).manual_seed(ring.rank)
    shape = len(plan.mine), HEADS, D, D
    m, u, weights = (torch.randn(shape, generator=draw, device=device) / 8 for _ in range(3))
    found = []
    for dtype in (torch.float64, torch.float32):
        own = [t.to(dtype).requires_grad_() for t in (m, u)]
        state, last = ring_scan(*own, plan=plan, final=True)
        assert last is not None
        loss = (state * weights).sum() + last.square().sum() / ring.size
        found.append([state.detach(), last.detach(), *torch.autograd.grad(loss, own)])
    return [relative_error(got, want) for want, got in zip(*found)]


def in_pieces(rule: str) -> list[float]:
    """For a pool: errors as of `ruled`, of runs that are cut at 64 tokens."""
    with mock.patch.object(cuts, "_SHORTEST", 64):
        return ruled(rule, "fla", "zigzag", False)


def ruled(
    rule: str, kernel: str, layout: str, zeros: bool, ring: Ring | None = None, width: int = D
) -> list[float]:
    """For a pool: errors of outputs, last states and gradients of a delta rule in bfloat16.

    `width` is the size of q, k and v.
    """
    ring, device = ring or Ring(None), torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, N, *shape, generator=draw, device=device)

    q, k, v = (normal(h, width) for h in (KEY_HEADS, KEY_HEADS, HEADS))
    g = -0.1 * torch.nn.functional.softplus(normal(HEADS, *(width,) * (rule == "kda")))
    if zeros:
        chance = torch.rand(g.shape, generator=draw, device=device)
        g = torch.where(chance < 0.03, -torch.inf, torch.where(chance > 0.97, 0.0, g))
    given = [t.bfloat16() for t in (q, k, v)] + [g, normal(HEADS).sigmoid().bfloat16()]
    cotangent = normal(HEADS, width)
    begins = torch.zeros(1, N, dtype=torch.bool, device=device)
    begins[:, CUTS[:-1]] = True
    wide = [t.double().requires_grad_() for t in given]
    q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in wide[:2])
    out, last = sequential(q * width**-0.5, k, *wide[2:], begins)
    want = torch.autograd.grad((out * cotangent.double()).sum() + last.sum(), wide)
    at = positions(layout, rank=ring.rank, ring_size=ring.size, length=N).to(device)
    mine = [t[:, at].clone().requires_grad_() for t in given]
    plan = RunPlan.make(mine[0], layout=layout, cu_seqlens=CUTS, group=ring)
    function = ring_kda if rule == "kda" else ring_gated_delta_rule
    got, state = function(*mine, plan=plan, normalize=True, final=True, kernel=kernel)
    assert state is not None
    loss = (got.float() * cotangent[:, at]).sum() + state.sum() / ring.size
    grads = torch.autograd.grad(loss, mine)
    pairs = [(got.detach(), out[:, at].detach()), (state.detach(), last.detach())]
    pairs += [(a, b[:, at]) for a, b in zip(grads, want)]
    return [relative_error(a, b) for a, b in pairs]


def replayed(kernel: str) -> list[float]:
    """For a pool: errors of a captured step, replayed with two contents, against the step itself.

    A step is a convolution and a delta rule, forward and backward.
    """
    ring, device = Ring(None), torch.device("cuda", torch.cuda.current_device())
    draw = torch.Generator(device).manual_seed(ring.rank)
    n = N // ring.size
    plan = RunPlan.make(torch.empty(1, n, device=device), layout="zigzag")
    shapes = [(1, n, KEY_HEADS, D)] * 2 + [(1, n, HEADS * D)] + [(1, n, HEADS)] * 2
    given = [torch.empty(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    weight = torch.randn(HEADS * D, 4, generator=draw, device=device)
    cotangent = torch.randn(1, n, HEADS, D, generator=draw, device=device)

    def fill() -> None:
        with torch.no_grad():
            for t in given:
                t.copy_(torch.rand(t.shape, generator=draw, device=device) - 0.5)
            given[3].sub_(0.5)
            given[4].add_(0.5)

    def step() -> list[Tensor]:
        q, k, v, g, beta = given
        v = ring_short_conv(v, weight, plan=plan).view(cotangent.shape)
        out, last = ring_gated_delta_rule(
            q, k, v, g, beta, plan=plan, normalize=True, final=True, kernel=kernel
        )
        assert last is not None
        loss = (out * cotangent).sum() + last.sum()
        return [out.detach(), last.detach(), *torch.autograd.grad(loss, given)]

    fill()
    replay = captured(step)  # which makes a step before
    errors = []
    for _ in range(2):
        fill()
        want = [t.clone() for t in step()]
        got = replay()
        errors += [relative_error(a, b) for a, b in zip(got, want)]
        for t in got:
            t.fill_(torch.nan)
    return errors


def test_one_kernel_follows_maps(nccl) -> None:
    assert max(max(errors) for errors in nccl(2).run(scanned)) < 1e-5


@needs_fla
@pytest.mark.parametrize("zeros", [False, True], ids=["", "gates 0 and 1"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_delta_rules_by_kernels_of_fla(nccl, rule, layout, zeros) -> None:
    of_ranks = nccl(2).run(ruled, rule, "fla", layout, zeros)
    assert max(max(errors) for errors in of_ranks) < 2e-2


@needs_fla
@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_runs_in_pieces(nccl, rule) -> None:
    assert max(max(errors) for errors in nccl(2).run(in_pieces, rule)) < 2e-2


@needs_fla
@pytest.mark.parametrize("size", [1, 2, 4])  # of 4 no run is long enough to be cut
@pytest.mark.parametrize("width", [D, 128])  # columns of a program, too
@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_runs_in_pieces_of_threads(taking_turns, rule, width, size) -> None:
    def rank_main(ring: Ring) -> list[float]:
        with torch.autograd.set_multithreading_enabled(False):  # ranks wait for one another
            return ruled(rule, "fla", "zigzag", True, ring, width)

    with mock.patch.object(cuts, "_SHORTEST", 64):
        of_ranks = threads.run(size, rank_main)[0]
    assert max(max(errors) for errors in of_ranks) < 2e-2


@pytest.mark.parametrize("rule", ["gated", "kda"])
def test_delta_rules_in_plain_pytorch(nccl, rule) -> None:
    of_ranks = nccl(2).run(ruled, rule, "eager", "zigzag", True)
    assert max(max(errors) for errors in of_ranks) < 1e-2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kernel", ["eager", pytest.param("fla", marks=needs_fla)])
def test_a_step_in_a_cuda_graph(nccl, kernel, size) -> None:
    of_ranks = nccl(size).run(replayed, kernel)
    assert max(max(errors) for errors in of_ranks) < 1e-3


@needs_fla
def test_tensors_may_begin_anywhere() -> None:
    """A call with aligned tensors has compiled kernels already."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, N, KEY_HEADS, D)] * 2 + [(1, N, HEADS, D)] + [(1, N, HEADS)] * 2
    values = [torch.rand(shape, generator=draw, device="cuda") / 8 for shape in shapes]
    plan, found = RunPlan.make(values[0]), []
    for offset in (0, 0, 1):
        given = []
        for t in (*values, values[2]):
            room = torch.empty(t.numel() + offset, device="cuda", dtype=torch.bfloat16)
            given.append(room[offset:].view(t.shape).copy_(t))
        leaves = [t.requires_grad_() for t in given[:5]]
        q, k, v, g, beta = leaves
        out, _ = ring_gated_delta_rule(q, k, v, -g, beta, plan=plan, kernel="fla")
        found.append([out.detach(), *torch.autograd.grad(out, leaves, given[5])])
    assert max(relative_error(got, want) for _, want, got in zip(*found)) < 5e-3


def test_mamba_2() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, N, HEADS, D, generator=draw, device="cuda").bfloat16()
    dt = torch.rand(1, N, HEADS, generator=draw, device="cuda")
    b, c = (torch.randn(1, N, 2, D, generator=draw, device="cuda").bfloat16() for _ in range(2))
    a = -torch.rand(HEADS, generator=draw, device="cuda")
    got, _ = ring_mamba2(x, dt, a, b, c, plan=RunPlan.make(x, cu_seqlens=CUTS))
    begins = torch.zeros(1, N, dtype=torch.bool, device="cuda")
    begins[:, CUTS[:-1]] = True
    wide = [t.double() for t in (c, b, x, dt, a)]
    want, _ = sequential(
        wide[0], wide[1], wide[2] * wide[3][..., None], wide[3] * wide[4], None, begins
    )
    assert relative_error(got, want) < 1e-2


@needs_fla
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rule", [ring_gated_delta_rule, ring_kda])
def test_tapes_repeat_phases_to_the_bit(rule, normalize: bool) -> None:
    """With other tensors in each call, beside the phases themselves."""
    channels = rule is ring_kda

    def drawn(seed: int) -> list[Tensor]:
        draw = torch.Generator("cuda").manual_seed(seed)
        shapes = [(4 << channels, 64)] * 2 + [(8, 64), (8, 64) if channels else (8,), (8,)]
        q, k, v, g, beta = (
            torch.randn(1, 1024, *shape, device="cuda", generator=draw) for shape in shapes
        )
        k = torch.nn.functional.normalize(k, dim=-1)
        given = [*(t.bfloat16() for t in (q / 8, k, v)), -g.abs() / 10, beta.sigmoid().bfloat16()]
        return [t.requires_grad_() for t in given]

    def phases_themselves(phase, call, *given):
        return phase(call, *given)

    plan = RunPlan.make(drawn(0)[0], layout="zigzag", group=Imagined(0, 2))
    for seed in range(6):
        given, found = drawn(seed), []
        for run in (fla_passes._run, phases_themselves):
            with mock.patch.object(fla_passes, "_run", run):
                out, _ = rule(*given, plan=plan, normalize=normalize)
                found.append([out, *torch.autograd.grad(out, given, out.detach().cos())])
        assert all(map(torch.equal, *found)), seed
    phases = [made for made in plan._made.values() if isinstance(made, fla_passes._Phase)]
    assert len(phases) == 4
    assert all(tape.replay for each in phases for tape in each.tapes.by_kind.values())
