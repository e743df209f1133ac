"""Stand-ins of the parts of flash-linear-attention: loops over tokens, each a chunk of its own.

A token maps a state S to a S + k v^T with v = u - S^T w, so its own output is all within a chunk.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.recurrent import cuts, fla_passes, layers
from ring_attention_pytorch.recurrent.chunks import Chunks, How, Inputs, Returned


def spread_out(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with a head for each of values, and gates with a dimension of channels."""
    share = x.v.shape[2] // x.q.shape[2]
    q, k = (t.repeat_interleave(share, 2) for t in (x.q, x.k))
    return q, k, (x.g if x.g.ndim == 4 else x.g[..., None]).exp()


def after(a: Tensor, k: Tensor, state: Tensor, value: Tensor) -> Tensor:
    return a[..., None] * state + k[..., None] * value[..., None, :]


class Loops:
    """A rule, of gates of heads or of channels."""

    def chunks(self, x: Inputs, how: How) -> Chunks:
        q, k, a = spread_out(x)
        beta = x.beta[..., None]
        return Chunks(q, k, beta * a * k, beta * x.v, x.g, (x.v.clone(),))

    def again(self, x: Inputs, kept: tuple[Tensor, ...], how: How) -> Chunks:
        assert torch.equal(kept[0], x.v)
        return self.chunks(x, how)._replace(kept=kept)

    def outputs(self, x: Inputs, v: Tensor, h: Tensor, work: Chunks, how: How) -> Tensor:
        q, k, a = spread_out(x)
        return x.scale * torch.einsum("bnhkv,bnhk->bnhv", after(a, k, h, v), q)

    def local(
        self, x: Inputs, v: Tensor, do: Tensor, work: Chunks, how: How
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x.scale * (work.q * work.k).sum(-1, keepdim=True) * do, (do,)

    def gradients(self, x: Inputs, work: Chunks, r: Returned, how: How) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta)]
            fresh = Inputs(*leaves, x.scale)
            again = self.chunks(fresh, how)
            value = again.u - torch.einsum("bnhkv,bnhk->bnhv", r.h, again.w)
            torch.testing.assert_close(value.detach(), r.v)
            out = self.outputs(fresh, value, r.h, again, how)
            _, k, a = spread_out(fresh)
            total = (out * r.do).sum() + (after(a, k, r.h, value) * r.dh).sum()
        return torch.autograd.grad(total, leaves)


def token(work: Chunks, t: int) -> tuple[Tensor, ...]:
    g = work.g[0, t]
    a = (g if g.ndim == 2 else g[..., None]).exp()
    return a, work.k[0, t], work.w[0, t], work.u[0, t], work.q[0, t]


def states(work: Chunks, before: Tensor, how: How) -> tuple[Tensor, Tensor]:
    h, values = [], []
    for run, (first, end) in enumerate(how.spans.tolist()):
        state = before[run]
        for t in range(first, end):
            a, k, w, u, _ = token(work, t)
            h.append(state)
            values.append(u - torch.einsum("hkv,hk->hv", state, w))
            state = after(a, k, state, values[-1])
    return torch.stack(h)[None], torch.stack(values)[None]


def store_maps(work: Chunks, spans: Tensor, maps: Tensor) -> None:
    heads, d_k, d_v = work.w.shape[2], work.w.shape[3], work.u.shape[3]
    for number, (first, end) in enumerate(spans.tolist()):
        zero = work.w.new_zeros(heads, d_k, d_v)
        state = torch.cat((zero, torch.eye(d_k, dtype=zero.dtype).expand(heads, d_k, d_k)), -1)
        for t in range(first, end):
            a, k, w, value, _ = token(work, t)
            wide = torch.cat((value, value.new_zeros(heads, d_k)), -1)
            state = after(a, k, state, wide - torch.einsum("hkv,hk->hv", state, w))
        maps[number] = state


def walked(
    work: Chunks, total: Tensor, do: Tensor, dv: Tensor, span: list[int], scale: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The gradient of the state before a run, from that after it, and those within."""
    dh, values = [], []
    for t in reversed(range(*span)):
        a, k, w, _, q = token(work, t)
        dh.append(total)
        values.append(dv[0, t] + torch.einsum("hkv,hk->hv", total, k))
        whole = total + scale * q[..., None] * do[0, t][..., None, :]
        total = a[..., None] * whole - w[..., None] * values[-1][..., None, :]
    return total, dh[::-1], values[::-1]


def gradients_of(work: Chunks, do: Tensor, dv: Tensor, spans: Tensor, scale: float) -> Tensor:
    zero = work.w.new_zeros(*work.w.shape[2:], work.u.shape[3])
    return torch.stack(
        [walked(work, zero, do, dv, span, scale)[0] for span in spans.tolist()]
    )  # fmt: skip


def state_gradients(
    work: Chunks, x: Inputs, ends: Tensor | None, do: Tensor, dv: Tensor, how: How
) -> tuple[Tensor, Tensor]:
    dh: list[Tensor] = []
    values: list[Tensor] = []
    zero = work.w.new_zeros(*work.w.shape[2:], work.u.shape[3])
    for run, span in enumerate(how.spans.tolist()):
        end = zero if ends is None else ends[run]
        _, more, also = walked(work, end, do, dv, span, x.scale)
        dh, values = dh + more, values + also
    return torch.stack(dh)[None], torch.stack(values)[None]


def prepared(x: Inputs, call: Any, how: How) -> tuple[Inputs, tuple[Tensor, ...]]:
    if not call.normalize:
        return x, ()
    return x._replace(q=layers.normalized(x.q), k=layers.normalized(x.k)), (x.q, x.k)


def unprepared(
    rule: Any, x: Inputs, work: Chunks, returned: Returned, norms: tuple[Tensor, ...], how: How
) -> tuple[Tensor, ...]:
    dq, dk, *more = rule.gradients(x, work, returned, how)
    if norms:
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in norms]
            outs = [layers.normalized(t) for t in given]
        dq, dk = torch.autograd.grad(outs, given, (dq, dk))
    return dq, dk, *more


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let calls with kernel "fla" compute by these, in any dtype on the CPU."""
    patch.setattr(layers, "fla_refusal", lambda *_: None)
    patch.setattr(layers, "_by_passes", lambda call, apart: call.beta is not None)
    patch.setattr(cuts, "CHUNK", 2)  # runs are cut at multiples of it
    patch.setattr(cuts, "_SHORTEST", 4)
    patch.setattr(fla_passes, "rule_of", lambda g: Loops())
    for name, function in (
        ("_prepared", prepared), ("_unprepared", unprepared), ("_states", states),
        ("_state_gradients", state_gradients), ("store_maps", store_maps),
        ("gradients_of", gradients_of),
    ):  # fmt: skip
        patch.setattr(fla_passes, name, function)
