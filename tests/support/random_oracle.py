"""The oracle of the random test: dense attention in float64, with a matrix of all scores.

It is written from the docstring of `ring_attn` and shares no code with it, nor with any other test.
Shapes: q [b, n, h, d], k [b, m, g, d], v [b, m, g, d_v], scores [b, h, n, m + 1]; the last column
is that of the sink, which is hidden where there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 2**32
# how much coarser than its float32 a score is by a key_bias: two numbers of bfloat16 hold it
COARSE = {torch.bfloat16: 64.0}


@dataclass(frozen=True)
class Asked:
    """The options beside q, k, v, sinks and key_bias; all of the whole sequence."""

    causal: bool = False
    window: int | None = None
    key_mask: Tensor | None = None  # bool [b, m]
    scale: float | None = None
    softclamp: float | None = None
    documents: Tensor | None = None  # int [b, n]
    alibi: Tensor | None = None  # [h]
    mask_mod: Callable[..., Tensor] | None = None
    prefix: tuple[int, ...] | None = None  # of each sample
    query_at: Tensor | None = None  # int [n], where positions are given
    key_at: Tensor | None = None
    dropout: float = 0.0
    dropout_seed: int = 0
    shared_seen: Tensor | None = None  # bool [b, s], of keys beside the sequence's


class Dense(NamedTuple):
    """All of one attention."""

    out: Tensor  # [b, n, h, d_v]
    lse: Tensor  # [b, h, n]
    p: Tensor  # [b, h, n, m + 1]
    left: Tensor | float  # what dropout multiplies p by, [b, h, n, m]


def attention(given: dict[str, Tensor], asked: Asked) -> Dense:
    """Compute attention of q, k, v, and sinks, key_bias and shared keys where they are given."""
    given = joined(given)
    q, k, v = (given[name] for name in "qkv")
    group = q.shape[2] // k.shape[2]
    k, v = (torch.stack([t[:, :, i // group] for i in range(q.shape[2])], 2) for t in (k, v))
    (b, n, h, d), m = q.shape, k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if asked.scale is None else asked.scale)
    if asked.softclamp is not None:
        s = asked.softclamp * torch.tanh(s / asked.softclamp)
    if asked.alibi is not None:
        s = s - asked.alibi[None, :, None, None] * behind(asked, b, n, m).abs()[:, None]
    if "key_bias" in given:
        s = s + bias_of_heads(given["key_bias"], h)[:, :, None]
    sink = given.get("sinks", torch.zeros(h, dtype=s.dtype))
    s = torch.cat((s, sink[None, :, None, None].expand(b, h, n, 1)), -1)
    has_sink = torch.full((b, h, n, 1), "sinks" in given)
    seen = torch.cat((visible(asked, b, h, n, m), has_sink), -1)
    top = s.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    blind = top == -torch.inf
    top = top.masked_fill(blind, 0.0)
    e = torch.where(seen, torch.exp(torch.where(seen, s, top) - top), 0.0)
    total = torch.where(blind, 1.0, e.sum(-1, keepdim=True))
    p, lse = e / total, torch.where(blind, -torch.inf, total.log() + top)[..., 0]
    left = 1.0
    if asked.dropout:
        left = kept(asked, b, h, n, m).double() / (1 - asked.dropout)
    return Dense(torch.einsum("bhij,bjhd->bihd", p[..., :m] * left, v), lse, p, left)


def joined(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """With shared keys and values after the others, without a bias of their own."""
    if "shared_k" not in given:
        return given
    k, v = (torch.cat((given[name], given[f"shared_{name}"]), 1) for name in "kv")
    found = {name: t for name, t in given.items() if "shared" not in name} | dict(k=k, v=v)
    if (bias := given.get("key_bias")) is not None:
        none = bias.new_zeros(len(bias), given["shared_k"].shape[1], *bias.shape[2:])
        found["key_bias"] = torch.cat((bias, none), 1)
    return found


def solve(
    given: dict[str, Tensor], asked: Asked, dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """out, lse and all gradients, by autograd."""
    leaves = {name: t.double().requires_grad_() for name, t in given.items()}
    out, lse, *_ = attention(leaves, asked)
    through = (out * dout.double()).sum()
    if dlse is not None:
        through = through + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.double()).sum()
    grads = torch.autograd.grad(through, list(leaves.values()))
    found = dict(out=out.detach(), lse=lse.detach())
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads)}


# --- what a query sees ---


def positions(asked: Asked, b: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """By which a sample's queries and keys count, [b, n] and [b, m]."""
    if asked.query_at is not None:
        return asked.query_at.expand(b, n), asked.key_at.expand(b, m)
    if asked.documents is None:
        return torch.arange(n).expand(b, n), torch.arange(m).expand(b, m)
    found = torch.zeros((b, n), dtype=torch.long)
    for sample, ids in enumerate(asked.documents.tolist()):
        for i, document in enumerate(ids):
            found[sample, i] = ids[:i].count(document)
    return found, found


