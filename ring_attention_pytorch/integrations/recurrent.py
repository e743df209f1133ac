"""Recurrent layers of transformers' models, over the runs of a batch.

transformers' layers call functions of their own Python module: a short convolution and a scan of
states. These functions are replaced once, and for good, so that recomputed checkpoints get them,
too. They compute over the ring in a block of `ring_forward`, and for a prompt that `RingHFCache`
spreads; elsewhere as before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import unwrap
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from transformers.activations import ACT2FN

from ring_attention_pytorch.plan.placement import (
    Placement,
    check_began_here,
    check_recomputed,
    current,
)
from ring_attention_pytorch.recurrent.halo import ring_short_conv
from ring_attention_pytorch.recurrent.layers import ring_gated_delta_rule, ring_kda, ring_mamba2
from ring_attention_pytorch.recurrent.plan import RunPlan, runs_of_batch
from ring_attention_pytorch.recurrent.selective import selective_scan
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.torch_func import run_apart

# the layers whose results over rings equal one process's
LAYERS: Final = (
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "JambaMambaMixer",
    "KimiLinearDeltaAttention",
    "NemotronHMamba2Mixer",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
)


def recurrent_layers(modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """List the recurrent layers that can be spread, and replace the functions that they call."""
    found = [module for module in modules.values() if type(module).__name__ in LAYERS]
    for kind in {type(layer) for layer in found}:
        space = unwrap(kind.forward).__globals__
        for name, function in _FUNCTIONS.items():
            if name in space and not hasattr(space[name], "of_ring"):
                space[name] = _spread(name, function, space[name])
    return found


def check_next_parts(layers: Sequence[nn.Module], tokens: int) -> None:
    """Raise ValueError if layers begin anew in later parts of a prompt, of at most `tokens`.

    One token is a step of decoding, which has the state before it.
    """
    if tokens > 1 and any(_MAMBA1 in unwrap(type(each).forward).__globals__ for each in layers):
        raise ValueError(
            "transformers' Mamba 1 has no state at the start of a prompt's later parts; leave "
            "chunk_size out, and read the prompt into an empty cache"
        )


# the block of `ring_forward` now, and the functions called in it; `watched.py`, above, sets it
_block_now: list[Callable[[], Any]] = []


def blocks_by(opened: Callable[[], Any]) -> None:
    """Take the current block of `ring_forward` from this function."""
    _block_now[:] = [opened]


def _spread(name: str, function: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """Return a function that computes over the ring in a block, and as `theirs` elsewhere."""

    @wraps(theirs)
    def call(*args: Any, **given: Any) -> Any:
        if _reading:
            return _reading[-1].call(name, function, theirs, *args, **given)
        block = _block_now[0]()
        if name == _PADDING:
            return theirs(*args, **given)
        if block is None:
            check_recomputed()
            return theirs(*args, **given)
        block.call.calls.append(name)
        if is_compiling():
            return run_apart(_held, function, block, *args, **given)
        return _held(function, block, *args, **given)

    call.of_ring = True  # type: ignore[attr-defined]
    return call


def _held(function: Callable[..., Any], block: Any, *args: Any, **given: Any) -> Any:
    """Call a function, and let autograd hold the block's placement as long as it may recompute."""
    found = function(_InBlock(block), *args, **given)
    out = found[0] if isinstance(found, tuple) else found
    if out is None or not out.requires_grad:
        return found
    held = _Held.apply(current(), out)
    return (held, *found[1:]) if isinstance(found, tuple) else held


class _Held(Function):
    """(placement, x) -> x; backward is of the same placement."""

    @staticmethod
    def forward(ctx: Any, placement: Placement | None, x: Tensor) -> Tensor:
        ctx.placement = placement
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        check_began_here(ctx.placement)
        return None, grads[0]


class _InBlock:
    """A call in a block of `ring_forward`: of whole sequences, without states of before."""

    tail: Tensor | None = None

    def __init__(self, block: Any) -> None:
        self.block = block

    def plan(self, x: Tensor) -> RunPlan:
        return _plan(self.block, x)

    def check(self, given: Mapping[str, Any], **states: Any) -> None:
        _check(self.block, given, **states)


