"""The table of transports, and the choice among them and the fabrics that carry them.

A transport is a `ScheduledTransport`, made by `make(ring, blocks, at_once)`, and one line in
`TRANSPORTS`. It decides which keys are needed by which rank, independent of how attention is
computed. This module alone chooses its fabric: by shared memory and the amount of work.
"""

import torch

from ring_attention_pytorch.comm.fabric import Fabric
from ring_attention_pytorch.comm.fabric_copies import CopyEngines
from ring_attention_pytorch.comm.fabric_kernels import OneStream
from ring_attention_pytorch.comm.fabric_machines import MachineMemory
from ring_attention_pytorch.comm.fabric_messages import Messages
from ring_attention_pytorch.comm.fabric_relays import Relays
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.comm.send_recv import SendRecv
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup, near_by, shared_by
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import Transport
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.arrangement import arrangements
from ring_attention_pytorch.schedule.hardware import H200, Hardware
from ring_attention_pytorch.schedule.held_keys import most_held
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Workload,
    in_two_stages,
    rounds_of,
    tokens,
)
from ring_attention_pytorch.schedule.policy import (
    is_few,
    keys_arrive_late,
    own_keys_apart,
    reduce_by_copy_engine,
)
from ring_attention_pytorch.schedule.relays import by_relays, relays_spare
from ring_attention_pytorch.schedule.steps import Block

TRANSPORTS: dict[str, type[SendRecv] | type[Gather]] = {"ring": SendRecv, "gather": Gather}


def check_transport(name: str | None, memory: int | None) -> None:
    """Raise ValueError if there is no such transport, or its memory can't be bounded so."""
    if name is not None and name not in TRANSPORTS:
        names = ", ".join(map(repr, TRANSPORTS))
        raise ValueError(f"transport must be None or one of {names}, got {name!r}")
    if memory is not None and memory < 0:
        raise ValueError(f"memory must be None or at least 0 bytes, got {memory}")
    if memory is not None and name == "ring":
        raise ValueError(
            "transport='ring' always takes the least memory there is; memory= bounds 'gather'"
        )


