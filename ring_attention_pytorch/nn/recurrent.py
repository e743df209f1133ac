"""Recurrent layers as modules: gated delta net and Mamba 2."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.geometry.segments import Segment
from ring_attention_pytorch.nn.checks import LayerPlan, dtype_refusal, near_plan
from ring_attention_pytorch.nn.feedforward import feed_forward
from ring_attention_pytorch.nn.norm import RMSNorm
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import report_to_ring_of, typed
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.recurrent.halo import last_tokens, ring_short_conv
from ring_attention_pytorch.recurrent.layers import ring_gated_delta_rule, ring_mamba2
from ring_attention_pytorch.recurrent.plan import RunPlan
from ring_attention_pytorch.recurrent.runs import Runs
from ring_attention_pytorch.runtime.torch_func import run_apart

_EPS = 1e-6  # of the norm of outputs, some of which are near 0; Qwen3-Next has the same


class LayerState(NamedTuple):
    """A recurrent layer's state after some tokens of each sample, the same on all ranks."""

    tail: Tensor  # [b, width - 1, c], the last inputs of the convolution
    state: Tensor  # [b, h, ...]


class _Call(NamedTuple):
    """A call of a layer: its mask and plan, the state before it; `keep`: return the one after."""

    mask: Tensor | None
    plan: RunPlan
    before: LayerState | None = None
    keep: bool = False

    @property
    def tail(self) -> Tensor | None:
        return None if self.before is None else self.before.tail

    @property
    def initial(self) -> Tensor | None:
        return None if self.before is None else self.before.state


class RecurrentLayer(nn.Module):
    """A layer that carries a state along the sequence."""

    @typed(report_to_ring_of("plan"))
    def forward(self, x: Tensor, mask: Tensor | None = None, *, plan: RunPlan) -> Tensor:
        """Compute the layer.

        Args:
            x: `[b, n, dim]`, this rank's tokens.
            mask: bool `[b, n]`, True for real tokens; others add nothing to states.
            plan: from `RunPlan.make` or `RunPlan.of`.

        Raises:
            ValueError: x or mask doesn't fit the plan.
        """
        return self._read(x, _Call(mask, plan))[0]

    @typed(report_to_ring_of("plan"), apart=True)
    def read(
        self, x: Tensor, mask: Tensor | None, plan: RunPlan, before: LayerState | None
    ) -> tuple[Tensor, LayerState]:
        """Read tokens `[b, n, dim]` after a state; return the results, and the state after them.

        Raises:
            ValueError: x or mask doesn't fit the plan.
        """
        out, after = self._read(x, _Call(mask, plan, before, keep=True))
        assert after is not None
        return out, after

    def _read(self, x: Tensor, call: _Call) -> tuple[Tensor, LayerState | None]:
        """Return the results, and the state after the tokens if it is to be kept."""
        raise NotImplementedError


