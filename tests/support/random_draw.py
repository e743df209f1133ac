"""Cases of the random test: each is drawn from one integer, and says all that is asked for."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from tests.support.lazy import LAZY
from tests.support.random_memory import EXPANDED, kinds, uniform

# (sample, head, position of the query, of the key)
PREDICATES: tuple[Callable[..., Tensor], ...] = (
    lambda sample, head, i, j: (sample + 2 * head + i + j * j) % 3 != 0,
    lambda sample, head, i, j: (j % 4 < 2) | (i == j),
    lambda sample, head, i, j: (i - j).abs() != head + 1,
    lambda sample, head, i, j: (i + j + head) < 0,
)
TENSORS = {
    "q": 4, "k": 4, "v": 4, "dout": 4, "dlse": 3, "key_mask": 2, "sinks": 1, "key_bias": 2,
    "alibi": 1, "documents": 2, "shared_k": 4, "shared_v": 4, "shared_mask": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What to compute, and how. Values of tensors are drawn from the seed, too."""

    seed: int = 0
    size: int = 1  # of the ring
    batch: int = 1
    length: int = 4
    heads: int = 1
    key_heads: int = 1
    d: int = 2
    d_v: int = 2
    dtype: str = "float64"
    layout: str = "contiguous"
    dealt: tuple[int, ...] = ()  # borders for which the layout "balanced" is made
    queries: tuple[int, ...] = ()  # of two sequences: what lies on each rank
    keys: tuple[int, ...] = ()
    cross: bool | None = None
    causal: bool = False
    window: int | None = None
    ids: tuple[tuple[int, ...], ...] = ()  # documents of each sample
    ids_dtype: str = "int64"
    borders: tuple[tuple[int, ...], ...] = ()  # of all samples, or of each
    tensor_borders: bool = False
    masked: str = ""  # "some", "few" or "none" are seen
    prefix: tuple[int, ...] = ()  # of all samples, or of each
    mask_mod: int | None = None
    query_at: tuple[int, ...] = ()
    key_at: tuple[int, ...] = ()
    scale: float | None = None
    softclamp: float | None = None
    sinks: bool = False
    alibi: bool = False
    bias: str = ""  # "keys", or "heads" too
    heavy_bias: bool = False
    dropout: float = 0.0
    dropout_seed: int = 0
    logits: float = 1.0
    ulysses: int = 1
    bucket_size: int = 1024
    kernel: str | None = None
    transport: str | None = None  # those in shared memory are gathers, too
    memory: int | None = None
    at_once: int = 9
    own_low_priority: bool = False
    late: bool = False
    plan: str = ""  # "made" before, or with another key mask which is "replaced"
    lse: str = ""  # "returned", or "differentiated"
    learned: tuple[str, ...] = ("q", "k", "v", "sinks", "key_bias", "shared_k", "shared_v")
    strides: tuple[tuple[str, str], ...] = ()  # of tensors by name
    decode: bool = False  # by tree_attn_decode
    unseen: str = ""  # "nan" or "inf" are keys and values that no query sees
    lazy: tuple[tuple[str, str], ...] = ()  # of tensors by name, whose memory has other values
    shared: int = 0  # keys that all ranks hold
    shared_masked: bool = False

    def __str__(self) -> str:
        default = asdict(Case())
        told = {name: value for name, value in vars(self).items() if value != default[name]}
        return f"Case({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    @property
    def two(self) -> bool:
        """Whether keys are of another sequence than queries."""
        return bool(self.queries)

    @property
    def lengths(self) -> tuple[int, int]:
        """Of all queries and of all keys."""
        return (sum(self.queries), sum(self.keys)) if self.two else (self.length, self.length)

    @property
    def counted(self) -> bool:
        """Whether queries of two sequences stand where their layout has them."""
        asked = self.dropout or self.alibi or self.modded
        return bool(self.two and not self.placed and not self.decode and asked)

    @property
    def placed(self) -> bool:
        return bool(self.query_at or self.key_at)

    @property
    def packed(self) -> bool:
        return bool(self.ids or self.borders)

    @property
    def needs_eager(self) -> bool:
        odd = self.scale is not None and self.scale <= 0
        return odd or self.softclamp is not None or self.alibi or bool(self.dropout) or self.modded

    @property
    def modded(self) -> bool:
        return self.mask_mod is not None

    def tensors(self) -> dict[str, Tensor]:
        """All that there are, whole, by name."""
        b, h, (n, m), dtype = self.batch, self.heads, self.lengths, getattr(torch, self.dtype)
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
            found["documents"] = torch.tensor(self.ids).view(b, n)
        kind = dict(self.strides)
        return {name: uniform(t, kind.get(name, "contiguous")) for name, t in found.items()}

    def normal(self, name: str, *shape: int) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed + 1000003 * (crc32(name.encode()) % 1009))
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def mask(self, b: int, m: int) -> Tensor:
        share = {"some": 0.25, "few": -1.3, "none": -99.0}[self.masked]
        seen = self.normal("key_mask", b, m) < share
        seen[:1, : m // 2] = False  # under causal the first queries see nothing
        return seen

    def key_bias(self, b: int, m: int, h: int) -> Tensor:
        found = self.normal("key_bias", b, m) if self.bias == "keys" else None
        found = self.normal("key_bias", b, m, h) if found is None else found
        heavy = self.normal("which are heavy", *found.shape) < 0.0
        return torch.where(heavy, -10000.0, found) if self.heavy_bias else found


def features(case: Case) -> Iterator[str]:
    """What of all that may be drawn is in a case."""
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
    """The case of a number. One of thirty is to be refused, if it happens to be one of those."""
    r = random.Random(seed)
    if r.random() < 0.04:
        return odd(random.Random(-1 - seed), decoding(r, seed))
    case = Case(seed, **sizes(r))
    case = replace(case, **two_sequences(r, case) if r.random() < 0.3 else one_sequence(r, case))
    case = replace(case, **seen(r, case), **scores(r), **running(r, case))
    case = case if r.random() < 0.03 else mended(case)
    if case.counted:
        everyone = (held(case.layout, sum(case.queries), i, case.size) for i in range(case.size))
        queries = tuple(map(len, everyone))
        case = replace(case, queries=queries, cross=True if queries == case.keys else case.cross)
    case = replace(case, strides=memory(r, case.tensors()))
    return beside(random.Random(-1000003 * seed - 7), odd(random.Random(-1 - seed), case))


def beside(r: random.Random, case: Case) -> Case:
    """With keys that all ranks hold, of one case in four."""
    shared, masked = r.choice((1, 2, 5, 9)), r.random() < 0.4
    if r.random() < 0.75 or (r.random() < 0.97 and (case.alibi or case.dropout)):
        return case
    learned = tuple(name for name in ("shared_k", "shared_v") if r.random() < 0.8)
    return replace(case, shared=shared, shared_masked=masked, learned=(*case.learned, *learned))


def odd(r: random.Random, case: Case) -> Case:
    """With what some tensors hold, or do not hold yet, that must change nothing."""
    spread = [name for name, kind in case.strides if kind in EXPANDED]
    names = [
        name for name, t in case.tensors().items() if t.is_floating_point() and name not in spread
    ]
    lazy = tuple((name, r.choice([*LAZY])) for name in names if r.random() < 0.15)
    unseen = maybe(r, 0.5, r.choice(("nan", "inf")), "")
    return replace(case, lazy=maybe(r, 0.5, lazy, ()), unseen=unseen)


def held(layout: str, length: int, rank: int, size: int) -> Tensor:
    """The positions that a rank holds in a layout that is named."""
    whole = torch.arange(length)
    if layout == "contiguous":
        return whole.tensor_split(size)[rank]
    if layout == "striped":
        return whole[rank::size]
    chunks = whole.tensor_split(2 * size)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def maybe(r: random.Random, share: float, value: Any, otherwise: Any = None) -> Any:
    return value if r.random() < share else otherwise


def sizes(r: random.Random) -> dict[str, Any]:
    key_heads, d = r.choice((1, 1, 2, 3)), r.choice((1, 2, 3, 5, 8, 16))
    return dict(
        size=r.choice((1, 2, 2, 3, 3, 4, 4)),
        batch=r.choice((1, 1, 2, 2, 3, maybe(r, 0.2, 0, 1))),
        length=maybe(r, 0.2, r.randint(0, 4), r.randint(1, 40)),
        heads=key_heads * r.choice((1, 2, 4)),
        key_heads=key_heads,
        d=d,
        d_v=r.choice((d, d, 1, 4, 7)),
        dtype=r.choice(("float64", "float32", "bfloat16", "float16")),
        logits=r.choice((1.0, 1.0, 4.0)),
    )


def one_sequence(r: random.Random, case: Case) -> dict[str, Any]:
    """How it is dealt, and its documents."""
    layout, n = r.choice(("contiguous", "striped", "zigzag", "balanced")), case.length
    found = dict(layout=layout, cross=maybe(r, 0.3, False))
    if layout == "balanced":
        found["dealt"] = borders(r, n)
    if r.random() < 0.25:
        each = r.choice((1, case.batch)) or 1
        found["borders"] = tuple(borders(r, n) for _ in range(each))
        found["tensor_borders"] = each == 1 and r.random() < 0.5
    elif r.random() < 0.25:
        found["ids"] = tuple(ids(r, n) for _ in range(case.batch))
        found["ids_dtype"] = r.choice(("int64", "int32", "int16", "int8", "uint8"))
    return found


def borders(r: random.Random, n: int) -> tuple[int, ...]:
    """Ascending ones, some of them alike, so that there are documents of nothing."""
    inner = sorted(r.randint(0, n) for _ in range(r.randint(0, 4)))
    return (0, *inner, *maybe(r, 0.3, inner[-1:], ()), n)


def ids(r: random.Random, n: int) -> tuple[int, ...]:
    """In runs, or scattered."""
    if r.random() < 0.5:
        return tuple(r.randint(0, 3) for _ in range(n))
    cuts = borders(r, n)
    return tuple(17 * sum(cut <= i for cut in cuts) % 5 for i in range(n))


def two_sequences(r: random.Random, case: Case) -> dict[str, Any]:
    """Shards of any lengths, maybe with positions."""
    queries, keys = (
        tuple(r.choice((0, 1, r.randint(0, 12))) for _ in range(case.size)) for _ in range(2)
    )
    found = dict(queries=queries, keys=keys, cross=True if queries == keys else maybe(r, 0.5, True))
    found["layout"] = r.choice(("contiguous", "striped", "zigzag"))
    if r.random() < 0.5 and sum(queries) + sum(keys):
        apart = r.random() < 0.5
        found["query_at"], found["key_at"] = (places(r, sum(n), apart) for n in (queries, keys))
    return found


def places(r: random.Random, n: int, apart: bool) -> tuple[int, ...]:
    """Positions in a few runs, or any; all different if they are apart."""
    if r.random() < 0.5:
        start, step = r.randint(-20, 20), r.choice((1, 1, 2))
        found = [start + step * i for i in range(n)]
        turn = r.randint(0, n)
        return tuple(found[turn:] + found[:turn])
    span = range(-30, 40)
    return tuple(r.sample(span, n) if apart else r.choices(span, k=n))


def seen(r: random.Random, case: Case) -> dict[str, Any]:
    n = case.length
    each = r.choice((1, case.batch)) or 1
    return dict(
        causal=r.random() < 0.5,
        window=maybe(r, 0.3, r.choice((0, 1, r.randint(0, n + 3)))),
        masked=maybe(r, 0.35, r.choice(("some", "some", "few", "none")), ""),
        prefix=maybe(r, 0.2, tuple(r.randint(0, n + 2) for _ in range(each)), ()),
        mask_mod=maybe(r, 0.12, r.randrange(len(PREDICATES))),
    )


def scores(r: random.Random) -> dict[str, Any]:
    dropout = maybe(r, 0.12, r.choice((0.1, 0.5, 0.95)), 0.0)
    bias = maybe(r, 0.25, r.choice(("keys", "heads")), "")
    return dict(
        scale=maybe(r, 0.35, r.choice((0.7, 2.5, 1e-3, 1e-6, -0.4, 0.0, 1))),
        softclamp=maybe(r, 0.12, r.choice((0.5, 3.0, 50.0))),
        sinks=r.random() < 0.25,
        alibi=r.random() < 0.12,
        bias=bias,
        heavy_bias=bool(bias) and r.random() < 0.5,
        dropout=dropout,
        dropout_seed=r.choice((1, r.randrange(2**64))) if dropout else 0,
    )


def running(r: random.Random, case: Case) -> dict[str, Any]:
    """How it is computed, which changes no result."""
    transports = [None, "ring", "gather", "gather"]
    in_memory = ["shared", "shared", "together", "own_apart"] * (case.size > 1)
    transport = r.choice(transports + in_memory)
    degrees = [n for n in (1, 2, 3, 4) if case.size % n == 0 and case.heads % n == 0]
    several = case.ids or len(case.borders) > 1 or len(case.prefix) > 1  # which see differently
    ulysses = r.choice(degrees) if r.random() < 0.5 else 1
    plan = r.choice(("", "", "made", *(("replaced",) if ulysses == 1 and case.masked else ())))
    return dict(
        ulysses=ulysses,
        bucket_size=r.choice((1, 3, 1024)),
        kernel=r.choice((None, None, "eager", "sdpa", "eager+sdpa", "sdpa+eager")),
        transport=transport,
        memory=maybe(r, 0.4, r.choice((0, 3000, 100000)))
        if transport in (None, "gather")
        else None,
        at_once=r.choice((1, 2, 9)) if transport == "shared" else 9,
        own_low_priority=transport == "shared" and not several and r.random() < 0.4,
        late=transport == "shared" and r.random() < 0.4,
        plan=plan,
        lse=r.choice(("", "returned", "differentiated")),
        learned=tuple(name for name in Case.learned[:5] if r.random() < 0.8),
    )


def memory(r: random.Random, tensors: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Strides of some tensors."""
    found = [(name, r.choice(kinds(TENSORS[name]))) for name in tensors if r.random() < 0.4]
    return tuple((name, kind) for name, kind in found if kind != "contiguous")


def decoding(r: random.Random, seed: int) -> Case:
    """Few queries of `tree_attn_decode`, alone."""
    drawn = sizes(r)
    return Case(
        seed,
        **drawn | dict(size=1),
        queries=(r.choice((0, 1, 1, 2, 5)),),
        keys=(drawn["length"],),
        masked=maybe(r, 0.4, r.choice(("some", "few", "none")), ""),
        strides=memory(r, ("q", "k", "v", "key_mask")),
        learned=(),
        decode=True,
    )
