"""Cases of attention to encoded keys: what a rank computes, and dense attention to the expanded."""

import random
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.latent import mla_plan, mla_ring_attn, tied_plan, tied_ring_attn
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime import codec
from tests.support import threads
from tests.support.cases import over_shared_memory
from tests.support.reference import dense_attention, dropout_weights, relative_error

H, G, D_NOPE, D_ROPE, RANK, D_V, D = 4, 2, 6, 4, 5, 3, 6  # G and D are of tied keys
SEED = 5


def masks(pick: random.Random, length: int, causal: bool) -> dict[str, Any]:
    """Masks and terms of scores, drawn."""
    options: dict[str, Any] = {}
    if pick.random() < 0.3:
        options["window"] = pick.randrange(0, 12)
    if pick.random() < 0.3:
        cuts = sorted(pick.sample(range(1, length), 2))
        options["cu_seqlens"] = [0, *cuts, length]
    if pick.random() < 0.3:
        options["key_mask"] = True
    if pick.random() < 0.3:
        options["sinks"] = True
    if pick.random() < 0.2:
        options |= dict(softclamp=3.0, kernel="eager")
    if pick.random() < 0.2:
        options |= dict(alibi_slopes=torch.linspace(0.1, 1, H).double(), kernel="eager")
    if pick.random() < 0.15:
        options |= dict(mask_mod=two_of_three, kernel="eager")
    elif pick.random() < 0.15:
        options |= dict(dropout=0.4, dropout_seed=3, kernel="eager")
    if causal and "cu_seqlens" not in options and pick.random() < 0.2:
        options["prefix"] = 5
    return options


