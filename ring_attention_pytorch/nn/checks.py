"""Checks of the options of layers and models, and of what they are given."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import least_problem
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.nn.rotary import THETA
from ring_attention_pytorch.nn.sharding import mask_problem
from ring_attention_pytorch.plan.checks import other_way_problem
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.tensor_kinds import dtensor_problem


def shape_problem(
    dim: int, dim_head: int, heads: int, num_grouped_query_heads: int, bucket_size: int
) -> str | None:
    """Say what is wrong with a layer's sizes; None if nothing."""
    if (problem := least_problem(1, heads=heads)) is not None:
        return problem
    if num_grouped_query_heads < 1 or heads % num_grouped_query_heads != 0:
        return f"num_grouped_query_heads must divide heads={heads}, got {num_grouped_query_heads}"
    return least_problem(1, dim=dim, dim_head=dim_head, bucket_size=bucket_size)


def check_sizes(num_tokens: int, depth: int, **widths: int) -> None:
    """Raise ValueError for sizes that a model can't have."""
    problem = least_problem(1, num_tokens=num_tokens, **widths) or least_problem(0, depth=depth)
    if problem is not None:
        raise ValueError(problem)


def kernel_problem(
    kernel: str | None, use_cuda_kernel: bool | None, regular: bool, dropout: float
) -> str | None:
    """Say what is wrong with a kernel, of regular attention or of ours; None if nothing."""
    if kernel not in (None, *KERNELS):
        return f"kernel must be None or one of {list(KERNELS)}, got {kernel!r}"
    if use_cuda_kernel and kernel not in (None, "triton"):
        return f"use_cuda_kernel=True is kernel='triton', got kernel={kernel!r}; leave one out"
    kernel = "triton" if use_cuda_kernel else kernel
    if regular and (kernel is not None or dropout > 0):
        return f"force_regular_attn uses no kernel and no dropout, got {kernel!r} and {dropout}"
    return None


def scores_problem(lookback: int | None, softclamp: float | None) -> str | None:
    """Say what is wrong with the scores that a layer asks for; None if nothing."""
    if lookback is not None and lookback < 0:
        return f"max_lookback_seq_len must be None or at least 0, got {lookback}"
    if softclamp is not None and not 0 < softclamp < math.inf:
        return f"softclamp must be None or positive, got {softclamp}"
    return None


def unused_problem(eps: float, rotary: bool, restart: bool, theta: float) -> str | None:
    """Say which option would have no effect; None if none."""
    if eps != 1e-10:
        return f"eps has no effect, results are normalised exactly; got {eps}"
    if restart and not rotary:
        return "rotary_restart needs rotary_embed=True: there is nothing to restart"
    if theta != THETA and not rotary:
        return f"rotary_embed_theta needs rotary_embed=True: nothing is rotated; got {theta}"
    return None


@runtime_checkable
class SummaryOptions(Protocol):
    """Options of attention that sees far tokens in summary, by which a layer makes that part."""

    def layer(self, dim: int, dim_head: int, heads: int, key_heads: int) -> Any: ...


def summaries_problem(
    causal: bool, lookback: int | None, dropout: float, graphs: bool, ulysses: int, regular: bool
) -> str | None:
    """Say what is wrong with the options of a layer with summaries; None if nothing."""
    if causal and (lookback, dropout, graphs, ulysses, regular) == (None, 0, False, 1, False):
        return None
    return (
        "attn_summaries needs causal=True and has a window of its own, no dropout, no CUDA graphs "
        f"and no Ulysses; got causal={causal}, max_lookback_seq_len={lookback}, dropout={dropout}, "
        f"in_graphs={graphs}, ulysses={ulysses}, force_regular_attn={regular}"
    )


def tokens_problem(name: str, x: Tensor, dim: int) -> str | None:
    """Say what is wrong with tokens `[b, n, dim]`; None if nothing."""
    if problem := dtensor_problem(name, x):
        return problem
    if x.ndim != 3 or x.shape[2] != dim:
        return f"{name} must be [batch, tokens, {dim}], got {list(x.shape)}"
    if x.is_meta or not x.is_floating_point():
        return f"{name} must be floating and have values, got {x.dtype} on {x.device}"
    return None


