"""A transport that brings all keys a rank needs at once, straight from their owners.

They come while the rank's own block computes. They are put together so that few large tiles cover
them, as a rule in the order of positions. In backward each rank sends an owner the gradients that
it computed for the owner's keys, in the inputs' dtype (float16 as float32). The owner sums them in
the accumulator's dtype, always in the same order.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.ring import Ring, Transfer
from ring_attention_pytorch.geometry.layouts import count
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import wire_dtype
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import (
    Chunks,
    Round,
    Workload,
    joined,
    of_owner,
    places,
    schedule,
    slice_segments,
    tokens,
)
from ring_attention_pytorch.schedule.policy import much_comes_last
from ring_attention_pytorch.schedule.steps import Schedule


@dataclass(frozen=True)
class Gather:
    """A transport of one group of owners at a time; the next group comes while one computes.

    Messages go point to point, over any process group, each exactly what its receiver needs.

    Every rank sends to and receives from every rank of a group, even if the message is empty: so
    whether there is a message never depends on the rank.
    """

    ring: Ring
    groups: tuple[Round, ...]
    lengths: tuple[int, ...]  # keys that each rank holds
    overtaken = False

    @classmethod
    def make(cls, ring: Ring, blocks: Workload, at_once: int) -> "Gather":
        return cls(ring, schedule(blocks, at_once), tuple(map(count, blocks.keys)))

    @property
    def keeps(self) -> bool:
        """Tell whether keys stay: of several groups, one's keys go when the next but one comes."""
        return len(self.groups) == 1

    @property
    def capturable(self) -> bool:
        """Tell whether a CUDA graph can hold the calls: only if nothing is sent."""
        return not self.groups

    def follow_stream(self) -> Hashable:
        """Return None: no memory is shared, so no stream waits."""
        return None

    def schedule(self, workload: Workload) -> Schedule:
        """Return what all ranks do."""
        rounds = [group.in_order for group in self.groups]
        cut = any(self._cut(length) < length for length in self.lengths)
        return steps.gather(workload, rounds, cut, gives_way=self.overtaken)

    def stream(self, keys: KVBlock) -> Iterator[KVBlock]:
        """Yield own keys, then those of the others, stage by stage."""
        for _, block, parts in self._blocks(keys, self.groups):
            yield from (_some(block, part) for part in parts)

    def stream_back(
        self, own_keys: KVBlock, own: tuple[GradAccumulator, GradAccumulator]
    ) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
        """Yield blocks as `stream`, but a group in one stage, each with (dk, dv) to add to.

        Gradients of a group go home while the next block computes. Where many come home last,
        half of own keys are kept for the end, to compute on meanwhile.
        """
        blocks = self._blocks(own_keys, self._back)
        next(blocks)
        if not self.groups:
            yield own_keys, own
            return
        length = own_keys.k.shape[1]
        cut = self._cut(length)
        yield from _of_own(own_keys, slice(0, cut), own)
        if len(self.groups) > 1:
            for total in own:
                total.begin_update()  # else each group's gradients would wait to be added
        going: Callable[[], None] | None = None
        for group, keys, parts in blocks:
            deque(parts, maxlen=0)  # until the whole group has come
            grads = self._grads_of(keys)
            if keys.segments:
                yield keys, grads
            if going is not None:
                going()
                going = None
            going = self._send_home(group, own_keys, grads, own)
            keys = grads = None  # they are sent, or lie where owners read them
        if cut < length:
            yield from _of_own(own_keys, slice(cut, length), own)
        if going is not None:
            going()

    def _cut(self, length: int) -> int:
        """Return where own keys are cut in backward: those that follow are for the end."""
        return length - length // 2 if self._much_comes_last else length

    @cached_property
    def _much_comes_last(self) -> bool:
        return much_comes_last(self.groups, self.lengths)

    @cached_property
    def _back(self) -> tuple[Round, ...]:
        """The groups in backward, each in one stage: more calls would cost more than they hide."""
        return tuple(group.at_once for group in self.groups)

    def _blocks(
        self, own: KVBlock, groups: tuple[Round, ...]
    ) -> Iterator[tuple[Round | None, KVBlock, Iterable[slice]]]:
        """Yield own keys, then each group and its keys, with slices of tokens as they come."""
        pulls = (self._pull(own, group) for group in groups)  # each is posted when asked for
        coming = next(pulls, None)
        yield None, own, (slice(0, own.k.shape[1]),)
        for group in groups:
            (k, v, *mask), parts = coming()
            coming = None  # freed before more is asked for
            coming = next(pulls, None)
            mine = joined(group.pieces[self.ring.rank])
            yield group, KVBlock(k, v, mask[0] if mask else None, mine), parts

    def _parts(self, group: Round) -> list[slice]:
        """List the tokens of a group that come here, one slice for each stage."""
        return [part for part in group.parts[self.ring.rank] if part.start < part.stop]

    def _pull(
        self, own: KVBlock, group: Round
    ) -> Callable[[], tuple[list[Tensor], Iterable[slice]]]:
        """Post the messages of a group; return a function that waits and joins what came."""
        rank, pieces = self.ring.rank, group.pieces[self.ring.rank]
        tensors = [t for t in own[:3] if t is not None]
        forms, taken, messages = {}, {}, {}
        for owner in self._owners(group.distances):
            forms[owner] = Form.of(tensors, tokens(of_owner(pieces, owner)))
        for user in self._users(group.distances):
            theirs = of_owner(group.pieces[user], rank)
            if theirs not in taken:  # what several ranks need is packed once
                taken[theirs] = _taken(tensors, theirs)
            messages[user] = taken[theirs]
        coming = self._exchange(own.k, messages, forms)

        def wait() -> tuple[list[Tensor], Iterable[slice]]:
            if not (received := coming.wait()) or not pieces:
                return [t[:, :0] for t in tensors], ()
            by_owner = {}
            for message, (owner, form) in zip(received, forms.items()):
                by_owner[owner] = _split(pieces, owner, form.open(message))
            in_order = [next(by_owner[piece.owner]) for piece in pieces]
            return [torch.cat(parts, dim=1) for parts in zip(*in_order)], self._parts(group)

        return wait

    def _grads_of(self, keys: KVBlock) -> tuple[GradAccumulator, GradAccumulator]:
        """Make the (dk, dv) accumulators of a group's keys, for one call."""
        return tuple(GradAccumulator(t, calls=1, dtype=wire_dtype(t.dtype)) for t in keys[:2])

    def _send_home(
        self,
        group: Round,
        own_keys: KVBlock,
        grads: tuple[GradAccumulator, GradAccumulator],
        own: tuple[GradAccumulator, GradAccumulator],
    ) -> Callable[[], None]:
        """Post a group's gradients; return a function that waits and adds what came to `own`."""
        rank, kinds = self.ring.rank, as_sent(own_keys)
        mine, messages = group.pieces[rank], {}
        sums = [total.finalize() for total in grads]
        for owner in self._owners(group.distances):
            columns = [where for _, where in places(mine, owner)]
            form = Form.of(kinds, tokens(of_owner(mine, owner)))
            parts = [_columns(t, columns) for t in sums] if columns else [t[:, :0] for t in kinds]
            messages[owner] = form.pack(parts, form.empty(own_keys.k.device))
        theirs = {user: of_owner(group.pieces[user], rank) for user in self._users(group.distances)}
        forms = {user: Form.of(kinds, tokens(pieces)) for user, pieces in theirs.items()}
        coming = self._exchange(own_keys.k, messages, forms)

        def wait() -> None:
            for message, (user, pieces) in zip(coming.wait(), theirs.items()):
                for total, part in zip(own, forms[user].open(message)):
                    total.add_all((piece.cols, part[:, at]) for piece, at in places(pieces, rank))

        return wait

    def _exchange(
        self, like: Tensor, messages: dict[int, Tensor], forms: dict[int, Form]
    ) -> Transfer:
        received = [(rank, form.empty(like.device)) for rank, form in forms.items()]
        return self.ring.exchange(list(messages.items()), received)

    def _owners(self, distances: tuple[int, ...]) -> list[int]:
        """List the ranks whose keys come to this rank from these distances."""
        return [(self.ring.rank - t) % self.ring.size for t in distances]

    def _users(self, distances: tuple[int, ...]) -> list[int]:
        """List the ranks to which this rank's keys go over these distances."""
        return [(self.ring.rank + t) % self.ring.size for t in distances]