@dataclass(frozen=True)
class Case:
    """One attention over a ring; `memory` names a fabric of shared memory instead of messages."""

    size: int = 2
    batch: int = 2
    length: int = 24
    layout: str = "zigzag"
    tied: bool = False
    memory: str | None = None
    machines: tuple[int, ...] = ()
    most: int = codec.MOST_DECODED
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        """A random one."""
        pick = random.Random(seed)
        size, length = pick.choice([1, 2, 3, 4]), pick.randrange(16, 40)
        options: dict[str, Any] = dict(
            kernel=pick.choice(["eager", None]), causal=pick.random() < 0.7,
            transport=pick.choice([None, "ring", "gather"]),
        )  # fmt: skip
        options |= masks(pick, length, options["causal"])
        if size % 2 == 0 and pick.random() < 0.4:
            options["ulysses"] = pick.choice([2, size])
        if options["transport"] == "gather" and pick.random() < 0.3:
            options["memory"] = 0
        machines = tuple(rank // 2 for rank in range(size)) if pick.random() < 0.4 else ()
        memory = pick.choice(["copies", "together"]) if pick.random() < 0.3 else None
        if memory is not None:
            options |= dict(transport="gather")
            machines = ()
        layout = pick.choice(["contiguous", "striped", "zigzag"])
        most = pick.choice([codec.MOST_DECODED, 1, 3000])
        batch, tied = pick.choice([1, 2]), pick.random() < 0.3
        return cls(size, batch, length, layout, tied, memory, machines, most, options)

    @property
    def names(self) -> tuple[str, ...]:
        latents = ("q_nope", "q_rope", "latent", "k_rope", "w_up")
        return ("q", "kv") if self.tied else latents

    @property
    def calls(self) -> tuple[Any, Any]:
        """The attention, and what makes its plan."""
        return (tied_ring_attn, tied_plan) if self.tied else (mla_ring_attn, mla_plan)

    def tensors(self) -> dict[str, Tensor]:
        """Draw tensors of the whole sequence, parameters, and cotangents."""
        draw = torch.Generator().manual_seed(SEED)
        b, n = self.batch, self.length
        shapes = dict(
            q_nope=(b, n, H, D_NOPE), q_rope=(b, n, H, D_ROPE), latent=(b, n, RANK),
            k_rope=(b, n, D_ROPE), w_up=(H, D_NOPE + D_V, RANK), sinks=(H,),
            q=(b, n, H, D), kv=(b, n, G, D), dout=(b, n, H, D if self.tied else D_V),
            dlse=(b, H, n),
        )  # fmt: skip
        found = {
            name: torch.randn(shape, generator=draw, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        found["key_mask"] = torch.rand(b, n, generator=draw) < 0.7
        return found

    def learned(self) -> tuple[str, ...]:
        return (*self.names, "sinks") if "sinks" in self.options else self.names

    def wanted(self) -> dict[str, Tensor]:
        """By dense attention to expanded keys."""
        given = self.tensors()
        leaves = {name: given[name].clone().requires_grad_() for name in self.learned()}
        options = {
            name: value for name, value in self.options.items()
            if name not in ("kernel", "transport", "ulysses", "memory", "cu_seqlens")
        }  # fmt: skip
        if "key_mask" in options:
            options["key_mask"] = given["key_mask"]
        if "sinks" in options:
            options["sinks"] = leaves["sinks"]
        if (ends := self.options.get("cu_seqlens")) is not None:
            at = torch.bucketize(torch.arange(self.length), torch.tensor(ends), right=True)
            options["documents"] = at.expand(self.batch, -1)
        if "prefix" in options:
            options["prefix"] = [options["prefix"]] * self.batch
        if rate := options.pop("dropout", None):
            sizes = self.batch, H, self.length, self.length
            options["weights"] = dropout_weights(rate, options.pop("dropout_seed"), *sizes)
        out, lse = dense_attention(*expanded(leaves), **options)
        return _results(out, lse, leaves, given)

    def of_rank(self, ring: threads.ThreadRing) -> dict[str, Tensor]:
        """One rank's results, and its tokens."""
        at = positions(self.layout, rank=ring.rank, ring_size=ring.size, length=self.length)
        given = {
            name: t[..., at] if name == "dlse" else t if name in ("w_up", "sinks") else t[:, at]
            for name, t in self.tensors().items()
        }
        leaves = {name: given[name].clone().requires_grad_() for name in self.learned()}
        options = {**self.options, "group": ring, "layout": self.layout}
        for name in ("key_mask", "sinks"):
            if name in options:
                options[name] = leaves.get(name, given[name])
        args = [leaves[name] for name in self.names]
        call, plan_of = self.calls
        if self.memory is None:
            out, lse = call(*args, return_lse=True, **options)
        else:
            plan = in_memory(plan_of(*args, **options), self, ring)
            out, lse = call(*args, plan=plan, sinks=leaves.get("sinks"), return_lse=True)
        return {"at": at, **_results(out, lse, leaves, given)}

    def errors(self) -> dict[str, float]:
        """Relative errors of each result over all ranks; parameters' gradients are summed."""
        with mock.patch.object(codec, "MOST_DECODED", self.most):
            found, _ = threads.run(self.size, self.of_rank, self.machines)
        worst = {}
        for name, want in self.wanted().items():
            if name in ("dw_up", "dsinks"):
                parts = [sum(rank[name] for rank in found)], [want]
            else:
                wants = [want[..., r["at"]] if name == "lse" else want[:, r["at"]] for r in found]
                parts = [rank[name] for rank in found], wants
            scale = want.norm() / self.length**0.5
            worst[name] = max(
                float((got - right).norm() / scale) if scale else relative_error(got, right)
                for got, right in zip(*parts)
            )
        return worst


def two_of_three(sample: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """A predicate that depends on all of its arguments."""
    return (sample + head + row + 2 * col) % 3 > 0


def expanded(given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of all heads, from what is given; differentiable."""
    if "kv" in given:
        return given["q"], given["kv"], given["kv"]
    both = torch.einsum("b m r, h d r -> b m h d", given["latent"], given["w_up"])
    rotated = given["k_rope"].unsqueeze(2).expand(-1, -1, both.shape[2], -1)
    d_nope = given["q_nope"].shape[-1]
    k = torch.cat((both[..., :d_nope], rotated), -1)
    return torch.cat((given["q_nope"], given["q_rope"]), -1), k, both[..., d_nope:]


def in_memory(plan: RingPlan, case: Case, ring: threads.ThreadRing) -> RingPlan:
    """The plan over memory that threads share."""
    b, n, m, h, g, d, *_ = plan.signature
    first, second = plan.codec.widths
    shapes = (b, n, h, d), (b, m, g, first), (b, m, g, max(second, plan.codec.d_v))
    like = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    how = {"together": True} if case.memory == "together" else {}
    return over_shared_memory(plan, like, ring, max(1, case.size - 1), **how)


__all__ = ["Case", "expanded", "in_memory", "replace"]


def _results(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return out, lse and the gradients of leaves; blind rows have lse 0 and no gradient."""
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), [*leaves.values()], (given["dout"], given["dlse"]))
    named = {f"d{name}": grad for name, grad in zip(leaves, grads)}
    return {"out": out.detach(), "lse": lse.detach(), **named}
