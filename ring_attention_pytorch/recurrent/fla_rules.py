"""The parts of flash-linear-attention's delta rules, for calls in two passes.

Its two rules, of a gate for each head and of one for each channel, as the steps that its own
functions take: chunks, outputs, and the gradients in two steps. The parts are inner functions of
fla-core 0.6 and are called unmodified; another version is refused.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from typing import Any, Protocol

from torch import Tensor

from ring_attention_pytorch.recurrent.chunks import Chunks, How, Inputs, Returned
from ring_attention_pytorch.recurrent.head_gradients import head_gradients

_VERSION = "0.6."  # whose inner functions these are
_MOST = 128  # the largest d_k of the kernels of states
_LEAST = 8  # two passes are for values at most so many times as wide as keys


class Rule(Protocol):
    """The steps of a rule that follow or precede the states."""

    def chunks(self, x: Inputs, how: How) -> Chunks: ...
    def again(self, x: Inputs, kept: tuple[Tensor, ...], how: How) -> Chunks: ...
    def outputs(self, x: Inputs, v: Tensor, h: Tensor, work: Chunks, how: How) -> Tensor: ...
    def local(
        self, x: Inputs, v: Tensor, do: Tensor, work: Chunks, how: How
    ) -> tuple[Tensor, Tensor | None]: ...
    def gradients(self, x: Inputs, work: Chunks, r: Returned, how: How) -> tuple[Tensor, ...]: ...


class OfHeads:
    """The gated delta rule: a gate for each head."""

    def chunks(self, x: Inputs, how: How) -> Chunks:
        w, u, a = part("ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_intra")(
            k=x.k, v=x.v, g=x.g, beta=x.beta, **how.sized
        )  # fmt: skip
        return Chunks(x.q, x.k, w, u, x.g, (a,))

    def again(self, x: Inputs, kept: tuple[Tensor, ...], how: How) -> Chunks:
        w, u = part("ops.gated_delta_rule.wy_fast.recompute_w_u_fwd")(
            k=x.k, v=x.v, beta=x.beta, A=kept[0], g=x.g, **how.given
        )
        return Chunks(x.q, x.k, w, u, x.g, kept)

    def outputs(self, x: Inputs, v: Tensor, h: Tensor, work: Chunks, how: How) -> Tensor:
        return part("ops.common.chunk_o.chunk_fwd_o")(
            q=x.q, k=x.k, v=v, h=h, g=x.g, scale=x.scale, **how.sized
        )

    def local(
        self, x: Inputs, v: Tensor, do: Tensor, work: Chunks, how: How
    ) -> tuple[Tensor, Tensor | None]:
        return part("ops.common.chunk_o.chunk_bwd_dv_local")(
            q=x.q, k=x.k, g=x.g, do=do, scale=x.scale, **how.sized
        ), None

    def gradients(self, x: Inputs, work: Chunks, r: Returned, how: How) -> tuple[Tensor, ...]:
        if on_hopper():
            dq, dk, dw, dg = head_gradients(x, work, r, how)
        else:
            dq, dk, dw, dg = part("ops.common.chunk_o.chunk_bwd_dqkwg")(
                q=x.q, k=x.k, v=r.v, w=work.w, g=x.g, h=r.h, dv=r.dv, do=r.do, dh=r.dh,
                scale=x.scale, **how.sized,
            )  # fmt: skip
        more_k, dv, db, more_g = part("ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd")(
            k=x.k, v=x.v, beta=x.beta, g=x.g, A=work.kept[0], dw=dw, du=r.dv, **how.given
        )
        return dq, dk.add_(more_k), dv, dg.add_(more_g), db


class OfChannels:
    """Kimi delta attention: a gate for each channel of a key."""

    def chunks(self, x: Inputs, how: How) -> Chunks:
        w, u, _, k, of_q, of_k = part("ops.kda.chunk_intra.chunk_kda_fwd_intra")(
            q=x.q, k=x.k, v=x.v, gk=x.g, beta=x.beta, scale=x.scale, **how.sized
        )
        return Chunks(x.q, k, w, u, x.g, (of_q, of_k))

    def again(self, x: Inputs, kept: tuple[Tensor, ...], how: How) -> Chunks:
        w, u, q, k = part("ops.kda.wy_fast.recompute_w_u_fwd")(
            q=x.q, k=x.k, v=x.v, beta=x.beta, A=kept[1], gk=x.g, **how.given
        )
        return Chunks(q, k, w, u, x.g, kept)

    def outputs(self, x: Inputs, v: Tensor, h: Tensor, work: Chunks, how: How) -> Tensor:
        return part("ops.gla.chunk.chunk_gla_fwd_o_gk")(
            q=x.q, v=v, g=x.g, A=work.kept[0], h=h, scale=x.scale, **how.sized
        )  # fmt: skip

    def local(
        self, x: Inputs, v: Tensor, do: Tensor, work: Chunks, how: How
    ) -> tuple[Tensor, Tensor | None]:
        d_scores, dv = part("ops.kda.chunk_bwd.chunk_kda_bwd_dAv")(
            q=x.q, k=x.k, v=v, do=do, A=work.kept[0], scale=x.scale, **how.sized
        )
        return dv, d_scores

    def gradients(self, x: Inputs, work: Chunks, r: Returned, how: How) -> tuple[Tensor, ...]:
        dq, dk, dv, db, dg, d_system = part("ops.kda.chunk_bwd.chunk_kda_bwd_wy_dqkg_fused")(
            q=x.q, k=x.k, v=x.v, v_new=r.v, g=x.g, beta=x.beta, A=work.kept[1], h=r.h, do=r.do,
            dh=r.dh, dv=r.dv, scale=x.scale, **how.stepped,
        )  # fmt: skip
        dq, dk, db, dg = part("ops.kda.chunk_intra.chunk_kda_bwd_intra")(
            q=x.q, k=x.k, g=x.g, beta=x.beta, dAqk=r.local, dAkk=d_system, dq=dq, dk=dk, db=db,
            dg=dg, **how.sized,
        )  # fmt: skip
        share = x.v.shape[2] // x.q.shape[2]
        if share > 1:
            dq, dk = (t.unflatten(2, (-1, share)).sum(3) for t in (dq, dk))
        return dq, dk, dv, dg, db


@cache
def part(path: str) -> Any:
    """Return a function of fla as it launches Triton's kernels.

    By its name fla chooses among backends in each call, which takes the host 10 us. One of them, in
    inference mode, reads tensors on the host.
    """
    module, _, name = path.rpartition(".")
    return unwrap(getattr(import_module(f"fla.{module}"), name))


def on_hopper() -> bool:
    """Return whether this package's kernel of gradients within chunks takes the place of fla's.

    On an H200 it was faster, a call with backward taking 6.6 ms instead of 6.9; and fla refuses its
    own on Hopper with some Tritons.
    """
    from fla.ops.common import chunk_o

    return bool(getattr(chunk_o, "IS_NVIDIA_HOPPER", False))


def rule_of(g: Tensor) -> Rule:
    """Return the rule for gates `[b, n, h]` or `[b, n, h, d_k]`."""
    return OfChannels() if g.ndim == 4 else OfHeads()


@cache
def known_parts() -> bool:
    """Return whether the installed fla-core has these parts."""
    try:
        if find_spec("triton") is None:
            return False
        import fla
        import fla.modules.norm.l2norm
        import fla.ops.common.chunk_delta_h
        import fla.ops.common.chunk_o
        import fla.ops.gated_delta_rule.chunk_fwd
        import fla.ops.gated_delta_rule.wy_fast
        import fla.ops.gla.chunk
        import fla.ops.kda.chunk_bwd
        import fla.ops.kda.chunk_intra
        import fla.ops.kda.wy_fast
        import fla.ops.utils.constant
    except ImportError:
        return False
    return str(getattr(fla, "__version__", "")).startswith(_VERSION)


def in_two_passes(d_k: int, d_v: int) -> bool:
    """Return whether two passes are there, and less work than one widened call.

    The widened call walks once through states of d_v + d_k columns, and its other kernels read so
    much wider values; two passes walk through d_v + d_k and d_v columns.
    """
    return d_k <= _MOST and d_k * _LEAST >= d_v and known_parts()