class GatedDeltaNet(RecurrentLayer):
    """A gated delta net (Yang et al. 2024), of sequences whose shards are runs of tokens.

    Args:
        dim: model width.
        heads: of values; key_heads: of keys, which consecutive value heads share; None is heads.
        dim_head: of queries, keys and values.
        conv: tokens that the convolution before q, k and v sees, with the token itself.

    Raises:
        ValueError: a number is out of range.

    >>> layer, x = GatedDeltaNet(16, heads=2, dim_head=8), torch.randn(1, 9, 16)
    >>> layer(x, plan=RunPlan.make(x)).shape
    torch.Size([1, 9, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        key_heads: int | None = None,
        dim_head: int = 64,
        conv: int = 4,
    ):
        super().__init__()
        key_heads = heads if key_heads is None else key_heads
        numbers = dict(key_heads=key_heads, dim=dim, dim_head=dim_head, conv=conv)
        _check("GatedDeltaNet", heads, "key_heads", **numbers)
        self.dim_head: int = dim_head
        self.widths: tuple[int, ...] = (*(key_heads * dim_head,) * 2, heads * dim_head)
        self.norm: RMSNorm = RMSNorm(dim)
        self.to_qkv: nn.Linear = nn.Linear(dim, sum(self.widths), bias=False)
        self.to_gates: nn.Linear = nn.Linear(dim, 2 * heads, bias=False)  # decay and beta
        self.to_out_gates: nn.Linear = nn.Linear(dim, heads * dim_head, bias=False)
        self.conv: nn.Parameter = _convolution(sum(self.widths), conv)
        self.log_rates: nn.Parameter = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.steps: nn.Parameter = nn.Parameter(torch.zeros(heads))
        self.out_norm: RMSNorm = RMSNorm(dim_head, eps=_EPS)
        self.to_out: nn.Linear = nn.Linear(heads * dim_head, dim, bias=False)

    def _read(self, x: Tensor, call: _Call) -> tuple[Tensor, LayerState | None]:
        x = _masked(x, call, self.to_qkv)
        normed = self.norm(x)
        qkv, tail = _convolved(self.to_qkv(normed), self.conv, call)
        parts = [*qkv.split(self.widths, -1), self.to_out_gates(normed)]
        q, k, v, gates = [rearrange(t, "b n (h d) -> b n h d", d=self.dim_head) for t in parts]
        decay, beta = self.to_gates(normed).chunk(2, -1)
        g = -self.log_rates.exp() * F.softplus(decay + self.steps)
        out, state = ring_gated_delta_rule(
            q, k, v, g, beta.sigmoid(), plan=call.plan, normalize=True, initial=call.initial,
            final=call.keep,
        )  # fmt: skip
        out = self.out_norm(out) * F.silu(gates)
        return self.to_out(out.flatten(2)), _layer_state(tail, state)


class Mamba2(RecurrentLayer):
    """A Mamba 2 layer (Dao and Gu 2024), of sequences whose shards are runs of tokens.

    Args:
        dim: model width.
        heads, dim_head: of the layer's values.
        dim_state: of B and C; groups: how many B and C, which consecutive heads share.
        conv: tokens that the convolution before x, B and C sees, with the token itself.

    Raises:
        ValueError: a number is out of range.

    >>> layer, x = Mamba2(16, heads=2, dim_head=8, dim_state=4), torch.randn(1, 9, 16)
    >>> layer(x, plan=RunPlan.make(x)).shape
    torch.Size([1, 9, 16])
    """

    @checked
    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        dim_head: int = 64,
        dim_state: int = 128,
        groups: int = 1,
        conv: int = 4,
    ):
        super().__init__()
        numbers = dict(groups=groups, dim=dim, dim_head=dim_head, dim_state=dim_state, conv=conv)
        _check("Mamba2", heads, "groups", **numbers)
        inner, self.dim_head, self.dim_state = heads * dim_head, dim_head, dim_state
        self.widths: tuple[int, ...] = (inner, groups * dim_state, groups * dim_state)
        self.norm: RMSNorm = RMSNorm(dim)
        self.to_xbc: nn.Linear = nn.Linear(dim, sum(self.widths), bias=False)
        self.to_steps: nn.Linear = nn.Linear(dim, heads, bias=False)
        self.to_out_gates: nn.Linear = nn.Linear(dim, inner, bias=False)
        self.conv: nn.Parameter = _convolution(sum(self.widths), conv)
        self.log_rates: nn.Parameter = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.steps: nn.Parameter = nn.Parameter(torch.zeros(heads))
        self.skip: nn.Parameter = nn.Parameter(torch.ones(heads))
        self.out_norm: RMSNorm = RMSNorm(inner, eps=_EPS)
        self.to_out: nn.Linear = nn.Linear(inner, dim, bias=False)

    def _read(self, x: Tensor, call: _Call) -> tuple[Tensor, LayerState | None]:
        x = _masked(x, call, self.to_xbc)
        normed = self.norm(x)
        xbc, tail = _convolved(self.to_xbc(normed), self.conv, call)
        values, b, c = xbc.split(self.widths, -1)
        values = rearrange(values, "b n (h d) -> b n h d", d=self.dim_head)
        b, c = (rearrange(t, "b n (g d) -> b n g d", d=self.dim_state) for t in (b, c))
        dt = F.softplus(self.to_steps(normed) + self.steps)
        out, state = ring_mamba2(
            values, dt, -self.log_rates.exp(), b, c, plan=call.plan, skip=self.skip,
            initial=call.initial, final=call.keep,
        )  # fmt: skip
        out = self.out_norm(out.flatten(2) * F.silu(self.to_out_gates(normed)))
        return self.to_out(out), _layer_state(tail, state)


def _convolution(channels: int, width: int) -> nn.Parameter:
    bound = width**-0.5
    return nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))


def _convolved(x: Tensor, weights: Tensor, call: _Call) -> tuple[Tensor, Tensor | None]:
    """Convolve tokens with the ones before them, SiLU; padding is 0, so that states skip it.

    Return also the last tokens of each sample, if they are to be kept.
    """
    last = None
    if call.keep:
        last = last_tokens(x, weights.shape[1] - 1, plan=call.plan, initial=call.tail)
    x = F.silu(ring_short_conv(x, weights, plan=call.plan, initial=call.tail))
    return x if call.mask is None else x * call.mask[..., None], last


def _layer_state(tail: Tensor | None, state: Tensor | None) -> LayerState | None:
    if tail is None or state is None:
        return None
    return LayerState(tail, state)


def _check(name: str, heads: int, shared: str, **numbers: int) -> None:
    """Raise ValueError if a number is below 1, or heads can't share `shared`."""
    with checks_of(name):
        check_least(1, heads=heads, **numbers)
        if heads % numbers[shared]:
            raise ValueError(
                f"heads must be a multiple of {shared}, got {heads} and {numbers[shared]}"
            )


