"""Types of public options, as type checkers and editors see them.

A checker knows the names of layouts, kernels and transports. At run time any text is accepted,
because all ranks must raise for a wrong one, with a list of the valid names. Of pairs of kernels it
knows those of the fast ones on GPUs: mypy prints every name of an option three times when another
is wrong. `cast(Any, "flex+eager")` is for the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from torch import Tensor

from ring_attention_pytorch.geometry.documents import Borders
from ring_attention_pytorch.geometry.layouts import AssignedLayout
from ring_attention_pytorch.runtime.interfaces import MaskMod

if TYPE_CHECKING:
    LayoutName = Literal["contiguous", "striped", "zigzag"]
    KernelName = Literal[
        "flash-attn-4", "sdpa-cudnn", "triton", "flash-attn-2", "sdpa-flash", "flex", "sdpa",
        "eager", "flash-attn",
    ]  # fmt: skip
    KernelPair = Literal[  # forward by one, backward by another
        "flash-attn-4+sdpa-cudnn", "flash-attn-4+triton", "flash-attn-4+flash-attn",
        "sdpa-cudnn+flash-attn-4", "sdpa-cudnn+triton", "sdpa-cudnn+flash-attn",
        "triton+flash-attn-4", "triton+sdpa-cudnn", "triton+flash-attn",
        "flash-attn+flash-attn-4", "flash-attn+sdpa-cudnn", "flash-attn+triton",
    ]  # fmt: skip
    TransportName = Literal["ring", "gather"]
    LayoutOption = LayoutName | AssignedLayout
    KernelOption = KernelName | KernelPair
    CheckOption = Literal["always"]
else:
    LayoutOption = str | AssignedLayout
    LayoutName = KernelOption = TransportName = CheckOption = str


class PlanOptions(TypedDict, total=False):
    """The options of `RingPlan.make`, which `ring_attn` documents."""

    causal: bool
    window: int | None
    key_mask: Tensor | None
    documents: Tensor | None
    cu_seqlens: Borders | None
    prefix: int | Sequence[int] | Tensor | None
    mask_mod: MaskMod | None
    cross: bool | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    shared_keys: tuple[Tensor, Tensor] | None
    shared_key_mask: Tensor | None
    scale: float | None
    softclamp: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    key_bias: Tensor | None
    dropout: float
    dropout_seed: int | None
    layout: LayoutOption
    kernel: KernelOption | None
    transport: TransportName | None
    ulysses: int | None
    memory: int | None
    bucket_size: int
    check: CheckOption | None


class UlyssesOptions(PlanOptions, total=False):
    """The options of `ulysses_attn`."""

    heads_first: bool
