"""A ring transport: keys go from neighbour to neighbour, their gradients come home behind them.

Liu et al. 2023, section 3. Memory does not grow with the ring.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from ring_attention_pytorch.comm.messages import Form, form_of, message_bytes, opened, packed, room
from ring_attention_pytorch.comm.ring import Ring, Transfer
from ring_attention_pytorch.geometry.layouts import Segments, count
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.schedule.pieces import Workload


@dataclass(frozen=True)
class SendRecv:
    """A transport of one neighbour's keys at a time; the next hop is under way while one computes.

    `segments` are every rank's keys; `distances` say which owners any rank needs, 0 first.
    All ranks pass the same distances in the same order. So there are no tags and no barriers, and
    whether there is a message never depends on the rank. All that belongs to an owner is one
    message, passed on as it came. A message's memory is used again for the one after next.
    """

    ring: Ring
    segments: tuple[Segments, ...]
    distances: tuple[int, ...]

    keeps = overtaken = False

    @property
    def capturable(self) -> bool:
        """Tell whether a CUDA graph can hold the calls: only if nothing is sent."""
        return self.distances == (0,)

    def follow_stream(self) -> Hashable:
        """Return None: no memory is shared, so no stream waits."""
        return None

    @classmethod
    def make(cls, ring: Ring, blocks: Workload, at_once: int) -> "SendRecv":
        """Make one; owners come one at a time, whatever `at_once` there is room for."""
        return cls(ring, blocks.keys, blocks.distances)

    def comes(self, own: Segments, back: bool) -> Iterator[Segments]:
        """Yield the positions of own keys, and of those at each needed distance."""
        return (self.segments[self._owner(distance)] for distance in self.distances)

    def stream(self, keys: KVBlock) -> Iterator[KVBlock]:
        """Yield own keys, then those at each needed distance."""
        if self.distances == (0,):
            yield keys
            return
        forms = self._forms(keys[:3])
        held, spare = self._rooms(keys.k, forms, 2)
        packed([t for t in keys[:3] if t is not None], forms[self.ring.rank], into=held)
        for here, there in pairwise(self.distances):
            coming = self._pass(held, spare, forms, here, there)
            yield keys
            coming.wait()
            held, spare = spare, held
            owner = self._owner(there)
            k, v, *mask = opened(held, forms[owner])
            keys = KVBlock(k, v, mask[0] if mask else None, self.segments[owner])
        yield keys

    def stream_back(
        self, own_keys: KVBlock, own: tuple[GradAccumulator, GradAccumulator]
    ) -> Iterator[tuple[KVBlock, tuple[GradAccumulator, GradAccumulator]]]:
        """Yield keys as `stream`, each with (dk, dv) to add to; `own` are those of own keys.

        Gradients travel one hop behind the keys that they belong to, and one jump home from
        the last rank. When the stream ends, `own` has what every rank added.
        """
        keys = self.stream(own_keys)
        yield next(keys), own
        if self.distances == (0,):
            return
        wide = accumulation_dtype(own_keys.k.dtype)
        forms = [tuple(p._replace(dtype=wide) for p in form) for form in self._forms(own_keys[:2])]
        computed, sent, received = self._rooms(own_keys.k, forms, 3)
        travelling = None
        ends = [*self.distances[2:], self.ring.size]
        for here, there, theirs in zip(self.distances[1:], ends, keys):
            memory = opened(computed, forms[self._owner(here)])
            grads = tuple(GradAccumulator(t, into=m) for t, m in zip(theirs[:2], memory))
            yield theirs, grads
            if travelling is not None:
                travelling.wait()
                _add(grads, opened(received, forms[self._owner(here)]))
            for total in grads:
                total.begin_update()  # the whole sum, in `computed`
            travelling = self._pass(computed, received, forms, here, there)
            computed, sent = sent, computed
        travelling.wait()
        _add(own, opened(received, forms[self.ring.rank]))

    def _forms(self, tensors: tuple[Tensor | None, ...]) -> list[Form]:
        """List the form of each owner's message."""
        return [form_of(tensors, count(s)) for s in self.segments]

    def _rooms(self, like: Tensor, forms: list[Form], how_many: int) -> list[Tensor]:
        """Return memory for so many messages of any owner."""
        longest = max(map(message_bytes, forms))
        return [room(like, longest) for _ in range(how_many)]

    def _pass(
        self, held: Tensor, spare: Tensor, forms: list[Form], here: int, there: int
    ) -> Transfer:
        """Send what is of the owner at distance `here` to the rank for which it is at `there`."""
        ring = self.ring
        target, source = ((ring.rank + step) % ring.size for step in (there - here, here - there))
        sent, received = (message_bytes(forms[self._owner(at)]) for at in (here, there))
        return ring.exchange([(target, held[:sent])], [(source, spare[:received])])

    def _owner(self, distance: int) -> int:
        return (self.ring.rank - distance) % self.ring.size


def _add(totals: tuple[GradAccumulator, ...], parts: list[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total.add(slice(0, part.shape[1]), part)
