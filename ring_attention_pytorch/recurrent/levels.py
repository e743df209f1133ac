"""States of all levels: following the maps of runs from the first state of each document."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ring_attention_pytorch.runtime.launches import launch_alike, power_of_2
from ring_attention_pytorch.runtime.rowwise import has_triton
from ring_attention_pytorch.runtime.torch_func import differentiable_grads

_MOST = 128  # the largest d_k whose map fits beside a state
_COLUMNS = 32  # of a state, for one program


class Levels(NamedTuple):
    """Which maps are followed.

    Attributes:
        places: for each level, the 2nd, 3rd, ... runs of chains, the places of the maps that lead
            to it. Longer chains come first, so a level has the first ones.
        table: int32 `[levels, chains]`, the same, -1 beyond a chain's end.
        offsets: int32 `[levels]`, how many states are stored before each level's.
        depths: int32 `[chains]`, how many maps each chain follows.
        before: for all that follow a map, in order, the state that it maps.
    """

    places: tuple[Tensor, ...]
    table: Tensor
    offsets: Tensor
    depths: Tensor
    before: Tensor

    @classmethod
    def of(cls, places: Sequence[Sequence[int]], chains: int, device: torch.device) -> "Levels":
        """Make it from lists of places.

        >>> levels = Levels.of([[4, 2], [5]], 3, torch.device("cpu"))
        >>> levels.table.tolist(), levels.offsets.tolist(), levels.before.tolist()
        ([[4, 2, -1], [5, -1, -1]], [3, 5], [0, 1, 3])
        """
        table: list[list[int]] = []
        offsets: list[int] = []
        before: list[int] = []
        so_far, last = chains, 0
        for maps in places:
            table.append([*maps] + [-1] * (chains - len(maps)))
            offsets.append(so_far)
            before += range(last, last + len(maps))
            last, so_far = so_far, so_far + len(maps)
        depths = [sum(len(maps) > chain for maps in places) for chain in range(chains)]

        def whole(numbers: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        by_level = tuple(whole(maps, torch.long) for maps in places)
        return cls(by_level, whole(table), whole(offsets), whole(depths), whole(before, torch.long))


def in_full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast casts nothing."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def mapped(m: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """Return M S + U, for a full or a diagonal M.

    >>> mapped(torch.full((1, 1), 0.5), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2)).tolist()
    [[[[1.5, 1.5]]]]
    """
    if m.ndim == 4:
        return torch.matmul(m, state) + u
    return scaled(m, state) + u


def scaled(m: Tensor, state: Tensor) -> Tensor:
    """Return a diagonal M times S."""
    return m.reshape(*m.shape, *(1,) * (state.ndim - m.ndim)) * state


def packed(m: Tensor, u: Tensor) -> Tensor:
    """Return the maps of runs as rows of numbers, as they travel: of each run M, then U.

    >>> rows = packed(torch.full((1, 1), 0.5), torch.ones(1, 1, 1, 2))
    >>> rows.tolist(), [t.shape[1:] for t in unpacked(rows, rows[:, :1], torch.ones(1, 1, 1, 2))]
    ([[0.5, 1.0, 1.0]], [torch.Size([1]), torch.Size([1, 1, 2])])
    """
    return torch.cat((m.flatten(1), u.flatten(1)), 1)


def unpacked(rows: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return M and U of `packed` rows, for each run of the shapes in m and u."""
    of_m, of_u = rows.split((prod(m.shape[1:]), prod(u.shape[1:])), 1)
    return of_m.unflatten(1, m.shape[1:]), of_u.unflatten(1, u.shape[1:])


def followed(m: Tensor, u: Tensor, first: Tensor, levels: Levels) -> Tensor:
    """Return the states of all levels, `[chains + ..., h, d_k, d_v]`, the first ones first.

    On CUDA one kernel follows full maps in float32; its second derivatives are of plain PyTorch.
    """
    if levels.places and kernel_fits(m, u):
        return _Follow.apply(m, u, first, levels)
    return _plain(m, u, first, levels)


