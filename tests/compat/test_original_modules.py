"""Modules, names and scripts of ring-attention-pytorch 0.5.20: all import here, and are right.

Each script's flow is written anew on its module paths, with random cotangents, in float64, and
compared on every rank with dense attention that knows nothing of ranks.
"""

import doctest
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from math import ceil
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from einops import rearrange
from ring_attention_pytorch.distributed import (
    AllGather,
    AllGatherFunction,
    all_gather_same_dim,
    all_gather_variable_dim,
    gather_sizes,
    get_rank,
    get_world_size,
    has_only_one_value,
    is_distributed,
    split_by_rank,
)
from ring_attention_pytorch.ring import (
    all_ring_pass,
    circular_index_left,
    circular_index_right,
    circular_rank_left,
    circular_rank_right,
    null_ring_pass,
    one_ring_pass,
    ring_pass,
    send_and_receive_,
)
from ring_attention_pytorch.ring_attention import (
    RingAttention,
    RingTransformer,
    apply_rotary_pos_emb,
    maybe_pad_seq_and_mask,
    sharded_batch_to_sharded_seq,
    sharded_seq_to_sharded_batch,
)
from ring_attention_pytorch.tensor_typing import Bool, Float, Int
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode
from ring_attention_pytorch.triton_flash_attn import flash_attn_backward, flash_attn_forward
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn, zig_zag_pad_seq, zig_zag_shard
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch import (
    RingError,
    default_attention,
    distributed,
    ring_flash_attn,
    tensor_typing,
    triton_flash_attn,
    zig_zag_attention,
)
from ring_attention_pytorch import ring as ring_module
from ring_attention_pytorch import ring_attention as ring_attention_module
from ring_attention_pytorch.plan.ring_plan import RingPlan
from tests.support.interpreter import needs_triton
from tests.support.module_cases import gradient_errors, made
from tests.support.ranks import alone
from tests.support.reference import dense_attention, relative_error

EXACT = 1e-12
Errors = dict[str, float]

NAMES = {
    "": "RingAttention RingTransformer RingRotaryEmbedding apply_rotary_pos_emb default_attention "
    "ring_flash_attn ring_flash_attn_ ring_flash_attn_cuda ring_flash_attn_cuda_ tree_attn_decode",
    ".distributed": "get_rank get_world_size is_distributed all_gather_same_dim gather_sizes "
    "has_only_one_value all_gather_variable_dim AllGatherFunction AllGather split_by_rank "
    "all_gather pad_dim_to",
    ".ring": "circular_index_left circular_index_right circular_rank_left circular_rank_right "
    "send_and_receive_ ring_pass one_ring_pass RingInfo null_ring_pass all_ring_pass get_rank "
    "get_world_size is_distributed",
    ".ring_attention": "default_attention RingRotaryEmbedding apply_rotary_pos_emb RingAttention "
    "RMSNorm FeedForward RingTransformer maybe_pad_seq_and_mask sharded_batch_to_sharded_seq "
    "sharded_seq_to_sharded_batch pad_at_dim pad_to_multiple rotate_half softclamp",
    ".ring_flash_attention": "RingFlashAttentionFunction ring_flash_attn ring_flash_attn_ "
    "softclamp",
    ".ring_flash_attention_cuda": "RingFlashAttentionCUDAFunction ring_flash_attn_cuda "
    "ring_flash_attn_cuda_",
    ".tensor_typing": "TorchTyping Float Int Bool",
    ".tree_attn_decoding": "tree_attn_decode",
    ".triton_flash_attn": "flash_attn_forward flash_attn_backward",
    ".zig_zag_attention": "zig_zag_pad_seq ShardOutput zig_zag_shard zig_zag_attn",
}


def test_every_path_and_name_imports() -> None:
    for path, names in NAMES.items():
        module = import_module(f"ring_attention_pytorch{path}")
        assert all(getattr(module, name) is not None for name in names.split()), path


def test_names_of_0_5_are_there_whichever_module_comes_first() -> None:
    first = "from ring_attention_pytorch.ring_attention import RingTransformer\n"
    first += "from ring_attention_pytorch.ring import ring_pass"
    subprocess.run([sys.executable, "-c", first], check=True, timeout=300)


