"""A router: it scores tokens, chooses the best ones, and computes gates by a soft top-k.

Parameter names and defaults match CoLT5-attention. eps is from its version 0.4.3, because the
exact solution at a small eps is a hard choice without a gradient.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.autograd import Function

from ring_attention_pytorch.arguments import check_least, checked
from ring_attention_pytorch.nn.sharding import ShardConfig, report_to_group_of_module
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.ranks.agreement import typed
from ring_attention_pytorch.ranks.ring import Caller, Group
from ring_attention_pytorch.routing.descent_triton import TRITON
from ring_attention_pytorch.routing.dispatch import Dispatch, dealt
from ring_attention_pytorch.routing.passes import PLAIN, Passes
from ring_attention_pytorch.routing.plan import RoutingPlan
from ring_attention_pytorch.routing.selection import best, causal_choice, slots, windows
from ring_attention_pytorch.routing.soft_topk import (
    Solution,
    check_count,
    check_descent,
    counts,
    descent,
    fixed_point,
    gates,
    threshold,
)
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype, has_triton, sum_of_products
from ring_attention_pytorch.runtime.torch_func import refuse_second_order

Tokens = int | float
_AT_ONCE = 65536  # tokens that are cast to the wide dtype at a time
_BITS = {torch.float64: 32, torch.float32: 12}  # rounding changes far lower bits


class Routing(NamedTuple):
    """The positions of all routed tokens, on every rank, and the gates of this rank's tokens."""

    positions: Tensor  # [b, r, W * K], -1 for empty slots
    gates: Tensor  # [b, r, n]


class RouterReturn(NamedTuple):
    """The routed tokens that this rank works on: its K slots of each route.

    Shapes are `[b, K]` and `[b, K, dim]`, or `[b, r, K]` and `[b, r, K, dim]` with a route
    dimension. `route_back` returns results to the owners by `dispatch`.
    """

    indices: Tensor  # positions in the whole sequence, -1 for empty slots
    scores: Tensor
    routed_tokens: Tensor
    routed_mask: Tensor
    dispatch: Dispatch


class Routed(NamedTuple):
    """Tokens `[b, r, K, dim]` in this rank's slots, their gates, and the way back to owners."""

    tokens: Tensor
    gates: Tensor
    way: Dispatch

    @classmethod
    def gather(
        cls, x: Tensor, routing: Routing, plan: RoutingPlan, slots: list[Tensor] | None = None
    ) -> "Routed":
        """Fetch the tokens routed to this rank; x `[b, n, dim]` are this rank's own tokens."""
        if slots is None:
            slots = dealt(routing.positions.shape[-1], plan.ring.size, x.device)
        way = Dispatch.make(routing.positions, plan, slots)
        return cls(way.out(x), way.out(routing.gates, by_route=True), way)

    @property
    def positions(self) -> Tensor:
        return self.way.positions

    @property
    def real(self) -> Tensor:
        """Mask of filled slots, bool `[b, K]`; all routes fill the same slots."""
        return self.positions[:, 0] >= 0

    def home(self, y: Tensor, base: Tensor) -> Tensor:
        """Send y `[b, K, dim]`, times gates, to the owners; return base `[b, n, dim]` filled."""
        gates = rearrange(self.gates, "b 1 k -> b k 1")
        gated = y * gates.to(y.dtype)
        return self.way.home(gated.unsqueeze(1), base)


