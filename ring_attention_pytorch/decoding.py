"""Tree decoding: attention of one query token to keys over ranks, merged by an all-reduce.

Shyam et al. 2024, "Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU
clusters": partial results can be merged in any order, so an all-reduce takes log(P) steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from ring_attention_pytorch.comm.collectives import gather_to_merge
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.given_keys import GivenKeys, refuse_capture
from ring_attention_pytorch.inference.partial import merged, merged_messages
from ring_attention_pytorch.inference.pushed_rows import pushed_rows
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.plan.plan_cache import PlanCache
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KernelRequest, KVBlock, ScoreMods
from ring_attention_pytorch.runtime.rowwise import has_triton
from ring_attention_pytorch.runtime.torch_func import resolved
from ring_attention_pytorch.schedule.passing import merging_machines
from ring_attention_pytorch.tensor_kinds import check_plain

_FEW_TOKENS, _LARGEST_HEAD = 16, 256  # limits for our kernel as the default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # q, k, v and key_mask


@typed(report_to_group("tree_attn_decode"), apart=True)
@torch.no_grad()
def tree_attn_decode(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    eps: float | int = 1e-8,
    shard_kv_seq: bool = True,
    use_triton: bool | None = None,
    *,
    key_mask: Tensor | None = None,
    group: Group = None,
) -> Tensor:
    """Compute attention of decoded tokens to keys that are, or will be, sharded over ranks.

    Heads come before tokens here, unlike elsewhere in the library. There are no gradients.

    Args:
        q: `[b, h, t, d]`, the same on every rank; t is 1 in decoding.
        k, v: `[b, h_kv, n, d]` and `[b, h_kv, n, d_v]`. With shard_kv_seq all keys, the same on
            every rank; otherwise this rank's keys, any number of them, or None for no keys. Where
            d_v differs from the last call's, pass k and v of no tokens instead of None.
        eps: lower bound of the total weight that results are divided by; queries without a visible
            key get 0.
        shard_kv_seq: shard the keys: each rank uses its part of k, v and key_mask.
        use_triton: True runs our kernel for caches, on CUDA and not in float64, and merges in
            shared memory if ranks have it. False runs PyTorch's fastest kernel, and ranks send one
            message each. None runs ours for up to 16 tokens and head sizes up to 256.
        key_mask: bool `[b, n]`, True where a key may be seen; whole or sharded as k is.
        group: the ranks; None is the default group, or this process alone.

    Returns:
        `[b, h, t, d_v]` in q's dtype, the same on every rank; merged in float32 at least.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; on every rank in the first
            call of a kind. Later ones compare nothing before: there the other ranks get a
            `RingError` with this one's error.

    >>> q, kv = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8)
    >>> tree_attn_decode(q, kv, kv).shape
    torch.Size([1, 4, 1, 8])
    """
    ring = as_ring(group)
    wrong = error_of(partial(_check, q, k, v, key_mask, eps, shard_kv_seq, use_triton))
    q, k, v, key_mask = resolved(q), resolved(k), resolved(v), resolved(key_mask)
    d_v = _width(ring, (q, k, v, key_mask), shard_kv_seq, use_triton, wrong)
    whole = 0
    if shard_kv_seq and k is not None and v is not None:
        whole = k.shape[2]  # the same on ranks that are in step
        k = k.tensor_split(ring.size, dim=2)[ring.rank]
        v = v.tensor_split(ring.size, dim=2)[ring.rank]
        if key_mask is not None:
            key_mask = key_mask.tensor_split(ring.size, dim=1)[ring.rank]
    ours = _by_triton(q, use_triton) and (use_triton or d_v <= _LARGEST_HEAD)
    way = _by_our_kernel if ours else _by_message
    return way(ring, (q.transpose(1, 2), k, v, key_mask), d_v, whole).transpose(1, 2).to(q.dtype)


def _by_triton(q: Tensor, use_triton: bool | None) -> bool:
    """Return whether our kernel computes attention for these queries."""
    if use_triton is not None or not q.is_cuda:
        return bool(use_triton) and q.numel() > 0
    few = q.ndim == 4 and 0 < q.shape[2] <= _FEW_TOKENS and q.shape[3] <= _LARGEST_HEAD
    return few and q.numel() > 0 and q.dtype in _DTYPES and has_triton()


def _by_message(ring: Ring, given: Given, d_v: int, whole: int) -> Tensor:
    """Run the fastest kernel, and merge the results of all ranks, in one message from each."""
    q, k, v, key_mask = given
    result = OutputAccumulator(q, d_v)
    if k is not None and v is not None and 0 not in (k.shape[2], q.shape[1]):
        by_token = rearrange(k, "b h n d -> b n h d"), rearrange(v, "b h n d -> b n h d")
        keys = KVBlock(*by_token, key_mask, ()).without_unseen()
        kernel = choose(None, KernelRequest.of(q, v, key_mask=key_mask))
        everything = Tile(slice(0, q.shape[1]), slice(0, k.shape[2]), None, None)
        terms = ScoreMods(q.shape[-1] ** -0.5, None, 1024)
        with torch.autocast(q.device.type, enabled=False):
            kernel.forward(q, keys, [everything], terms, result)
    out, lse = result.begin_update()
    if ring.size == 1:
        return out
    message = torch.cat((out, rearrange(lse, "b h t -> b t h 1")), dim=-1)
    with ring.call("tree_attn_decode", crc32(f"{d_v} of {whole}".encode()), None):
        machines = merging_machines(ring.machines, message.nbytes)
        every = gather_to_merge(message, ring, machines, merged_messages)
    return merged(every[..., :-1], every[..., -1])[0]


def _by_our_kernel(ring: Ring, given: Given, d_v: int, whole: int) -> Tensor:
    """Run our kernel, which also merges, in shared memory if there is any."""
    q, k, v, key_mask = given
    heads = q.shape[2] if k is None else k.shape[1]

    def prepared() -> GivenKeys:
        refuse_capture(q)
        return GivenKeys(ring, q, heads, d_v)

    kind = ring.size, ring.first, q.shape, q.dtype, q.device, heads, d_v
    return _known_to(ring).of(kind, prepared).attend(q, k, v, key_mask, whole)


# per group: keys in our kernel's form, and head sizes of v
_known: WeakKeyDictionary[ProcessGroup, PlanCache[Any]] = WeakKeyDictionary()
_known_alone: PlanCache[Any] = PlanCache()


def _known_to(ring: Ring) -> PlanCache[Any]:
    return _known_alone if ring.group is None else _known.setdefault(ring.group, PlanCache())


def _width(
    ring: Ring, given: Given, shard_kv_seq: bool, use_triton: bool | None, wrong: ValueError | None
) -> int:
    """Return the head size of v; ranks without keys learn it once, from the others.

    This spares an agreement for each token. Only for another head size do ranks with keys agree
    anew; one without keys uses the last.
    """
    q, _, v, key_mask = given
    known = _known_to(ring)
    whole = key_mask is not None if shard_kv_seq else None
    kind = ring.size, ring.first, q.shape, q.dtype, q.device, shard_kv_seq, whole, use_triton
    width = None if v is None or v.ndim != 4 else v.shape[3]
    found = known.get((kind, width))
    if found is None:
        found = _agreed_width(ring, given, shard_kv_seq, use_triton, wrong)
        for each in (found, None):  # a rank without keys uses the last
            known.keep((kind, each), found)
    elif wrong is not None:
        with ring.call("tree_attn_decode", 0, None):
            raise ValueError(f"tree_attn_decode: {wrong}")
    return found


def _agreed_width(
    ring: Ring, given: Given, shard_kv_seq: bool, use_triton: bool | None, wrong: ValueError | None
) -> int:
    q, k, v, key_mask = given
    if ring.size > 1:
        refuse_capture(q)
    same = {
        "q": list(q.shape),
        "dtype": q.dtype,
        "shard_kv_seq": shard_kv_seq,
        "device": q.device.type,
        "use_triton": use_triton,
        "our kernel": _by_triton(q, use_triton),  # False if Triton is not installed
    }
    if shard_kv_seq and k is not None:
        same |= {"k": list(k.shape), "key_mask": key_mask is not None}
    own = {"d_v": -1 if wrong or v is None else v.shape[-1]}
    notes = agree(ring, "tree_attn_decode", same, own, check=wrong)
    widths = {note["d_v"] for note in notes} - {-1}
    if len(widths) != 1:
        raise ValueError(
            "tree_attn_decode: some rank must have keys, and all v one head size, "
            f"got {sorted(widths)}"
        )
    if decode_plan.PUSH:
        pushed_rows(ring, q.device)  # collective: all ranks make it together
    return widths.pop()


def _check(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_mask: Tensor | None,
    eps: float,
    shard_kv_seq: bool,
    use_triton: bool | None,
) -> None:
    """Raise ValueError if tensors or options of a call are wrong."""
    _check_tensors(q, k, v, key_mask)
    if use_triton and not (q.is_cuda and has_triton() and q.dtype in _DTYPES):
        raise ValueError(
            "use_triton=True needs tensors on CUDA, not in float64, and Triton; leave it None"
        )
    if not 0 < eps <= 1:
        raise ValueError(f"eps must be positive and at most 1, the least total weight, got {eps}")
    if shard_kv_seq and k is None:
        raise ValueError("shard_kv_seq=True needs the whole k and v on every rank")


def _check_tensors(q: Tensor, k: Tensor | None, v: Tensor | None, key_mask: Tensor | None) -> None:
    if (k is None) != (v is None) or (k is None and key_mask is not None):
        raise ValueError("k and v must be given together, and key_mask with them only")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t is not None:
            check_plain(name, t)
    devices = {t.device for t in (q, k, v, key_mask) if t is not None}
    if len(devices) > 1 or q.is_meta:
        raise ValueError(
            f"q, k, v and key_mask must be on one device and have values, got {devices}"
        )
    if k is None or v is None:
        if q.ndim != 4:
            raise ValueError(f"q must be [b, h, t, d], got {list(q.shape)}")
        return
    _check_shapes(q.shape, k.shape, v.shape)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k, v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    want = k.shape[0], k.shape[2]
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != want):
        got = f"{key_mask.dtype} {list(key_mask.shape)}"
        raise ValueError(f"key_mask must be bool {[*want]}, got {got}")


def _check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> None:
    if not len(q) == len(k) == len(v) == 4:
        wanted = "q, k, v must be [batch, heads, tokens, head size]"
    elif k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3]:
        wanted = "q [b, h, t, d], k [b, h_kv, n, d] and v [b, h_kv, n, d_v] must agree"
    elif k[1] == 0 or q[1] % k[1] != 0 or 0 in (q[3], v[3]):
        wanted = "heads of q must be a multiple of those of k, head sizes positive"
    else:
        return
    raise ValueError(f"{wanted}, got q {[*q]}, k {[*k]}, v {[*v]}")
