"""All-gather and sum over ranks, without gradients; `sharding.all_to_all` has gradients."""

from collections.abc import Sequence

from torch import Tensor

from ring_attention_pytorch.comm.ring import Ring

Shape = tuple[int, ...]


def everyones(x: Tensor, shapes: Sequence[Shape], ring: Ring) -> list[Tensor]:
    """Gather every rank's x, in the order of ranks; `shapes[i]` is the shape of rank i's x."""
    x = x.contiguous()
    sends, receives = [], []
    for rank, shape in enumerate(shapes):
        if rank != ring.rank:
            sends.append((rank, x))
            receives.append((rank, x.new_empty(shape)))
    with ring.call("routing"):
        parts = ring.exchange(sends, receives).wait()
    parts.insert(ring.rank, x)
    return parts


def total_over_ranks(x: Tensor, ring: Ring) -> Tensor:
    """Sum all ranks' x, of one shape, in the order of ranks, so that all get the same bits."""
    shape = tuple(x.shape)
    parts = everyones(x, [shape] * ring.size, ring)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
