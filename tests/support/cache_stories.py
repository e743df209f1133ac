"""Stories of caches: what is done to one, at random, beside dense tensors that know no ranks."""

import io
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.ranks.ring import Group
from tests.support.reference import dense_attention, relative_error

HEADS, D, D_V = 4, 8, 6


@dataclass(frozen=True)
class Story:
    """`deeds` draws what is done; `options` are of scores."""

    seed: int = 0
    page: int = 2
    sequences: int = 2
    key_heads: int = 2
    layers: int = 1
    capacity: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()  # "sinks", "alibi_slopes", "starts"
    deeds: tuple[str, ...] = ("attend",) * 8 + ("append", "rollback", "reorder", "fork", "free")
    steps: int = 12
    most: int = 5  # tokens at a time
    dtype: torch.dtype = torch.float64
    kept: torch.dtype | None = None  # the dtype of the cache; None is that of the queries
    windows: tuple[int | None, ...] | None = None  # of layers; of queries, if `options` has none
    spare: int = 5
    tied: bool = False  # values are the first numbers of keys
    kernel: str | None = None
    device: str = "cpu"


def in_8_bits(t: Tensor) -> Tensor:
    """Return what 8 bits and a power of two for each row say of it."""
    power = torch.ceil(torch.log2(t.abs().amax(-1, keepdim=True) / 448))
    scale = torch.exp2(power.clamp(-63, 63))
    return (t / scale).float().to(torch.float8_e4m3fn).double() * scale


