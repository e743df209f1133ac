"""Following chains of maps: the states from the first one of each document or run."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, chain
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
    """Which maps are followed: chains of them, one after another.

    States are stored in the same order: of each chain the first one, then that after each map.

    Attributes:
        places: int32 `[maps]`, the place of each map that is followed.
        offsets: int32 `[chains + 1]`, how many states are stored before each chain's, and in all.
        before: for each map that is followed, the state that it maps.
        steps: level by level, the places of maps, and the states of the level before that they map.
        order: for each state, its place among the states of level after level.
    """

    places: Tensor
    offsets: Tensor
    before: Tensor
    steps: tuple[tuple[Tensor, Tensor], ...]
    order: Tensor

    @classmethod
    def of(cls, chains: Sequence[Sequence[int]], device: torch.device) -> "Levels":
        """Make it from the places of each chain's maps.

        >>> levels = Levels.of([[4], [2, 5], []], torch.device("cpu"))
        >>> levels.places.tolist(), levels.offsets.tolist(), levels.before.tolist()
        ([4, 2, 5], [0, 2, 5, 6], [0, 2, 3])
        """

        def whole(numbers: Any, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        offsets = [0, *accumulate(len(maps) + 1 for maps in chains)]
        before = list[int]()
        for first, maps in zip(offsets, chains):
            before += range(first, first + len(maps))
        going, steps = [*range(len(chains))], []
        by_level = offsets[:-1]  # the states, level after level
        for level in range(max(map(len, chains), default=0)):
            rows = [row for row, number in enumerate(going) if len(chains[number]) > level]
            going = [going[row] for row in rows]
            steps.append((whole([chains[number][level] for number in going]), whole(rows)))
            by_level += [offsets[number] + level + 1 for number in going]
        return cls(
            places=whole([*chain.from_iterable(chains)], torch.int32),
            offsets=whole(offsets, torch.int32),
            before=whole(before),
            steps=tuple(steps),
            order=whole(by_level).argsort(),
        )


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
    """Return the states of all chains, `[chains + maps, h, d_k, d_v]`, from the first of each.

    On CUDA one kernel follows full maps in float32; its second derivatives are of plain PyTorch.
    """
    if levels.steps and kernel_fits(m, u):
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
    for places, rows in levels.steps:
        states.append(mapped(m[places], u[places], states[-1].index_select(0, rows)))
    return torch.cat(states).index_select(0, levels.order)


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
    """(maps M, U of all runs, first states, levels) -> states of all chains."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, u: Tensor, first: Tensor, levels: Levels) -> Tensor:
        from ring_attention_pytorch.recurrent._triton_levels import follow_kernel

        states = first.new_empty(len(first) + len(levels.before), *first.shape[1:])
        rows, values = _in_rows(m), _in_rows(u)
        _launch(
            follow_kernel, first, rows, values, first.contiguous(), states, levels.places,
            levels.offsets, **_strides(M=rows, U=values),
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
            return_kernel, first, rows, grads.contiguous(), du, dfirst, levels.places,
            levels.offsets, **_strides(M=rows),
        )  # fmt: skip
        if ctx.needs_input_grad[0]:
            at = levels.places.long()
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
            num_warps=8, num_stages=1,  # with 4 warps a map of 128 x 128 spills
        )  # fmt: skip