def behind(asked: Asked, b: int, n: int, m: int) -> Tensor:
    """Return how far each key lies behind each query, [b, n, m]."""
    queries, keys = positions(asked, b, n, m)
    return queries[:, :, None] - keys[:, None, :]


def visible(asked: Asked, b: int, h: int, n: int, m: int) -> Tensor:
    """bool [b, h, n, m]; shared keys, the last ones, are seen by all queries."""
    if asked.shared_seen is not None:
        s = asked.shared_seen.shape[1]
        own = visible(replace(asked, shared_seen=None), b, h, n, m - s)
        return torch.cat((own, asked.shared_seen[:, None, None].expand(b, h, n, s)), -1)
    far = behind(asked, b, n, m)
    seen = torch.ones((b, n, m), dtype=torch.bool)
    if asked.causal:
        seen = far >= 0
    if asked.prefix is not None:
        for sample, tokens in enumerate(asked.prefix):
            seen[sample, :tokens, :tokens] = True
    if asked.window is not None:
        seen = seen & (far <= asked.window) & (far >= -asked.window)
    if asked.documents is not None:
        seen = seen & (asked.documents[:, :, None] == asked.documents[:, None, :])
    if asked.key_mask is not None:
        seen = seen & asked.key_mask[:, None, :]
    seen = seen[:, None].expand(b, h, n, m)
    if asked.mask_mod is not None:
        queries, keys = positions(asked, b, n, m)
        sample, head = torch.arange(b).view(b, 1, 1, 1), torch.arange(h).view(1, h, 1, 1)
        seen = seen & asked.mask_mod(sample, head, queries[:, None, :, None], keys[:, None, None])
    return seen


def bias_of_heads(bias: Tensor, h: int) -> Tensor:
    """[b, h, m] of a bias [b, m] or [b, m, h]."""
    return bias[:, None].expand(-1, h, -1) if bias.ndim == 2 else bias.transpose(1, 2)


# --- dropout, by the text of `dropout.py` ---


def kept(asked: Asked, b: int, h: int, n: int, m: int) -> Tensor:
    """bool [b, h, n, m]. Tokens count by their places, or by positions that are given."""
    queries = torch.arange(n) if asked.query_at is None else asked.query_at
    keys = torch.arange(m) if asked.key_at is None else asked.key_at
    seed = mixed_seed(asked.dropout_seed)
    marks = []
    for word in (seed % WORD, seed // WORD):
        x = mixed(torch.tensor(word) ^ torch.arange(b).view(b, 1, 1, 1))
        x = mixed(x ^ torch.arange(h).view(1, h, 1, 1))
        marks.append(mixed(x ^ (queries.view(1, 1, n, 1) % WORD)))
    x = (marks[0] ^ (keys % WORD)) * 0xED5AD4BB % WORD
    x = ((x ^ (x >> 16)) ^ marks[1]) * 0xAC4C1B51 % WORD
    x = (x ^ (x >> 15)) * 0x31848BAB % WORD
    return x >= int(asked.dropout * WORD)


def mixed(x: Tensor) -> Tensor:
    """Numbers of 32 bits in int64, whose products wrap around without harm to the low bits."""
    for by, times in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        x = (x ^ (x >> by)) * times % WORD
    return x ^ (x >> 14)


def mixed_seed(x: int) -> int:
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) % WORD**2
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD**2
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD**2
    return x ^ (x >> 31)