def context_problem(
    is_given: bool, placed: bool, mask: Tensor | None, context_mask: Tensor | None
) -> str | None:
    """Say what does not go with a context; `placed`: the module knows places of tokens."""
    if is_given and placed:
        return (
            "context is another sequence, whose tokens have no place among these: it needs a "
            "module without causal, max_lookback_seq_len and rotary_embed, and no rotary_emb"
        )
    if not is_given and context_mask is not None:
        return "context_mask needs a context; the mask of x is `mask`"
    if is_given and mask is not None:
        return "with a context its own context_mask says what may be seen, not mask"
    return None


def angles_problem(x: Tensor, angles: Tensor, dim_head: int, by_sample: bool) -> str | None:
    """Say what is wrong with the rotary angles of tokens x, or of each sample; None if nothing."""
    shape, want = list(angles.shape), [x.shape[1], dim_head]
    if shape != want and not (by_sample and shape == [x.shape[0], *want]):
        return f"rotary_emb must be {want}, got {shape}"
    if angles.device != x.device:
        return f"rotary_emb must be on {x.device} as x is, got {angles.device}"
    return None


class PlanOfLayer(NamedTuple):
    """What a layer wants of a plan, by its own options."""

    visible: Mask
    softclamp: float | None
    rate: float
    training: bool
    kernel: str | None
    layout: Layout
    ring_attn: bool
    over_ring: Mapping[str, Any]


def plan_problem(plan: RingPlan, wanted: PlanOfLayer) -> str | None:
    """Say where a plan does otherwise than a layer wants; None if nowhere."""
    over_ring = plan.ring.size > 1
    if over_ring and isinstance(plan.layout, str) and plan.layout != wanted.layout:
        return f"the plan has layout={plan.layout!r}, the module {wanted.layout!r}"
    mods = plan.terms
    rate = mods.dropout.rate if mods.dropout else 0.0
    if (plan.visible, mods.softclamp, rate) != (wanted.visible, wanted.softclamp, wanted.rate):
        return (
            f"the plan shows {plan.visible} with softclamp={mods.softclamp} and dropout={rate}, "
            f"this module wants {wanted.visible} with {wanted.softclamp} and {wanted.rate} "
            f"(in training: {wanted.training}); make it with RingAttention.plan"
        )
    if wanted.kernel is not None and not f"{plan.kernel.name}-".startswith(f"{wanted.kernel}-"):
        return (
            f"the plan uses kernel={plan.kernel.name!r}, this module {wanted.kernel!r}; make it "
            "with RingAttention.plan"
        )
    if not over_ring:
        return None
    has = dict(transport=plan.transport_name, ulysses=plan.degree, memory=plan.memory)
    if problem := other_way_problem(has, **wanted.over_ring):
        return problem
    return None if wanted.ring_attn else "a plan over a ring needs a module with ring_attn=True"


def ids_problem(
    x: Tensor, mask: Tensor | None, labels: Tensor | None, classes: int, ignored: int
) -> str | None:
    """Say what is wrong with this rank's arguments, without asking other ranks."""
    if x.ndim != 2 or x.dtype not in (torch.int64, torch.int32) or x.is_meta:
        return (
            "x must be int64 or int32 ids [batch, tokens] that have values, "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )
    if labels is not None and (labels.dtype, labels.shape) != (torch.int64, x.shape):
        return f"labels must be int64 {list(x.shape)}, got {labels.dtype} {list(labels.shape)}"
    if (
        x.device.type == "cpu" and not is_compiling()
    ):  # elsewhere a look at the values would wait for the device
        wanted = f"0 to {classes - 1}"
        if (got := _outside(x, classes)) is not None:
            return f"ids must be {wanted}, got {got}"
        if labels is not None and (got := _outside(labels[labels != ignored], classes)) is not None:
            return f"labels must be {wanted}, or ignore_index={ignored} for none, got {got}"
    return mask_problem("mask", mask, x)


def _outside(values: Tensor, classes: int) -> str | None:
    """Say how far values reach, if not all are 0 to classes - 1; None if they are."""
    outside = (values < 0) | (values >= classes)
    if not bool(outside.any()):
        return None
    return f"{int(values.min())} to {int(values.max())}"


def plans_problem(plans: Sequence[RingPlan], blocks: int, decided: Sequence[Any]) -> str | None:
    """Say what is wrong with a model's plans and what is given beside; None if nothing."""
    if len(plans) != blocks or blocks == 0:
        return f"plans must be one for each of {blocks} blocks, got {len(plans)}"
    if all(value is None for value in decided):
        return None
    return (
        "beside plans only labels are taken: mask, documents and ring_size are the plans', and "
        "without labels there is no loss; see RingTransformer.plans"
    )
