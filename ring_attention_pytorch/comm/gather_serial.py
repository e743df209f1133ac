"""A gather of all keys that a rank needs, all of it on the current stream.

It is for few tokens, where the host takes longer to launch calls that overlap than a GPU takes to
run them. Nothing runs side by side, so no stream waits for another, and launches are few: own keys
come among the others, in one block, or are computed on by themselves, whichever takes fewer calls
of the kernel (`policy.own_keys_apart`).

What a rank computes on in one block comes together in its memory that others read
(`schedule.arrangement`): own keys are written there once, and the others' pulled between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from ring_attention_pytorch.comm import visits
from ring_attention_pytorch.comm.carry_out import KVGrads
from ring_attention_pytorch.comm.gather import GatherCall
from ring_attention_pytorch.comm.gather_symmetric import (
    SymmetricCall,
    SymmetricGather,
    apart,
)
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.symmetric_memory import PeerGroup
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.arrangement import Arrangement, Move, arrangements, moves
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, schedule
from ring_attention_pytorch.schedule.steps import Block, Program, Transfer


@dataclass(frozen=True)
class SerialGather(SymmetricGather):
    """A `SymmetricGather` of one round, on one stream.

    Keys are `arranged` in the memory of each rank. Gradients come home `beside` what the kernel
    leaves for later, if it makes those of keys first.
    """

    arranged: tuple[Arrangement, ...] = field(kw_only=True)
    beside: bool = False

    @classmethod
    def like(
        cls,
        gather: SymmetricGather,
        blocks: Workload,
        job: KVShape,
        shared: PeerGroup,
        own_apart: bool = False,
        keys_first: bool = False,
    ) -> "SerialGather":
        """Make one like a gather, in the same memory; own keys are a block `own_apart`, or not.

        The kernel makes gradients of keys first, or not. All ranks of the ring call this together.
        """
        if own_apart:
            rounds = schedule(blocks, at_once=len(blocks.keys))
            plan = steps.gather(blocks, [Block.of(each) for each in rounds])
        else:
            plan = steps.gather_first(blocks)
        arranged = arrangements(plan.forward)
        most, held = max(each.tokens for each in arranged), max(each.held for each in arranged)
        token_bytes = job.token_bytes + job.batch  # with a key mask
        shared.space.make_room(shared.group, keys=most * token_bytes, grads=held * job.grad_bytes)
        return cls(
            gather.ring, plan, space=shared.space, ranks=shared.ranks, arranged=arranged,
            beside=keys_first,
        )  # fmt: skip

    @property
    def moves(self) -> tuple[Move, ...]:
        """What this rank pulls, forward and backward; worked out once."""
        if "moves" not in self.known:
            program = self.schedule.forward
            (transfer,) = program.transfers
            self.known["moves"] = moves(program, transfer, self.ring.rank, self.arranged)
        return self.known["moves"]

    @property
    def keeps(self) -> bool:
        """False: there is nothing that could run beside a call."""
        return False

    @property
    def taped(self) -> bool:
        """True: all is on the current stream, and meetings are `opaque`."""
        return True

    def in_turn(self) -> Self:
        return replace(self, beside=False)

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> GatherCall:
        return _Call(self, program, own, totals)


class _Call(SymmetricCall):
    """One call, all of it on the current stream.

    Its meetings and what follows them are one launch each (`visits`), but where a CUDA graph is
    captured before there are tables.
    """

    def __init__(
        self,
        gather: SerialGather,
        program: Program,
        own: KVBlock,
        totals: KVGrads | None = None,
    ) -> None:
        super().__init__(gather, program, own, totals)
        self.serial, self.mine = gather, gather.arranged[gather.ring.rank]

    def _begin(self, turns: int) -> None:
        self.space.begin(turns, self.totals is not None)

    def _publish(self, block: int) -> None:
        self.rooms = self._written()

    def _written(self) -> list[Tensor]:
        """Write own keys where others read them, and this rank computes on them if not apart."""
        shelf, own, lies = self.space.keys, self.own, self.mine
        table = visits.table_of_writes(shelf, own.k, own.v, lies.tokens, lies.own)
        forward = self.totals is None
        if forward and table is None:
            shelf.meet()
        both, *masks = shelf.own(self._form(lies))
        if table is None:
            for mine, at in lies.own:
                torch.cat((own.k[:, mine], own.v[:, mine]), dim=-1, out=both[:, at])
        else:
            visits.write(visits.Writing(shelf.to_write(), table, forward), own.k, own.v, both)
        if own.key_mask is not None:
            for mine, at in lies.own:
                masks[0][:, at].copy_(own.key_mask[:, mine])
        return [both, *masks]

    def _come(self, transfer: Transfer) -> None:
        """Pull others' keys to where they belong among own ones."""
        shelf, (both, *masks) = self.space.keys, self.rooms
        there, here = [], []
        for owner, at, to in self.serial.moves:
            theirs = self._form(self.serial.arranged[owner])
            there.append([t[:, at] for t in shelf.of(self.serial.ranks[owner], theirs)])
            here.append(to)
        parts, *parts_of_masks = [*zip(*there)] or [()] * len(self.rooms)
        table = visits.table_of_copies(shelf, both, parts, here)
        if table is None:
            shelf.publish()  # after the call for own keys, which needs nobody
            _copy_all(both, here, parts)
        else:
            visits.pull(visits.Visit(shelf.to_read(), table), both)
        for mask, some in zip(masks, parts_of_masks):
            _copy_all(mask, here, some)
        if table is None or masks:  # what a visit brings it has looked after
            self.space.board.spoil(both)
        held = slice(0, self.mine.held)
        found = [t[:, held] for t in (*apart(both, self.own), *masks)]
        self._has_come(transfer.block, found)

    def _form(self, lies: Arrangement) -> Form:
        return self.gather.form(self.own, lies.tokens, masks=True)

    def _send_home(self, transfer: Transfer) -> Callable[[], None]:
        for total in self.sums.pop(transfer.source):
            total.finalize()
        del self.blocks[transfer.source]

        def add() -> None:
            shares = [visits.Share(*at) for at in self._coming(transfer)]
            if not self._add_up(shares):
                self._add_plainly(shares)

        if not self.serial.beside:
            return add
        add()
        return lambda: None  # what follows on this stream waits by itself

    def _add_up(self, shares: list[visits.Share]) -> bool:
        """Publish, and add what others have of own gradients, in one launch; tell if it can be."""
        k, shelf = self.own.k, self.space.grads
        fresh, tokens = all(total.is_empty for total in self.totals), slice(0, k.shape[1])
        wholes = [total.whole() for total in self.totals]  # what they wait for has come then
        dk, dv = [total.alloc(tokens) for total in self.totals] if fresh else wholes
        if dk is None or dv is None or not k.numel():
            return False
        table = visits.table_of_sums(shelf, k, shares)
        if table is None:
            return False
        how = visits.Adding(shelf.to_read(), table, fresh, self.serial.beside)
        visits.add_up(how, dk, dv, wire_dtype(k.dtype))
        for total, t in zip(self.totals, (dk, dv)) if fresh else ():
            total.add(tokens, t)
        return True

    def _add_plainly(self, shares: list[visits.Share]) -> None:
        self.space.grads.publish()
        for here, parts in shares:
            for both in parts:
                for total, part in zip(self.totals, apart(both, self.own)):
                    total.add_lent(here, part)
        self.space.board.spoil(*[total.settle() for total in self.totals])


def _copy_all(place: Tensor, here: Sequence[slice], parts: Sequence[Tensor]) -> None:
    """Copy parts to their places, by one kernel: nothing else computes."""
    if parts and len(place):
        torch._foreach_copy_(_by_sample([place[:, at] for at in here]), _by_sample(parts))


def _by_sample(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split tensors of several samples into single samples, which are dense."""
    return [*tensors] if len(tensors[0]) == 1 else [t for each in tensors for t in each.unbind()]