class Dense:
    """The keys and values of each layer and sequence, whole."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.kv = [[self._none() for _ in range(story.sequences)] for _ in range(story.layers)]
        self.starts = [0] * story.sequences

    def _none(self) -> tuple[Tensor, Tensor]:
        heads, dtype = self.story.key_heads, torch.float64
        return torch.zeros(0, heads, D, dtype=dtype), torch.zeros(0, heads, D_V, dtype=dtype)

    def append(self, k: Tensor, v: Tensor, layer: int) -> None:
        if self.story.kept is not None:
            k, v = in_8_bits(k), in_8_bits(v)
        for i, old in enumerate(self.kv[layer]):
            self.kv[layer][i] = tuple(torch.cat(both) for both in zip(old, (k[i], v[i])))

    def each(self, change: Any) -> None:
        self.kv = [change(sequences) for sequences in self.kv]

    def attend(self, q: Tensor, layer: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for i, (k, v) in enumerate(self.kv[layer]):
            n, m = q.shape[1], len(k)
            mask = torch.arange(m)[None] >= self.starts[i]
            out, lse = dense_attention(
                q[i : i + 1], k[None], v[None], causal=True, key_mask=mask,
                positions=(torch.arange(m - n, m), torch.arange(m)), **options,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


class Teller:
    """Does to a cache what it does to dense tensors; notes the worst error."""

    def __init__(self, story: Story, group: Group = None) -> None:
        self.story, self.draw = story, random.Random(story.seed)
        self.torch = torch.Generator().manual_seed(story.seed)
        self.cache = self.empty(group)
        self.dense, self.worst = Dense(story), 0.0
        self.tensors: dict[str, Tensor] = {}
        self.longest = [0] * story.sequences
        for name in ("sinks", "alibi_slopes"):
            if name in story.given:
                self.tensors[name] = self.normal(HEADS).abs()
        if "starts" in story.given:
            self.dense.starts = [self.draw.randint(0, 4) for _ in range(story.sequences)]
            self.cache.hide_before(self.dense.starts)

    def empty(self, group: Group) -> RingCache:
        story = self.story
        return RingCache(
            story.sequences, story.key_heads, D, value_dim=D_V, layers=story.layers,
            capacity=story.capacity, page=story.page, dtype=story.kept or story.dtype,
            device=story.device, windows=story.windows, spare=story.spare,
            tied=story.tied, group=group,
        )  # fmt: skip

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.torch, dtype=torch.float64)
        return drawn.to(self.story.dtype).double()

    def tell(self) -> float:
        for _ in range(self.story.steps):
            getattr(self, self.draw.choice(self.story.deeds))()
            lengths = [len(k) for k, _ in self.dense.kv[0]]
            self.longest = [max(n, most) if n else 0 for n, most in zip(lengths, self.longest)]
            assert self.cache.lengths == lengths
            assert self.cache.lengths_of[0].tolist() == lengths
        return self.worst

    def _room(self) -> int:
        if self.story.capacity is None:
            return self.story.most
        return min(self.story.most, self.cache.capacity - max(self.cache.lengths))

    def _chunk(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        b, h = self.story.sequences, self.story.key_heads
        q, k, v = self.normal(b, n, HEADS, D), self.normal(b, n, h, D), self.normal(b, n, h, D_V)
        return q, k, k[..., :D_V] if self.story.tied else v

    def _options(self, layer: int) -> dict[str, Any]:
        windows = self.story.windows or (None,) * self.story.layers
        return {"window": windows[layer], **self.story.options}

    def _as_given(self, t: Tensor) -> Tensor:
        return t.to(self.story.device, self.story.dtype)

    def _values(self, v: Tensor) -> Tensor | None:
        return None if self.story.tied else self._as_given(v)

    def attend(self) -> None:
        n = self.draw.choice([0, 1, 1, 1, self.story.most])
        for layer in range(self.story.layers):
            if not (n := min(n, self._room())):
                return
            q, k, v = self._chunk(n)
            self.dense.append(k, v, layer)
            given = [self._as_given(q), self._as_given(k), self._values(v)]
            if self.draw.random() < 0.3:
                self.cache.append(*given[1:], layer=layer)
                given[1:] = [None, None]
            tensors = {name: self._as_given(t) for name, t in self.tensors.items()}
            asked = len(self.dense.kv[0][0][0]) % 3 > 0
            got = ring_attn_with_cache(
                *given, self.cache, layer=layer, kernel=self.story.kernel, return_lse=asked,
                **self._options(layer), **tensors,
            )  # fmt: skip
            want = self.dense.attend(q, layer, {**self._options(layer), **self.tensors})
            self.compare(got if asked else (got, want[1]), want)

    def compare(self, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
        assert got[0].dtype == self.story.dtype
        assert (got[1].cpu().isneginf() == want[1].isneginf()).all()
        for mine, right in zip(got, want):
            mine, right = (t.double().cpu().nan_to_num(neginf=0.0) for t in (mine, right))
            self.worst = max(self.worst, relative_error(mine, right))

    def prefill(self) -> None:
        """Attend with a chunk that is spread over the ranks."""
        layout = self.draw.choice(("contiguous", "zigzag", "striped"))
        n = min(self.draw.randint(1, 3 * self.story.most), self._room())
        for layer in range(self.story.layers):
            if n < 1:
                return
            q, k, v = self._chunk(n)
            self.dense.append(k, v, layer)
            ring = self.cache.ring
            mine = positions(layout, rank=ring.rank, ring_size=ring.size, length=n)
            tensors = {name: self._as_given(t) for name, t in self.tensors.items()}
            given = self._as_given(q[:, mine]), self._as_given(k[:, mine]), self._values(v[:, mine])
            got = ring_attn_with_cache(
                *given, self.cache, layer=layer, layout=layout, return_lse=True,
                **self._options(layer), **tensors,
            )  # fmt: skip
            out, lse = self.dense.attend(q, layer, {**self._options(layer), **self.tensors})
            if len(mine):
                self.compare(got, (out[:, mine], lse[..., mine]))

    def append(self) -> None:
        n = min(self.draw.randint(1, self.story.most), self._room())
        for layer in range(self.story.layers):
            _, k, v = self._chunk(n)
            if n:
                self.dense.append(k, v, layer)
                self.cache.append(self._as_given(k), self._values(v), layer=layer)

    def rollback(self) -> None:
        n = [self.draw.randint(0, min(length, 7)) for length in self.cache.lengths]
        if any(map(self._overwritten, self.longest, self.cache.lengths, n)):
            with pytest.raises(ValueError, match="roll back less"):
                self.cache.rollback(n)
            return
        self.cache.rollback(n)
        self.dense.each(lambda kv: [(k[: len(k) - m], v[: len(v) - m]) for (k, v), m in zip(kv, n)])

    def _overwritten(self, longest: int, length: int, n: int) -> bool:
        """True if so many tokens can't be rolled back in a layer with a window."""
        page, spare = self.story.page, self.story.spare
        kept = [
            -(-(w + 2 * spare) // page) * page for w in self.story.windows or () if w is not None
        ]
        too_many = longest - length + n > spare and length > n
        return too_many and any(longest > each for each in kept)

    def reorder(self) -> None:
        beams = [self.draw.randrange(self.story.sequences) for _ in range(self.story.sequences)]
        self._reordered(beams)
        self.cache.reorder(beams)

    def fork(self) -> None:
        source, target = (self.draw.randrange(self.story.sequences) for _ in range(2))
        beams = list(range(self.story.sequences))
        beams[target] = source
        self._reordered(beams)
        self.cache.fork(source, target)

    def reload(self) -> None:
        """Let another cache, which holds other tokens, go on from the states of all ranks."""
        ring, saved = self.cache.ring, io.BytesIO()
        torch.save(self.cache.state_dict(), saved)
        states = [io.BytesIO(note) for note in ring.gather_notes("states", saved.getvalue())]
        self.cache = self.empty(ring)
        for layer in range(self.story.layers):
            _, k, v = self._chunk(self.story.most)
            self.cache.append(self._as_given(k), self._values(v), layer)
        self.cache.reorder([0] * self.story.sequences)
        self.cache.hide_before([3] * self.story.sequences)
        self.cache.load_state_dict(*map(torch.load, states[::-1]))
        assert self.cache.starts.tolist() == self.dense.starts

    def _reordered(self, beams: list[int]) -> None:
        self.dense.each(lambda kv: [kv[i] for i in beams])
        self.dense.starts = [self.dense.starts[i] for i in beams]
        self.longest = [self.longest[i] for i in beams]

    def free(self) -> None:
        which = self.draw.randrange(self.story.sequences)
        self.cache.free(which)
        self.dense.starts[which] = 0
        self.dense.each(
            lambda kv: [(k[:0], v[:0]) if i == which else (k, v) for i, (k, v) in enumerate(kv)]
        )


def told(stories: list[Story]) -> list[float]:
    """The worst error of each story on this rank."""
    return [Teller(story).tell() for story in stories]


OPTIONS = [
    dict(options={"window": 3}),
    dict(options={"window": 0}),
    dict(options={"softclamp": 1.5, "scale": 0.7}),
    dict(given=("sinks",)),
    dict(given=("alibi_slopes",), options={"window": 6}),
    dict(given=("starts",)),
    dict(key_heads=1, given=("sinks", "starts"), options={"window": 4}),
    dict(key_heads=4, layers=2),
]
