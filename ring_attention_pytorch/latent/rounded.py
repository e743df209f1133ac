"""`rounded_ring_attn`: keys and values in 8 bits, where the network is the bottleneck.

    own k, v   ── rounded to float8 and a power of two for each token and head ──   k', v'
    k', v'     ── sent as these bytes, the same numbers on every rank              out of q, k', v'
    dk', dv'   ── sent in k's dtype, as ever                                       are dk and dv

Every rank computes attention to the same rounded keys, its own ones included.
"""

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from ring_attention_pytorch.latent.calls import (
    CodedOptions,
    CodedPlanOptions,
    Encoded,
    attend,
    encoded,
    make_plan,
    report,
)
from ring_attention_pytorch.latent.codecs import RoundedKeys
from ring_attention_pytorch.plan.checks import check_qkv
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.runtime.scaled import rounded
from ring_attention_pytorch.runtime.torch_func import Function


@overload
def rounded_ring_attn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[CodedOptions],
) -> Tensor: ...  # fmt: skip
@overload
def rounded_ring_attn(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[CodedOptions]
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@typed(report, apart=True)
def rounded_ring_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    plan: RingPlan | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `ring_attn` of keys and values rounded to 8 bits, which messages send so.

    It is not the attention of k and v: each is rounded to 3 bits after its first (float8 e4m3),
    with a power of two as scale of each token and head. All ranks use the rounded ones, for their
    own tokens, too. Where ranks share memory nothing is sent, and only the rounding is left. A key
    or value of a token and head with a number that is not finite, or beyond 448 * 2 ** 63, is NaN.

    Args:
        q: `[b, n, h, d]`, this rank's queries.
        k, v: `[b, m, h_kv, d]` and `[b, m, h_kv, d_v]`, this rank's keys and values.
        group: as for `ring_attn`.
        plan: from `rounded_plan`; it replaces all options except return_lse and sinks.
        options: as for `ring_attn`, but no key_bias and no shared_keys.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        As `ring_attn`. The gradient of q is exactly that of attention to the rounded keys. Those
        of k and v are the exact gradients of the rounded ones, passed on as if rounding changed
        nothing (straight-through); they travel in the dtype in which `ring_attn` sends them.

    Raises:
        ValueError: as `ring_attn`; on all ranks, before any tensor is sent.
        NotImplementedError: second derivatives or forward mode.

    >>> from ring_attention_pytorch import ring_attn
    >>> q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    >>> out, exact = rounded_ring_attn(q, k, k, causal=True), ring_attn(q, k, k, causal=True)
    >>> bool((out - exact).norm() < 0.1 * exact.norm())
    True
    """
    options |= dict(group=group, plan=plan, return_lse=return_lse)
    return attend("rounded_ring_attn", _rounded, (q, k, v), options)


@typed(report)
def rounded_plan(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[CodedPlanOptions]) -> RingPlan:
    """Make the plan of `rounded_ring_attn` for tensors like these; all ranks call this together.

    Args:
        q, k, v, options: as for `rounded_ring_attn`; values don't matter.

    Raises:
        ValueError: as `rounded_ring_attn`.

    >>> q, k = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)
    >>> rounded_plan(q, k, k, causal=True).codec
    RoundedKeys(d=8, d_v=8)
    """
    return make_plan(encoded("rounded_plan", _rounded, (q, k, v), dict(options)), dict(options))


class _StraightThrough(Function):
    """(t) -> t in 8 bits; gradients pass as they are."""

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return rounded(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, along: Tensor) -> Tensor:
        return along.view_as(along)


def _rounded(q: Tensor, k: Tensor, v: Tensor) -> Encoded:
    """Encode for `rounded_ring_attn`; raise ValueError if shapes, dtypes or devices don't fit."""
    check_qkv(q, k, v)
    keys = _StraightThrough.apply(k), _StraightThrough.apply(v)
    return Encoded(q, keys, RoundedKeys(k.shape[-1], v.shape[-1]), {})
