"""Every feature by itself, as data: what the ring is given of it, and what the oracle.

`python docs/what_works.py` tabulates them, and tests walk all pairs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ring_attention_pytorch import RingPlan, balanced, ring_attn
from ring_attention_pytorch.geometry.layouts import Layout, positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import dense_attention, dropout_weights, relative_error

B, N, HEADS, KEY_HEADS, D = 2, 29, 4, 2, 8
BORDERS = [0, 3, 3, 4, 21, N]
LAYOUTS = ("contiguous", "striped", "zigzag", "balanced")
Options = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """`shared` goes to the ring and the oracle; `sharded` too, each rank's part to the ring.

    `varied` are sharded and have gradients; `learned` are parameters, whole on every rank, whose
    gradients sum up over ranks; `ring` and `oracle` are what only one of the two is given, and
    `along` what the ring is given along the tokens; `sizes` change those of q, k and v.
    """

    shared: Options = field(default_factory=dict)
    sharded: dict[str, Tensor] = field(default_factory=dict)
    varied: dict[str, Tensor] = field(default_factory=dict)
    learned: dict[str, Tensor] = field(default_factory=dict)
    ring: Options = field(default_factory=dict)
    oracle: Options = field(default_factory=dict)
    along: dict[str, Tensor] = field(default_factory=dict)  # `[n]`, sharded, for the ring
    sizes: dict[str, int] = field(default_factory=dict)
    with_lse: bool = False

    def __or__(self, other: "Feature") -> "Feature":
        merged = {
            name: getattr(self, name) | getattr(other, name) for name in self.__dataclass_fields__
        }
        return Feature(**merged)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def key_mask(n: int) -> Tensor:
    mask = drawn(B, n, seed=2) < 0.5
    mask[0, : n // 2] = False  # under causal the first queries see nothing
    return mask


def a_third_hidden(sample: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (sample + 2 * head + i + j * j) % 3 != 0


@lru_cache
def features(n: int = N) -> dict[str, Feature]:
    """All of them, of so many tokens: N, or a multiple, and all that is seen so much longer."""
    times = n // N
    borders = [times * at for at in BORDERS]
    ids = torch.arange(5).repeat_interleave(torch.tensor(borders).diff()).expand(B, -1)
    scattered = torch.stack([torch.arange(N) * 7 % 5, torch.arange(N) // 4 % 3])
    slopes = torch.tensor([0.5, 0.25, 0.125, -0.1])
    # places of tokens of two sequences
    at = torch.arange(n) * 2 // 3 + 4
    at_keys = torch.cat((torch.arange(9 * times) - 2, torch.arange(n - 9 * times) + 5))
    return {
        "causal": Feature(dict(causal=True)),
        "window": Feature(dict(window=5 * times)),
        "key mask": Feature(sharded=dict(key_mask=key_mask(n))),
        "softclamp": Feature(dict(softclamp=1.5)),
        "scale": Feature(dict(scale=0.5)),
        "one key head": Feature(sizes=dict(key_heads=1)),
        "d_v != d": Feature(sizes=dict(d_v=5)),
        "gradient of lse": Feature(with_lse=True),
        "cu_seqlens": Feature(ring=dict(cu_seqlens=borders), oracle=dict(documents=ids)),
        "documents": Feature(sharded=dict(documents=scattered.repeat_interleave(times, dim=1))),
        "sinks": Feature(learned=dict(sinks=drawn(HEADS, seed=3))),
        "alibi": Feature(dict(alibi_slopes=slopes.double() / times)),
        "bias": Feature(varied=dict(key_bias=drawn(B, n, seed=9))),
        "bias of heads": Feature(varied=dict(key_bias=drawn(B, n, HEADS, seed=10))),
        "mask_mod": Feature(dict(mask_mod=a_third_hidden)),
        "prefix": Feature(dict(prefix=[11 * times, 0], causal=True)),
        "positions": Feature(
            dict(causal=True),
            oracle=dict(positions=(at, at_keys)),
            along=dict(query_positions=at, key_positions=at_keys),
        ),
        "dropout": Feature(
            ring=dict(dropout=0.3, dropout_seed=7),
            oracle=dict(weights=dropout_weights(0.3, 7, B, HEADS, n, n)),
        ),
    }


FEATURES = features()


class Problem:
    """A feature's tensors, whole, and what the oracle makes of them as `dtype` holds them.

    Tensors are drawn in float64 on the CPU; what is computed on is on `device`.
    """

    def __init__(
        self, feature: Feature, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> None:
        self.feature, self.dtype, self.device = feature, dtype, device
        sizes = dict(n=N, key_heads=KEY_HEADS, d=D) | feature.sizes
        self.n, key_heads, d = (sizes[name] for name in ("n", "key_heads", "d"))
        d_v = sizes.get("d_v", d)
        self.qkv = [
            drawn(B, self.n, HEADS, d, seed=4),
            drawn(B, self.n, key_heads, d, seed=5),
            drawn(B, self.n, key_heads, d_v, seed=6),
        ]
        self.dout = drawn(B, self.n, HEADS, d_v, seed=7)
        self.dlse = drawn(B, HEADS, self.n, seed=8) * feature.with_lse
        self.want = self.dense(torch.float64)

    def dense(self, dtype: torch.dtype) -> list[Tensor]:
        """What the oracle makes of it, computing in a dtype."""
        feature = self.feature
        learned = dict(zip("qkv", self.qkv)) | feature.varied | feature.learned
        given = learned | feature.shared | feature.sharded
        given = self.cast(given, self.dtype, dtype) | self.cast(feature.oracle, dtype)
        leaves = {name: given[name].clone().requires_grad_() for name in learned}
        with torch.device(self.device):
            out, lse = dense_attention(**given | leaves)
        return self.results([*leaves.values()], out, lse, self.dout, self.dlse)

    def cast(self, given: Options, *dtypes: torch.dtype) -> Options:
        """Tensors on the device, floating ones rounded to one dtype after another."""

        def one(t: Tensor) -> Tensor:
            for dtype in dtypes if t.is_floating_point() else ():
                t = t.to(dtype)
            return t.to(self.device)

        return tree_map_only(Tensor, one, given)

    @property
    def names(self) -> list[str]:
        return [
            "out",
            "lse",
            "dq",
            "dk",
            "dv",
            *(f"d{name}" for name in self.feature.varied | self.feature.learned),
        ]

    def results(
        self, leaves: list[Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor
    ) -> list[Tensor]:
        through, along = [out], [dout.to(self.dtype).to(out)]
        if self.feature.with_lse:
            through.append(lse)
            along.append(dlse.to(lse).masked_fill(lse == -torch.inf, 0.0))
        grads = torch.autograd.grad(through, leaves, along)
        return [out.detach(), lse.detach(), *grads]

    def dealt(self, size: int, layout: str) -> Layout:
        if layout != "balanced":
            return layout
        return balanced([self.n // N * at for at in BORDERS], size)

    def places(self, rank: int, size: int, layout: str) -> Tensor:
        """Those of a rank's tokens."""
        return positions(self.dealt(size, layout), rank=rank, ring_size=size, length=self.n)

    def held(self, whole: list[Tensor], at: Tensor) -> list[Tensor]:
        """Of whole results those of these places, and all of what is learned."""
        dims = [1, 2, *[1] * (3 + len(self.feature.varied))]
        at = at.to(self.device)
        return [t.index_select(dim, at) for dim, t in zip(dims, whole)] + whole[len(dims) :]

    def part(self, ring: Ring, layout: str) -> tuple[Tensor, dict[str, Tensor], Options]:
        """One rank's places, its q, k, v and what else has gradients, and what else it is given."""
        feature, at = self.feature, self.places(ring.rank, ring.size, layout)
        varied = {name: t[:, at] for name, t in zip("qkv", self.qkv)}
        varied |= {name: t[:, at] for name, t in feature.varied.items()} | feature.learned
        sharded = {name: t[:, at] for name, t in feature.sharded.items()}
        sharded |= {name: t[at] for name, t in feature.along.items()}
        options = self.cast(feature.shared | sharded | feature.ring, self.dtype)
        options |= dict(layout=self.dealt(ring.size, layout), group=ring)
        options |= dict(return_lse=True, bucket_size=4 * self.n // N)
        varied = self.cast(varied, self.dtype)
        return at, {n: t.clone().requires_grad_() for n, t in varied.items()}, options

    def shard(self, ring: Ring, layout: str, kernel: str | None, **how: Any) -> list[Tensor]:
        """One rank's results; `how` are further options of the ring."""
        at, leaves, options = self.part(ring, layout)
        out, lse = ring_attn(**leaves, **options, kernel=kernel, **how)
        return self.results(list(leaves.values()), out, lse, self.dout[:, at], self.dlse[..., at])

    def shard_replayed(
        self,
        ring: Ring,
        layout: str,
        kernel: str,
        between: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> list[Tensor]:
        """The same of a plan in graphs: those of its third call, which has other tensors than the
        second, that was captured; `between` is called before each."""
        at, leaves, options = self.part(ring, layout)
        del options["return_lse"]
        plan = RingPlan.make(**leaves, **options, kernel=kernel, **how).in_graphs()
        for scale in (0.5, 2.0, 1.0):
            given = {name: (scale * t).detach().requires_grad_() for name, t in leaves.items()}
            between()
            out, lse = ring_attn(**given, plan=plan, return_lse=True)
            found = self.results(
                list(given.values()), out, lse, self.dout[:, at], self.dlse[..., at]
            )
        return found

    def errors(
        self, size: int, layout: str, kernel: str | None = None, **how: Any
    ) -> dict[str, float]:
        """The worst relative error of each result over a ring of threads."""
        got, _ = threads.run(size, lambda ring: self.shard(ring, layout, kernel, **how))
        want = [self.held(self.want, self.places(r, size, layout)) for r in range(size)]
        found = {}
        for i, name in enumerate(self.names):
            mine, theirs = ([each[i] for each in results] for results in (got, want))
            if i >= 5 + len(self.feature.varied):
                mine, theirs = [sum(mine)], theirs[:1]
            found[name] = max(map(relative_error, mine, theirs))
        return found


def together(names: Iterable[str], n: int = N, **sizes: int) -> Feature:
    merged = Feature(sizes=dict(n=n, **sizes))
    for name in names:
        merged = merged | features(n)[name]
    return merged


def refusal(call: Callable[[], Any]) -> str | None:
    """The text of the ValueError, if it is one."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
