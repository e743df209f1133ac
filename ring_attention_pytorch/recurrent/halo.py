"""Halos: the tokens before each run, from whichever ranks hold them; and short convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checks_of
from ring_attention_pytorch.comm.exchange import fetch_rows
from ring_attention_pytorch.ranks.agreement import report_to_group, typed
from ring_attention_pytorch.recurrent.plan import RunPlan

_CALLER = "ring_halo"


@typed(report_to_group(_CALLER, agreed=("plan", ...)))
def ring_halo(x: Tensor, width: int, *, plan: RunPlan) -> Tensor:
    """Return the `width` tokens before each of this rank's runs, in the run's document.

    All ranks of the ring call this together. Tokens before a document's start are 0. Gradients go
    back to the tokens.

    Args:
        x: `[b, n, ...]`, this rank's tokens.
        width: how many, at least 0. They may be on several ranks.
        plan: from `RunPlan.make` or `RunPlan.of`.

    Returns:
        `[runs, width, ...]`, for the runs `plan.mine`.

    Raises:
        ValueError: x doesn't fit the plan, or ranks differ in its shape or in width.

    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> ring_halo(x, 2, plan=RunPlan.make(x)).tolist()
    [[0.0, 0.0]]
    """
    with checks_of(_CALLER):
        check_least(0, width=width)
    plan.check_tokens(_CALLER, x=x)
    runs = len(plan.mine)
    if not plan.runs.continues or width == 0:
        return x.new_zeros(runs, width, *x.shape[2:])
    plan.agree_once(_CALLER, width=width, shape=[*x.shape[2:]], dtype=x.dtype)
    route = plan.halo_route(width)
    rows = runs * width
    return fetch_rows(x, route.sends, route.lands, rows, plan.ring).unflatten(0, (runs, width))


@typed(report_to_group("ring_short_conv", agreed=("plan", ...)))
def ring_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    plan: RunPlan,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute a causal depthwise convolution along documents, before which there are zeros.

    All ranks of the ring call this together.

    Args:
        x: `[b, n, c]`, this rank's tokens.
        weight: `[c, width]`; the last column multiplies the token itself.
        bias: `[c]`, or None.
        plan: from `RunPlan.make` or `RunPlan.of`.
        dtype: of the result; None is the dtype of x. The weight's dtype is computed in.

    Returns:
        `[b, n, c]`.

    Raises:
        ValueError: shapes don't fit the plan or one another.

    >>> x, weight = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[10.0, 1.0]])
    >>> ring_short_conv(x, weight, plan=RunPlan.make(x)).flatten().tolist()
    [1.0, 12.0, 23.0]
    """
    plan.check_tokens("ring_short_conv", x=x)
    channels = x.shape[-1]
    if x.ndim != 3 or weight.ndim != 2 or len(weight) != channels or weight.shape[1] < 1:
        raise plan.error(
            "ring_short_conv: x must be [b, n, c] and weight [c, width], got "
            f"{list(x.shape)} and {list(weight.shape)}"
        )
    if bias is not None and list(bias.shape) != [channels]:
        raise plan.error(f"ring_short_conv: bias must be [{channels}], got {list(bias.shape)}")
    width = weight.shape[1] - 1
    halo = ring_halo(x, width, plan=plan)
    route = plan.halo_route(width)
    if not len(route.tokens):
        nothing = halo.sum() + weight.sum() + (0 if bias is None else bias.sum()) * 0
        return (x + nothing.to(x.dtype) * 0).to(dtype or x.dtype)
    together = torch.cat((x.flatten(0, 1), halo.flatten(0, 1)))[route.tokens]
    out = F.conv1d(
        together.T[None].to(weight.dtype), weight[:, None], bias, groups=channels
    )  # fmt: skip
    return out[0].T[route.outputs].to(dtype or x.dtype).view_as(x)