def owners_at_once(memory: int | None, blocks: Workload, kv_shape: KVShape) -> int:
    """Return how many owners' keys fit in `memory` bytes at once, at least one.

    Backward stores per owner: the previous block and the current one, with their gradients in the
    accumulator's dtype; the keys that arrive next; gradients that are sent and received. In
    addition a rank stores its own outgoing data and the sum of incoming gradients.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> from ring_attention_pytorch.geometry.tiles import Mask
    >>> eight = all_segments("zigzag", 8, 80)
    >>> blocks, kv_shape = Workload(eight, eight, Mask()), KVShape(1, 2, 1, 2, 3, itemsize=2)
    >>> [owners_at_once(memory, blocks, kv_shape) for memory in (None, 0, 600 + 3 * 900)]
    [7, 1, 3]
    """
    longest, most = max(map(count, blocks.keys)), max(1, len(blocks.keys) - 1)
    if memory is None or most == 1 or longest * kv_shape.token_bytes == 0:
        return most
    of_each = 3 * kv_shape.token_bytes + 2 * kv_shape.grad_bytes + 2 * kv_shape.wide_bytes
    fit = (memory // longest - 4 * kv_shape.token_bytes - kv_shape.wide_bytes) // of_each
    return min(most, max(1, fit))


def make_transport(
    name: str,
    ring: Ring,
    blocks: Workload,
    at_once: int,
    kv_shape: KVShape,
    device: torch.device,
    machine: Hardware = H200,
    own_low_priority: bool = False,
) -> Transport:
    """Make the transport of that name; all ranks of the ring call this together.

    With `own_low_priority` the backward call for own keys runs at low priority, under transfers.
    """
    if name == "gather" and (shared := shared_by(ring, device)) is not None:
        late = keys_arrive_late(blocks, at_once, kv_shape, machine)
        return by_copy_engines(
            ring, blocks, at_once, kv_shape, shared, machine, own_low_priority, late
        )
    if name == "gather" and relays_spare(blocks, ring.machines):
        return over_machines(ring, blocks, at_once, kv_shape, device)
    return TRANSPORTS[name].make(ring, blocks, at_once)


def over_machines(
    ring: Ring, blocks: Workload, at_once: int, kv_shape: KVShape, device: torch.device
) -> Gather:
    """Make a gather whose keys cross to a machine once, in rounds of at most `at_once` owners.

    Inside machines copies replace messages if each machine's ranks share memory. All ranks of the
    ring call this together, and exchange a byte: NCCL connects a group in its first exchange, for
    which it needs all ranks, and later ones may have no message for some.
    """
    if device.type == "cuda":
        ahead, behind = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        sent, room = torch.zeros(2, 1, dtype=torch.uint8, device=device).unbind()
        ring.exchange([(ahead, sent)], [(behind, room)]).wait()
    plan = by_relays(blocks, ring.machines, at_once)
    idle = not plan.forward.transfers
    shared = None if idle else near_by(ring, device)
    if shared is None:
        return Gather(plan, Relays(ring, idle, machines=ring.machines))
    memory = MachineMemory(ring, machines=ring.machines, shared=shared)
    widest, longest = most_held(memory.inside(plan.backward, back=True)[0].held)
    _reserve(shared, kv_shape, keys=longest, grads=widest)
    return Gather(plan, memory)


def make_one_stream(
    gather: Transport,
    blocks: Workload,
    kv_shape: KVShape,
    device: torch.device,
    machine: Hardware = H200,
    square: bool = False,
    keys_first: bool = False,
) -> Gather | None:
    """Make a gather with little host work if tokens are few; otherwise return None.

    With few tokens the host takes longer to launch a gather's calls than a GPU to run them.
    `square`: the kernel has causal tiles only for square blocks. `keys_first`: it computes dk and
    dv first. All ranks of the ring call this together.
    """
    shares = gather.fabric.name != ""
    if not (shares and gather.keeps and is_few(blocks, kv_shape, machine)):
        return None
    shared = shared_by(gather.fabric.ring, device)
    if shared is None:
        return None
    apart = own_keys_apart(blocks, square)
    return on_one_stream(gather.fabric.ring, blocks, kv_shape, shared, apart, keys_first)


def by_copy_engines(
    ring: Ring,
    blocks: Workload,
    at_once: int,
    kv_shape: KVShape,
    shared: PeerGroup,
    machine: Hardware = H200,
    own_low_priority: bool = False,
    late: bool = False,
) -> Gather:
    """Make a gather by copy engines, with room for the keys of `kv_shape` and their gradients.

    Keys that are `late` arrive in two stages. With `own_low_priority` the backward call for own
    keys still runs while gradients are sent home.
    """
    rounds = (in_two_stages(blocks),) if late else rounds_of(blocks, at_once)
    longest = max(map(count, blocks.keys))
    widest = max((tokens(chunks) for each in rounds for chunks in each.pieces), default=0)
    _reserve(shared, kv_shape, keys=longest, grads=widest)
    own_low_priority = (
        own_low_priority and len(rounds) == 1
    )  # with several rounds, calls wait for one another
    by_copy_engine = reduce_by_copy_engine(blocks, rounds, kv_shape, machine, own_low_priority)
    schedule = steps.gather(blocks, [*map(Block.of, rounds)], low_priority=own_low_priority)
    idle = not schedule.forward.transfers
    return Gather(schedule, CopyEngines(ring, shared.space, shared.ranks, by_copy_engine, idle))


def on_one_stream(
    ring: Ring,
    blocks: Workload,
    kv_shape: KVShape,
    shared: PeerGroup,
    own_apart: bool = False,
    keys_first: bool = False,
) -> Gather:
    """Make a gather of one round, on one stream; own keys are a block `own_apart`, or not.

    `keys_first`: the kernel computes dk and dv first. All ranks of the ring call this together.
    """
    if own_apart:
        rounds = rounds_of(blocks, at_once=len(blocks.keys))
        schedule = steps.gather(blocks, [Block.of(each) for each in rounds])
    else:
        schedule = steps.gather_first(blocks)
    arranged = arrangements(schedule.forward)
    most, held = max(each.tokens for each in arranged), max(each.held for each in arranged)
    _reserve(shared, kv_shape, keys=most, grads=held)
    return Gather(
        schedule, OneStream(ring, shared.space, shared.ranks, arranged, overlap=keys_first)
    )


def _reserve(shared: PeerGroup, kv_shape: KVShape, keys: int, grads: int) -> None:
    """Reserve shared memory for `keys` keys, with a mask, and for gradients of `grads` keys."""
    token_bytes = kv_shape.token_bytes + kv_shape.batch
    shared.space.reserve(shared.group, keys=keys * token_bytes, grads=grads * kv_shape.grad_bytes)


def fabric_among(neighbours: Ring, most: int, device: torch.device) -> Fabric:
    """Make the fabric of neighbours that swap tensors of at most `most` bytes together.

    It is shared memory if the ranks have any. All ranks of the group call this together.
    """
    shared = shared_by(neighbours, device) or near_by(neighbours, device, neighbours.size)
    if shared is None:
        return Messages(neighbours)
    shared.space.reserve(shared.group, swaps=most)
    return OneStream(neighbours, shared.space, shared.ranks)
