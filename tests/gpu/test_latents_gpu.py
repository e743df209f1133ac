"""Attention to encoded keys on a CUDA device: latents, keys that are values; a cache.

Rings are of threads that share the device. Head sizes are those of DeepSeek V3.
"""

from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingCache, mla_attn_with_cache
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.kernels import refusal
from ring_attention_pytorch.latent import mla_ring_attn, tied_ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime import codec
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.gpu.memory import poison
from tests.support.gpu_rings import in_threads
from tests.support.latent_cases import expanded
from tests.support.reference import dense_attention, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

B, N, H, D_NOPE, D_ROPE, RANK, D_V = 2, 333, 8, 128, 64, 512, 128
LATENTS = "q_nope", "q_rope", "latent", "k_rope", "w_up"
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "latents": (mla_ring_attn, LATENTS),
    "tied": (tied_ring_attn, ("q", "kv")),
}
CAUSAL: dict[str, Any] = dict(causal=True)


class Way(NamedTuple):
    """How attention is computed; `most` bytes of keys are decoded at once."""

    options: dict[str, Any]
    layout: str = "zigzag"
    most: int = codec.MOST_DECODED
    kind: str = "latents"

    @property
    def mask(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name in MASKS}


MASKS = "causal", "window", "documents", "key_mask", "sinks"
WAYS = [
    Way(dict(CAUSAL, transport="ring")),
    Way(dict(CAUSAL, transport="gather"), most=1),
    Way(dict(CAUSAL, transport="gather", memory=0), "striped", most=3 << 20),
    Way(dict(transport="ring"), "contiguous", most=1),
    Way(dict(CAUSAL, transport="gather", documents=(0, 100, 107, 333))),
    Way(dict(CAUSAL, sinks=True)),
    Way(dict(CAUSAL, window=50), "contiguous", most=1),
    Way(dict(CAUSAL, key_mask=True)),
    Way(dict(CAUSAL, ulysses=2), most=1),
    Way(dict(CAUSAL, transport="ring"), kind="tied"),
    Way(dict(CAUSAL, transport="gather"), kind="tied"),
]


