"""A transport that brings all keys a rank needs at once, straight from their owners.

They come while the rank's own block computes. They are put together so that few large tiles cover
them, as a rule in the order of positions. In backward each rank sends an owner the gradients that
it computed for the owner's keys, in the inputs' dtype (float16 as float32). The owner sums them in
the accumulator's dtype, always in the same order.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.comm.carry_out import Carrier, KVGrads
from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.geometry.segments import count, slice_segments
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.ranks.ring import Transfer as Exchange
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import (
    Chunks,
    Workload,
    of_owner,
    places,
    schedule,
    tokens,
)
from ring_attention_pytorch.schedule.policy import much_comes_last
from ring_attention_pytorch.schedule.steps import KEYS, Block, Part, Program, Transfer


@dataclass(frozen=True)
class Gather(Carrier):
    """A transport of one round of owners at a time; the next round comes while one computes.

    Messages go point to point, over any process group, each exactly what its receiver needs.
    Every rank sends to and receives from every rank of a round, even if the message is empty.

    Forward a round comes in stages, backward at once. Its gradients go home while the next block
    computes. Where many come home last, half of own keys are kept for the end, to compute on
    meanwhile. `known` keeps what was worked out.
    """

    known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def make(cls, ring: Ring, blocks: Workload, at_once: int) -> "Gather":
        """Make one, with rounds of `at_once` owners."""
        rounds = schedule(blocks, at_once)
        cut = much_comes_last(rounds, [count(keys) for keys in blocks.keys])
        return cls(ring, steps.gather(blocks, [*map(Block.of, rounds)], cut))

    @property
    def keeps(self) -> bool:
        """Tell whether keys stay: of several rounds, one's keys go when the next but one comes."""
        return len(self.schedule.forward.blocks) == 2

    @property
    def overtaken(self) -> bool:
        """Tell whether backward own keys come in one block, whose call the others' overtake."""
        return self.schedule.backward.parts[0].gives_way

    def call(self, program: Program, own: KVBlock, totals: KVGrads | None = None) -> "GatherCall":
        return GatherCall(self, program, own, totals)


