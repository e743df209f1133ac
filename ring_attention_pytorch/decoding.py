"""Tree decoding: attention of one query token to keys over ranks, merged by an all-reduce.

Shyam et al. 2024, "Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU
clusters": partial results can be merged in any order, so an all-reduce takes log(P) steps.
"""

import torch
from einops import rearrange
from torch import Tensor

from ring_attention_pytorch.comm.agreement import agree, problem_of, told_by_group, typed
from ring_attention_pytorch.comm.ring import Group, Ring, as_ring
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels import choose
from ring_attention_pytorch.runtime.accumulate import OutputAccumulator
from ring_attention_pytorch.runtime.interfaces import KernelRequest, KVBlock, ScoreMods


@typed(told_by_group("tree_attn_decode"), apart=True)
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
            every rank; else this rank's keys, of any number, or None for no keys.
        eps: lower bound of the total weight that results are divided by; queries that see no key
            get 0.
        shard_kv_seq: shard the keys: each rank takes its part of k, v and key_mask.
        use_triton: must not be True; the fastest kernel is chosen.
        key_mask: bool `[b, n]`, True where a key may be seen; whole or sharded as k is.
        group: the ranks; None is the default group, or this process alone.

    Returns:
        `[b, h, t, d_v]` in q's dtype, the same on every rank; merged in float32 at least.

    Raises:
        ValueError: an argument is invalid, or differs between ranks; on every rank.

    >>> q, kv = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8)
    >>> tree_attn_decode(q, kv, kv).shape
    torch.Size([1, 4, 1, 8])
    """
    ring = as_ring(group)
    d_v = _agreed_width(ring, q, k, v, key_mask, eps, shard_kv_seq, use_triton)
    if shard_kv_seq and k is not None and v is not None:
        k = k.tensor_split(ring.size, dim=2)[ring.rank]
        v = v.tensor_split(ring.size, dim=2)[ring.rank]
        if key_mask is not None:
            key_mask = key_mask.tensor_split(ring.size, dim=1)[ring.rank]

    queries = rearrange(q, "b h t d -> b t h d")
    result = OutputAccumulator(queries, queries[..., :1].expand(*queries.shape[:3], d_v))
    if k is not None and v is not None and 0 not in (k.shape[2], q.shape[2]):
        by_token = rearrange(k, "b h n d -> b n h d"), rearrange(v, "b h n d -> b n h d")
        keys = KVBlock(*by_token, key_mask, ())
        kernel = choose(None, KernelRequest.of(queries, v, key_mask=key_mask))
        everything = Tile(slice(0, q.shape[2]), slice(0, k.shape[2]), None, None)
        terms = ScoreMods(q.shape[-1] ** -0.5, None, 1024)
        with torch.autocast(q.device.type, enabled=False):
            kernel.forward(queries, keys, [everything], terms, result)
    out, lse = result.begin_update()
    out = _merge(out, lse, eps, ring)
    return rearrange(out, "b t h d -> b h t d").to(q.dtype)


def _merge(out: Tensor, lse: Tensor, eps: float, ring: Ring) -> Tensor:
    if ring.size == 1:
        return out
    largest = lse.clone()
    ring.largest(largest)
    # ranks without keys get weight exp(-inf) = 0, also where no rank has keys
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weight = (lse - largest).exp()
    weight = rearrange(weight, "b h t -> b t h 1")
    total = torch.cat((out * weight, weight), dim=-1)
    ring.total(total)
    return total[..., :-1] / total[..., -1:].clamp(min=eps)


def _agreed_width(
    ring: Ring,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_mask: Tensor | None,
    eps: float,
    shard_kv_seq: bool,
    use_triton: bool | None,
) -> int:
    """Return the head size of v, which ranks without keys learn from the others."""
    problem = problem_of(lambda: _problem(q, k, v, key_mask))
    if not 0 < eps <= 1:
        problem = f"eps must be positive and at most 1, the least total weight, got {eps}"
    if use_triton:
        problem = "use_triton=True: leave it None, the fastest kernel there is gets chosen"
    if shard_kv_seq and k is None:
        problem = "shard_kv_seq=True needs the whole k and v on every rank"
    same = {
        "q": list(q.shape),
        "dtype": q.dtype,
        "shard_kv_seq": shard_kv_seq,
        "device": q.device.type,
    }
    if shard_kv_seq and k is not None:
        same |= {"k": list(k.shape), "key_mask": key_mask is not None}
    own = {} if problem or v is None else {"d_v": v.shape[-1]}
    notes = agree(ring, "tree_attn_decode", same, own, problem)
    widths = {note["d_v"] for note in notes if "d_v" in note}
    if len(widths) != 1:
        raise ValueError(
            "tree_attn_decode: some rank must have keys, and all v one head size, "
            f"got {sorted(widths)}"
        )
    return widths.pop()


def _problem(q: Tensor, k: Tensor | None, v: Tensor | None, key_mask: Tensor | None) -> str | None:
    if (k is None) != (v is None) or (k is None and key_mask is not None):
        return "k and v must be given together, and key_mask with them only"
    devices = {t.device for t in (q, k, v, key_mask) if t is not None}
    if len(devices) > 1 or q.is_meta:
        return f"q, k, v and key_mask must be on one device and have values, got {devices}"
    if k is None or v is None:
        return None if q.ndim == 4 else f"q must be [b, h, t, d], got {list(q.shape)}"
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(t.ndim != 4 for t in (q, k, v)):
        return f"q, k, v must be [batch, heads, tokens, head size], got {shapes}"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return f"q [b, h, t, d], k [b, h_kv, n, d] and v [b, h_kv, n, d_v] must agree, got {shapes}"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0 or 0 in (q.shape[3], v.shape[3]):
        return f"heads of q must be a multiple of those of k, head sizes positive, got {shapes}"
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.is_floating_point():
        return f"q, k, v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
    want = [k.shape[0], k.shape[2]]
    if key_mask is not None and (key_mask.dtype != torch.bool or list(key_mask.shape) != want):
        return f"key_mask must be bool {want}, got {key_mask.dtype} {list(key_mask.shape)}"
    return None