@dataclass
class PromptChunk:
    """A part of a prompt, spread over the ranks, that continues from earlier states."""

    runs: RunPlan
    mask: Tensor | None  # [b, n], of this rank's tokens; 0 for padding
    tail: Tensor | None = None  # [b, width - 1, c], the tokens before, of the next convolution
    calls: list[str] = field(default_factory=list)

    def call(
        self, name: str, function: Callable[..., Any], theirs: Callable[..., Any],
        *args: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """Compute one function of a layer over the ring."""
        if name == _PADDING:
            return theirs(args[0], self.mask)
        self.calls.append(name)
        return function(self, *args, **given)

    def plan(self, x: Tensor) -> RunPlan:
        """Return the runs of the chunk."""
        self.runs.check_tokens(_CALLER, x=x)
        return self.runs

    def check(self, given: Mapping[str, Any], **_: Any) -> None:
        """Raise ValueError if a call has documents."""
        documents = _documents(given)
        if documents:
            raise self.runs.error(f"{_CALLER}: {documents} can't be given with a cache")

    def check_layers(self, layers: int) -> None:
        """Raise ValueError if the layers did not call a convolution and a scan of ours, each."""
        made = [name for name in self.calls if name != _FUSED]
        right = all(name == _CONVOLUTION for name in made[::2])
        if len(made) != 2 * layers or not right or _CONVOLUTION in made[1::2]:
            raise ValueError(
                f"{_CALLER}: {layers} layers did not compute their states by the functions that "
                f"are spread (they called {', '.join(made) or 'none'}); leave use_kernels out, or "
                "generate without prefill"
            )


_reading: list[PromptChunk] = []


def chunk_now() -> PromptChunk | None:
    """Return the part of a prompt that is read now, if it is spread."""
    return _reading[-1] if _reading else None


@contextmanager
def spread_chunk(chunk: PromptChunk) -> Iterator[None]:
    """Compute recurrent layers over the ring, for this part of a prompt."""
    _reading.append(chunk)
    try:
        yield
    finally:
        _reading.pop()


def check_calls(layer: nn.Module, calls: Sequence[str]) -> None:
    """Raise ValueError if a layer did not call one convolution and one scan of ours."""
    made = [name for name in calls if name != _FUSED]
    if len(made) != 2 or made[0] != _CONVOLUTION or made[1] == _CONVOLUTION:
        raise ValueError(
            f"{type(layer).__name__} did not compute its states by the functions that are spread "
            f"(it called {', '.join(made) or 'none'}), as with kernels of another package; it "
            "can't be spread so: leave use_kernels out"
        )


def _plan(block: Any, x: Tensor) -> RunPlan:
    """Return the runs of the block's batch; made once, without communication."""
    key = x.shape[0], x.device
    if key not in block.runs:
        batch = block.batch
        if batch.key_mask is not None and min(batch.counts) < 2:
            raise ValueError(
                "transformers drops the mask of one token, and a rank has one here; pad the batch, "
                "or take fewer ranks"
            )
        block.runs[key] = runs_of_batch(batch, x.device, x.shape[0])
    return block.runs[key]


def _documents(given: Mapping[str, Any]) -> str:
    """Name the arguments that divide a call's tokens into documents; "" if there are none."""
    return ", ".join(n for n in ("cu_seqlens", "seq_idx") if given.get(n) is not None)


def _check(block: Any, given: Mapping[str, Any], **states: Any) -> None:
    """Raise ValueError on all ranks if a call has states of before, or documents of its own."""

    def check() -> None:
        names = [name for name, value in states.items() if value is not None and value is not False]
        if names:
            raise ValueError(
                f"a recurrent layer was given {', '.join(names)}: ring_forward is for whole "
                "sequences, without a cache"
            )
        documents = _documents(given)
        if documents:
            raise ValueError(
                f"{documents} was given beside the documents of the batch; leave it out"
            )

    block.ensure(check)


def _convolution(
    within: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **given: Any,
) -> Tensor:
    within.check(given)
    x = hidden_states.mT
    out = ring_short_conv(
        x, weight, bias, plan=within.plan(x), dtype=weight.dtype, initial=within.tail
    )
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(x.dtype).mT


def _delta(rule: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        within: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **given: Any,
    ) -> tuple[Tensor, Tensor | None]:
        states = dict(initial_state=initial_state, output_final_state=output_final_state)
        within.check(given, **states)
        out, last = rule(
            query, key, value, g, beta, plan=within.plan(value), initial=initial_state,
            final=output_final_state, normalize=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        return out.contiguous(), last

    return scan


def _mamba2(
    within: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:
    states = dict(initial_states=initial_states, return_final_states=return_final_states)
    within.check(given, z=z, **states)
    dt = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    x = hidden_states.to(accumulation_dtype(hidden_states.dtype))
    out, last = ring_mamba2(
        x, dt, A, B, C, plan=within.plan(x), skip=D,
        initial=initial_states, final=return_final_states,
    )  # fmt: skip
    return (out.contiguous(), last) if return_final_states else out.contiguous()


def _mamba1(
    within: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:
    within.check(given, return_last_state=return_last_state)
    dt = _steps(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
    x = hidden_states.mT
    out, last = selective_scan(
        x.to(accumulation_dtype(x.dtype)), dt.mT, A, B.mT, C.mT, plan=within.plan(x), skip=D,
        final=return_last_state,
    )  # fmt: skip
    out = out.mT if z is None else out.mT * F.silu(z)
    return (out, last) if return_last_state else out


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _not_fused(within: Any, *_: Any, **given: Any) -> None:
    """Let a layer compute step by step, as where the package of this function is missing."""
    within.check(given)


_CALLER: Final = "RingHFCache.prefill"
_PADDING: Final = "apply_mask_to_padding_states"
_CONVOLUTION: Final = "causal_conv1d_fn"
_FUSED: Final = "mamba2_split_conv1d_scan_combined"
_MAMBA1: Final = "mamba_selective_scan"
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    _CONVOLUTION: _convolution,
    _FUSED: _not_fused,
    _PADDING: _not_fused,  # never called: transformers' own is, with the mask of a chunk
    "torch_chunk_gated_delta_rule": _delta(ring_gated_delta_rule),
    "chunk_kimi_delta_attention": _delta(ring_kda),
    "mamba2_chunk_scan": _mamba2,
    _MAMBA1: _mamba1,
}