class _Scores(Function):
    """(tokens `[b, n, dim]`, directions `[b or 1, r, dim]`) -> their products `[b, r, n]`.

    The result has the dtype of the directions. Tokens are cast to it some at a time, so that there
    is never a wide copy of all of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, toward: Tensor) -> Tensor:
        ctx.save_for_backward(x, toward)
        routes = toward.unsqueeze(-2).unbind(1)
        scores = []
        if x.is_cuda and x.dtype != torch.float64 and has_triton():
            for t in routes:
                along = t.expand(x.shape).unsqueeze(2)
                scores.append(sum_of_products(x.unsqueeze(2), along))
            return torch.cat(scores, 1)
        for part in x.split(_AT_ONCE, 1):
            wide = part.to(toward.dtype)
            scores.append(torch.stack([(wide * t).sum(-1) for t in routes], 1))
        return torch.cat(scores, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_order("routing by scores")
        x, toward = ctx.saved_tensors
        dx = torch.empty_like(x)
        dtoward = torch.zeros_like(toward)
        with torch.autocast(x.device.type, enabled=False):
            everyones = toward.expand(len(x), -1, -1)
            parts = zip(dx.split(_AT_ONCE, 1), x.split(_AT_ONCE, 1), grad.split(_AT_ONCE, -1))
            for dx_part, x_part, g in parts:
                dx_part.copy_(einsum(g, everyones, "b r n, b r d -> b n d"))
                dtoward_part = einsum(g, x_part.to(g.dtype), "b r n, b n d -> b r d")
                dtoward += dtoward_part.sum_to_size(toward.shape)
        return dx, dtoward


class CoordinateDescentRouter(nn.Module):
    """A router that scores tokens along a learned direction and chooses the k best.

    Gates come from an entropy-regularised soft top-k of the scores.

    Args:
        dim: model width.
        straight_through: gates are 1 in forward and soft in backward; if False, soft in both.
        n_iters: None solves for the exact fixed point; an int takes this many steps of the
            published descent.
        fetch_k_ratio: soft gates sum to this many times the number of routed tokens.
        eps: how soft the gates are; tokens of mean square 1 have scores of size sqrt(dim).
        eps_decay, eps_init, use_triton: options of the descent, so they need n_iters.
        num_routing_tokens: number of sets of tokens to choose, each along its own direction.
        learned_routing_tokens: the router has no direction of its own; pass routing_tokens to
            `forward`.
        cosine_sim_routing, cosine_sim_scale: scores are cosine_sim_scale times the cosine.
        route_block_size: choose an equal share, rounded up, from each block of this many tokens.
        triton_checkpoint_segments: backward needs no checkpoints; only None is accepted.
        ring_attn: x is this rank's part of a sequence over a ring.
        layout, group: the layout of that sequence, and its ring.

    Raises:
        ValueError: arguments are invalid or contradict one another.

    >>> router = CoordinateDescentRouter(8)
    >>> found = router(torch.randn(2, 10, 8), num_tokens=3)
    >>> found.indices.shape, found.routed_tokens.shape
    (torch.Size([2, 3]), torch.Size([2, 3, 8]))
    """

    @checked
    def __init__(
        self,
        dim: int,
        straight_through: bool = True,
        n_iters: int | None = None,
        fetch_k_ratio: float | int = 9 / 8,
        eps: float | int = 1.0,
        eps_decay: float | int | None = None,
        eps_init: float | int | None = None,
        num_routing_tokens: int = 1,
        learned_routing_tokens: bool = False,
        use_triton: bool = False,
        cosine_sim_routing: bool = False,
        cosine_sim_scale: float | int = 8,
        route_block_size: int | None = None,
        triton_checkpoint_segments: int | None = None,
        *,
        ring_attn: bool = False,
        layout: LayoutName | None = None,
        group: Group = None,
    ):
        super().__init__()
        descends = {"eps_decay": eps_decay, "eps_init": eps_init, "use_triton": use_triton or None}
        given = [name for name, value in descends.items() if value is not None]
        if n_iters is None and given:
            raise ValueError(f"{', '.join(given)} need n_iters: the fixed point has no steps")
        if triton_checkpoint_segments is not None:
            raise ValueError("triton_checkpoint_segments: leave it None, backward needs none")
        decay = 1.0 if eps_decay is None else eps_decay
        check_least(
            1, dim=dim, fetch_k_ratio=fetch_k_ratio, num_routing_tokens=num_routing_tokens,
            route_block_size=route_block_size,
        )  # fmt: skip
        check_descent(1 if n_iters is None else n_iters, eps, eps_init, decay)
        if not 0 < cosine_sim_scale < math.inf:
            raise ValueError(
                f"cosine_sim_scale must be positive and finite, got {cosine_sim_scale}"
            )
        self.dim: int = dim
        self.routes: int = num_routing_tokens
        self.straight_through: bool = straight_through
        self.fetch_k_ratio = fetch_k_ratio
        self.eps: float = float(eps)
        self.passes: Passes = TRITON if use_triton else PLAIN
        self.steps: tuple[int, float, float | None, float] | None = (
            None if n_iters is None else (n_iters, float(eps), eps_init, float(decay))
        )
        self.cosine_scale: float | None = cosine_sim_scale if cosine_sim_routing else None
        self.route_block_size = route_block_size
        self.spread: ShardConfig = ShardConfig.make(ring_attn, layout=layout, group=group)
        self.routing_token: nn.Parameter | None = None
        if not learned_routing_tokens:
            self.routing_token = nn.Parameter(torch.randn(num_routing_tokens, dim))

    @typed(report_to_group_of_module("CoordinateDescentRouter"))
    def forward(
        self,
        x: Tensor,
        *,
        num_tokens: Tokens,
        mask: Tensor | None = None,
        random_route: bool = False,
        routing_tokens: Tensor | None = None,
        keep_one_route_dim: bool = False,
        plan: RoutingPlan | None = None,
    ) -> RouterReturn:
        """Choose tokens, and return the routed ones that this rank works on.

        Args:
            x: `[b, n, dim]`, this rank's tokens.
            num_tokens: tokens to choose per sample; a float is a share of its real tokens.
            mask: bool `[b, n]`, True where a token is real.
            random_route: choose tokens at random, with gates 1.
            routing_tokens: directions `[b, dim]` or `[b, r, dim]`, with learned_routing_tokens.
            keep_one_route_dim: keep the route dimension even if there is one route.
            plan: the plan of this batch, made with the mask; pass no mask with it.

        Raises:
            ValueError: an argument is invalid, or differs between ranks; on every rank.
        """

        def check() -> None:
            check_count("num_tokens", num_tokens)
            self.check(x, routing_tokens)

        also = {"num_tokens": num_tokens, "random_route": random_route}
        plan = RoutingPlan.of(plan, x, mask, self.spread, "CoordinateDescentRouter", also, check)
        routing = self.choose(
            x, plan, num_tokens, routing_tokens=routing_tokens, random_route=random_route
        )
        routed = Routed.gather(x, routing, plan)
        fields = (routed.positions, routed.gates, routed.tokens, routed.positions >= 0)
        if self.routes == 1 and not keep_one_route_dim:
            positions, gates, tokens, real = fields
            fields = positions.squeeze(1), gates.squeeze(1), tokens.squeeze(1), real.squeeze(1)
        return RouterReturn(*fields, routed.way)

    @staticmethod
    @checked
    def route_back(src: Tensor, routed_tokens: Tensor, dispatch: Dispatch) -> Tensor:
        """Return src `[b, n, ...]` with one route's tokens `[b, K, ...]` at their own places."""
        return dispatch.home(routed_tokens.unsqueeze(1), src)

    def check(self, x: Tensor, routing_tokens: Tensor | None = None) -> None:
        """Raise ValueError if this rank's arguments are invalid."""
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError(f"tokens must be [batch, tokens, {self.dim}], got {list(x.shape)}")
        self.passes.check(x.device)
        if (routing_tokens is None) == (self.routing_token is None):
            raise ValueError(
                "routing_tokens go with learned_routing_tokens=True, and with that only"
            )
        if routing_tokens is not None:
            shape, want = list(routing_tokens.shape), [len(x), self.routes, self.dim]
            if shape != want and (self.routes > 1 or shape != [len(x), self.dim]):
                raise ValueError(f"routing_tokens must be {want}, got {shape}")

    def choose(
        self,
        x: Tensor,
        plan: RoutingPlan,
        k: Tokens,
        *,
        size: int | None = None,
        causal: bool = False,
        routing_tokens: Tensor | None = None,
        random_route: bool = False,
    ) -> Routing:
        """Choose k tokens of the whole sequence, or of each window of `size` tokens.

        x `[b, n, dim]` are this rank's tokens. If causal, `selection.causal_choice` chooses, and a
        token's gate follows from its score by the soft top-k of the window before its own.
        """
        if size is None and self.route_block_size is not None:
            size = self.route_block_size
            blocks = -(-plan.length // size)
            if isinstance(k, int):
                k = -(-k // max(blocks, 1))
        if size is None:
            size = max(plan.length, 1)
        if random_route:
            shape = (x.shape[0], self.routes, x.shape[1])
            scores = torch.rand(shape, device=x.device, dtype=torch.float64)
        else:
            scores = self.scores(x, routing_tokens)
        with torch.no_grad():
            real = windows(plan.real.unsqueeze(1), size, False)  # [b, 1, W, size]
            whole = windows(plan.whole(scores), size, 0.0).masked_fill(~real, -torch.inf)
            known = real.sum(-1).expand(whole.shape[:-1])
            count, most = counts(k, known), slots(k, size)
            ranked = whole
            if not random_route:
                ranked = rounded(whole, self._toward(scores.dtype, routing_tokens))
            if causal:
                positions = causal_choice(ranked, real.expand(whole.shape), count, most)
            else:
                positions = best(ranked, count, most)
        if random_route:
            return Routing(positions, torch.ones_like(scores))
        soft_count = (count * self.fetch_k_ratio).minimum(known.double())
        solution = self._solve(whole, soft_count)
        return Routing(positions, self._gates(scores, solution, plan, size, causal))

    def scores(self, x: Tensor, routing_tokens: Tensor | None = None) -> Tensor:
        """Compute the scores `[b, r, n]` of tokens x, in float32 at least.

        Products are summed per token, so that equal tokens have equal scores on any ring.
        """
        toward = self._toward(accumulation_dtype(x.dtype), routing_tokens)
        if self.cosine_scale is not None:
            x = F.normalize(x.to(toward.dtype), dim=-1)
            x = x * self.dim**0.5
        return _Scores.apply(x, toward.squeeze(-2))

    def _toward(self, dtype: torch.dtype, routing_tokens: Tensor | None) -> Tensor:
        """Return the directions `[b or 1, r, 1, dim]`; scores are tokens times directions."""
        toward: Any = self.routing_token if routing_tokens is None else routing_tokens
        toward = toward.to(dtype).reshape(-1, self.routes, 1, self.dim)
        if self.cosine_scale is None:
            return toward
        scale = self.cosine_scale * self.dim**-0.5
        return F.normalize(toward, dim=-1) * scale

    def _solve(self, whole: Tensor, k: Tensor) -> Solution:
        with torch.no_grad():
            if self.steps is None:
                return fixed_point(whole, k, self.eps)
            return descent(whole, k, *self.steps, by=self.passes.partition)

    def _gates(
        self, scores: Tensor, solution: Solution, plan: RoutingPlan, size: int, causal: bool
    ) -> Tensor:
        positions = plan.positions(scores.device)
        window = positions // size
        padding = None if plan.mask is None else ~plan.mask.unsqueeze(1)
        wide = hidden = scores.double()
        if padding is not None:
            hidden = wide.masked_fill(padding, -torch.inf)
        a = threshold(
            hidden, solution, window, Caller(plan.ring, "routing", plan.number), self.passes.slope
        )
        if a.shape[-1] > 1:  # with one a for all, index_select would add gradients one by one
            decisive = (window - int(causal)).clamp(min=0)
            a = a.index_select(-1, decisive)
        p = gates(wide, a, solution.eps)
        p = p.masked_fill(positions < size * causal, 0.0)
        if padding is not None:
            p = p.masked_fill(padding, 0.0)
        if self.straight_through:
            p = p + (1 - p).detach()
        return p.to(scores.dtype)


def rounded(scores: Tensor, toward: Tensor) -> Tensor:
    """Round scores `[b, r, W, n]` for comparison, `_BITS` bits below a typical score.

    Tokens in equal surroundings, such as a long run of blanks, should have equal scores. Rounding
    errors make them differ, and differently on another ring. Rounded scores are ties, which go to
    the earlier token. `toward` `[b or 1, r, 1, dim]` are the directions; their norm is a typical
    score for tokens of mean square 1.
    """
    usual = toward.norm(dim=-1, keepdim=True)
    exponent = torch.frexp(usual).exponent - _BITS[scores.dtype]
    step = torch.ldexp(torch.ones_like(usual), exponent)
    steps = (scores / step).round()
    return steps * step


_OF_ROUTERS = {
    "n_iters", "fetch_k_ratio", "eps", "eps_decay", "eps_init", "use_triton", "cosine_sim_routing",
    "cosine_sim_scale", "route_block_size", "triton_checkpoint_segments",
}  # fmt: skip


def router_options(
    given: dict | None, straight_through: bool, use_triton: bool, *decided: str
) -> dict[str, Any]:
    """Merge `router_kwargs` with the module's own options for its router.

    Raises:
        ValueError: an option is none of a router's, or the module decides it, as it does `decided`.
    """
    allowed = sorted(_OF_ROUTERS - {*decided})
    if wrong := [name for name in given or {} if name not in allowed]:
        raise ValueError(
            f"router_kwargs may be {', '.join(allowed)}, got {', '.join(map(str, wrong))}; what "
            "else a router has, the module decides"
        )
    options = dict(given or {}, straight_through=straight_through)
    if use_triton:
        options["use_triton"] = True
    return options


def refuse_blocks(router: CoordinateDescentRouter, windows: str) -> None:
    """Raise ValueError if a router has route_block_size, which contradicts a module's windows."""
    if router.route_block_size is not None:
        raise ValueError(f"route_block_size: the module already chooses by {windows}")
