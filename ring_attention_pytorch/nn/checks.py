"""Checks of the options and arguments of layers and models."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import check_least
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.nn.rotary import THETA
from ring_attention_pytorch.nn.sharding import check_mask
from ring_attention_pytorch.plan.checks import DTYPES, autocast_dtype, check_same_way
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.tensor_kinds import check_plain, has_values


def check_shape(
    dim: int, dim_head: int, heads: int, num_grouped_query_heads: int, bucket_size: int
) -> None:
    """Raise ValueError if the sizes of a layer are invalid."""
    check_least(1, heads=heads)
    if num_grouped_query_heads < 1 or heads % num_grouped_query_heads != 0:
        raise ValueError(
            f"num_grouped_query_heads must divide heads={heads}, got {num_grouped_query_heads}"
        )
    check_least(1, dim=dim, dim_head=dim_head, bucket_size=bucket_size)


def check_sizes(num_tokens: int, depth: int, **widths: int) -> None:
    """Raise ValueError if the sizes of a model are invalid."""
    check_least(1, num_tokens=num_tokens, **widths)
    check_least(0, depth=depth)


def check_kernel(
    kernel: str | None, use_cuda_kernel: bool | None, regular: bool, dropout: float
) -> None:
    """Raise ValueError if no such kernel exists, or it contradicts the other options."""
    if kernel not in (None, *KERNELS):
        raise ValueError(f"kernel must be None or one of {list(KERNELS)}, got {kernel!r}")
    if use_cuda_kernel and kernel not in (None, "triton"):
        raise ValueError(
            f"use_cuda_kernel=True is kernel='triton', got kernel={kernel!r}; leave one out"
        )
    kernel = "triton" if use_cuda_kernel else kernel
    if regular and (kernel is not None or dropout > 0):
        raise ValueError(
            f"force_regular_attn uses no kernel and no dropout, got {kernel!r} and {dropout}"
        )


def check_scores(lookback: int | None, softclamp: float | None) -> None:
    """Raise ValueError if the window or softclamp is out of range."""
    if lookback is not None and lookback < 0:
        raise ValueError(f"max_lookback_seq_len must be None or at least 0, got {lookback}")
    if softclamp is not None and not 0 < softclamp < math.inf:
        raise ValueError(f"softclamp must be None or positive, got {softclamp}")


def check_unused(eps: float, rotary: bool, restart: bool, theta: float) -> None:
    """Raise ValueError if an option would have no effect."""
    if eps != 1e-10:
        raise ValueError(f"eps has no effect, results are normalised exactly; got {eps}")
    if restart and not rotary:
        raise ValueError("rotary_restart needs rotary_embed=True: there is nothing to restart")
    if theta != THETA and not rotary:
        raise ValueError(
            f"rotary_embed_theta needs rotary_embed=True: nothing is rotated; got {theta}"
        )


@runtime_checkable
class SummaryOptions(Protocol):
    """Options for attention to summaries of far tokens; `layer` makes that part of a layer."""

    def layer(self, dim: int, dim_head: int, heads: int, key_heads: int) -> Any: ...


@runtime_checkable
class PlanWithSummaries(Protocol):
    """The plan of a layer with summaries: `near` is that of attention to tokens themselves."""

    @property
    def near(self) -> RingPlan: ...

    @property
    def rule(self) -> Any: ...

    @property
    def ring(self) -> Ring: ...


LayerPlan = RingPlan | PlanWithSummaries


def near_plan(plan: LayerPlan) -> RingPlan:
    """Return a layer's plan of attention to tokens themselves."""
    return plan if isinstance(plan, RingPlan) else plan.near


def check_summaries(
    causal: bool,
    lookback: int | None,
    dropout: float,
    ulysses: int | None,
    regular: bool,
) -> None:
    """Raise ValueError if options don't work with summaries."""
    plain = lookback is None and dropout == 0 and ulysses in (None, 1)
    if not causal or not plain or regular:
        raise ValueError(
            "attn_summaries needs causal=True and has a window of its own, no dropout and no "
            f"Ulysses; got causal={causal}, max_lookback_seq_len={lookback}, dropout={dropout}, "
            f"ulysses={ulysses}, force_regular_attn={regular}"
        )