def test_paths_of_0_5_import_without_a_warning() -> None:
    imports = "".join(f"import ring_attention_pytorch{path}\n" for path in NAMES)
    subprocess.run([sys.executable, "-W", "error", "-c", imports], check=True, timeout=300)


@pytest.mark.parametrize(
    "module",
    [
        distributed,
        ring_module,
        ring_attention_module,
        tensor_typing,
        triton_flash_attn,
        zig_zag_attention,
    ],
)
def test_the_examples_of_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


# --- the flows of the scripts ---


def attended(attn: RingAttention, x: Tensor, causal: bool, angles: Tensor | None = None) -> Tensor:
    """What the layer makes of a whole sequence, by its weights and dense attention."""
    qkv = rearrange(attn.to_qkv(x), "b n (h d) -> b n h d", d=attn.dim_head)
    q, k, v = qkv.split(attn.qkv_head_breakdown, dim=2)
    if angles is not None:
        q, k = (apply_rotary_pos_emb(angles, t) for t in (q, k))
    return attn.to_out(
        rearrange(dense_attention(q, k, v, causal=causal)[0], "b n h d -> b n (h d)")
    )


def transformed(model: RingTransformer, ids: Tensor, causal: bool) -> Tensor:
    tokens, angles = model.token_emb(ids), model.rotary_emb(torch.arange(ids.shape[1]))
    for attn, ff in model.layers:
        tokens = tokens + attended(attn, tokens, causal, angles)
        tokens = tokens + ff(tokens)
    return model.to_logits(tokens)


def everyones(var_len: bool, *shape: int, ids: int | None = None) -> list[Tensor]:
    """A batch for each rank, of 2 or 3 samples with var_len; the same batches on all ranks."""
    draw, found = torch.Generator().manual_seed(3), []
    for rank in range(get_world_size()):
        whole = (2 + rank % 2 if var_len else 2, *shape)
        if ids is None:
            found.append(torch.randn(whole, generator=draw, dtype=torch.float64))
        else:
            found.append(torch.randint(0, ids, whole, generator=draw))
    return found


def module_against_dense(script: str, options: dict[str, Any]) -> Errors:
    """assert.py and assert_attn.py: a module under DDP that shards by itself."""
    n, rings, var_len = options.pop("n"), options.pop("rings", 1), options.pop("var_len", False)
    rank, size = dist.get_rank(), dist.get_world_size()
    kind: Any = RingTransformer if script == "assert" else RingAttention
    given = dict(ring_attn=True, auto_shard_seq=True, ring_seq_size=ceil(n / size) * rings)
    module = made(kind, options | given)
    dense = made(kind, options | dict(force_regular_attn=True, striped_ring_attn=False))
    width = dense.token_emb.num_embeddings if script == "assert" else dense.to_out.out_features
    inputs = (
        everyones(var_len, n, ids=width) if script == "assert" else everyones(var_len, n, width)
    )
    cotangents = [t.flip(1) for t in everyones(var_len, n, width)]
    mine = inputs[rank].clone()
    if script != "assert":
        for x in (mine, *inputs):
            x.requires_grad_()
    oracle = transformed if script == "assert" else attended
    outs = [oracle(dense, x, options.get("causal", False)) for x in inputs]
    torch.autograd.backward(outs, [c / size for c in cotangents])  # DDP takes the mean
    parallel = DistributedDataParallel(module)  # which must live until backward
    out = parallel(mine)
    out.backward(cotangents[rank])
    found = {"out": relative_error(out, outs[rank])}
    if script != "assert":
        found["dx"] = relative_error(mine.grad, inputs[rank].grad * size)
    return found | gradient_errors(module, dense, ranks="own")


SCRIPTS = [
    pytest.param(
        script, dict(n=n, **options), marks=[pytest.mark.thorough] if "rings" in options else []
    )
    for script in ("assert", "assert_attn")
    for n, options in (
        (31, {}),
        (31, dict(causal=True)),
        (31, dict(causal=True, striped_ring_attn=True, var_len=True)),
        (30, dict(causal=True, rings=2)),
        (31, dict(rings=2, var_len=True, num_grouped_query_heads=4)),
        (31, dict(causal=True, striped_ring_attn=True, rings=2)),
        (5, dict(causal=True, num_grouped_query_heads=1)),
    )
]


