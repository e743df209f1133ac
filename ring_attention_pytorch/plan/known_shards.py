"""Shards that remember how they were made, so that a call by another layout is an error.

Shards of every layout have the same shapes, and nothing else distinguishes them from one another,
nor from whole sequences. Only the very tensor remembers: results of operations on it do not, nor
does it after a change in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import ref

from torch import Tensor
from torch.compiler import is_compiling

from ring_attention_pytorch.geometry.layouts import Layout, all_segments
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.runtime.recompute import version_of
from ring_attention_pytorch.runtime.streams import capturing

# options with which a result depends on where tokens are
_BY_PLACE = ("causal", "window", "documents", "cu_seqlens", "prefix", "mask_mod", "alibi_slopes")


@dataclass(frozen=True)
class Made:
    """How a tensor was made: a shard of a sequence, or the `whole` of one, gathered.

    Attributes:
        ranks: the ranks that share the sequence; None if there was no group.
        size: their number.
        layout, length: of the sequence's tokens, which are the tensor's dimension `dim`.
    """

    ranks: tuple[int, ...] | None
    size: int
    layout: Layout
    length: int
    dim: int
    whole: bool = False

    def is_over(self, ring: Ring) -> bool:
        """Return whether the sequence lies on the ranks of this ring."""
        return self.size == ring.size and self.ranks in (None, tuple(ring.ranks))

    def lies_by(self, layout: Layout) -> bool:
        """Return whether a layout puts the same tokens on each rank."""
        if layout == self.layout:
            return True
        try:
            other = all_segments(layout, self.size, self.length)
        except ValueError:  # it is of another length
            return False
        return other == all_segments(self.layout, self.size, self.length)


# shards that are alive, by id, with the version; if there are none, nothing need be compared
known_shards: dict[int, tuple[ref[Tensor], int, Made]] = {}


def remember(t: Tensor, made: Made) -> Tensor:
    """Remember how a tensor was made, as long as it is not changed in place; return it."""
    if made.size > 1 and not is_compiling():
        key = id(t)
        known_shards[key] = ref(t, lambda _: known_shards.pop(key, None)), version_of(t), made
    return t


def made_as(t: Tensor) -> Made | None:
    """Return how a tensor was made; None if it is not known."""
    found = known_shards.get(id(t))
    if found is None or found[0]() is not t or found[1] != version_of(t):
        return None
    return found[2]


def swap_dims(t: Tensor, first: int, second: int) -> Tensor:
    """Return a tensor with two dimensions swapped, which remembers how t was made."""
    swapped, known = t.transpose(first, second), made_as(t)
    if known is None:
        return swapped
    dim = {first: second, second: first}.get(known.dim, known.dim)
    return remember(swapped, replace(known, dim=dim))


def depends_on_places(options: Mapping[str, object]) -> bool:
    """Return whether attention with these options depends on where its tokens are."""
    if options.get("query_positions") is not None:
        return False
    given = [options.get(name) for name in _BY_PLACE]
    return any(each is not None and each is not False for each in given)


def check_known_shards(
    ring: Ring, given: Mapping[str, Tensor], layout: Layout | None, dim: int = 1
) -> None:
    """Raise ValueError if tensors are known to be other shards than a call over a ring takes.

    Args:
        ring: the call's; alone any tensors are right.
        given: the call's tensors, by name.
        layout: the call's; None if any is right.
        dim: the dimension of tokens.
    """
    if not known_shards or ring.size == 1:
        return
    for name, t in given.items():
        if (known := made_as(t)) is not None:
            _check(name, known, ring, layout, dim)


def check_whole(ring: Ring, given: Mapping[str, object], dim: int = 1) -> None:
    """Raise ValueError if tensors to be sharded over a ring are known to be its shards already."""
    if not known_shards or ring.size == 1:
        return
    for name, t in given.items():
        known = made_as(t) if isinstance(t, Tensor) else None
        if known is not None and not known.whole and known.dim == dim and known.is_over(ring):
            raise ValueError(
                f"{name} is a shard already, of {known.length} tokens by layout={known.layout!r}; "
                "pass whole sequences"
            )


def digest_of_shard(t: Tensor) -> int | None:
    """Return a digest of a shard, which other ranks' shards should not have; waits for its device.

    None if they may: a tensor with one value everywhere, or in a CUDA graph, which can't be read.
    """
    if not t.numel() or (t.is_cuda and capturing(t.device)):
        return None
    return None if bool((t == t.flatten()[0]).all()) else digest(t)


def _check(name: str, known: Made, ring: Ring, layout: Layout | None, dim: int) -> None:
    over = known.is_over(ring)
    if known.whole:
        if over:
            raise ValueError(
                f"{name} is a whole sequence, gathered by unshard_sequence, which every rank has; "
                "this rank's shard is expected, as shard_sequence returns"
            )
    elif known.dim != dim:
        if over:
            raise ValueError(
                f"{name} was sharded along another dimension than its tokens are here; give "
                "attention heads_first=True if, and only if, heads come before tokens"
            )
    elif not over:
        there = f"{known.size} ranks" if known.ranks is None else f"ranks {[*known.ranks]}"
        raise ValueError(
            f"{name} is a shard of a sequence over {there}, the call is over ranks {ring.ranks}; "
            "pass the group that it was sharded for"
        )
    elif layout is not None and not known.lies_by(layout):
        raise ValueError(
            f"{name} was sharded by layout={known.layout!r}, but the call has layout={layout!r}; "
            "pass the layout that it was sharded by"
        )