def whole(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of the whole sequence, as the dtype holds them."""
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = dict(
        q_nope=(B, N, H, D_NOPE), q_rope=(B, N, H, D_ROPE), latent=(B, N, RANK),
        k_rope=(B, N, D_ROPE), w_up=(H, D_NOPE + D_V, RANK), sinks=(H,), q=(B, N, H, 128),
        kv=(B, N, 2, 128), dout=(B, N, H, 128), dlse=(B, H, N),
    )  # fmt: skip
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    found["w_up"] *= RANK**-0.5
    held = *KINDS[kind][1], "sinks", "dout", "dlse"
    found = {name: found[name].to(dtype) for name in held}
    found["key_mask"] = torch.rand(B, N, generator=draw) < 0.7
    return {name: t.cuda() for name, t in found.items()}


def learned(way: Way) -> tuple[str, ...]:
    return KINDS[way.kind][1] + (("sinks",) if "sinks" in way.options else ())


@lru_cache(maxsize=64)
def wanted(which: int, held_in: torch.dtype, computed_in: torch.dtype) -> dict[str, Tensor]:
    """By dense attention to expanded keys, computed in a dtype, of values that another holds."""
    way = WAYS[which]
    given = {
        name: t.to(computed_in) if t.is_floating_point() else t
        for name, t in whole(way.kind, held_in).items()
    }
    leaves = {name: given[name].requires_grad_() for name in learned(way)}
    options = way.mask
    for name in {"sinks", "key_mask"} & {*options}:
        options[name] = given[name]
    with torch.device("cuda"):
        if ends := options.pop("documents", None):
            at = torch.bucketize(torch.arange(N), torch.tensor(ends), right=True)
            options["documents"] = at.expand(B, -1)
        out, lse = dense_attention(*expanded(leaves), **options)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, lse), [*leaves.values()], (given["dout"], given["dlse"]))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads))}


def of_rank(ring: Ring, which: int, kernel: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """One rank's results, and its tokens."""
    poison()
    way = WAYS[which]
    at = positions(way.layout, rank=ring.rank, ring_size=ring.size, length=N).cuda()
    given = {
        name: t[..., at] if name == "dlse" else t if name in ("w_up", "sinks") else t[:, at]
        for name, t in whole(way.kind, dtype).items()
    }
    leaves = {name: given[name].clone().requires_grad_() for name in learned(way)}
    options = dict(way.options, kernel=kernel, group=ring, layout=way.layout)
    if "key_mask" in options:
        options["key_mask"] = given["key_mask"]
    if "sinks" in options:
        options["sinks"] = leaves["sinks"]
    if ends := options.pop("documents", None):
        options["cu_seqlens"] = [*ends]
    if ring.size % options.get("ulysses", 1):
        del options["ulysses"]
    call, names = KINDS[way.kind]
    out, lse = call(*(leaves[name] for name in names), return_lse=True, **options)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    along = given["dout"], given["dlse"].to(lse.dtype)
    grads = torch.autograd.grad((out, lse), [*leaves.values()], along)
    return {"at": at, "out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads))}


def gathered(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Results of the whole sequence out of every rank's; gradients of parameters are summed."""
    joined = {}
    order = torch.argsort(torch.cat([each["at"] for each in found]))
    for name in found[0].keys() - {"at"}:
        parts = [each[name] for each in found]
        if name in ("w_up", "sinks"):
            joined[name] = torch.stack([part.double() for part in parts]).sum(0)
        else:
            dim = 2 if name == "lse" else 1
            joined[name] = torch.cat(parts, dim=dim).index_select(dim, order)
    return joined


def errors(which: int, kernel: str, dtype: torch.dtype, size: int) -> dict[str, tuple[float, ...]]:
    """Relative errors of each result, and the most that it may have.

    Sixteen bits may be twice as far off as dense attention that is computed in them.
    """
    with mock.patch.object(codec, "MOST_DECODED", WAYS[which].most):
        found = gathered(in_threads(size, lambda ring: of_rank(ring, which, kernel, dtype)))
    exact, most = wanted(which, dtype, torch.float64), {}
    rough = wanted(which, dtype, dtype)
    for name, want in exact.items():
        if dtype.itemsize > 2:
            most[name] = {8: 1e-12, 4: 1e-5}[dtype.itemsize]
        else:
            most[name] = max(2 * relative_error(rough[name], want), torch.finfo(dtype).eps)
    return {name: (relative_error(found[name], want), most[name]) for name, want in exact.items()}


def able(kernel: str, way: Way, dtype: torch.dtype) -> bool:
    d = D_NOPE + D_ROPE if way.kind == "latents" else 128
    like = [torch.empty(1, 0, 1, size, device="cuda", dtype=dtype) for size in (d, D_V)]
    masks = dict(window=way.options.get("window"), key_mask=way.options.get("key_mask"))
    return refusal(kernel, KernelRequest.of(like[0], like[1], **masks)) is None


CASES = [("sdpa-cudnn", torch.bfloat16), ("triton", torch.bfloat16), ("triton", torch.float16),
         ("triton", torch.float32), ("eager", torch.float64)]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("kernel", "dtype"), CASES, ids=lambda x: str(x).split(".")[-1])
def test_all_gradients_equal_those_of_dense_attention_to_expanded_keys(
    taking_turns, kernel, dtype, size
):
    if dtype in (torch.float16, torch.float32) and size != 2:
        pytest.skip("one ring is enough of a dtype for which kernels are compiled anew")
    ran, bad = 0, []
    for which, way in enumerate(WAYS):
        if not able(kernel, way, dtype):
            continue
        ran += 1
        found = errors(which, kernel, dtype, size)
        said = " ".join(f"{name} {error:.1e}" for name, (error, _) in found.items())
        print(kernel, str(dtype)[6:], size, way.kind, way.options, way.layout, way.most, said)
        bad += [(way, found)] * any(not error <= most for error, most in found.values())
    assert ran
    assert not bad


# --- a cache of latents ---


def generated(ring: Ring, given: list[Tensor], kinds: dict[str, Any]) -> Tensor:
    """A prompt that all ranks have, a chunk that they share, and then a token at a time."""
    *tokens, w_up = given
    b, n = tokens[0].shape[:2]
    kinds = dict(kinds, group=ring, device="cuda")
    cache = RingCache(b, 1, RANK + D_ROPE, value_dim=RANK, **kinds)

    def part(at: Tensor | slice) -> list[Tensor]:
        return [*(t[:, at] for t in tokens), w_up]

    found = [mla_attn_with_cache(*part(slice(0, 40)), cache)]
    at = 40 + positions("zigzag", rank=ring.rank, ring_size=ring.size, length=24).cuda()
    mine = mla_attn_with_cache(*part(at), cache, layout="zigzag")
    chunk = torch.zeros(b, 24, *mine.shape[2:], device="cuda", dtype=mine.dtype)
    chunk[:, at - 40] = mine
    ring.total(chunk)
    found.append(chunk)
    for token in range(64, n):
        found.append(mla_attn_with_cache(*part(slice(token, token + 1)), cache))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("size", "tied"), [(1, True), (2, True), (3, True), (2, False)])
@pytest.mark.parametrize("heads", [16, 128])
def test_generation_with_a_cache_of_latents(heads: int, size: int, tied: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    n, dtype = 70, torch.bfloat16
    shapes = (2, n, heads, D_NOPE), (2, n, heads, D_ROPE), (2, n, RANK), (2, n, D_ROPE)
    given = [torch.randn(shape, generator=draw) for shape in shapes]
    given.append(torch.randn(heads, D_NOPE + D_V, RANK, generator=draw) * RANK**-0.5)
    given = [t.to("cuda", dtype) for t in given]
    want, _ = dense_of(given, torch.float64)
    rough, _ = dense_of(given, dtype)
    bound = 2 * relative_error(rough, want)
    with torch.no_grad():
        kinds = dict(page=16, dtype=dtype, tied=tied)
        ranks = in_threads(size, lambda ring: generated(ring, given, kinds))
    found = [relative_error(out, want) for out in ranks]
    print("cache of latents", heads, size, tied, *(f"{error:.1e}" for error in found), bound)
    assert max(found) < bound


def dense_of(given: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    named = dict(zip(LATENTS, (t.to(dtype) for t in given)))
    with torch.device("cuda"):
        return dense_attention(*expanded(named), causal=True)