@pytest.mark.parametrize(("script", "options"), SCRIPTS)
def test_assert_and_assert_attn(pools: Callable, script: str, options: dict[str, Any]) -> None:
    check(pools(4).run(module_against_dense, script, dict(options)))


def check(by_rank: list[Errors], limit: float = EXACT) -> None:
    """Every result of every rank."""
    for rank, errors in enumerate(by_rank):
        assert errors
        bad = {name: error for name, error in errors.items() if not error < limit}
        assert not bad, f"rank {rank}"


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("softclamp", [False, True])
def test_assert_flash(causal: bool, masked: bool, softclamp: bool) -> None:
    qkv = torch.randn(3, 2, 62, 2, 16, dtype=torch.float64)
    mask = torch.randint(0, 2, (2, 62)).bool() if masked else None
    cotangent, results = torch.randn(2, 62, 2, 16, dtype=torch.float64), []
    for function in (
        lambda q, k, v: dense_attention(
            q, k, v, causal=causal, key_mask=mask, softclamp=2.0 if softclamp else None
        )[0],
        lambda q, k, v: ring_flash_attn(
            q, k, v, mask, causal, 4, softclamp_qk_sim=softclamp, softclamp_value=2.0
        ),
        lambda q, k, v: default_attention(q, k, v, mask, causal, softclamp, 2.0),
    ):
        given = [t.clone().requires_grad_() for t in qkv]
        out = function(*given)
        out.backward(cotangent)
        results.append([out, *(t.grad for t in given)])
    for found in results[1:]:
        assert max(map(relative_error, found, results[0])) < EXACT


def decoded(n: int, key_heads: int) -> Errors:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, *shape), generator=draw, dtype=torch.float64)
        for shape in ((8, 1, 64), (key_heads, n, 64), (key_heads, n, 64))
    )
    want = dense_attention(*(t.transpose(1, 2) for t in (q, k, v)))[0].transpose(1, 2)
    own = [t.tensor_split(get_world_size(), dim=2)[get_rank()] for t in (k, v)]
    return {
        "whole": relative_error(tree_attn_decode(q, k, v), want),
        "parts": relative_error(tree_attn_decode(q, *own, shard_kv_seq=False), want),
    }


@pytest.mark.parametrize(("n", "key_heads"), [(31, 8), (5, 2), (3, 8)])
def test_assert_tree_attn(pools: Callable, n: int, key_heads: int) -> None:
    check(pools(4).run(decoded, n, key_heads))


def zig_zag_against_dense(
    n: int, rotary: bool, var_len: bool, group: int, pad: bool, gather: bool
) -> Errors:
    """assert_zig_zag.py: a layer's projections by hand, around `zig_zag_attn`."""
    rank, size = get_rank(), get_world_size()
    options = dict(num_grouped_query_heads=group, rotary_embed=rotary, causal=True)
    attn, dense = made(RingAttention, options), made(RingAttention, options)
    inputs, cotangents = everyones(var_len, n, 12), [-t for t in everyones(var_len, n, 12)]
    cotangents = [t.roll(1, 1) for t in cotangents]
    if not gather:  # all have the same sequences, and a loss each of the same result
        inputs, cotangents = ([ts[0].clone() for _ in range(size)] for ts in (inputs, cotangents))
    angles = dense.rotary_embed(torch.arange(n)) if rotary else None
    outs = [attended(dense, x.requires_grad_(), True, angles) for x in inputs]
    torch.autograd.backward(outs, cotangents)

    mine = inputs[rank].detach().clone().requires_grad_()
    padded, remove_padding = zig_zag_pad_seq(mine) if pad else (mine, lambda t: t)
    shard, inverse = zig_zag_shard(padded, all_gather_batch=gather)
    qkv = rearrange(attn.to_qkv(shard.local_sequence), "b n (h d) -> b h n d", d=attn.dim_head)
    q, k, v = qkv.split(attn.qkv_head_breakdown, dim=-3)
    if rotary:
        at = attn.rotary_embed(shard.query_positions)
        q, k = (apply_rotary_pos_emb(at, t, head_dim_first=True) for t in (q, k))
    seen = shard.query_positions[:, None] >= shard.key_value_positions[None]
    out = attn.to_out(rearrange(zig_zag_attn(q, k, v, attn_mask=seen), "b h n d -> b n (h d)"))
    out = remove_padding(inverse(out))
    out.backward(cotangents[rank])
    dx = mine.grad
    if not gather:  # each rank's is of its own tokens, in as many losses as ranks
        dist.all_reduce(dx)
        dx /= size
    found = {"out": relative_error(out, outs[rank]), "dx": relative_error(dx, inputs[rank].grad)}
    return found | gradient_errors(attn, dense)


