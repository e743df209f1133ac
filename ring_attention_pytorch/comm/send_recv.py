"""A ring transport: keys go from neighbour to neighbour, their gradients come home behind them.

Liu et al. 2023, section 3. Memory does not grow with the ring.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.comm.ring import Ring, Transfer
from ring_attention_pytorch.geometry.layouts import Segments, count
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.schedule import steps
from ring_attention_pytorch.schedule.pieces import Workload
from ring_attention_pytorch.schedule.steps import Schedule


@dataclass(frozen=True)
class SendRecv:
    """A transport of one neighbour's keys at a time; the next hop is under way while one computes.

    `segments` are every rank's keys; `distances` say which owners any rank needs, 0 first.
    All ranks pass the same distances in the same order. So there are no barriers, and whether there
    is a message never depends on the rank. All that belongs to an owner is one message, passed on
    as it came. A message's memory is used again for the one after next.
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

    @cached_property
    def owners(self) -> dict[int, int]:
        """The rank whose keys are here after so many hops; after all of them its own are."""
        rank, size = self.ring.rank, self.ring.size
        return {distance: (rank - distance) % size for distance in range(size + 1)}

    def schedule(self, workload: Workload) -> Schedule:
        """Return what all ranks do."""
        return steps.ring(workload)

    def stream(self, keys: KVBlock) -> Iterator[KVBlock]:
        """Yield own keys, then those at each needed distance."""
        if self.distances == (0,):
            yield keys
            return
        tensors = [t for t in keys[:3] if t is not None]
        forms = [Form.of(tensors, count(segments)) for segments in self.segments]
        held, spare = _buffers(2, forms, keys.k.device)
        forms[self.ring.rank].pack(tensors, held)
        for here, there in pairwise(self.distances):
            coming = self._pass(held, spare, forms, here, there)
            yield keys
            coming.wait()
            held, spare = spare, held
            owner = self.owners[there]
            k, v, *mask = forms[owner].open(held)
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
        forms = [Form.of(own_keys[:2], count(segments), wide) for segments in self.segments]
        computed, sent, received = _buffers(3, forms, own_keys.k.device)
        travelling: Transfer | None = None
        jumps = [*self.distances[1:], self.ring.size]
        for (here, there), block in zip(pairwise(jumps), keys):
            form = forms[self.owners[here]]
            grads = tuple(
                GradAccumulator(t, into=memory) for t, memory in zip(block[:2], form.open(computed))
            )
            yield block, grads
            if travelling is not None:
                travelling.wait()
                _add(grads, form.open(received))
            for total in grads:
                total.begin_update()  # the whole sum, in `computed`
            travelling = self._pass(computed, received, forms, here, there)
            computed, sent = sent, computed
        travelling.wait()
        _add(own, forms[self.ring.rank].open(received))

    def _pass(
        self, held: Tensor, spare: Tensor, forms: list[Form], here: int, there: int
    ) -> Transfer:
        """Send what is of the owner at distance `here` to the rank for which it is at `there`."""
        ring = self.ring
        target, source = (
            (ring.rank + there - here) % ring.size,
            (ring.rank + here - there) % ring.size,
        )
        sent, received = forms[self.owners[here]].nbytes, forms[self.owners[there]].nbytes
        return ring.exchange([(target, held[:sent])], [(source, spare[:received])])


def _buffers(number: int, forms: Sequence[Form], device: torch.device) -> list[Tensor]:
    """Return so many buffers for a message of any of these forms."""
    longest = max(forms, key=lambda form: form.nbytes)
    return [longest.empty(device) for _ in range(number)]


def _add(totals: tuple[GradAccumulator, ...], parts: list[Tensor]) -> None:
    for total, part in zip(totals, parts):
        total.add(slice(0, part.shape[1]), part)
