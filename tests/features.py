"""Every feature by itself, as data: what the ring is given of it, and what the oracle.

`python docs/what_works.py` tabulates them, and tests walk all pairs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch import balanced, ring_attn
from ring_attention_pytorch.layouts import positions
from ring_attention_pytorch.ring import Ring
from tests import threads
from tests.reference import dense_attention, dropout_weights, relative_error

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


def key_mask() -> Tensor:
    mask = drawn(B, N, seed=2) < 0.5
    mask[0, : N // 2] = False  # under causal the first queries see nothing
    return mask


def a_third_hidden(sample: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (sample + 2 * head + i + j * j) % 3 != 0


IDS = torch.arange(5).repeat_interleave(torch.tensor(BORDERS).diff()).expand(B, -1)
SCATTERED = torch.stack([torch.arange(N) * 7 % 5, torch.arange(N) // 4 % 3])

# places of tokens of two sequences
AT = torch.arange(N) * 2 // 3 + 4
AT_KEYS = torch.cat((torch.arange(9) - 2, torch.arange(N - 9) + 5))

FEATURES: dict[str, Feature] = {
    "causal": Feature(dict(causal=True)),
    "window": Feature(dict(window=5)),
    "key mask": Feature(sharded=dict(key_mask=key_mask())),
    "softclamp": Feature(dict(softclamp=1.5)),
    "scale": Feature(dict(scale=0.5)),
    "one key head": Feature(sizes=dict(key_heads=1)),
    "d_v != d": Feature(sizes=dict(d_v=5)),
    "gradient of lse": Feature(with_lse=True),
    "cu_seqlens": Feature(ring=dict(cu_seqlens=BORDERS), oracle=dict(documents=IDS)),
    "documents": Feature(sharded=dict(documents=SCATTERED)),
    "sinks": Feature(learned=dict(sinks=drawn(HEADS, seed=3))),
    "alibi": Feature(dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, -0.1]).double())),
    "bias": Feature(varied=dict(key_bias=drawn(B, N, seed=9))),
    "bias of heads": Feature(varied=dict(key_bias=drawn(B, N, HEADS, seed=10))),
    "mask_mod": Feature(dict(mask_mod=a_third_hidden)),
    "prefix": Feature(dict(prefix=[11, 0], causal=True)),
    "positions": Feature(
        dict(causal=True),
        oracle=dict(positions=(AT, AT_KEYS)),
        along=dict(query_positions=AT, key_positions=AT_KEYS),
    ),
    "dropout": Feature(
        ring=dict(dropout=0.3, dropout_seed=7),
        oracle=dict(weights=dropout_weights(0.3, 7, B, HEADS, N, N)),
    ),
}


class Problem:
    """A feature's tensors, whole, and what the oracle makes of them."""

    def __init__(self, feature: Feature, dtype: torch.dtype = torch.float64):
        self.feature, self.dtype = feature, dtype
        sizes = dict(key_heads=KEY_HEADS, d_v=D) | feature.sizes
        self.qkv = [
            drawn(B, N, HEADS, D, seed=4),
            drawn(B, N, sizes["key_heads"], D, seed=5),
            drawn(B, N, sizes["key_heads"], sizes["d_v"], seed=6),
        ]
        self.dout = drawn(B, N, HEADS, sizes["d_v"], seed=7)
        self.dlse = drawn(B, HEADS, N, seed=8) * feature.with_lse
        leaves = [t.clone().requires_grad_() for t in self.qkv]
        learned = feature.varied | feature.learned
        learned = {n: t.clone().requires_grad_() for n, t in learned.items()}
        given = feature.shared | feature.sharded | learned | feature.oracle
        out, lse = dense_attention(*leaves, **given)
        self.want = self.results([*leaves, *learned.values()], out, lse, self.dout, self.dlse)

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
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
        grads = torch.autograd.grad((out, lse), leaves, (dout.to(out), dlse.to(lse)))
        return [out.detach(), lse.detach(), *grads]

    def part(self, ring: Ring, layout: str) -> tuple[Tensor, dict[str, Tensor], Options]:
        """One rank's places, its q, k, v and what else has gradients, and what else it is given."""
        dealt = balanced(BORDERS, ring.size) if layout == "balanced" else layout
        at = positions(dealt, rank=ring.rank, ring_size=ring.size, length=N)
        feature = self.feature
        varied = {name: t[:, at] for name, t in zip("qkv", self.qkv)}
        varied |= {name: t[:, at] for name, t in feature.varied.items()} | feature.learned
        sharded = {name: t[:, at] for name, t in feature.sharded.items()}
        sharded |= {name: t[at] for name, t in feature.along.items()}
        shared = {
            name: t.to(self.dtype) if isinstance(t, Tensor) else t
            for name, t in feature.shared.items()
        }
        options = shared | sharded | feature.ring
        options |= dict(layout=dealt, group=ring, return_lse=True, bucket_size=4)
        leaves = {n: t.clone().to(self.dtype).requires_grad_() for n, t in varied.items()}
        return at, leaves, options

    def shard(self, ring: Ring, layout: str, kernel: str | None, **how: Any) -> list[Tensor]:
        """One rank's results; `how` are further options of the ring."""
        at, leaves, options = self.part(ring, layout)
        out, lse = ring_attn(**leaves, **options, kernel=kernel, **how)
        return self.results(list(leaves.values()), out, lse, self.dout[:, at], self.dlse[..., at])

    def errors(
        self, size: int, layout: str, kernel: str | None = None, **how: Any
    ) -> dict[str, float]:
        """The worst relative error of each result over a ring of threads."""
        got, _ = threads.run(size, lambda ring: self.shard(ring, layout, kernel, **how))
        dealt = balanced(BORDERS, size) if layout == "balanced" else layout
        places = [positions(dealt, rank=r, ring_size=size, length=N) for r in range(size)]
        found = {}
        for i, (name, want) in enumerate(zip(self.names, self.want)):
            if i >= 5 + len(self.feature.varied):
                found[name] = relative_error(sum(mine[i] for mine in got), want)
                continue
            dim = 2 if name == "lse" else 1
            found[name] = max(
                relative_error(mine[i], want.index_select(dim, at)) for mine, at in zip(got, places)
            )
        return found


def together(names: Iterable[str]) -> Feature:
    merged = Feature()
    for name in names:
        merged = merged | FEATURES[name]
    return merged


def refusal(call: Callable[[], Any]) -> str | None:
    """The text of the ValueError, if it is one."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