def as_sent(keys: KVBlock) -> tuple[Tensor, Tensor]:
    """Return tensors like the gradients of k and v that travel, but for the number of tokens."""
    wide = wire_dtype(keys.k.dtype)
    if wide == keys.k.dtype:
        return keys.k, keys.v
    return keys.k[:, :0].to(wide), keys.v[:, :0].to(wide)


def _some(keys: KVBlock, span: slice) -> KVBlock:
    """Return the keys of some tokens, as views."""
    if span == slice(0, keys.k.shape[1]):
        return keys
    mask = None if keys.key_mask is None else keys.key_mask[:, span]
    k, v, segments = keys.k[:, span], keys.v[:, span], slice_segments(keys.segments, span)
    return keys._replace(k=k, v=v, key_mask=mask, segments=segments)


def _of_own(
    keys: KVBlock, span: slice, own: tuple[GradAccumulator, GradAccumulator]
) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
    """Yield some own keys and accumulators for them; then add those gradients to `own`."""
    some_keys = _some(keys, span)
    grads = GradAccumulator(some_keys.k), GradAccumulator(some_keys.v)
    yield some_keys, grads
    for total, part in zip(own, grads):
        part.move_to(total, span.start)


def _columns(t: Tensor, spans: list[slice]) -> Tensor:
    """Return these tokens, one span behind another; a view if it is one span."""
    if len(spans) == 1:
        return t[:, spans[0]]
    return torch.cat([t[:, span] for span in spans], dim=1)


def _taken(tensors: list[Tensor], pieces: Chunks) -> Tensor:
    """Pack these pieces of own keys into a message."""
    chosen = [p.cols for p in pieces] or [slice(0, 0)]
    form = Form.of(tensors, tokens(pieces))
    return form.pack([_columns(t, chosen) for t in tensors], form.empty(tensors[0].device))


def _split(pieces: Chunks, owner: int, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield each piece of one owner, out of the tensors that it sent."""
    for _, at in places(of_owner(pieces, owner), owner):
        yield [t[:, at] for t in tensors]
