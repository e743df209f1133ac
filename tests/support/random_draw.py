"""Cases of ring attention with every option: each is drawn from one integer, or written out.

To add an option: a field here, its argument in `cases.options`, its meaning in `random_oracle`.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch import balanced
from ring_attention_pytorch.geometry.layouts import Layout, positions
from tests.support import case as language
from tests.support.case import Tokens, axis, drawn
from tests.support.lazy import LAZY
from tests.support.random_memory import EXPANDED, kinds, uniform

# (sample, head, position of the query, of the key)
PREDICATES: tuple[Callable[..., Tensor], ...] = (
    lambda sample, head, i, j: (sample + 2 * head + i + j * j) % 3 != 0,
    lambda sample, head, i, j: (j % 4 < 2) | (i == j),
    lambda sample, head, i, j: (i - j).abs() != head + 1,
    lambda sample, head, i, j: (i + j + head) < 0,
)
LEARNED = ("q", "k", "v", "sinks", "key_bias", "shared_k", "shared_v")
ASKED = (None, "ring", "gather")  # transports that a call can name
# what each tensor's and result's second dimension is along, if that is tokens; and of lse the last
OF_QUERIES = ("q", "dq", "out", "dout", "documents")
OF_ALL = (  # the same on every rank
    "sinks", "dsinks", "alibi", "shared_k", "shared_v", "shared_mask",
)  # fmt: skip


# --- how what is not one of a few values is drawn ---


def borders(r: random.Random, n: int) -> tuple[int, ...]:
    """Draw ascending ones, some of them alike, so that there are documents of nothing."""
    inner = sorted(r.randint(0, n) for _ in range(r.randint(0, 4)))
    return (0, *inner, *(inner[-1:] if r.random() < 0.3 else ()), n)


def ids(r: random.Random, n: int) -> tuple[int, ...]:
    """Draw documents in runs, or scattered."""
    if r.random() < 0.5:
        return tuple(r.randint(0, 3) for _ in range(n))
    cuts = borders(r, n)
    return tuple(17 * sum(cut <= i for cut in cuts) % 5 for i in range(n))


def shards(r: random.Random, case: "Case") -> tuple[int, ...]:
    """Draw any lengths."""
    return tuple(r.choice((0, 1, r.randint(0, 12))) for _ in range(case.size))


def whether_crossed(r: random.Random, case: "Case") -> bool | None:
    """Draw what is said of it; it must be said where shards look like one sequence's."""
    if case.two and case.queries == case.keys:
        return True
    return r.choice((None, True) if case.two else (None, None, False))


def places(r: random.Random, n: int) -> tuple[int, ...]:
    """Draw positions in a few runs, or any; mostly all different."""
    if r.random() < 0.5:
        start, step = r.randint(-20, 20), r.choice((1, 1, 2))
        found = [start + step * i for i in range(n)]
        turn = r.randint(0, n)
        return tuple(found[turn:] + found[:turn])
    span = range(-30, 40)
    return tuple(r.sample(span, n) if r.random() < 0.7 else r.choices(span, k=n))


