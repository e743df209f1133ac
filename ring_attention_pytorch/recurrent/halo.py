"""Halos, the tokens before each run, fetched from the ranks that hold them; short convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.arguments import check_least, checks_of
from ring_attention_pytorch.comm.collectives import fetch_rows
from ring_attention_pytorch.ranks.agreement import report_to_ring_of, reporting, typed
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.recurrent.plan import RunPlan, needs_gradients
from ring_attention_pytorch.recurrent.runs import before_samples, last_of_samples

_CALLER = "ring_halo"


@typed(report_to_ring_of("plan"), apart=True)
def ring_halo(x: Tensor, width: int, *, plan: RunPlan, initial: Tensor | None = None) -> Tensor:
    """Return the `width` tokens before each of this rank's runs, in the run's document.

    All ranks of the ring call this together. Tokens before a document's start are 0. Gradients go
    back to the tokens.

    Args:
        x: `[b, n, ...]`, this rank's tokens.
        width: how many, at least 0; without `initial` at most the tokens of a sample. They may be
            on several ranks.
        plan: from `RunPlan.make` or `RunPlan.of`.
        initial: `[b, width, ...]`, the tokens before each sample, the same on all ranks; None is 0.
            A gradient is of this rank's use: sum it over ranks.

    Returns:
        `[runs, width, ...]`, for the runs `plan.mine`.

    Raises:
        ValueError: x or initial doesn't fit the plan, or ranks differ in its shape or in width.

    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> ring_halo(x, 2, plan=RunPlan.make(x)).tolist()
    [[0.0, 0.0]]
    """
    with reporting(plan.ring.report_failure), checks_of(_CALLER):
        check_least(0, width=width)
        if initial is None and width > (most := sum(plan.runs.tokens)):
            raise ValueError(f"width must be at most {most}, the tokens of a sample, got {width}")
    plan.check_tokens(_CALLER, x=x)
    return _halo(_CALLER, x, width, plan, initial)


def _halo(name: str, x: Tensor, width: int, plan: RunPlan, initial: Tensor | None) -> Tensor:
    """Compute `ring_halo` of tokens that fit, for the caller that errors name."""
    _check_initial(name, x, width, plan, initial)
    caller = _agree(name, x, width, plan, initial)
    runs = len(plan.mine)
    if not plan.runs.continues or width == 0:
        halos = x.new_zeros(runs * width, *x.shape[2:])
    else:
        route = plan.halo_route(width)
        halos = fetch_rows(x, route.sends, route.lands, runs * width, caller)
    if initial is not None and width:
        rows, places = plan.once(("before samples", width), lambda: _first_rows(plan, width))
        halos = halos.index_copy(0, rows, initial.flatten(0, 1)[places].to(halos.dtype))
    return halos.unflatten(0, (runs, width))


def last_tokens(x: Tensor, width: int, *, plan: RunPlan, initial: Tensor | None = None) -> Tensor:
    """Return the `width` last tokens of each sample, `[b, width, ...]`, the same on all ranks.

    All ranks of the ring call this together. They are of a sample's last document, after 0, or
    after `initial` if it is the sample's only one: the `initial` of a next call's `ring_halo`.

    Args:
        x, width, plan, initial: as for `ring_halo`.

    Raises:
        ValueError: x or initial doesn't fit the plan.

    >>> x = torch.tensor([[1.0, 2.0, 3.0]])
    >>> last_tokens(x, 4, plan=RunPlan.make(x), initial=torch.full((1, 4), 9.0)).tolist()
    [[9.0, 1.0, 2.0, 3.0]]
    """
    plan.check_tokens("last_tokens", x=x)
    _check_initial("last_tokens", x, width, plan, initial)
    sends, lands, rows, places = plan.once(("last", width), lambda: _last_route(plan, width))
    caller = _agree("last_tokens", x, width, plan, initial)
    tokens = fetch_rows(x, sends, lands, plan.runs.batch * width, caller)
    if initial is not None:
        tokens = tokens.index_copy(0, rows, initial.flatten(0, 1)[places].to(tokens.dtype))
    return tokens.unflatten(0, (plan.runs.batch, width))


def _agree(name: str, x: Tensor, width: int, plan: RunPlan, initial: Tensor | None) -> Caller:
    return plan.agree_once(
        name, width=width, shape=tuple(x.shape[2:]), dtype=x.dtype, initial=initial is not None,
        requires_grad=needs_gradients(x),
    )  # fmt: skip


def _check_initial(name: str, x: Tensor, width: int, plan: RunPlan, initial: Tensor | None) -> None:
    """Raise ValueError if tokens before each sample don't fit."""
    want = plan.runs.batch, width, *x.shape[2:]
    if initial is not None and (tuple(initial.shape) != want or initial.device != x.device):
        raise plan.error(
            f"{name}: initial must be {[*want]} on {x.device}, the tokens before each sample, got "
            f"{list(initial.shape)} on {initial.device}"
        )
    if initial is not None and torch.promote_types(initial.dtype, x.dtype) != x.dtype:
        raise plan.error(
            f"{name}: initial must fit into {x.dtype}, the dtype of x, got {initial.dtype}; cast it"
        )