def _masked(x: Tensor, call: _Call, projection: nn.Linear) -> Tensor:
    """Return tokens with 0 for padding; raise ValueError if they don't fit the plan."""
    mask, plan, dim = call.mask, call.plan, projection.in_features
    plan.check_tokens("a recurrent layer", x=x, mask=mask)
    if x.ndim != 3 or x.shape[2] != dim or not x.is_floating_point():
        raise plan.error(
            f"a recurrent layer: x must be floating [b, n, {dim}], got {x.dtype} {list(x.shape)}"
        )
    if why := dtype_refusal(x, projection):
        raise plan.error(f"a recurrent layer: {why}")
    if mask is None:
        return x
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise plan.error(
            f"a recurrent layer: mask must be bool [b, n], got {mask.dtype} {list(mask.shape)}"
        )
    return x.masked_fill(~mask[..., None], 0.0)


# layers of a pattern, by letter: "a" is attention
RECURRENT: Final[dict[str, Callable[..., nn.Module]]] = {"r": GatedDeltaNet, "m": Mamba2}


def recurrent_block(
    kind: str, dim: int, dim_head: int, heads: int, ff_mult: float
) -> nn.ModuleList:
    """Make a block of a transformer: a recurrent layer of this kind, and a feed-forward."""
    layer = RECURRENT[kind](dim, heads=heads, dim_head=dim_head)
    return nn.ModuleList([layer, feed_forward(dim, ff_mult)])


def plans_by_layer(
    plans: Mapping[Any, LayerPlan], pattern: str, layers: Iterable[Any]
) -> tuple[LayerPlan, ...]:
    """List the plan of each block, from plans by window and dropout of attention.

    Recurrent layers take the first one: its tokens are the same.
    """
    by_layer = []
    for number, (kind, (attn, _)) in enumerate(zip(pattern, layers)):
        if kind == "a":
            plan = plans[attn.window, attn.rate]
            by_layer.append(plan.for_layer(number) if isinstance(plan, RingPlan) else plan)
        else:
            by_layer.append(next(iter(plans.values())))
    return tuple(by_layer)


def run_recurrent(
    layer: nn.Module, x: Tensor, mask: Tensor | None, plans: Sequence[LayerPlan]
) -> Tensor:
    """Run a recurrent layer on the tokens of attention's plan; without one, on whole sequences."""
    if is_compiling():
        return run_apart(run_recurrent, layer, x, mask, plans)
    if not plans:
        runs = Runs.of(((Segment(0, 1, x.shape[1]),),), None, len(x))
        return layer(x, mask, plan=RunPlan(Ring.alone(), runs, x.device))
    plan = near_plan(plans[0])
    return layer(x, plan.own_mask.values, plan=RunPlan.of(plan))


def check_pattern(
    pattern: str, causal: bool, layout: Layout, windows: Sequence[int | None]
) -> None:
    """Raise ValueError if recurrent blocks contradict other options of a transformer."""
    recurrent_windows = {window for kind, window in zip(pattern, windows) if kind != "a"}
    if not recurrent_windows:
        return
    if not causal or layout == "striped":
        raise ValueError(
            "recurrent layers need causal=True, and shards of consecutive tokens, not the striped "
            f"layout; got causal={causal}, layout={layout!r}"
        )
    if len({*windows}) > 1 and recurrent_windows != {None}:
        raise ValueError("max_lookback_seq_len must be None for recurrent blocks")


def pattern_of(layers: str | Sequence[str] | None, depth: int) -> str:
    """Return the kind of each of `depth` blocks, from a pattern that is repeated.

    Raises:
        ValueError: there is no such kind, no attention, or the pattern doesn't divide depth.

    >>> pattern_of("rrra", 8)
    'rrrarrra'
    """
    if layers is None:
        return "a" * depth
    pattern = "".join(layers)
    if not pattern or {*pattern} - {"a", *RECURRENT} or "a" not in pattern or depth % len(pattern):
        raise ValueError(
            "layers must be of 'a' (attention), 'r' (gated delta net) and 'm' (Mamba 2), with an "
            f"'a', and of a length that divides depth={depth}; got {layers!r}"
        )
    return pattern * (depth // len(pattern))