@pytest.mark.parametrize(
    "options",
    [
        (31, False, False, 2, True, True),
        (31, True, True, 2, True, True),
        (32, True, False, 1, True, False),
        (31, True, True, 4, False, True),  # without padding shards differ by a token
        (5, False, False, 2, False, False),
    ],
    ids=str,
)
def test_assert_zig_zag(pools: Callable, options: tuple) -> None:
    check(pools(4).run(zig_zag_against_dense, *options))


# --- helpers ---


def gathered() -> Errors:
    """Lengths that differ, one of them 0, along any dim, and what comes home backward."""
    rank, size = get_rank(), get_world_size()
    lengths = [(3 * r + 2) % 5 for r in range(size)]
    draw, found = torch.Generator().manual_seed(5), {}
    for dim in (0, -2):
        shapes = [(n, 2, 3) if dim == 0 else (2, n, 3) for n in lengths]
        xs = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
        whole = torch.cat(xs, dim)
        weights = [torch.randn(whole.shape, generator=draw, dtype=torch.float64) for _ in xs]
        mine = xs[rank].clone().requires_grad_()
        for how, sizes in ((AllGather(dim=dim), None), (AllGather(dim=dim), torch.tensor(lengths))):
            mine.grad = None
            got, told = how(mine, sizes)
            (got**2 * weights[rank]).sum().backward()
            want = (2 * whole * sum(weights)).split(lengths, dim)[rank]
            found[f"{dim} {sizes}"] = relative_error(got, whole)
            found[f"{dim} {sizes} d"] = relative_error(mine.grad, want)
            assert told.tolist() == lengths
        assert gather_sizes(mine, dim=dim).tolist() == lengths
        mask, _ = all_gather_variable_dim(mine > 0, dim)
        assert torch.equal(mask, whole > 0)
        assert torch.equal(AllGatherFunction.apply(mine, dim, None)[0], whole)
    each = all_gather_same_dim(torch.tensor(float(rank)))
    assert [t.item() for t in each] == list(range(size))
    return found


def sizes_that_are_wrong() -> Errors:
    x = torch.zeros(2, 3 + get_rank())
    for sizes in ([3, 3], [3, 4, 5]):
        with pytest.raises(ValueError, match="sizes must be"):
            all_gather_variable_dim(x, 1, torch.tensor(sizes))
    return {"right": relative_error(all_gather_variable_dim(x, 1)[0], torch.zeros(2, 7))}


@pytest.mark.parametrize("size", [2, 4])
def test_all_gather_takes_any_sizes_and_brings_every_rank_s_gradient_home(
    pools: Callable, size: int
) -> None:
    check(pools(size).run(gathered))


def test_sizes_are_compared(pools: Callable) -> None:
    check(pools(2).run(sizes_that_are_wrong))