def check_tokens(name: str, x: Tensor, dim: int) -> None:
    """Raise ValueError if x is not a tensor of tokens `[b, n, dim]`."""
    check_plain(name, x)
    if x.ndim != 3 or x.shape[2] != dim:
        raise ValueError(f"{name} must be [batch, tokens, {dim}], got {list(x.shape)}")
    if x.is_meta or not x.is_floating_point():
        raise ValueError(f"{name} must be floating and have values, got {x.dtype} on {x.device}")


def dtype_refusal(x: Tensor, projection: Any) -> str | None:
    """Return why a layer can't project tokens x, after a norm in its weight's dtype, or None."""
    weight: Tensor = getattr(projection, "weight", x)  # a layer in its place may have none
    if x.dtype == weight.dtype or weight.dtype not in DTYPES:
        return None
    wanted = autocast_dtype(weight)
    if torch.promote_types(autocast_dtype(x), wanted) == wanted:
        return None
    return f"x must be {weight.dtype} as the weights are, got {x.dtype}; cast it, or use autocast"


def check_context(
    is_given: bool, placed: bool, mask: Tensor | None, context_mask: Tensor | None
) -> None:
    """Raise ValueError if masks don't fit; a module with positions (`placed`) takes no context."""
    if is_given and placed:
        raise ValueError(
            "context is another sequence, whose tokens have no place among these: it needs a "
            "module without causal, max_lookback_seq_len and rotary_embed, and no rotary_emb"
        )
    if not is_given and context_mask is not None:
        raise ValueError("context_mask needs a context; the mask of x is `mask`")
    if is_given and mask is not None:
        raise ValueError("with a context its own context_mask says what may be seen, not mask")


def check_angles(x: Tensor, angles: Tensor, dim_head: int, by_sample: bool) -> None:
    """Raise ValueError unless angles are `[n, d]` like tokens x; `by_sample` allows `[b, n, d]`."""
    shape, want = list(angles.shape), [x.shape[1], dim_head]
    if shape != want and not (by_sample and shape == [x.shape[0], *want]):
        raise ValueError(f"rotary_emb must be {want}, got {shape}")
    if angles.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"rotary_emb must be float32 or float64, got {angles.dtype}: in 16 bits the angles of "
            "far tokens collide. If FSDP casts them, make the module with rotary_embed=True, or "
            "its policy with cast_forward_inputs=False"
        )
    if angles.device != x.device:
        raise ValueError(f"rotary_emb must be on {x.device} as x is, got {angles.device}")


def check_call(
    layer: Any,
    x: Tensor,
    mask: Tensor | None,
    rotary_emb: Tensor | None,
    context: Tensor | None,
    context_mask: Tensor | None,
) -> None:
    """Raise ValueError for a mistake in the arguments of a call of a `RingAttention`."""
    dim, rotary = layer.to_out.out_features, layer.rotary_embed or rotary_emb is not None
    check_tokens("x", x, dim)
    if context is not None:
        check_tokens("context", context, dim)
    placed = bool(layer.causal or layer.window is not None or rotary)
    check_context(context is not None, placed, mask, context_mask)
    if rotary_emb is not None:
        if layer.rotary_embed is not None:
            raise ValueError(
                "a module with rotary_embed makes its own angles, rotary_emb would be ignored"
            )
        if layer.summaries and layer.summaries.rotary is None:
            raise ValueError(
                "rotary_emb says no angles of summaries; make the module with rotary_embed=True"
            )
        check_angles(x, rotary_emb, layer.dim_head, by_sample=not layer.spread.auto)
    if context is not None:
        check_mask("context_mask", context_mask, context)
    else:
        check_mask("mask", mask, x)