class GatherCall:
    """One call of a gather by messages."""

    ring: Ring
    program: Program
    blocks: dict[int, KVBlock]
    totals: KVGrads | Any  # None is forward

    def __init__(
        self, gather: Gather, program: Program, own: KVBlock, totals: KVGrads | None = None
    ) -> None:
        self.gather, self.ring, self.program, self.totals = gather, gather.ring, program, totals
        self.own = own
        self.blocks = {0: own}
        self.sums: dict[int, KVGrads] = {}  # by block
        self.arrivals: dict[int, Callable[[], None]] = {}  # by transfer

    def start(self, number: int) -> None:
        transfer = self.program.transfers[number]
        begin = self._pull if transfer.kind == KEYS else self._send_home
        self.arrivals[number] = begin(transfer)

    def wait(self, number: int) -> None:
        self.arrivals.pop(number)()

    def keys(self, part: Part) -> KVBlock:
        return some_of(self.blocks[part.block], self._span(part))

    def grads(self, part: Part, keys: KVBlock) -> KVGrads:
        if len(self.program.blocks) == 1:
            return self.totals
        if part.block == 0:
            self.sums[0] = GradAccumulator(keys.k), GradAccumulator(keys.v)
        else:
            self.sums[part.block] = self._grads_of(keys)
        return self.sums[part.block]

    def computed(self, part: Part) -> None:
        blocks = len(self.program.blocks)
        if part.block == 0 and self.totals is not None and blocks > 1:
            for total, of_part in zip(self.totals, self.sums.pop(0)):
                of_part.move_to(total, self._span(part).start)
                if blocks > 2 and part.stage == 0:
                    total.begin_update()  # else each round's gradients would wait to be added
        last = part.stage == len(self.program.blocks[part.block].stages) - 1
        if part.block and self.totals is None and last:  # backward, it goes with its gradients
            del self.blocks[part.block]

    def _span(self, part: Part) -> slice:
        """Return the tokens of a part in its block."""
        known, back = self.gather.known, self.totals is not None
        if (part, back) not in known:
            known[part, back] = self.program.spans(part.block, self.ring.rank)[part.stage]
        return known[part, back]

    def _chunks(self, block: int) -> Chunks:
        return self.program.chunks(block, self.ring.rank)

    def _pull(self, transfer: Transfer) -> Callable[[], None]:
        """Post the messages of a round; return a function that waits and joins what came."""
        rank, own, pieces = self.ring.rank, self.own, self._chunks(transfer.block)
        tensors = [t for t in own[:3] if t is not None]
        forms, taken, messages = {}, {}, {}
        for owner in self._behind(transfer):
            forms[owner] = Form.of(tensors, tokens(of_owner(pieces, owner)))
        for user in self._in_front(transfer):
            theirs = of_owner(self.program.chunks(transfer.block, user), rank)
            if theirs not in taken:  # what several ranks need is packed once
                taken[theirs] = _packed(tensors, [piece.cols for piece in theirs])
            messages[user] = taken[theirs]
        coming = self._exchange(messages, forms)

        def wait() -> None:
            received = coming.wait()
            if received and pieces:
                by_owner = {}
                for message, (owner, form) in zip(received, forms.items()):
                    by_owner[owner] = _split(pieces, owner, form.open(message))
                in_order = [next(by_owner[piece.owner]) for piece in pieces]
                found = [torch.cat(parts, dim=1) for parts in zip(*in_order)]
            else:
                found = [t[:, :0] for t in tensors]
            self._has_come(transfer.block, found)

        return wait

    def _has_come(self, block: int, tensors: list[Tensor]) -> None:
        k, v, *mask = tensors
        segments = self.program.held(block, self.ring.rank)
        self.blocks[block] = KVBlock(k, v, mask[0] if mask else None, segments)

    def _grads_of(self, keys: KVBlock) -> KVGrads:
        """Make the (dk, dv) accumulators of a round's keys, for one call."""
        dk, dv = (GradAccumulator(t, calls=1, dtype=wire_dtype(t.dtype)) for t in keys[:2])
        return dk, dv

    def _send_home(self, transfer: Transfer) -> Callable[[], None]:
        """Post a round's gradients; return a function that waits and adds what came to own ones."""
        rank, own, mine, messages = self.ring.rank, self.own, self._chunks(transfer.source), {}
        sums = [total.finalize() for total in self.sums.pop(transfer.source)]
        del self.blocks[transfer.source]
        for owner in self._in_front(transfer):
            messages[owner] = _packed(sums, [where for _, where in places(mine, owner)])
        theirs, forms = {}, {}
        for user in self._behind(transfer):
            theirs[user] = of_owner(self.program.chunks(transfer.source, user), rank)
            forms[user] = Form.of(own[:2], tokens(theirs[user]), wire_dtype(own.k.dtype))
        coming = self._exchange(messages, forms)

        def wait() -> None:
            for message, (user, pieces) in zip(coming.wait(), theirs.items()):
                for total, part in zip(self.totals, forms[user].open(message)):
                    total.add_all((piece.cols, part[:, at]) for piece, at in places(pieces, rank))

        return wait

    def _exchange(self, messages: dict[int, Tensor], forms: dict[int, Form]) -> Exchange:
        device = self.own.k.device
        received = [(rank, form.empty(device)) for rank, form in forms.items()]
        return self.ring.exchange(list(messages.items()), received)

    def _behind(self, transfer: Transfer) -> list[int]:
        """List the ranks from which something comes."""
        return [(self.ring.rank - t) % self.ring.size for t in transfer.distances]

    def _in_front(self, transfer: Transfer) -> list[int]:
        """List the ranks to which something goes."""
        return [(self.ring.rank + t) % self.ring.size for t in transfer.distances]


def some_of(keys: KVBlock, span: slice) -> KVBlock:
    """Return the keys of some tokens, as views."""
    if span == slice(0, keys.k.shape[1]):
        return keys
    mask = None if keys.key_mask is None else keys.key_mask[:, span]
    k, v, segments = keys.k[:, span], keys.v[:, span], slice_segments(keys.segments, span)
    return keys._replace(k=k, v=v, key_mask=mask, segments=segments)


def _columns(t: Tensor, spans: list[slice]) -> Tensor:
    """Return these tokens, one span behind another; a view if it is one span."""
    if len(spans) == 1:
        return t[:, spans[0]]
    return torch.cat([t[:, span] for span in spans], dim=1)


def _packed(tensors: list[Tensor], spans: list[slice]) -> Tensor:
    """Pack these tokens into a message, one span behind another."""
    form = Form.of(tensors, sum(span.stop - span.start for span in spans))
    some = [_columns(t, spans or [slice(0, 0)]) for t in tensors]
    return form.pack(some, form.empty(tensors[0].device))


def _split(pieces: Chunks, owner: int, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield each piece of one owner, out of the tensors that it sent."""
    for _, at in places(of_owner(pieces, owner), owner):
        yield [t[:, at] for t in tensors]