def split() -> Errors:
    rank, size = get_rank(), get_world_size()
    draw = torch.Generator().manual_seed(1)
    x, weights = (torch.randn((2, 3, size), generator=draw, dtype=torch.float64) for _ in range(2))
    mine = x.clone().requires_grad_()
    whole, _ = all_gather_variable_dim(mine, 0)
    lengths = [3 + r % 2 for r in range(size)]
    parts = whole.flatten(0, 1)[: sum(lengths)].split(lengths)
    part, sizes = split_by_rank(parts)
    assert sizes.tolist() == lengths
    begin = sum(lengths[:rank])
    (part * (rank + 1) * weights[0, 0]).sum().backward()
    # of all ranks' results, what is made of my x
    factor = torch.cat([torch.full((n,), r + 1.0).double() for r, n in enumerate(lengths)])
    want = torch.zeros(size * 6, size, dtype=torch.float64)
    want[: len(factor)] = factor[:, None] * weights[0, 0]
    even, told = split_by_rank(torch.arange(2.0 * size).view(size, 2))
    assert (even.tolist(), told.tolist()) == ([2.0 * rank, 2.0 * rank + 1], [2] * size)
    return {
        "part": relative_error(part, x.repeat(size, 1, 1).flatten(0, 1)[begin:][: lengths[rank]]),
        "dx": relative_error(mine.grad, want.view(size, 2, 3, size)[rank]),
    }


def test_split_by_rank_after_all_gather_counts_each_gradient_once(pools: Callable) -> None:
    check(pools(4).run(split))


def passed(ring_size: int) -> Errors:
    rank = get_rank()
    first, place, found = rank - rank % ring_size, rank % ring_size, {}
    x = torch.full((2, 3), float(rank), dtype=torch.float64).requires_grad_()
    for by in (1, 2, -1, 0, ring_size + 1):
        x.grad = None
        buffer = torch.full_like(x, -1.0).detach() if by == 1 else None
        kept = buffer
        got, sent = ring_pass(by, x, buffer, ring_size)
        assert sent is x
        assert kept is None or got.data_ptr() == kept.data_ptr()
        got.backward(torch.full_like(x, rank + 0.5))
        left, right = (first + (place + way) % ring_size for way in (-by, by))
        found[f"{by}"] = relative_error(got, torch.full_like(x, left))
        found[f"{by} d"] = relative_error(x.grad, torch.full_like(x, right + 0.5))
        assert circular_rank_left(ring_size=ring_size, num=by) == left
        assert circular_rank_right(ring_size=ring_size, num=by) == right
    assert one_ring_pass(x.T, ring_size=ring_size)[0].shape == (3, 2)
    buffer = torch.empty_like(x)
    send_and_receive_(x, buffer, circular_rank_right(), circular_rank_left())
    found["sent"] = relative_error(buffer, torch.full_like(x, circular_rank_left()))
    assert not buffer.requires_grad
    return found


@pytest.mark.parametrize(("size", "ring_size"), [(4, 4), (4, 2), (4, 1), (2, 2)])
def test_a_ring_pass_goes_so_far_as_it_says_and_its_gradient_back(
    pools: Callable, size: int, ring_size: int
) -> None:
    check(pools(size).run(passed, ring_size))


def went_round(ring_size: int, max_iters: int | None) -> Errors:
    """Dense attention from `all_ring_pass`: scores of all owners, whose places say who they are."""
    rank = get_rank()
    first, found = rank - rank % ring_size, {}
    draw = torch.Generator().manual_seed(2)
    x = torch.randn((get_world_size(), 2, 3), generator=draw, dtype=torch.float64)
    mine, mask = x[rank].clone().requires_grad_(), x[rank] > 0
    buffers = (torch.empty(2, 3, dtype=torch.float64), None, None)
    hops = all_ring_pass(
        mine, None, mask, max_iters=max_iters, receive_buffers=buffers, ring_size=ring_size
    )
    total, owners, flags = 0.0, [], []
    for (owner, about), ((t, nothing, seen), (_, _, _)) in hops:
        assert nothing is None
        assert torch.equal(seen, t > 0)
        found[f"{owner}"] = relative_error(t, x[first + owner])
        total = total + (t**2 * (rank + 1.0)).sum()
        owners.append(owner)
        flags.append(about)
    iters = max(1, min(ring_size, ring_size if max_iters is None else max_iters))
    assert owners == [(rank - first - hop) % ring_size for hop in range(iters)]
    assert flags == [(hop == 0, hop == iters - 1) for hop in range(iters)]
    total.backward()
    reach = [first + (rank - first + hop) % ring_size for hop in range(iters)]  # whom mine came to
    want = 2 * x[rank] * sum(r + 1.0 for r in reach)
    return found | {"d": relative_error(mine.grad, want), "mine": relative_error(mine, x[rank])}