class PlanOfLayer(NamedTuple):
    """The settings that a layer requires of a plan."""

    visible: Mask
    softclamp: float | None
    rate: float
    training: bool
    kernel: str | None
    layout: Layout
    ring_attn: bool
    over_ring: Mapping[str, Any]


def check_plan(plan: RingPlan, wanted: PlanOfLayer) -> None:
    """Raise ValueError if a plan's settings differ from the layer's."""
    over_ring = plan.ring.size > 1
    if over_ring and isinstance(plan.layout, str) and plan.layout != wanted.layout:
        raise ValueError(f"the plan has layout={plan.layout!r}, the module {wanted.layout!r}")
    mods = plan.terms
    rate = mods.dropout.rate if mods.dropout else 0.0
    if (plan.visible, mods.softclamp, rate) != (wanted.visible, wanted.softclamp, wanted.rate):
        raise ValueError(
            f"the plan shows {plan.visible} with softclamp={mods.softclamp} and dropout={rate}, "
            f"this module wants {wanted.visible} with {wanted.softclamp} and {wanted.rate} "
            f"(in training: {wanted.training}); make it with RingAttention.plan"
        )
    if wanted.kernel is not None and not f"{plan.kernel.name}-".startswith(f"{wanted.kernel}-"):
        raise ValueError(
            f"the plan uses kernel={plan.kernel.name!r}, this module {wanted.kernel!r}; make it "
            "with RingAttention.plan"
        )
    if over_ring:
        has = dict(transport=plan.chosen.name, ulysses=plan.degree, memory=plan.chosen.memory)
        check_same_way(has, **wanted.over_ring)
        if not wanted.ring_attn:
            raise ValueError("a plan over a ring needs a module with ring_attn=True")


def check_ids(
    x: Tensor, mask: Tensor | None, labels: Tensor | None, classes: int, ignored: int
) -> None:
    """Raise ValueError if this rank's ids, labels or mask are invalid."""
    if x.ndim != 2 or x.dtype not in (torch.int64, torch.int32) or x.is_meta:
        raise ValueError(
            "x must be int64 or int32 ids [batch, tokens] that have values, "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )
    if labels is not None and (labels.dtype, labels.shape) != (torch.int64, x.shape):
        raise ValueError(
            f"labels must be int64 {list(x.shape)}, got {labels.dtype} {list(labels.shape)}"
        )
    # on a GPU, reading values would synchronize
    if x.device.type == "cpu" and not is_compiling() and has_values(x):
        _check_values(x, labels, classes, ignored)
    check_mask("mask", mask, x)


def _check_values(ids: Tensor, labels: Tensor | None, classes: int, ignored: int) -> None:
    """Raise ValueError if an id or a label is no class."""
    wanted = f"0 to {classes - 1}"
    if (got := _outside(ids, classes)) is not None:
        raise ValueError(f"ids must be {wanted}, got {got}")
    if labels is None:
        return
    if (got := _outside(labels[labels != ignored], classes)) is not None:
        raise ValueError(f"labels must be {wanted}, or ignore_index={ignored} for none, got {got}")


def _outside(values: Tensor, classes: int) -> str | None:
    """Describe the range of values if any is outside 0 to classes - 1; None if all are inside."""
    outside = (values < 0) | (values >= classes)
    if not bool(outside.any()):
        return None
    return f"{int(values.min())} to {int(values.max())}"


def check_plans(plans: Sequence[LayerPlan], blocks: int, decided: Sequence[Any]) -> None:
    """Raise ValueError if plans don't fit the model, or contradict other arguments."""
    if len(plans) != blocks or blocks == 0:
        raise ValueError(f"plans must be one for each of {blocks} blocks, got {len(plans)}")
    if any(value is not None for value in decided):
        raise ValueError(
            "beside plans only labels are taken: mask, documents and ring_size are the plans', and "
            "without labels there is no loss; see RingTransformer.plans"
        )
