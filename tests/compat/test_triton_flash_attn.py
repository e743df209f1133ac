"""Attention to one block by the names of 0.5.20: blocks merge, and gradients add up."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from einops import rearrange
from ring_attention_pytorch.triton_flash_attn import flash_attn_backward, flash_attn_forward
from torch import Tensor

from ring_attention_pytorch import triton_flash_attn
from ring_attention_pytorch.plan.ring_plan import RingPlan
from tests.support.interpreter import needs_triton
from tests.support.original import Errors, check
from tests.support.reference import dense_attention, relative_error

# --- blocks of keys by the Triton kernel ---


def test_without_a_gpu_the_triton_functions_say_what_they_need() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="kernel='triton' runs on CUDA"):
        flash_attn_forward(q, q, q)
    with pytest.raises(ValueError, match="bias must be"):
        flash_attn_forward(q, q, q, bias=torch.ones(1, 4))
    with pytest.raises(ValueError, match="bias must be"):
        flash_attn_forward(q, q, q, bias=torch.zeros(1, 1, 4, 4))


def by_kernel(kernel: str) -> Any:
    """Lets another kernel do what the Triton kernels do on GPUs."""

    def make(*qkv: Tensor, **options: Any) -> RingPlan:
        assert options["kernel"] == "triton"
        return RingPlan.make(*qkv, **(options | {"kernel": kernel}))

    return mock.patch.object(triton_flash_attn, "RingPlan", SimpleNamespace(make=make))


def striped_blocks(case: dict[str, Any]) -> Errors:
    """A striped ring by hand in one process: blocks of keys one after another, as 0.5 did."""
    torch.manual_seed(0)
    ranks, n, h, h_kv = 2, 5, 2, case.get("h_kv", 2)
    q, k, v = (
        torch.randn(1, n * ranks, heads, 16, dtype=torch.float64).requires_grad_()
        for heads in (h, h_kv, h_kv)
    )
    clamp, scale, first = case.get("clamp"), case.get("scale"), case.get("head_first", False)
    mask = torch.rand(1, n * ranks) < 0.7 if case.get("masked") else None
    if mask is not None:
        mask[:, 0] = False  # the first query sees nothing
    want, lse_ = dense_attention(q, k, v, causal=True, softclamp=clamp, scale=scale, key_mask=mask)
    cotangent = torch.randn_like(want)
    want.backward(cotangent)
    found: Errors = {}
    stripe = [slice(rank, None, ranks) for rank in range(ranks)]
    dk, dv = (torch.zeros(t.shape) for t in (k, v))
    options = dict(
        causal=True, softmax_scale=scale, softclamp_qk_sim=clamp is not None,
        softclamp_value=clamp or 1.0,
    )  # fmt: skip
    for mine in range(ranks):
        carry: Any = (None, None, None)
        queries = q[:, stripe[mine]].detach().float()
        blocks = []
        for owner in range(ranks):
            keys = [t[:, stripe[owner]].detach().float() for t in (k, v)]
            bias = None
            if mask is not None:
                bias = torch.where(mask[:, stripe[owner]], 0.0, -torch.inf)
            how = dict(options, causal_mask_diagonal=mine < owner)
            blocks.append((keys, bias, how))
            given = [queries, *keys]
            if first:
                given = [t.transpose(1, 2).contiguous() for t in given]
            carry = flash_attn_forward(
                *given, bias=bias, o=carry[0], m=carry[1], lse=carry[2],
                load_accumulated=owner > 0, head_first_dim=first,
                remove_padding=case.get("remove", False), **how,
            )  # fmt: skip
        out, m, lse = carry
        out = out.transpose(1, 2).contiguous() if first else out
        scaled = out * (m - lse).exp()[..., :n].transpose(1, 2).unsqueeze(-1)
        found[f"out {mine}"] = relative_error(scaled, want[:, stripe[mine]])
        seen = lse_[..., stripe[mine]].isfinite()
        at = lse[..., :n]
        found[f"lse {mine}"] = relative_error(at[seen], lse_[..., stripe[mine]][seen])
        dq, delta = torch.zeros_like(queries), None
        for owner, (keys, bias, how) in enumerate(blocks):
            parts = [torch.empty_like(t) for t in (queries, *keys)]
            bias = None if bias is None else rearrange(bias, "b j -> b 1 1 j")
            delta = flash_attn_backward(
                cotangent[:, stripe[mine]].float(), queries, *keys, out, lse, *parts,
                delta=delta, bias=bias, **how,
            )  # fmt: skip
            dq += parts[0]
            dk[:, stripe[owner]] += parts[1]
            dv[:, stripe[owner]] += parts[2]
        assert delta.shape == lse.shape
        found[f"dq {mine}"] = relative_error(dq, q.grad[:, stripe[mine]])
    return found | {"dk": relative_error(dk, k.grad), "dv": relative_error(dv, v.grad)}


BLOCKS = [
    dict(masked=True, remove=True, head_first=True),
    dict(clamp=2.0, scale=0.3, h_kv=1),
    dict(masked=True, h_kv=1),
]


@needs_triton
@pytest.mark.parametrize(
    "case", [BLOCKS[0], pytest.param(BLOCKS[1], marks=pytest.mark.thorough)], ids=str
)
def test_blocks_of_a_striped_ring_merge_and_sum_by_triton(interpreted: Any, case: dict) -> None:
    check([interpreted.submit(striped_blocks, case).result()], 1e-5)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks_of_a_striped_ring_merge_and_sum_by_any_kernel(case: dict) -> None:
    with by_kernel("eager"):
        check([striped_blocks(case)], 1e-5)