@pytest.mark.parametrize(("ring_size", "iters"), [(4, None), (4, 2), (2, None), (2, 9), (1, None)])
def test_all_ring_pass_brings_the_ring_s_tensors_in_order(
    pools: Callable, ring_size: int, iters: int | None
) -> None:
    check(pools(4).run(went_round, ring_size, iters))


def test_null_ring_pass_brings_what_it_was_given() -> None:
    x = torch.randn(2)
    ((info, ((got, nothing), buffers)),) = null_ring_pass(x, None, ring_size=7)
    assert got is x
    assert nothing is None
    assert (info.ring_rank, info.iter_info, buffers) == (0, (True, True), (None, None))


def test_circular_indices() -> None:
    assert [circular_index_left(p, 4) for p in range(4)] == [3, 0, 1, 2]
    assert [circular_index_right(p, 4, 2) for p in range(4)] == [2, 3, 0, 1]
    assert [circular_rank_left(r, 4) for r in range(8)] == [3, 0, 1, 2, 7, 4, 5, 6]
    assert (circular_rank_left(), circular_rank_right()) == (0, 0)
    with pytest.raises(ValueError, match="ring_size must be at least 1, got 0"):
        circular_rank_left(1, 0)


def sharded_by_hand(n: int, seq_size: int, rings: int) -> Errors:
    """A ring's attention on what `sharded_batch_to_sharded_seq` gives, and home again."""
    rank, size = get_rank(), get_world_size()
    xs = everyones(rings < size, n, 4, 8)
    cotangents = [-t.flip(0) for t in everyones(rings < size, n, 4, 8)]
    masks = [x[:, :, 0, 0] > -1 for x in xs]
    mine = xs[rank].clone().requires_grad_()
    padded, mask = maybe_pad_seq_and_mask(mine, masks[rank], seq_size)
    (x, mask), sizes, found_rings = sharded_batch_to_sharded_seq(padded, mask, seq_size)
    assert found_rings == rings
    assert sizes.tolist() == [len(t) for t in xs]
    out = ring_flash_attn(x, x, x, mask, ring_reduce_col=True, ring_size=size // rings)
    out = sharded_seq_to_sharded_batch(out.flatten(2), sizes, rings)[:, :n]
    out.backward(cotangents[rank].flatten(2))
    own = xs[rank].requires_grad_()
    want = dense_attention(own, own, own, key_mask=masks[rank])[0]
    want.backward(cotangents[rank])
    return {"out": relative_error(out, want.flatten(2)), "dx": relative_error(mine.grad, own.grad)}


@pytest.mark.parametrize(("n", "seq_size", "rings"), [(11, 3, 1), (11, 6, 2), (3, 4, 4)])
def test_batches_are_sharded_by_hand_and_come_home(
    pools: Callable, n: int, seq_size: int, rings: int
) -> None:
    check(pools(4).run(sharded_by_hand, n, seq_size, rings))


def before_and_in_a_group(rank: int, folder: str) -> list[tuple[int, int, bool]]:
    told = [(get_rank(), get_world_size(), is_distributed())]
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(folder, 2))
    told.append((get_rank(), get_world_size(), is_distributed()))
    dist.barrier()  # or the other one may still be connecting
    dist.destroy_process_group()
    return [*told, (get_rank(), get_world_size(), is_distributed())]


def test_d19_ranks_are_asked_for_anew(tmp_path: Any) -> None:
    """D19: asked for once before there was a group, every rank was 0 of 1 for ever."""
    told = alone(before_and_in_a_group, 2, str(tmp_path / "store"))
    lonely = (0, 1, False)
    assert told == [[lonely, (rank, 2, True), lonely] for rank in range(2)]