def _first_rows(plan: RunPlan, width: int) -> tuple[Tensor, Tensor]:
    """Return rows of this rank's halos that are before a sample, and their places in `initial`."""
    rows, places = [], []
    for run, place, of_sample in before_samples(plan.runs, width):
        if run.rank == plan.ring.rank:
            rows.append(plan.number_of[run] * width + place)
            places.append(run.sample * width + of_sample)
    return plan.indices(rows), plan.indices(places)


def _last_route(plan: RunPlan, width: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Return how the last tokens of each sample travel: this rank's go to all.

    Also the rows that are before a sample, and their places in `initial`.
    """
    size, rank = plan.ring.size, plan.ring.rank
    own_last, rows, places = [], [], []
    lands: list[list[int]] = [[] for _ in range(size)]
    for sample, place, owner, index in last_of_samples(plan.runs, width):
        row = sample * width + place
        if owner is None:
            rows.append(row)
            places.append(sample * width + index)
            continue
        lands[owner.rank].append(row)
        if owner.rank == rank:
            own_last.append(sample * plan.runs.tokens[rank] + owner.start + index)
    sends = [plan.indices(own_last)] * size
    return sends, [*map(plan.indices, lands)], plan.indices(rows), plan.indices(places)


@typed(report_to_ring_of("plan"), apart=True)
def ring_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    plan: RunPlan,
    dtype: torch.dtype | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Compute a causal depthwise convolution along documents, before which there are zeros.

    All ranks of the ring call this together.

    Args:
        x: `[b, n, c]`, this rank's tokens.
        weight: `[c, width]`; the last column multiplies the token itself.
        bias: `[c]`, or None.
        plan: from `RunPlan.make` or `RunPlan.of`.
        dtype: of the result; None is the dtype of x. It is computed in the weight's dtype, or
            under autocast in autocast's, as `torch.nn.functional.conv1d` is.
        initial: `[b, width - 1, c]`, the tokens before each sample, as for `ring_halo`.

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
    plan.check_numbers("ring_short_conv", weight, x=x, weight=weight, bias=bias)
    if (bias is not None and bias.dtype != weight.dtype) or (dtype and not dtype.is_floating_point):
        raise plan.error(
            "ring_short_conv: bias must be of the weight's dtype, and dtype floating, got "
            f"{None if bias is None else bias.dtype} and {dtype}"
        )
    width = weight.shape[1] - 1
    halo = _halo("ring_short_conv", x, width, plan, initial)
    route = plan.halo_route(width)
    if not len(route.tokens):
        nothing = halo.sum() + weight.sum() + (0 if bias is None else bias.sum()) * 0
        return (x + nothing.to(x.dtype) * 0).to(dtype or x.dtype)
    together = torch.cat((x.flatten(0, 1), halo.flatten(0, 1)))[route.tokens]
    out = F.conv1d(
        together.T[None].to(weight.dtype), weight[:, None], bias, groups=channels
    )  # fmt: skip
    return out[0].T[route.outputs].to(dtype or x.dtype).view_as(x)
