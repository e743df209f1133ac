"""The table of transports, and the choice among them.

A transport is one class that satisfies `contract.Transport`, made by `make(ring, blocks, at_once)`,
and one line in `TRANSPORTS`. It knows what is needed where, and nothing of how it is computed.
"""

from typing import NamedTuple

import torch

from ring_attention_pytorch.contract import Transport
from ring_attention_pytorch.layouts import count
from ring_attention_pytorch.ring import Ring
from ring_attention_pytorch.transports.gather import Gather
from ring_attention_pytorch.transports.pieces import Blocks
from ring_attention_pytorch.transports.send_recv import SendRecv
from ring_attention_pytorch.transports.symmetric import SymmetricGather, space_of

TRANSPORTS: dict[str, type[SendRecv] | type[Gather]] = {"ring": SendRecv, "gather": Gather}


class Load(NamedTuple):
    """What a token's keys and values weigh."""

    device: torch.device
    token_bytes: int
    mask_bytes: int
    wide_bytes: int  # of their gradients in the accumulator's dtype


def transport_problem(name: str | None, memory: int | None) -> str | None:
    """What is wrong with the options of a transport; None if nothing."""
    if name is not None and name not in TRANSPORTS:
        return f"transport must be None or one of {', '.join(map(repr, TRANSPORTS))}, got {name!r}"
    if memory is not None and memory < 0:
        return f"memory must be None or at least 0 bytes, got {memory}"
    if memory is not None and name == "ring":
        return "transport='ring' always takes the least memory there is; memory= bounds 'gather'"
    return None


def owners_at_once(memory: int | None, shard_bytes: int, wide_bytes: int) -> int:
    """How many owners' keys may be here at once, at least one.

    `shard_bytes` are those of the longest shard's keys and values, `wide_bytes` those of their
    gradients in the accumulator's dtype. Of each owner there are at once, in backward: the block
    that was computed on last and the one at hand, with their gradients; the keys that come next;
    gradients that go out and that come in. Beside that, what is sent of one's own.

    >>> owners_at_once(None, 100, 200), owners_at_once(0, 100, 200)
    (1048576, 1)
    >>> owners_at_once(3200, 100, 200)
    3
    """
    if memory is None or shard_bytes == 0:
        return 1 << 20
    return max(1, (memory - 4 * shard_bytes) // (5 * shard_bytes + 2 * wide_bytes))


def make_transport(
    name: str, ring: Ring, blocks: Blocks, memory: int | None, load: Load
) -> Transport:
    """The transport of that name; all ranks of the ring make it together."""
    longest = max(count(segments) for segments in blocks.keys)
    at_once = owners_at_once(memory, longest * load.token_bytes, longest * load.wide_bytes)
    shared = ring.shared() if name == "gather" and load.device.type == "cuda" else None
    space = None if shared is None else space_of(shared[0], load.device)
    if space is not None:
        each = load.token_bytes + load.mask_bytes
        return SymmetricGather.over(ring, blocks, at_once, each, shared, space)
    return TRANSPORTS[name].make(ring, blocks, at_once)