def test_alone_all_of_it_works_without_a_group() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(AllGather()(x)[0], x)
    assert torch.equal(one_ring_pass(x)[0], x)
    assert torch.equal(split_by_rank((x,))[0], x)
    assert has_only_one_value(gather_sizes(x, dim=1))
    assert not has_only_one_value(torch.tensor([1, 2]))
    ((_, ((got,), _)),) = all_ring_pass(x)
    assert got is x


def refusals() -> list[str]:
    """What each call says on this rank, where ranks disagree or one is wrong."""
    rank, said = dist.get_rank(), []
    x, q = torch.zeros(2, 3 + rank), torch.zeros(1, 4, 2, 8)
    for call in (
        lambda: all_gather_variable_dim(x, 0),
        lambda: all_gather_variable_dim(x, 2 * rank),
        lambda: ring_pass(1, x),
        lambda: ring_pass(1 + rank, x[:, :3]),
        lambda: ring_pass(1, x[:, :3], torch.zeros(2, 5 - 2 * rank)),
        lambda: ring_pass("1" if rank else 1, x[:, :3]),
        lambda: send_and_receive_(x[:, :3].clone(), torch.zeros(2, 3), 1, 1),
        lambda: zig_zag_attn(q, q[:, : 3 + rank], q[:, : 3 + rank]),
        lambda: zig_zag_attn(q, q, q, attn_mask=torch.zeros(2, 2 + 2 * rank)),
        lambda: zig_zag_shard(torch.zeros(1, 4 + rank, 2), all_gather_batch=True),
        lambda: sharded_batch_to_sharded_seq(torch.zeros(2, 5, 2), None, 3),
        lambda: split_by_rank((x,)),
    ):
        try:
            call()
            said.append("nothing")
        except (ValueError, RingError) as error:
            said.append(f"{type(error).__name__}: {error}")
    ring_pass(1, torch.zeros(2))  # which goes on
    return said


def test_ranks_that_disagree_all_hear_the_same(pools: Callable) -> None:
    first, second = pools(2).run(refusals)
    assert first == second
    words = (
        "rest of the shape", "no dimension 2", "shape must be the same",
        "num_ring_passes must be the same", "receive_buffer must be", "parameter num_ring_passes",
        "who is sent to must receive", "h a multiple of h_kv", "attn_mask must be",
        "rest of the shape", "seq_size times a divisor", "a part for each of 2 ranks",
    )  # fmt: skip
    for said, word in zip(first, words, strict=True):
        assert word in said


# --- blocks of keys by the Triton kernel ---


def test_without_a_gpu_the_triton_functions_say_what_they_need() -> None:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="kernel='triton' runs on CUDA"):
        flash_attn_forward(q, q, q)
    with pytest.raises(ValueError, match="bias must be"):
        flash_attn_forward(q, q, q, bias=torch.ones(1, 4))
    with pytest.raises(ValueError, match="bias must be"):
        flash_attn_forward(q, q, q, bias=torch.zeros(1, 1, 4, 4))


def by_kernel(kernel: str) -> Any:
    """Lets another kernel do what the Triton kernels do on GPUs."""

    def make(*qkv: Tensor, **options: Any) -> RingPlan:
        assert options["kernel"] == "triton"
        return RingPlan.make(*qkv, **(options | {"kernel": kernel}))

    return mock.patch.object(triton_flash_attn, "RingPlan", SimpleNamespace(make=make))