def in_steps(found: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Look back from before the step, as noisy blocks do; a step of 1 changes nothing.

    >>> in_steps((0, 1, 2, 3, 4), 2)
    (-1, -1, 1, 1, 3)
    """
    return found if step == 1 else tuple(at // step * step - 1 for at in found)


def of_samples(
    one: Callable[[random.Random, "Case"], Any],
) -> Callable[[random.Random, "Case"], Any]:
    """Draw one for all samples, or one for each."""

    def draw_each(r: random.Random, case: "Case") -> tuple[Any, ...]:
        return tuple(one(r, case) for _ in range(r.choice((1, case.batch)) or 1))

    return draw_each


def degrees(r: random.Random, case: "Case") -> int:
    return r.choice([n for n in (1, 2, 3, 4) if case.size % n == case.heads % n == 0])


def transports(r: random.Random, case: "Case") -> str | None:
    shared = ["shared", "shared", "together", "own_apart"] * (case.size > 1)
    return r.choice([None, "ring", "gather", "gather", *shared])


def of_the_ring(case: "Case") -> dict[str, Tensor]:
    """Return all tensors but those that every rank holds whole beside the sequence."""
    return {name: t for name, t in case.tensors().items() if not name.startswith("shared")}


def some_strides(r: random.Random, case: "Case") -> tuple[tuple[str, str], ...]:
    """Draw strides of some tensors."""
    some = {name: t for name, t in of_the_ring(case).items() if r.random() < 0.4}
    if case.decode:
        some = {name: t for name, t in some.items() if name in ("q", "k", "v", "key_mask")}
    found = [(name, r.choice(kinds(t.ndim))) for name, t in some.items()]
    return tuple((name, kind) for name, kind in found if kind != "contiguous")


def not_there_yet(r: random.Random, case: "Case") -> tuple[tuple[str, str], ...]:
    """Draw which tensors' memory has other values."""
    spread = [name for name, kind in case.laid_as.items() if kind in EXPANDED]
    some = [
        name
        for name, t in of_the_ring(case).items()
        if t.is_floating_point() and name not in spread
    ]
    return tuple((name, r.choice([*LAZY])) for name in some if r.random() < 0.15)


@dataclass(frozen=True, kw_only=True)
class Case(language.Case):
    """A random case, and how it is computed. Values of tensors are drawn from the seed, too."""

    # sizes
    size: int = axis(1, (1, 2, 2, 3, 3, 4, 4))  # of the ring
    batch: int = axis(1, (*(1, 1, 2, 2, 3) * 5, 1, 1, 1, 1, 0))
    length: int = axis(
        4, lambda r, c: r.randint(0, 4) if r.random() < 0.2 else r.randint(1, 40), kw_only=False
    )
    key_heads: int = axis(1, (1, 1, 2, 3))
    heads: int = axis(1, lambda r, c: c.key_heads * r.choice((1, 2, 4)))
    d: int = axis(2, (1, 2, 3, 5, 8, 16))
    d_v: int = axis(2, lambda r, c: r.choice((c.d, c.d, 1, 4, 7)))
    dtype: str | torch.dtype = axis("float64", ("float64", "float32", "bfloat16", "float16"))
    logits: float = axis(1.0, (1.0, 1.0, 4.0))
    # of two sequences: what lies on each rank
    queries: tuple[int, ...] = axis((), shards, 0.3)
    keys: tuple[int, ...] = axis((), shards, when=lambda c: c.two)
    layout: Layout = axis(
        "contiguous",
        lambda r, c: r.choice(("contiguous", "striped", "zigzag", *["balanced"] * (not c.two))),
        kw_only=False,
    )
    dealt: tuple[int, ...] = axis(  # borders for which the layout "balanced" is made
        (), lambda r, c: borders(r, c.length), when=lambda c: c.layout == "balanced"
    )
    cross: bool | None = axis(None, whether_crossed)
    # documents: of all samples, or of each
    borders: tuple[tuple[int, ...], ...] = axis(
        (), of_samples(lambda r, c: borders(r, c.length)), 0.25, lambda c: not c.two
    )
    tensor_borders: bool = axis(False, (True,), 0.5, lambda c: len(c.borders) == 1)
    ids: tuple[tuple[int, ...], ...] = axis(
        (),
        lambda r, c: tuple(ids(r, c.length) for _ in range(c.batch)),
        0.25,
        lambda c: not c.two,
    )
    ids_dtype: str = axis(
        "int64", ("int64", "int32", "int16", "int8", "uint8"), when=lambda c: c.ids
    )
    # what is seen
    query_at: tuple[int, ...] = axis(
        (),
        lambda r, c: in_steps(places(r, sum(c.queries)), r.choice((1, 1, 2, 3, 5))),
        0.5,
        lambda c: c.two,
    )
    key_at: tuple[int, ...] = axis(
        (),
        lambda r, c: places(r, sum(c.keys)),
        when=lambda c: c.query_at or (c.two and not any(c.queries) and c.seed % 2),
    )
    causal: bool = axis(False, (True,), 0.5)
    window: int | None = axis(None, lambda r, c: r.choice((0, 1, r.randint(0, c.length + 3))), 0.3)
    masked: str | bool = axis("", ("some", "some", "few", "none"), 0.35)  # are seen
    prefix: tuple[int, ...] = axis((), of_samples(lambda r, c: r.randint(0, c.length + 2)), 0.2)
    mask_mod: int | Callable[..., Tensor] | None = axis(None, (*range(len(PREDICATES)),), 0.12)
    shared: int = axis(0, (1, 2, 5, 9), 0.25)  # keys that all ranks hold
    shared_masked: bool = axis(False, (True,), 0.4, lambda c: c.shared)
    # scores
    scale: float | None = axis(None, (0.7, 2.5, 1e-3, 1e-6, -0.4, 0.0, 1), 0.35)
    softclamp: float | None = axis(None, (0.5, 3.0, 50.0), 0.12)
    sinks: bool = axis(False, (True,), 0.25)
    alibi: bool = axis(False, (True,), 0.12)
    bias: str = axis("", ("keys", "heads"), 0.25)  # of each key, or of each of its heads too
    heavy_bias: bool = axis(False, (True,), 0.5, lambda c: c.bias)
    dropout: float = axis(0.0, (0.1, 0.5, 0.95), 0.12)
    dropout_seed: int = axis(
        0, lambda r, c: r.choice((1, r.randrange(2**64))), when=lambda c: c.dropout
    )
    # how it is computed, which changes no result
    ulysses: int = axis(1, degrees, 0.5)
    bucket_size: int = axis(1024, (1, 3, 1024))
    kernel: str | None = axis(None, (None, None, "eager", "sdpa", "eager+sdpa", "sdpa+eager"))
    transport: str | None = axis(None, transports)  # those in shared memory are gathers, too
    memory: int | None = axis(
        None, (0, 3000, 100000), 0.4, lambda c: c.transport in (None, "gather")
    )
    at_once: int = axis(9, (1, 2, 9), when=lambda c: c.transport == "shared")
    own_low_priority: bool = axis(
        False, (True,), 0.4, lambda c: c.transport == "shared" and not c.differs_by_sample
    )
    late: bool = axis(False, (True,), 0.4, lambda c: c.transport == "shared")
    # "made" before, or with another key mask which is "replaced"
    plan: str = axis(
        "",
        lambda r, c: r.choice(("", "", "made", *["replaced"] * bool(c.ulysses == 1 and c.masked))),
    )
    lse: str = axis("", ("", "returned", "differentiated"))
    learned: tuple[str, ...] = axis(
        LEARNED, lambda r, c: tuple(name for name in LEARNED if r.random() < 0.8)
    )
    decode: bool = False  # by tree_attn_decode
    # what tensors are, which changes none either: of tensors by name
    strides: tuple[tuple[str, str], ...] | str = axis((), some_strides)
    lazy: tuple[tuple[str, str], ...] = axis((), not_there_yet, 0.5)  # memory has other values
    unseen: str = axis("", ("nan", "inf"), 0.5)  # keys and values that no query sees
    parts: int = axis(  # that are merged; what is lazy is given once
        1, (2, 3), 0.15, lambda c: not (c.plan or c.lazy) and c.transport in ASKED
    )

    @property
    def two(self) -> bool:
        """True if keys are of another sequence than queries."""
        return bool(self.queries)

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of all queries, and of all keys."""
        return (sum(self.queries), sum(self.keys)) if self.two else (self.length, self.length)

    @property
    def counted(self) -> bool:
        """True if queries of two sequences stand where their layout has them."""
        asked = self.dropout or self.alibi or self.modded
        return bool(self.two and not self.placed and not self.decode and asked)

    @property
    def placed(self) -> bool:
        return bool(self.query_at or self.key_at)

    @property
    def packed(self) -> bool:
        return bool(self.ids or self.borders)

    @property
    def differs_by_sample(self) -> bool:
        return bool(self.ids) or len(self.borders) > 1 or len(self.prefix) > 1

    @property
    def needs_eager(self) -> bool:
        odd = self.scale is not None and self.scale <= 0
        return odd or self.softclamp is not None or self.alibi or bool(self.dropout) or self.modded

    @property
    def modded(self) -> bool:
        return self.mask_mod is not None

    @property
    def predicate(self) -> Callable[..., Tensor] | None:
        return PREDICATES[self.mask_mod] if isinstance(self.mask_mod, int) else self.mask_mod

    @property
    def kind(self) -> torch.dtype:
        return getattr(torch, self.dtype) if isinstance(self.dtype, str) else self.dtype

    @property
    def laid_as(self) -> dict[str, str]:
        """The strides of each tensor that has odd ones."""
        if isinstance(self.strides, str):
            return dict.fromkeys(("q", "k", "v", "dout", "dlse"), self.strides)
        return dict(self.strides)

    def plain(self) -> dict[str, Any]:
        """Return the options that are what they say, for rings and oracles alike."""
        return dict(
            causal=self.causal, window=self.window, softclamp=self.softclamp, scale=self.scale
        )

    # --- which tokens a rank has ---

    def layout_over(self, size: int) -> Layout:
        return balanced(self.dealt, size) if self.layout == "balanced" else self.layout

    def places(self, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """Say which queries and which keys a rank holds."""
        n, m = self.lengths
        layout = self.layout_over(size)
        if self.two and not self.counted:
            queries = torch.arange(n).split(self.queries)[rank]
        elif isinstance(layout, str):
            queries = held(layout, n, rank, size)
        else:
            queries = positions(layout, rank=rank, ring_size=size, length=n)
        return queries, torch.arange(m).split(self.keys)[rank] if self.two else queries

    def tokens(self, name: str, rank: int, size: int) -> Tokens:
        queries, keys = self.places(rank, size)
        if name in ("dshared_k", "dshared_v"):  # sums already, on each rank
            return 1, torch.arange(self.shared)
        if name in OF_ALL:
            return None
        if name in ("lse", "dlse"):
            return 2, queries
        return 1, queries if name in OF_QUERIES else keys

    def anywhere(self) -> "Case":
        alone = dict(
            queries=self.queries and (sum(self.queries),), keys=self.keys and (sum(self.keys),)
        )
        usual = {f.name: f.default for f in fields(Case) if f.name in HOW}
        return replace(self, **usual, **alone)

    # --- values ---

    def tensors(self) -> dict[str, Tensor]:
        """All that there are, whole, by name."""
        b, h, (n, m), dtype = self.batch, self.heads, self.lengths, self.kind
        wide = torch.promote_types(dtype, torch.float32)
        found = {
            "q": self.normal("q", b, n, h, self.d).mul(self.logits).to(dtype),
            "k": self.normal("k", b, m, self.key_heads, self.d).to(dtype),
            "v": self.normal("v", b, m, self.key_heads, self.d_v).to(dtype),
            "dout": self.normal("dout", b, n, h, self.d_v).to(dtype),
            "dlse": self.normal("dlse", b, h, n).to(wide),
        }
        if self.shared:
            found["shared_k"] = self.normal("shared_k", b, self.shared, *found["k"].shape[2:])
            found["shared_v"] = self.normal("shared_v", b, self.shared, *found["v"].shape[2:])
            found |= {name: found[name].to(dtype) for name in ("shared_k", "shared_v")}
        if self.shared_masked:
            found["shared_mask"] = self.normal("shared_mask", b, self.shared) < 0.3
        if self.masked:
            found["key_mask"] = self.mask(b, m)
        if self.sinks:
            found["sinks"] = self.normal("sinks", h).to(dtype)
        if self.alibi:
            found["alibi"] = self.normal("alibi", h).to(wide) * 0.2
        if self.bias:
            found["key_bias"] = self.key_bias(b, m, h).to(dtype)
        if self.ids:
            found["documents"] = torch.tensor(self.ids, dtype=torch.long).expand(b, n)
        laid_as = self.laid_as
        return {name: uniform(t, laid_as.get(name, "contiguous")) for name, t in found.items()}

    def mask(self, b: int, m: int) -> Tensor:
        share = {"some": 0.25, True: 0.25, "few": -1.3, "none": -99.0}[self.masked]
        seen = self.normal("key_mask", b, m) < share
        seen[:1, : m // 2] = False  # under causal the first queries see nothing
        return seen

    def key_bias(self, b: int, m: int, h: int) -> Tensor:
        found = self.normal("key_bias", b, m) if self.bias == "keys" else None
        found = self.normal("key_bias", b, m, h) if found is None else found
        heavy = self.normal("which are heavy", *found.shape) < 0.0
        return torch.where(heavy, -10000.0, found) if self.heavy_bias else found


# fields that change no result
HOW = (
    "size", "layout", "dealt", "ids_dtype", "tensor_borders", "ulysses", "bucket_size", "kernel",
    "transport", "memory", "at_once", "own_low_priority", "late", "plan", "lazy", "unseen",
    "parts",
)  # fmt: skip


def held(layout: str, length: int, rank: int, size: int) -> Tensor:
    """The positions that a rank holds in a layout that is named."""
    whole = torch.arange(length)
    if layout == "contiguous":
        return whole.tensor_split(size)[rank]
    if layout == "striped":
        return whole[rank::size]
    chunks = whole.tensor_split(2 * size)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def features(case: Case) -> Iterator[str]:
    """List the features that a case has, of all that can be drawn."""
    usual = Case()
    for name, value in vars(case).items():
        if name not in ("seed", "strides", "learned", "lazy") and value != getattr(usual, name):
            yield f"{name}: {value}" if isinstance(value, str) or name == "size" else name
    for name in usual.learned:
        yield f"{name} {'has a gradient' if name in case.learned else 'has none'}"
    for name, kind in (*case.strides, *case.lazy):
        yield f"{name}: {kind}"
    for n, what in zip(case.lengths, ("queries", "keys")):
        if n < case.size:
            yield f"fewer {what} than ranks" if n else f"no {what}"
    if (why := refused(case)) is not None:
        yield f"refused: {why}"


# --- what can't be, and what is left out then ---

Rule = tuple[str, Callable[[Case], Any], dict[str, Any]]
RULES: tuple[Rule, ...] = (
    ("the clamp would bend the bias", lambda c: c.bias and c.softclamp, dict(softclamp=None)),
    ("a bias is divided by the scale", lambda c: c.bias and c.scale == 0, dict(scale=None)),
    (
        "float16 does not hold a bias divided by so small a scale",
        lambda c: c.bias and c.dtype == "float16" and 0 < abs(c.scale or 1) < 1e-4,
        dict(scale=None),
    ),
    ("a prefix is of causal attention", lambda c: c.prefix and not c.causal, dict(prefix=())),
    ("no prefix of documents", lambda c: c.prefix and c.packed, dict(prefix=())),
    ("no prefix of positions", lambda c: c.prefix and c.placed, dict(prefix=())),
    (
        "two sequences share no positions",
        lambda c: c.two and not c.placed and (c.causal or c.window is not None),
        dict(causal=False, window=None),
    ),
    ("two ways to tell documents", lambda c: c.ids and c.borders, dict(borders=())),
    (
        "dropout draws by positions",
        lambda c: c.dropout and any(len({*at}) < len(at) for at in (c.query_at, c.key_at)),
        dict(dropout=0.0),
    ),
    (
        "shared keys have no positions",
        lambda c: c.shared and (c.alibi or c.dropout),
        dict(shared=0, shared_masked=False),
    ),
    (
        "kernel sdpa has none of that",
        lambda c: c.needs_eager and "sdpa" in (c.kernel or ""),
        dict(kernel=None),
    ),
    (
        "memory bounds a gather",
        lambda c: c.memory is not None and c.transport == "ring",
        dict(memory=None),
    ),
)  # fmt: skip


def refused(case: Case) -> str | None:
    """Why the case can't be, if so."""
    return next((why for why, applies, _ in RULES if applies(case)), None)


def mended(case: Case) -> Case:
    """The case without what can't be."""
    for _, applies, without in RULES:
        if applies(case):
            case = replace(case, **without)
    return case


# --- drawing ---


def draw(seed: int) -> Case:
    """The case of a number. Some are to be refused, where one happens to be such a case."""
    r = random.Random(f"{seed} kind")
    if r.random() < 0.04:
        return decoding(r, seed)
    case = drawn(Case, seed)
    case = case if r.random() < 0.03 else mended(case)
    if case.counted:
        everyone = (held(case.layout, sum(case.queries), i, case.size) for i in range(case.size))
        queries = tuple(map(len, everyone))
        case = replace(case, queries=queries, cross=True if queries == case.keys else case.cross)
    return case


def decoding(r: random.Random, seed: int) -> Case:
    """Few queries of `tree_attn_decode`, alone."""
    usual = {f.name: f.default for f in fields(Case) if f.name not in DECODED}
    length = r.choice((0, r.randint(1, 40), r.randint(1, 40)))
    alone = dict(decode=True, learned=(), length=length, keys=(length,))
    return drawn(Case, seed, **usual | alone | dict(queries=(r.choice((0, 1, 1, 2, 5)),)))


DECODED = (
    "seed", "batch", "heads", "key_heads", "d", "d_v", "dtype", "logits", "masked", "strides",
    "lazy", "unseen",
)  # fmt: skip