# --- how exact a result can be ---


def magnitudes(
    given: dict[str, Tensor], asked: Asked, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what each result would be if nothing cancelled: errors are a few eps of that.

    All terms are absolute values, of v the largest of all keys: where a part is merged whose weight
    is nearly 1, another's weight is off by an eps of 1. Nothing counts as dropped. A score that is
    off by some of its own eps makes its probability wrong by as much, so that probabilities weigh
    more where scores are large. Scores are float32 at least, hence of less weight in 16 bits.
    """
    own = given["k"].shape[1]
    given = joined({name: t.double() for name, t in given.items()})
    dense, size = attention(given, asked), {name: t.abs() for name, t in given.items()}
    (b, n, h, d), (m, g) = given["q"].shape, given["k"].shape[1:3]
    k, v = (size[name].repeat_interleave(h // g, dim=2) for name in "kv")
    scale = d**-0.5 if asked.scale is None else abs(asked.scale)
    lse = dense.lse.masked_fill(dense.lse == -torch.inf, 0.0).abs()
    s = scale * torch.einsum("bihd,bjhd->bhij", size["q"], k)
    if asked.alibi is not None:
        s = s + asked.alibi.abs()[:, None, None] * behind(asked, b, n, m).abs()[:, None]
    if "key_bias" in size:
        s = s + COARSE.get(dtype, 1.0) * bias_of_heads(size["key_bias"], h)[:, :, None]
    sink = size.get("sinks", torch.zeros(h, dtype=s.dtype))
    s = torch.cat((s, sink[:, None, None].expand(b, h, n, 1)), -1) + lse[..., None]
    fine = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / torch.finfo(dtype).eps
    p, left = dense.p * (1 + fine * s), 1 / (1 - asked.dropout)
    v = v.amax((1, 3), keepdim=True).expand_as(v) if v.numel() else v
    out = left * torch.einsum("bhij,bjhd->bihd", p[..., :m], v)
    dout = dout.double().abs()
    delta = torch.einsum("bihd,bihd->bhi", dout, out)
    delta = (delta if dlse is None else delta + dlse.double().abs())[..., None]
    ds = p[..., :m] * (torch.einsum("bihd,bjhd->bhij", dout, v) * left + delta)

    def of_key_heads(t: Tensor) -> Tensor:
        return t.view(b, m, g, h // g, t.shape[-1]).sum(3)

    found = dict(
        out=out,
        lse=(dense.p.sum(-1) + (dense.p * s).sum(-1)),
        dq=scale * torch.einsum("bhij,bjhd->bihd", ds, k),
        dk=of_key_heads(scale * torch.einsum("bhij,bihd->bjhd", ds, size["q"])),
        dv=of_key_heads(left * torch.einsum("bhij,bihd->bjhd", p[..., :m], dout)),
        dsinks=(p[..., m:] * delta).sum((0, 2, 3)),
        dkey_bias=like_bias(ds.sum(2).transpose(1, 2), given.get("key_bias"))[:, :own],
    )
    shared = {f"dshared_{name}": found[f"d{name}"][:, own:] for name in "kv"}
    return found | shared | {name: found[name][:, :own] for name in ("dk", "dv")}


def like_bias(t: Tensor, bias: Tensor | None) -> Tensor:
    """[b, m, h] as the bias is, of each head or shared by all."""
    return t.sum(2) if bias is not None and bias.ndim == 2 else t