def striped_blocks(case: dict[str, Any]) -> Errors:
    """A striped ring by hand in one process: blocks of keys one after another, as 0.5 did."""
    torch.manual_seed(0)
    ranks, n, h, h_kv = 2, 5, 2, case.get("h_kv", 2)
    q, k, v = (
        torch.randn(1, n * ranks, heads, 16, dtype=torch.float64).requires_grad_()
        for heads in (h, h_kv, h_kv)
    )
    clamp, scale, first = case.get("clamp"), case.get("scale"), case.get("head_first", False)
    mask = torch.rand(1, n * ranks) < 0.7 if case.get("masked") else None
    if mask is not None:
        mask[:, 0] = False  # the first query sees nothing
    want, lse_ = dense_attention(q, k, v, causal=True, softclamp=clamp, scale=scale, key_mask=mask)
    cotangent = torch.randn_like(want)
    want.backward(cotangent)
    found: Errors = {}
    stripe = [slice(rank, None, ranks) for rank in range(ranks)]
    dk, dv = (torch.zeros(t.shape) for t in (k, v))
    options = dict(
        causal=True, softmax_scale=scale, softclamp_qk_sim=clamp is not None,
        softclamp_value=clamp or 1.0,
    )  # fmt: skip
    for mine in range(ranks):
        carry: Any = (None, None, None)
        queries = q[:, stripe[mine]].detach().float()
        blocks = []
        for owner in range(ranks):
            keys = [t[:, stripe[owner]].detach().float() for t in (k, v)]
            bias = None
            if mask is not None:
                bias = torch.where(mask[:, stripe[owner]], 0.0, -torch.inf)
            how = dict(options, causal_mask_diagonal=mine < owner)
            blocks.append((keys, bias, how))
            given = [queries, *keys]
            if first:
                given = [t.transpose(1, 2).contiguous() for t in given]
            carry = flash_attn_forward(
                *given, bias=bias, o=carry[0], m=carry[1], lse=carry[2],
                load_accumulated=owner > 0, head_first_dim=first,
                remove_padding=case.get("remove", False), **how,
            )  # fmt: skip
        out, m, lse = carry
        out = out.transpose(1, 2).contiguous() if first else out
        scaled = out * (m - lse).exp()[..., :n].transpose(1, 2).unsqueeze(-1)
        found[f"out {mine}"] = relative_error(scaled, want[:, stripe[mine]])
        seen = lse_[..., stripe[mine]].isfinite()
        at = lse[..., :n]
        found[f"lse {mine}"] = relative_error(at[seen], lse_[..., stripe[mine]][seen])
        dq, delta = torch.zeros_like(queries), None
        for owner, (keys, bias, how) in enumerate(blocks):
            parts = [torch.empty_like(t) for t in (queries, *keys)]
            bias = None if bias is None else rearrange(bias, "b j -> b 1 1 j")
            delta = flash_attn_backward(
                cotangent[:, stripe[mine]].float(), queries, *keys, out, lse, *parts,
                delta=delta, bias=bias, **how,
            )  # fmt: skip
            dq += parts[0]
            dk[:, stripe[owner]] += parts[1]
            dv[:, stripe[owner]] += parts[2]
        assert delta.shape == lse.shape
        found[f"dq {mine}"] = relative_error(dq, q.grad[:, stripe[mine]])
    return found | {"dk": relative_error(dk, k.grad), "dv": relative_error(dv, v.grad)}


BLOCKS = [
    dict(masked=True, remove=True, head_first=True),
    dict(clamp=2.0, scale=0.3, h_kv=1),
    dict(masked=True, h_kv=1),
]


@needs_triton
@pytest.mark.parametrize(
    "case", [BLOCKS[0], pytest.param(BLOCKS[1], marks=pytest.mark.thorough)], ids=str
)
def test_blocks_of_a_striped_ring_merge_and_sum_by_triton(interpreted: Any, case: dict) -> None:
    check([interpreted.submit(striped_blocks, case).result()], 1e-5)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_blocks_of_a_striped_ring_merge_and_sum_by_any_kernel(case: dict) -> None:
    with by_kernel("eager"):
        check([striped_blocks(case)], 1e-5)


# --- hints ---


def test_hints_are_checked_by_beartype() -> None:
    from beartype import beartype
    from beartype.roar import BeartypeCallHintParamViolation

    @beartype
    def f(x: Float["b n 8"], i: Int["b n"], m: Bool["... n"]) -> None:  # noqa: F722
        pass

    good = torch.zeros(2, 3, 8), torch.zeros(2, 3).long(), torch.zeros(3).bool()
    f(*good)
    for at, wrong in enumerate((torch.zeros(2, 3, 7), torch.zeros(2, 3), torch.zeros(3))):
        with pytest.raises(BeartypeCallHintParamViolation):
            f(*(wrong if i == at else t for i, t in enumerate(good)))
