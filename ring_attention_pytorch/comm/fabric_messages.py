"""A fabric of messages, over any process group: each has exactly the data that its receiver needs.

Every rank exchanges messages with every rank of a transfer, even empty ones. Data for several ranks
are packed once. The list of messages is computed once for each transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.comm.all_to_all import CopyPlan, form_between, given, taken
from ring_attention_pytorch.comm.fabric import KVGrads
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.ranks.ring import Exchange, Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule.pieces import Chunks, of_owner, places, tokens
from ring_attention_pytorch.schedule.steps import KEYS, Program, Transfer


class Pack(NamedTuple):
    """Spans of tokens, one behind another in a message."""

    form: Form
    spans: list[slice]

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack these tokens of the tensors into a new message."""
        some = []
        for t in tensors:
            spans = [t[:, span] for span in self.spans or [slice(0, 0)]]
            some.append(spans[0] if len(spans) == 1 else torch.cat(spans, dim=1))
        return self.form.pack(some, self.form.empty(tensors[0].device))


class Traffic(NamedTuple):
    """The messages of one transfer on this rank."""

    packs: list[Pack]  # each packed once
    sends: list[tuple[int, int]]  # receiver, index of the pack
    receives: list[tuple[int, Form]]  # sender, form
    pieces: list[tuple[int, slice, slice]]  # index of the message, place in it, place here

    @classmethod
    def of(cls, program: Program, transfer: Transfer, ring: Ring, own: KVBlock) -> "Traffic":
        """Compute the messages of a transfer, for keys like own ones or for their gradients."""
        rank, block, back = ring.rank, transfer.fetched, transfer.kind != KEYS
        form = partial(Form.of_grads if back else Form.of_keys, own)
        packs: dict[Chunks, tuple[int, Pack]] = {}
        mine, sends, receives, pieces = program.chunks(block, rank), [], [], []
        for number, distance in enumerate(transfer.distances):
            to, by = (rank + distance) % ring.size, (rank - distance) % ring.size
            if back:  # own copies of their keys, and theirs of mine
                gone, come = of_owner(mine, to), of_owner(program.chunks(block, by), rank)
                spans = [at for _, at in places(mine, to)]
                here = [piece.cols for piece in come]
            else:
                gone, come = of_owner(program.chunks(block, to), rank), of_owner(mine, by)
                spans = [piece.cols for piece in gone]
                here = [at for _, at in places(mine, by)]
            there = [at for _, at in places(come, rank if back else by)]
            pieces += [(number, *both) for both in zip(there, here)]
            packs.setdefault(gone, (len(packs), Pack(form(tokens(gone)), spans)))
            sends.append((to, packs[gone][0]))
            receives.append((by, form(tokens(come))))
        if not back:
            pieces.sort(key=lambda piece: piece[2].start)  # the order in which they are joined
        return cls([pack for _, pack in packs.values()], sends, receives, pieces)


class MessageChannel:
    """One call by messages."""

    def __init__(
        self, fabric: "Messages", program: Program, own: KVBlock, totals: KVGrads | None
    ) -> None:
        self.fabric: Messages = fabric
        self.program: Program = program
        self.own: KVBlock = own
        self.totals: KVGrads | None = totals
        self.under_way: dict[Transfer, Exchange] = {}

    def put(self, transfer: Transfer) -> None:
        self._post(transfer, [t for t in self.own[:3] if t is not None])

    def take(self, transfer: Transfer) -> list[Tensor]:
        tensors, pieces = self._received(transfer), self.fabric.known[transfer].pieces
        if not pieces:
            return [t[:, :0] for t in self.own[:3] if t is not None]
        in_order = [[t[:, at] for t in tensors[number]] for number, at, _ in pieces]
        return [torch.cat(parts, dim=1) for parts in zip(*in_order)]

    def grad_accumulators(self, keys: KVBlock) -> KVGrads:
        dk, dv = (GradAccumulator(t, calls=1, dtype=wire_dtype(t.dtype)) for t in keys[:2])
        return dk, dv

    def give(self, transfer: Transfer, grads: KVGrads) -> None:
        self._post(transfer, [total.finalize() for total in grads])

    def reduce(self, transfer: Transfer) -> None:
        tensors, pieces = self._received(transfer), self.fabric.known[transfer].pieces
        for number, of_message in groupby(pieces, itemgetter(0)):
            places = [(here, at) for _, at, here in of_message]
            for total, part in zip(self.totals or (), tensors[number]):
                total.add_all((here, part[:, at]) for here, at in places)

    def _post(self, transfer: Transfer, tensors: list[Tensor]) -> None:
        """Post the messages of a transfer."""
        known, ring, device = self.fabric.known, self.fabric.ring, self.own.k.device
        if transfer not in known:
            known[transfer] = Traffic.of(self.program, transfer, ring, self.own)
        packs, sends, receives, _ = known[transfer]
        packed = [pack.packed(tensors) for pack in packs]
        self.under_way[transfer] = ring.exchange(
            [(rank, packed[which]) for rank, which in sends],
            [(rank, form.empty(device)) for rank, form in receives],
        )

    def _received(self, transfer: Transfer) -> list[list[Tensor]]:
        """Wait for the messages of a transfer; return the tensors of each."""
        messages = self.under_way.pop(transfer).wait()
        receives = self.fabric.known[transfer].receives
        return [form.open(message) for message, (_, form) in zip(messages, receives)]


@dataclass(frozen=True)
class Messages:
    """A fabric of messages; it is `idle` if there never are any."""

    channel_type = MessageChannel

    ring: Ring
    idle: bool = False
    known: dict[Transfer, Traffic] = field(default_factory=dict, compare=False, repr=False)

    name = return_path = ""

    @property
    def sends_messages(self) -> bool:
        return not self.idle

    @property
    def taped(self) -> bool:
        return self.idle

    def follow_stream(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def swap(
        self, tensors: Sequence[Tensor], ways: Sequence[CopyPlan], outs: Sequence[Tensor]
    ) -> None:
        device, me = tensors[0].device, self.ring.rank
        sends, receives, forms = [], [], {}
        for rank in range(self.ring.size):
            if rank != me:
                form = form_between(tensors, ways, me, rank)
                sends.append((rank, form.pack(given(tensors, ways, me, rank), form.empty(device))))
                forms[rank] = form_between(tensors, ways, rank, me)
                receives.append((rank, forms[rank].empty(device)))
        messages = self.ring.exchange(sends, receives).wait()
        parts = {me: given(tensors, ways, me, me)}
        for message, (rank, form) in zip(messages, forms.items()):
            parts[rank] = form.open(message)
        for rank, theirs in parts.items():
            for place, part in zip(taken(outs, ways, rank, me), theirs):
                place.copy_(part)