def kernel_fits(m: Tensor, u: Tensor) -> bool:
    """Return whether the kernel can follow these maps."""
    return (
        u.is_cuda
        and has_triton()
        and m.ndim == 4
        and u.dtype == torch.float32
        and m.shape[-1] <= _MOST
    )


def _plain(m: Tensor, u: Tensor, first: Tensor, levels: Levels) -> Tensor:
    states = [first]
    for places in levels.places:
        states.append(mapped(m[places], u[places], states[-1][: len(places)]))
    return torch.cat(states)


def first_states(
    like: Tensor, rows: int, starts: tuple[Tensor, Tensor], initial: Tensor | None
) -> Tensor:
    """Return `[rows, ...]` states, 0 where no sample begins.

    `starts` are the rows that begin with a sample's `initial` state, and these samples.
    """
    first = like.new_zeros(rows, *like.shape[1:])
    if initial is None:
        return first
    at, samples = starts
    return first.index_copy(0, at, initial[samples])


def last_states(batch: int, samples: Tensor, states: Tensor, initial: Tensor | None) -> Tensor:
    """Return `[batch, ...]`: the states after these samples; one without tokens keeps its first."""
    last = states.new_zeros(batch, *states.shape[1:]) if initial is None else initial
    return last.index_copy(0, samples, states)


class _Follow(Function):
    """(maps M, U of all runs, first states, levels) -> states of all levels."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, u: Tensor, first: Tensor, levels: Levels) -> Tensor:
        from ring_attention_pytorch.recurrent._triton_levels import follow_kernel

        states = first.new_empty(len(first) + len(levels.before), *first.shape[1:])
        rows, values = _in_rows(m), _in_rows(u)
        _launch(
            follow_kernel, first, rows, values, first.contiguous(), states, levels.table,
            levels.offsets, levels.depths, len(first), **_strides(M=rows, U=values),
        )  # fmt: skip
        ctx.levels = levels
        ctx.save_for_backward(m, u, first, states)
        return states

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        m, u, first, states = ctx.saved_tensors
        levels: Levels = ctx.levels
        if torch.is_grad_enabled():  # a graph of the gradients is wanted
            states_again, needed = _plain(m, u, first, levels), ctx.needs_input_grad[:3]
            return *differentiable_grads(states_again, (m, u, first), needed, grads), None
        from ring_attention_pytorch.recurrent._triton_levels import return_kernel

        du = states.new_zeros(len(u), *first.shape[1:])
        rows, dm = _in_rows(m), None
        dfirst = states.new_empty(first.shape)
        _launch(
            return_kernel, first, rows, grads.contiguous(), du, dfirst, levels.table,
            levels.offsets, levels.depths, len(first), **_strides(M=rows),
        )  # fmt: skip
        if ctx.needs_input_grad[0]:
            at = torch.cat(levels.places)
            d_each = torch.matmul(du[at], states[levels.before].mT)
            dm = m.new_zeros(m.shape).index_copy(0, at, d_each)
        return dm, du, dfirst, None


def _in_rows(x: Tensor) -> Tensor:
    """Return x with each row's numbers side by side."""
    return x if x.stride(3) == 1 else x.contiguous()


def _strides(**maps: Tensor) -> dict[str, int]:
    names = "RUN", "HEAD", "ROW"
    return {f"{which}_{n}": by for which, t in maps.items() for n, by in zip(names, t.stride())}


def _launch(kernel: Any, first: Tensor, *args: Any, **strides: int) -> None:
    chains, heads, d_k, d_v = first.shape
    with torch.cuda.device_of(first):
        launch_alike(
            kernel, -(-d_v // _COLUMNS) * heads * chains, *args, **strides,
            HEADS=heads, K=d_k, V=d_v, BK=power_of_2(d_k), BV=_COLUMNS,
            num_warps=4, num_stages=1,
        )  # fmt: skip
