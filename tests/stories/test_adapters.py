"""Adapters of kernels that need CUDA, in rings on the CPU: over stand-ins for those kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from tests.support import threads
from tests.support.cases import TOLERANCES, Attention, check_symmetric, results
from tests.support.features import FEATURES, LAYOUTS, Problem, refusal, together
from tests.support.reference import dense_attention, relative_error
from tests.support.sampling import grid
from tests.support.stand_ins import STAND_INS

SHORT = Attention(layout="zigzag", causal=True, batch=1)
WAYS = ((2, dict(ulysses=2)), (3, dict(transport="gather")), (4, {}))


@pytest.fixture
def stood_in(monkeypatch):
    """`stood_in(kernel)`: it runs on the CPU, and in rings, by its stand-in."""

    def of(kernel: str) -> None:
        STAND_INS[kernel](monkeypatch)
        can = KERNELS[kernel].CAN._replace(
            devices=None, dtypes=None, head_dim_multiple=1, head_dims=None, package=None
        )
        monkeypatch.setattr(KERNELS[kernel], "CAN", can)

    return of


@grid("kernel", STAND_INS, always=2, drawn=1)
def test_every_feature_in_rings(kernel, stood_in):
    stood_in(kernel)
    tried = [("causal", name, "gradient of lse") for name in FEATURES if name != "mask_mod"]
    tried += [("cu_seqlens",), ("documents",), ("window", "cu_seqlens"), ("window", "documents")]
    done = 0
    for i, names in enumerate(tried):
        problem, layout = Problem(together(names)), LAYOUTS[i % len(LAYOUTS)]
        why = refusal(lambda: problem.shard(Ring.alone(), layout, kernel))  # noqa: B023
        if why is not None:
            assert f"kernel={kernel!r} " in why
            continue
        for size, how in (WAYS[i % 3], WAYS[(i + 1) % 3]):
            errors = problem.errors(size, layout, kernel, **how)
            assert max(errors.values()) < 1e-12, (names, size, how, errors)
            done += 1
    assert done > 20


@pytest.mark.parametrize("kernel", STAND_INS)
@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_ranks_without_a_token(kernel, transport, length, stood_in):
    """One that fails where others have work to do would leave them waiting."""
    stood_in(kernel)
    case = replace(SHORT, length=length, kernel=kernel)
    tensors, _, dout, dlse = case.data()
    leaves = [t.clone().requires_grad_() for t in tensors]
    want = results(leaves, *dense_attention(*leaves, causal=True), dout, dlse)

    def rank(ring: Ring) -> float:
        at = case.places(ring.rank, ring.size)[0]
        mine = [t[:, at].requires_grad_() for t in tensors]
        found = ring_attn(
            *mine, causal=True, layout="zigzag", kernel=kernel, group=ring, return_lse=True,
            transport=transport,
        )  # fmt: skip
        got = results(mine, *found, dout[:, at], dlse[..., at])
        exact = [t[..., at] if i == 1 else t[:, at] for i, t in enumerate(want)]
        return max((relative_error(a, b) for a, b in zip(got, exact) if b.numel()), default=0.0)

    assert max(threads.run(4, rank)[0]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["flash-attn-2", "flash-attn-4"])
def test_gradients_are_made_where_others_read_them(kernel, dtype, stood_in, monkeypatch):
    """Gradients of zigzag's two calls overlap, and those of documents have gaps between them."""
    stood_in(kernel)
    monkeypatch.setitem(TOLERANCES, torch.bfloat16, 2e-2)
    blank, there = GradAccumulator.alloc, []

    def noted(total: GradAccumulator, *asked: slice | bool, **how: bool) -> Tensor:
        made = blank(total, *asked, **how)
        there.append(total._place is not None and made is total._place[0])
        return made

    monkeypatch.setattr(GradAccumulator, "alloc", noted)
    ids = tuple(i // 7 for i in range(40))
    for case in (Attention(40, "zigzag", causal=True), Attention(40, ids=(ids,))):
        there.clear()
        check_symmetric(replace(case, kernel=kernel, dtype=dtype), 4, 9)
        assert any(there)
