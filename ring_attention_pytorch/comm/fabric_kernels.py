"""A fabric of kernels, all of it on the current stream.

It is for few tokens, where launching overlapping calls takes the host longer than the GPU needs to
run them. Everything runs in order on one stream, with few launches. Own keys are in one block with
the others, or in a block of their own, whichever takes fewer kernel calls
(`policy.own_keys_apart`).

A block's keys are arranged in the shared buffer (`schedule.arrangement`): own keys are written
there once, and peers' keys are pulled into the gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_attention_pytorch.comm import fused_copies
from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.fabric_shared import SharedChannel, SharedMemory, apart
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.observe import are_timed
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule.arrangement import Arrangement, Move, moves
from ring_attention_pytorch.schedule.steps import Program, Transfer


class KernelChannel(SharedChannel):
    """One call, all of it on the current stream.

    A barrier and the copies behind it are one launch (`fused_copies`), except in a CUDA graph that
    is captured before the tables exist.
    """

    fabric: "OneStream"

    def __init__(
        self, fabric: "OneStream", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        super().__init__(fabric, program, own, totals)
        self.mine: Arrangement = fabric.arranged[fabric.ring.rank]
        self.overlap: bool = fabric.overlap and not are_timed()  # timed calls must not overlap

    def put(self, transfer: Transfer) -> None:
        self.received = self._written()

    def _written(self) -> list[Tensor]:
        """Write own keys to memory that peers read, and compute on them there if not apart."""
        buffer, own, lies = self.space.keys, self.own, self.mine
        table = fused_copies.table_of_writes(buffer, own.k, own.v, lies.tokens, lies.own)
        forward = self.totals is None
        if forward and table is None:
            buffer.wait_for_readers()
        both, *masks = buffer.write_view(self._form(lies))
        if table is None:
            for mine, at in lies.own:
                torch.cat((own.k[:, mine], own.v[:, mine]), dim=-1, out=both[:, at])
        else:
            fused_copies.write(
                fused_copies.FusedWrite(buffer.write_barrier(), table, forward), own.k, own.v, both
            )
        if own.key_mask is not None:
            for mine, at in lies.own:
                masks[0][:, at].copy_(own.key_mask[:, mine])
        return [both, *masks]

    def take(self, transfer: Transfer) -> list[Tensor]:
        """Pull peers' keys to their places among own ones."""
        buffer, (both, *masks) = self.space.keys, self.received
        there, here = [], []
        for owner, at, to in self.fabric.moves(self.program):
            theirs = self._form(self.fabric.arranged[owner])
            there.append([t[:, at] for t in buffer.peer_view(self.fabric.ranks[owner], theirs)])
            here.append(to)
        parts, *parts_of_masks = [*zip(*there)] or [()] * len(self.received)
        table = fused_copies.table_of_copies(buffer, both, parts, here)
        if table is None:
            buffer.publish()  # after the call for own keys, which needs no peer
            _copy_all(both, here, parts)
        else:
            fused_copies.pull(fused_copies.FusedCopy(buffer.read_barrier(), table), both)
        for mask, some in zip(masks, parts_of_masks):
            _copy_all(mask, here, some)
        if table is None or masks:  # a fused copy has checked its data already
            self.space.board.fill_nan(both)
        return [t[:, : self.mine.held] for t in (*apart(both, self.own), *masks)]

    def _form(self, lies: Arrangement) -> Form:
        return self.fabric.form(self.own, lies.tokens, masks=True)

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        for total in grads:
            total.finalize()
        if self.overlap:
            self._add(transfer)

    def reduce(self, transfer: Transfer) -> None:
        if not self.overlap:  # the current stream waits anyway
            self._add(transfer)

    def _add(self, transfer: Transfer) -> None:
        peer_gradients = [fused_copies.PeerGradients(*at) for at in self.peer_gradients(transfer)]
        if not self._add_up(peer_gradients):
            self._add_plainly(peer_gradients)

    def _add_up(self, peer_gradients: list[fused_copies.PeerGradients]) -> bool:
        """Publish and add peers' gradients of own keys in one launch; False if impossible."""
        k, buffer = self.own.k, self.space.grads
        fresh, tokens = all(total.is_empty for total in self.totals), slice(0, k.shape[1])
        wholes = [total.whole() for total in self.totals]  # also waits for pending writes to them
        dk, dv = [total.alloc(tokens) for total in self.totals] if fresh else wholes
        if dk is None or dv is None or not k.numel():
            return False
        table = fused_copies.table_of_sums(buffer, k, peer_gradients)
        if table is None:
            return False
        how = fused_copies.FusedSum(buffer.read_barrier(), table, fresh, self.overlap)
        fused_copies.add_up(how, dk, dv, wire_dtype(k.dtype))
        for total, t in zip(self.totals, (dk, dv)) if fresh else ():
            total.add(tokens, t)
        return True

    def _add_plainly(self, peer_gradients: list[fused_copies.PeerGradients]) -> None:
        self.space.grads.publish()
        for here, parts in peer_gradients:
            for both in parts:
                for total, part in zip(self.totals, apart(both, self.own)):
                    total.add_borrowed(here, part)
        self.space.board.fill_nan(*[total.flush() for total in self.totals])


@dataclass(frozen=True)
class OneStream(SharedMemory):
    """A fabric of one round, on one stream; with no round, for Ulysses alone.

    Keys are `arranged` in each rank's memory. With `overlap` dk and dv are reduced while the kernel
    computes dq, if it makes dk and dv first.
    """

    channel_type = KernelChannel

    arranged: tuple[Arrangement, ...] = ()
    overlap: bool = False

    return_path = ", added where they lie"

    @property
    def taped(self) -> bool:
        return True

    def moves(self, program: Program) -> tuple[Move, ...]:
        """Return this rank's pulls, the same forward and backward; cached."""
        if "moves" not in self.known:
            transfer = program.transfers[0]
            self.known["moves"] = moves(program, transfer, self.ring.rank, self.arranged)
        return self.known["moves"]


def _copy_all(place: Tensor, here: Sequence[slice], parts: Sequence[Tensor]) -> None:
    """Copy parts to their places, by one kernel."""
    if parts and len(place):
        torch._foreach_copy_(_by_sample([place[:, at] for at in here]), _by_sample(parts))


def _by_sample(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split tensors of several samples into single samples, which are dense."""
    return [*tensors] if len(tensors[0]) == 1 else [t for each in tensors for t in each.unbind()]
