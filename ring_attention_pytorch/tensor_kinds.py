"""Special kinds of tensors: DTensors of sharded sequences, and tensors without values.

DTensor, Shard(1) ── to_local ── ring attention over its mesh ── DTensor with q's placements
meta, fake        ── ranks agree that all have no values ── shapes and dtypes of results
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ring_attention_pytorch.plan.checks import agreed_shapes, check_shapes
from ring_attention_pytorch.plan.known_shards import swap_dims
from ring_attention_pytorch.plan.placement import attention_ring
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import agree, error_of
from ring_attention_pytorch.ranks.ring import Group, as_ring

QKV = tuple[Tensor, Tensor, Tensor]
_Tensors = TypeVar("_Tensors", bound=tuple[Tensor, ...])
_TAKEN = (
    "DTensors q, k and v must be sharded alike, along the sequence by one dimension of one mesh, "
    "and along batch or heads, or not at all, by its others; group and plan, if given, must be of "
    "that dimension; got {}"
)


def has_values(*tensors: Tensor) -> bool:
    """True if no tensor is on the meta device or a FakeTensor."""
    return not any(t.is_meta or isinstance(t, FakeTensor) for t in tensors)


def shapes_of_results(
    qkv: QKV, sinks: Tensor | None, group: Group, plan: RingPlan | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse without values, differentiable; ranks exchange only notes.

    Raises:
        ValueError: shapes or dtypes don't fit, or other ranks have values; the same on all ranks.
    """
    q, k, v = qkv
    wrong = error_of(lambda: check_shapes(q, k, v))
    if plan is None:
        same = {} if wrong else agreed_shapes(q, k, v)
        with unset_fake_temporarily():
            ring = attention_ring(group)
            none = {"device": "meta: tensors have no values"}
            agree(ring, "ring attention", same | none, everywhere=none, check=wrong)
    elif wrong is not None or plan.signature[:-1] != type(plan.signature).of(q, k, v)[:-1]:
        raise ValueError(f"ring attention: {wrong or 'the plan was made for other tensors'}")
    out, lse, _ = torch.ops.ring_attention.forward.default(q, k, v, sinks, 0)
    return out, lse


class Sharded(NamedTuple):
    """The local tensors of DTensors, their ring, and their placements."""

    qkv: QKV
    group: Group
    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, int, int, int]  # the global shape of out

    def out(self, t: Tensor) -> Tensor:
        """Return this rank's part of out as a DTensor with q's placements."""
        return self._placed(t, self.placements, self.shape)

    def lse(self, t: Tensor) -> Tensor:
        """Return this rank's part of lse `[b, h, n]` as a DTensor."""
        swapped = {1: 2, 2: 1}
        shard = next(type(each) for each in self.placements if each.is_shard())
        placements = []
        for each in self.placements:
            dim = each.dim if each.is_shard() else 0
            placements.append(shard(swapped[dim]) if dim in swapped else each)
        b, n, h, _ = self.shape
        return self._placed(t, tuple(placements), (b, h, n))

    def _placed(self, t: Tensor, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
        from torch.distributed.tensor import DTensor

        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        return DTensor.from_local(
            t.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape),
            stride=tuple(strides),
        )  # fmt: skip


def sharded(
    qkv: QKV, options: Mapping[str, Any], group: Group, plan: RingPlan | None
) -> Sharded | None:
    """Return the local tensors of DTensors sharded along the sequence; None without DTensors.

    Raises:
        ValueError: they are sharded otherwise, or group or plan has other ranks; on all ranks.
    """
    given: dict[str, Any] = {"q": qkv[0], "k": qkv[1], "v": qkv[2], **options}
    found = [name for name, t in given.items() if _is_dtensor(t)]
    found += ["shared_keys"] if any(map(_is_dtensor, options["shared_keys"] or ())) else []
    if not found:
        return None
    if found != ["q", "k", "v"]:
        raise ValueError(
            f"ring attention: q, k and v must be DTensors together, and options plain tensors, of "
            f"this rank; got DTensors as {', '.join(found)}"
        )
    q, k, v = given["q"], given["k"], given["v"]
    lie = [(t.device_mesh, tuple(t.placements)) for t in (q, k, v)]
    mesh, placements = lie[0]
    along = [i for i, each in enumerate(placements) if each.is_shard(1)]
    others = all(each.is_replicate() or each.is_shard() for each in placements)
    if len(along) != 1 or not others or any(each.is_shard(3) for each in placements):
        raise ValueError(f"ring attention: {_TAKEN.format(placements)}")
    of_mesh = mesh.get_group(along[0])
    theirs = [plan.ring.group] if plan is not None else []
    theirs += [] if group is None else [as_ring(group).group]
    if any(each != lie[0] for each in lie) or any(each is not of_mesh for each in theirs):
        raise ValueError(f"ring attention: {_TAKEN.format([p for _, p in lie])} and {group}")
    local = q.to_local(), k.to_local(), v.to_local()
    shape = (*q.shape[:3], v.shape[3])
    return Sharded(local, of_mesh if plan is None else None, mesh, placements, shape)


def check_plain(name: str, x: Tensor) -> None:
    """Raise ValueError if x is a DTensor or not dense, for functions that take plain tensors only.

    >>> check_plain("x", torch.zeros(2))
    """
    if type(x) is not Tensor and _is_dtensor(x):
        raise ValueError(
            f"{name} must be a plain tensor, got a DTensor: its to_local() is this rank's part, "
            "its full_tensor() the whole"
        )
    if x.layout != torch.strided or x.is_nested:
        raise ValueError(f"{name} must be dense, got {x.layout}{', nested' * x.is_nested}")


def _is_dtensor(t: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # another thread may be importing it
    return kind is not None and isinstance(t, kind)


def swapped(tensors: _Tensors) -> _Tensors:
    """Swap tokens and heads of tensors `[b, n, h, d]`; tensors of other ranks stay the same."""
    found: Any = tuple([swap_dims(t, 1, 2) if t.ndim == 4 else t for t in tensors])
    return found
