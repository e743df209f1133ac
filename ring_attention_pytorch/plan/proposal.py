"""What one rank brings to the agreement on a plan: what it is asked for, and what is wrong with it.

Nothing here waits for another rank. Whatever goes wrong becomes the proposal's problem, which all
ranks are told, so that none of them is left waiting.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ring_attention_pytorch.comm.agreement import problem_of
from ring_attention_pytorch.comm.transports import transport_problem
from ring_attention_pytorch.comm.ulysses import ulysses_problem
from ring_attention_pytorch.geometry.documents import (
    BatchDocuments,
    Borders,
    digest,
    documents_problem,
)
from ring_attention_pytorch.geometry.layouts import Layout
from ring_attention_pytorch.kernels import SelectedKernel, choose
from ring_attention_pytorch.plan.calibrate import measures, room_left
from ring_attention_pytorch.plan.checks import (
    agreed_shapes,
    check_problem,
    like_autocast,
    option_problem,
    qkv_problem,
)
from ring_attention_pytorch.plan.masks import (
    Prefix,
    mask_mod_problem,
    positions_problem,
    prefix_digest,
    prefix_problem,
)
from ring_attention_pytorch.runtime.dropout import dropout_problem, own_seed
from ring_attention_pytorch.runtime.interfaces import KernelRequest, MaskMod
from ring_attention_pytorch.runtime.scores import (
    bias_problem,
    columns,
    per_head_problem,
    sinks_note,
    widened,
)


@dataclass(frozen=True)
class Asked:
    """The options of a plan; `ring_attn` says what they mean."""

    causal: bool
    window: int | None
    key_mask: Tensor | None
    scale: float | None
    softclamp: float | None
    layout: Layout
    kernel: str | None
    transport: str | None
    ulysses: int
    memory: int | None
    bucket_size: int
    cross: bool | None
    documents: Tensor | BatchDocuments | None
    cu_seqlens: Borders | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    key_bias: Tensor | None
    mask_mod: MaskMod | None
    prefix: Prefix
    query_positions: Tensor | None
    key_positions: Tensor | None
    dropout: float
    dropout_seed: int | None
    check: str | None

    @property
    def packed(self) -> bool:
        """Whether there are documents."""
        return self.documents is not None or self.cu_seqlens is not None

    @property
    def placed(self) -> bool:
        """Whether positions are given."""
        return self.query_positions is not None or self.key_positions is not None


@dataclass(frozen=True)
class Proposal:
    """What must be the `same` on all ranks of the ring, or `everywhere` in its group, and what is
    this rank's `own`; or a problem, and nothing else.

    `shaped` are q, k and v as kernels will get them, maybe without memory.
    """

    same: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    everywhere: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None
    kernel: SelectedKernel | None = None
    shaped: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, asked: Asked, size: int, also: Mapping[str, Any]
    ) -> "Proposal":
        """For tensors like these, over a ring of that size; `also` must be the same, too."""
        found = cls()

        def find() -> str | None:
            nonlocal found
            given = [like_autocast(t) for t in (q, k, v)]
            problem = next((p for p in _problems(*given, asked, size) if p is not None), None)
            if problem is None:
                found = cls._right(*given, asked, also)
            return problem

        problem = problem_of(find)
        return found if problem is None else cls(problem=problem)

    @classmethod
    def _right(
        cls, q: Tensor, k: Tensor, v: Tensor, asked: Asked, also: Mapping[str, Any]
    ) -> "Proposal":
        """What is proposed where all checks pass; a kernel that can't do it is a ValueError."""
        if asked.key_bias is not None:
            more = columns(q, k, asked.key_bias)
            q, k = widened(q, more), widened(k, more)
        kernel = choose(asked.kernel, _case(q, v, asked))
        return cls(
            same={**agreed_shapes(q, k, v), **also, **_agreed(asked), "kernel chosen": kernel.name},
            own={
                "n": q.shape[1],
                "m": k.shape[1],
                "seed": own_seed(asked.dropout, asked.dropout_seed),
                "room": room_left(q) if asked.transport is None and asked.memory is None else 0,
            },
            everywhere={
                "documents": _presence(asked.documents),
                "query_positions and key_positions": "given" if asked.placed else None,
                "measuring (transport=None, unless deterministic)": measures(q, asked.transport),
            },
            kernel=kernel,
            shaped=(q, k, v),
        )


def _problems(q: Tensor, k: Tensor, v: Tensor, asked: Asked, size: int) -> Iterator[str | None]:
    """What is wrong with one rank's arguments, one check after another."""
    yield qkv_problem(q, k, v, asked.key_mask)
    masked = asked.causal or asked.window is not None
    yield option_problem(
        asked.window, asked.scale, asked.softclamp, asked.layout, asked.bucket_size,
        not asked.placed and asked.cross and masked,
    )  # fmt: skip
    yield documents_problem(asked.documents, asked.cu_seqlens, q.shape)
    yield per_head_problem("sinks", q, asked.sinks)
    yield per_head_problem("alibi_slopes", q, asked.alibi_slopes)
    if asked.alibi_slopes is not None and asked.alibi_slopes.requires_grad:
        yield "alibi_slopes have no gradient; detach them"
    yield bias_problem(asked.key_bias, q, k, asked.scale, asked.softclamp)
    yield mask_mod_problem(asked.mask_mod, q.device)
    fits = asked.causal and not asked.packed and not asked.placed
    yield prefix_problem(asked.prefix, len(q), fits)
    yield positions_problem(asked.query_positions, asked.key_positions, q, k, asked.packed)
    yield dropout_problem(asked.dropout, asked.dropout_seed)
    yield transport_problem(asked.transport, asked.memory)
    yield check_problem(asked.check)
    yield ulysses_problem(asked.ulysses, size, q.shape[2])


def _agreed(asked: Asked) -> dict[str, Any]:
    """What all ranks must have been asked for alike."""
    alike = ("causal", "window", "scale", "softclamp", "kernel", "cross", "transport", "ulysses",
             "memory", "dropout_seed", "check")  # fmt: skip
    given = ("key_mask", "mask_mod", "alibi_slopes")
    bias = asked.key_bias
    return {
        **{name: getattr(asked, name) for name in alike},
        **{name: _presence(getattr(asked, name)) for name in given},
        "layout": str(asked.layout),
        "cu_seqlens": digest(asked.cu_seqlens),
        "sinks": sinks_note(asked.sinks),
        "prefix": prefix_digest(asked.prefix),
        "key_bias": None if bias is None else list(bias.shape[2:]),
        "dropout": float(asked.dropout),
    }


def _case(q: Tensor, v: Tensor, asked: Asked) -> KernelRequest:
    """What is asked of a kernel."""
    of_kernels = ("window", "key_mask", "scale", "softclamp", "alibi_slopes", "mask_mod", "dropout")
    options = {name: getattr(asked, name) for name in of_kernels}
    return KernelRequest.of(q, v, **options, packed=asked.packed)


def _presence(value: object) -> str | None:
    return None if value is None else "given"
