"""Code written for ring-attention-pytorch 0.5.20 works here, without that version's errors."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ring_attention_pytorch.distributed import all_gather, split_by_rank
from ring_attention_pytorch.ring import all_ring_pass, null_ring_pass
from ring_attention_pytorch.ring_attention import (
    sharded_batch_to_sharded_seq,
    sharded_seq_to_sharded_batch,
)
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn, zig_zag_pad_seq, zig_zag_shard
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ring_attention_pytorch
from ring_attention_pytorch import (
    RingAttention,
    RingRotaryEmbedding,
    RingTransformer,
    apply_rotary_pos_emb,
    default_attention,
    ring_attn,
    ring_flash_attn,
    ring_flash_attn_,
    shard_sequence,
    tree_attn_decode,
    unshard_sequence,
)
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.cases import Attention, check_in_processes, check_in_threads, oracle
from tests.support.module_cases import Case, attention_cases, check, made, transformer_cases
from tests.support.ranks import alone
from tests.support.reference import dense_attention, relative_error

LAYOUTS = ("contiguous", "striped", "zigzag")
REQUIRED = inspect.Parameter.empty

ORIGINAL: dict[Callable, dict[str, Any]] = {
    RingAttention.__init__: dict(
        self=REQUIRED, dim=REQUIRED, dim_head=64, heads=8, num_grouped_query_heads=1, causal=False,
        eps=1e-10, bucket_size=512, ring_attn=False, ring_seq_size=512, max_lookback_seq_len=None,
        striped_ring_attn=False, auto_shard_seq=False, prenorm=True, force_regular_attn=False,
        rotary_embed=False, rotary_embed_theta=10000, use_cuda_kernel=None,
    ),
    RingAttention.forward: dict(
        self=REQUIRED, x=REQUIRED, mask=None, rotary_emb=None, force_ring_reduce_off=False,
        ring_size=None,
    ),
    RingTransformer.__init__: dict(
        self=REQUIRED, num_tokens=REQUIRED, dim=REQUIRED, depth=REQUIRED, causal=False, dim_head=64,
        heads=8, ff_mult=4, num_grouped_query_heads=1, bucket_size=512, ring_attn=False,
        striped_ring_attn=False, ring_seq_size=512, auto_shard_seq=None, max_lookback_seq_len=None,
        rotary_embed_theta=10000, ignore_index=-1, force_regular_attn=False, use_cuda_kernel=None,
    ),
    RingTransformer.forward: dict(
        self=REQUIRED, x=REQUIRED, mask=None, labels=None, return_loss=False,
        force_ring_reduce_off=False, ring_size=None,
    ),
    RingRotaryEmbedding.__init__: dict(
        self=REQUIRED, dim=REQUIRED, ring=False, striped=False, buckets=1, theta=10000,
    ),
    RingRotaryEmbedding.forward: dict(self=REQUIRED, seq=REQUIRED),
    apply_rotary_pos_emb: dict(pos=REQUIRED, t=REQUIRED, head_dim_first=False),
    default_attention: dict(
        q=REQUIRED, k=REQUIRED, v=REQUIRED, mask=None, causal=False, softclamp_qk_sim=False,
        softclamp_value=50.0,
    ),
    ring_flash_attn: dict(
        q=REQUIRED, k=REQUIRED, v=REQUIRED, mask=None, causal=False, bucket_size=1024,
        ring_reduce_col=False, striped_ring_attn=False, max_lookback_seq_len=None, ring_size=None,
        softclamp_qk_sim=False, softclamp_value=50.0,
    ),
    tree_attn_decode: dict(
        q=REQUIRED, k=None, v=None, eps=1e-8, shard_kv_seq=True, use_triton=None,
    ),
}  # fmt: skip
BY_NAME_ONLY = {RingAttention.__init__: 2, RingTransformer.__init__: 1}  # after so many


@pytest.mark.parametrize("function", ORIGINAL, ids=lambda f: f.__qualname__)
def test_the_parameters_and_defaults_of_the_original(function: Callable) -> None:
    ours = inspect.signature(function).parameters
    theirs = ORIGINAL[function]
    assert list(ours)[: len(theirs)] == list(theirs)
    defaults = {name: ours[name].default for name in theirs}
    assert defaults == theirs
    assert [type(d) for d in defaults.values()] == [type(d) for d in theirs.values()]
    positional = BY_NAME_ONLY.get(function, len(theirs))
    for i, parameter in enumerate(ours.values()):
        by_name = parameter.kind == inspect.Parameter.KEYWORD_ONLY
        assert by_name == (i >= positional), parameter
        assert i < len(theirs) or parameter.default is not REQUIRED


@pytest.mark.parametrize(
    "name",
    [
        "RingAttention", "RingTransformer", "RingRotaryEmbedding", "apply_rotary_pos_emb",
        "default_attention", "ring_flash_attn", "ring_flash_attn_", "tree_attn_decode",
    ],
)  # fmt: skip
def test_the_names_of_the_original(name: str) -> None:
    assert name in ring_attention_pytorch.__all__
    assert hasattr(ring_attention_pytorch, name)


# 2.1: wrong results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_d1_gradients_of_keys_and_values_are_right_in_every_ring(
    pools: Callable, size: int
) -> None:
    """D1: dk and dv were sums of one another, in every ring."""
    cases = [
        Attention(layout=layout, causal=causal, key_heads=key_heads)
        for layout, causal, key_heads in product(LAYOUTS, (False, True), (1, 4))
    ]
    check_in_processes(cases, pools(size))


def test_d2_gradients_come_home_from_every_rank(pools: Callable) -> None:
    """D2: the gather's backward kept a rank's own slice and dropped the cross terms."""
    cases = [Case(dict(layout=x, ring_seq_size=4), ((2, 16),) * 4) for x in LAYOUTS]
    check(pools(4), attention_cases, cases)
    check(pools(4), transformer_cases, cases)


def test_d3_gradients_of_zero_do_not_pass() -> None:
    """D3: the tolerance was larger than the gradients that it judged."""
    for want in oracle(Attention(causal=True))[2:]:
        assert relative_error(torch.zeros_like(want), want) == 1.0
        assert relative_error(want * 1e-9, want * 1e-9 * (1 + 1e-6)) > 1e-7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d4_a_window_counts_tokens_and_knows_no_shards(pools: Callable, layout: str) -> None:
    """D4: lookback was cut at shard borders, counted in buckets and mangled by stripes."""
    cases = [
        Attention(length=16, causal=True, window=w, layout=layout, bucket_size=bucket)
        for w, bucket in product((0, 1, 3, 4, 5, 11), (4, 1024))
    ]
    check_in_processes(cases, pools(4))


def test_d5_samples_of_different_rings_never_mix(pools: Callable) -> None:
    """D5: with rings smaller than the world, RingAttention mixed up their samples."""
    options = dict(causal=True, ring_seq_size=8, layout="contiguous")
    check(pools(4), attention_cases, [Case(options, ((1, 16),) * 4)])


def test_d6_gradients_stay_in_their_ring_and_positions_are_of_the_ring(pools: Callable) -> None:
    """D6: gradients left their ring, and stripes were counted over the world."""
    cases = [
        Case(dict(causal=True, rotary_embed=True, ring_seq_size=8, layout=x), ((2, 13),) * 4)
        for x in LAYOUTS
    ]
    check(pools(4), attention_cases, cases)
    check(pools(4), transformer_cases, [without_rotary(c) for c in cases])


def without_rotary(case: Case) -> Case:
    """RingTransformer always has it."""
    kept = {k: v for k, v in case.options.items() if k != "rotary_embed"}
    return Case(kept, case.batches)


def causal_without_a_ring() -> list[float]:
    rank = dist.get_rank()
    q = torch.randn(1, 9 + rank, 4, 8, dtype=torch.float64)
    want, _ = dense_attention(q, q, q, causal=True)
    module = made(RingAttention, dict(causal=True, ring_attn=True, auto_shard_seq=True))
    whole = made(RingAttention, dict(causal=True, force_regular_attn=True))
    x = torch.randn(1, 9 + rank, 12, dtype=torch.float64)
    return [
        relative_error(ring_flash_attn(q, q, q, causal=True), want),
        relative_error(module(x, force_ring_reduce_off=True), whole(x)),
        relative_error(made(RingAttention, dict(causal=True))(x), whole(x)),
    ]


def test_d7_causal_is_causal_on_every_rank_without_a_ring_too(pools: Callable) -> None:
    """D7: ranks other than 0 lost the causal mask where there was no ring."""
    for found in pools(3).run(causal_without_a_ring):
        assert max(found) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_d8_every_floating_dtype_runs_forward_and_backward(dtype: torch.dtype) -> None:
    """D8: anything but float32 raised."""
    q, k, v = (torch.randn(1, 9, h, 8).to(dtype).requires_grad_() for h in (4, 2, 2))
    out = ring_flash_attn(q, k, v, causal=True)
    out.sum().backward()
    assert {t.dtype for t in (out, q.grad, k.grad, v.grad)} == {dtype}
    want, _ = dense_attention(*(t.detach().double() for t in (q, k, v)), causal=True)
    assert relative_error(out, want) < 2 * torch.finfo(dtype).eps


def test_d8_gradients_pass_gradcheck() -> None:
    """D8: there was no float64, hence no gradcheck."""
    tensors = [torch.randn(1, 5, h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    assert torch.autograd.gradcheck(lambda *t: ring_flash_attn(*t, None, True), tensors)


@pytest.mark.parametrize("bucket_size", [1, 4, 16])
def test_d9_a_striped_module_leaks_no_future_without_a_group(bucket_size: int) -> None:
    """D9: stripes of several buckets were masked though nothing had been striped."""
    model = made(RingAttention, dict(
        causal=True, ring_attn=True, auto_shard_seq=True, striped_ring_attn=True,
        bucket_size=bucket_size, ring_seq_size=16, rotary_embed=True,
    ))  # fmt: skip
    x = torch.randn(1, 16, 12, dtype=torch.float64)
    for j in range(16):
        other = x.clone()
        other[:, j] += 1.0
        assert torch.equal(model(x)[:, :j], model(other)[:, :j])
    whole = made(RingAttention, dict(causal=True, rotary_embed=True, force_regular_attn=True))
    assert relative_error(model(x), whole(x)) < 1e-12


def ring_switched_off(layout: str) -> list[float]:
    shared = dict(causal=True)
    x = torch.randn(1, 16, 12, dtype=torch.float64)
    ids = torch.randint(0, 11, (1, 16))
    found = []
    for kind, given in ((RingAttention, x), (RingTransformer, ids)):
        ring = dict(ring_attn=True, auto_shard_seq=True, layout=layout, ring_seq_size=4)
        module, whole = made(kind, shared | ring), made(kind, shared | {"force_regular_attn": True})
        found.append(relative_error(module(given, force_ring_reduce_off=True), whole(given)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d10_off_the_ring_nothing_is_sharded_and_nothing_striped(
    pools: Callable, layout: str
) -> None:
    """D10: with force_ring_reduce_off a shard attended to itself, with stripes' angles."""
    for found in pools(4).run(ring_switched_off, layout):
        assert max(found) < 1e-12


def test_d11_angles_and_layout_never_disagree_about_stripes(pools: Callable) -> None:
    """D11: rotary assumed other buckets than the layout had."""
    for use_cuda_kernel, bucket in product((None, False), (1, 2, 512)):
        options = dict(causal=True, rotary_embed=True, striped_ring_attn=True, ring_seq_size=4)
        options |= dict(use_cuda_kernel=use_cuda_kernel, bucket_size=bucket)
        check(pools(4), attention_cases, [Case(options, ((1, 16),) * 4)])
    with pytest.raises(ValueError, match="buckets must be 1"):
        RingRotaryEmbedding(8, ring=True, striped=True, buckets=2)


@pytest.mark.parametrize("causal", [False, True])
def test_d12_a_key_mask_holds_under_causal_too(pools: Callable, causal: bool) -> None:
    """D12: the mask was dropped without a word where attention was causal."""
    q = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    mask = torch.rand(2, 9) < 0.6
    mask[0, :4] = False
    want, _ = dense_attention(q, q, q, causal=causal, key_mask=mask)
    assert relative_error(ring_flash_attn(q, q, q, mask, causal), want) < 1e-12
    assert relative_error(default_attention(q, q, q, mask, causal), want) < 1e-12
    in_rings = [Attention(causal=causal, masked=True, layout=layout) for layout in LAYOUTS]
    check_in_processes(in_rings, pools(4))


def test_d13_cross_attention_sees_every_rank_s_keys(pools: Callable) -> None:
    """D13: sharded queries saw local keys only."""
    case = Attention(queries=(4, 3, 1, 2), keys=(1, 5, 0, 7), cross=True, masked=True)
    check_in_processes([case], pools(4))
    module = Case({}, ((2, 10),), by_hand=True, context=(1, 5, 0, 7))
    check(pools(4), attention_cases, [module])


def test_d13_causal_attention_to_another_length_is_refused() -> None:
    """D13: forward shifted the diagonal and backward did not."""
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 8)
    for function in (ring_flash_attn, default_attention):
        with pytest.raises(ValueError, match="need as many keys as queries"):
            function(q, k, k, causal=True)


@pytest.mark.parametrize("bucket_size", [1, 2, 3, 5, 1024])
def test_d14_no_bucket_size_changes_a_result(bucket_size: int) -> None:
    """D14: shards that buckets did not divide were masked wrongly."""
    for layout, window in product(LAYOUTS, (None, 4)):
        check_in_threads(
            Attention(length=26, causal=True, layout=layout, window=window, kernel="eager",
                      bucket_size=bucket_size), 4,
        )  # fmt: skip


def test_d15_the_loss_is_the_mean_over_real_tokens_and_never_nan(pools: Callable) -> None:
    """D15: crashed without a mask, was NaN on padding, and averaged unequal shards equally."""
    small = dict(causal=True, ring_seq_size=4)
    cases = [
        Case(small, ((1, n),) * 4, masked=masked, loss=goal)
        for n, masked, goal in product((16, 17, 5), (False, True), ("next", "labels"))
    ]
    check(pools(4), transformer_cases, cases)


def test_d15_labels_are_left_alone() -> None:
    """D15: labels were filled in place."""
    model, x = made(RingTransformer, dict(causal=True)), torch.randint(0, 11, (2, 9))
    labels, mask = torch.randint(0, 11, (2, 9)), torch.rand(2, 9) < 0.5
    before = labels.clone()
    model(x, mask, labels=labels)
    assert torch.equal(labels, before)


def test_d16_queries_before_whose_keys_are_many_masked_ones_are_no_nan(pools: Callable) -> None:
    """D16: a row whose first 128 keys were all masked became NaN."""
    q = torch.randn(1, 300, 2, 8, dtype=torch.float64)
    mask = torch.arange(300)[None] >= 200
    for causal in (False, True):
        want, _ = dense_attention(q, q, q, causal=causal, key_mask=mask)
        assert relative_error(ring_flash_attn(q, q, q, mask, causal), want) < 1e-12
        check_in_threads(Attention(length=40, masked=True, causal=causal), 8)


def sixteen_bit_error(dtype_name: str, n: int) -> list[float]:
    """Out, dq, dk, dv of a shard: flat attention, values all alike, so nothing averages out."""
    dtype, rank, size = getattr(torch, dtype_name), dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn((1, n, 2, 8), generator=draw).to(dtype) * 0.01 for _ in range(2))
    v = (torch.randn((1, n, 2, 8), generator=draw) + 100.0).to(dtype)
    dout = torch.randn((1, n, 2, 8), generator=draw).to(dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want, _ = dense_attention(*exact)
    want = [want, *torch.autograd.grad(want, exact, dout.double())]
    mine = [t.chunk(size, dim=1)[rank].clone().requires_grad_() for t in (q, k, v)]
    out = ring_attn(*mine)
    assert isinstance(out, Tensor)
    got = [out, *torch.autograd.grad(out, mine, dout.chunk(size, dim=1)[rank])]
    return [relative_error(g, w.chunk(size, dim=1)[rank]) for g, w in zip(got, want)]


@pytest.mark.parametrize("dtype_name", ["float16", "bfloat16"])
def test_d17_sixteen_bit_results_are_finite_and_no_worse_in_larger_rings(
    pools: Callable, dtype_name: str
) -> None:
    """D17: the running output was kept in 16 bits: it grew inexact, and past 65504 infinite."""
    plain = sixteen_bit_alone(dtype_name, 1024)
    for size in (2, 4):
        found = pools(size).run(sixteen_bit_error, dtype_name, 1024)
        for i in (0, 3):  # dq and dk all but cancel out here
            assert max(f[i] for f in found) <= 2 * plain[i]


def sixteen_bit_alone(dtype_name: str, n: int) -> list[float]:
    dtype = getattr(torch, dtype_name)
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn((1, n, 2, 8), generator=draw).to(dtype) * 0.01 for _ in range(2))
    v = (torch.randn((1, n, 2, 8), generator=draw) + 100.0).to(dtype)
    dout = torch.randn((1, n, 2, 8), generator=draw).to(dtype)
    found = []
    for like in (torch.float64, dtype):
        tensors = [t.to(like).requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors)).transpose(1, 2)
        found.append([out, *torch.autograd.grad(out, tensors, dout.to(like))])
    return [relative_error(g, w) for w, g in zip(*found)]


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_d18_positions_stay_distinct_in_sixteen_bits(cast: str) -> None:
    """D18: of 4096 positions 769 stayed distinct in bfloat16."""
    model = getattr(made(RingTransformer, dict(causal=True)), cast)()
    assert model.token_emb.weight.dtype in (torch.bfloat16, torch.float16)
    assert len(model.rotary_emb(4096)[:, 0].unique()) == 4096


def touched_before_a_group(rank: int, folder: str) -> float:
    """Rank and size are asked before there is a group, as an import might do."""
    assert (Ring().rank, Ring().size) == (0, 1)
    q = torch.randn((1, 8, 2, 4), generator=torch.Generator().manual_seed(0)).double()
    ring_attn(q, q, q)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    mine = shard_sequence(q)
    out = ring_attn(mine, mine, mine, causal=True)
    assert isinstance(out, Tensor)
    whole = unshard_sequence(out, length=8)
    dist.destroy_process_group()
    return relative_error(whole, dense_attention(q, q, q, causal=True)[0])


def test_d19_a_ring_starts_when_its_group_does(tmp_path: Any) -> None:
    """D19: ranks were cached for ever, from before there was a group."""
    assert max(alone(touched_before_a_group, 2, str(tmp_path))) < 1e-12


# 2.2: crashes


@pytest.mark.thorough
def test_d20_importing_needs_no_kernel_and_ends_no_process() -> None:
    """D20: without its own build of triton the import printed a line and exited with 0.

    `tests/project/test_imports.py` has a process without Triton and flash-attn, too.
    """
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['flash_attn'] = None\n"
        "import torch, ring_attention_pytorch as r\n"
        "q = torch.randn(1, 5, 2, 4); r.ring_flash_attn(q, q, q, causal=True)\n"
        "print('still here')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert run.stdout.strip().endswith("still here"), run.stderr
    assert run.returncode == 0


def ring_of_one() -> float:
    q = torch.randn(1, 7, 2, 4, dtype=torch.float64, requires_grad=True)
    out = ring_flash_attn(q, q, q, causal=True, ring_reduce_col=True, ring_size=1)
    want, _ = dense_attention(q, q, q, causal=True)
    grads = [torch.autograd.grad(o.square().sum(), q)[0] for o in (out, want)]
    return max(relative_error(out, want), relative_error(*grads))


def test_d22_a_ring_of_one_in_a_group_of_many_sends_nothing_to_itself(pools: Callable) -> None:
    """D22: backward of a ring of one rank sent to itself and died."""
    assert max(pools(2).run(ring_of_one)) < 1e-12


def test_d23_shards_of_unequal_lengths_work(pools: Callable) -> None:
    """D23: unequal shards crashed in gloo and would hang or corrupt elsewhere."""
    cases = [
        Attention(length=n, layout=layout, causal=True)
        for n, layout in product((1, 2, 5, 13), LAYOUTS)
    ]
    check_in_processes(cases, pools(4))


def wrongly_sharded() -> str:
    q = torch.randn(1, (3, 1, 2, 2)[dist.get_rank()], 2, 4)
    with pytest.raises(ValueError, match="layout='contiguous' puts") as error:
        ring_flash_attn(q, q, q, causal=True, ring_reduce_col=True)
    return str(error.value)


def test_d23_shards_that_are_no_layout_are_refused_by_all(pools: Callable) -> None:
    """D23: there was no agreement about lengths."""
    assert len(set(pools(4).run(wrongly_sharded))) == 1


def decoded(rank_without_keys: int) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    q = torch.randn((1, 8, 1, 16), generator=draw)
    kv = torch.randn((1, 2, 3 * size, 16), generator=draw)
    mine = kv.chunk(size, dim=2)[rank]
    spread = [kv.chunk(size, dim=2)[r] for r in range(size) if r != rank_without_keys]
    keys = torch.cat(spread, dim=2)
    mine = None if rank == rank_without_keys else mine
    found = []
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        q_, keys_ = q.to(dtype), keys.to(dtype)
        args = None if mine is None else mine.to(dtype)
        want = dense_attention(*(t.double().transpose(1, 2) for t in (q_, keys_, keys_)))[0]
        got = tree_attn_decode(q_, args, args, shard_kv_seq=False)
        found.append(relative_error(got, want.transpose(1, 2)) / limit)
        few = keys_[:, :, :2]
        want = dense_attention(*(t.double().transpose(1, 2) for t in (q_, few, few)))[0]
        got = tree_attn_decode(q_, few, few)
        found.append(relative_error(got, want.transpose(1, 2)) / limit)
    return found


def test_d24_decoding_takes_no_keys_few_keys_and_grouped_heads(pools: Callable) -> None:
    """D24: ranks without keys crashed, fp16 with few keys aborted, grouped heads were refused."""
    for found in pools(4).run(decoded, 2):
        assert max(found) < 1.0


@pytest.mark.parametrize("kind", [RingAttention, RingTransformer])
def test_d25_autocast_and_rotary_go_together(kind: type) -> None:
    """D25: under bfloat16 autocast rotary made q and k of another dtype than v."""
    options = dict(causal=True) | (dict(rotary_embed=True) if kind is RingAttention else {})
    module = made(kind, options).float()
    x = torch.randn(2, 9, 12) if kind is RingAttention else torch.randint(0, 11, (2, 9))
    want = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(x)
    got.float().sum().backward()
    assert relative_error(got, want) < 2**-5
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_d26_a_star_import_works() -> None:
    """D26: it raised, __all__ holding objects."""
    names: dict[str, Any] = {}
    exec("from ring_attention_pytorch import *", names)  # what the defect was about
    assert set(ring_attention_pytorch.__all__) <= set(names)


def test_d26_odd_head_sizes_are_refused_at_once() -> None:
    """D26: they were rejected late."""
    with pytest.raises(ValueError, match="an even dim"):
        RingTransformer(num_tokens=4, dim=8, depth=1, dim_head=7)


# what the original's own assert scripts compare, with tolerances that can fail


def batches_of(size: int, var_len: bool, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [((1 + r % 2 if var_len else 2), *shape) for r in range(size)]


def compared(script: str, options: dict[str, Any]) -> list[tuple[str, float]]:
    """A module under DDP over the ring against itself without, in float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    var_len, seq_len = options.pop("var_len", False), options.pop("seq_len", 31)
    shared = dict(dim=8, heads=8, num_grouped_query_heads=2, dim_head=16, bucket_size=4) | options
    ring = dict(ring_attn=True, auto_shard_seq=True, ring_seq_size=-(-seq_len // size))
    kind: Any = RingAttention
    if script == "assert":
        shared |= dict(num_tokens=256, depth=2)
        kind = RingTransformer
    plain = {k: v for k, v in shared.items() if k not in ("striped_ring_attn", "layout")}
    torch.manual_seed(0)
    modules = [kind(**shared, **ring), kind(**plain, force_regular_attn=True)]
    modules[1].load_state_dict(modules[0].state_dict())
    ring_module = DistributedDataParallel(modules[0])
    draw = torch.Generator().manual_seed(1)
    inputs = [
        torch.randint(0, 256, shape, generator=draw) if script == "assert"
        else torch.randn((*shape, 8), generator=draw)
        for shape in batches_of(size, var_len, (seq_len,))
    ]  # fmt: skip
    if script == "assert":
        got = ring_module(inputs[rank])
        want = [modules[1](x) for x in inputs]
        got.mean().backward()
        (sum(w.mean() for w in want) / size).backward()
        grads = [m.token_emb.weight.grad for m in modules]
    else:
        mine = inputs[rank].clone().requires_grad_()
        got = ring_module(mine)
        for x in inputs:
            x.requires_grad_()
        want = [modules[1](x) for x in inputs]
        got.mean().backward()
        want[rank].mean().backward()
        grads = [mine.grad, inputs[rank].grad]
    return [("out", relative_error(got, want[rank])), ("grad", relative_error(*grads))]


SCRIPTS: list[tuple[str, dict[str, Any]]] = [
    ("assert", {}),
    ("assert", dict(causal=True)),
    ("assert", dict(causal=True, striped_ring_attn=True)),
    ("assert", dict(causal=True, var_len=True)),
    ("assert", dict(causal=True, seq_len=5)),
    ("assert_attn", {}),
    ("assert_attn", dict(causal=True)),
    ("assert_attn", dict(causal=True, striped_ring_attn=True)),
    ("assert_attn", dict(var_len=True)),
    ("assert_zig_zag", dict(causal=True, layout="zigzag")),
    ("assert_zig_zag", dict(causal=True, layout="zigzag", rotary_embed=True)),
]


@pytest.mark.parametrize(("script", "options"), SCRIPTS)
def test_the_assert_scripts_hold_to_a_hundred_thousandth(
    pools: Callable, script: str, options: dict[str, Any]
) -> None:
    for found in pools(4).run(compared, script, dict(options)):
        for name, error in found:
            assert error < 1e-5, name


@pytest.mark.parametrize("softclamp", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_assert_flash_holds_to_a_hundred_thousandth(
    causal: bool, masked: bool, softclamp: bool
) -> None:
    qkv = torch.randn(3, 2, 62, 2, 16)
    mask = torch.randint(0, 2, (2, 62)).bool() if masked else None
    results = []
    for function, size in ((ring_flash_attn, {"bucket_size": 4}), (default_attention, {})):
        q, k, v = (t.clone().requires_grad_() for t in qkv)
        out = function(
            q, k, v, mask, causal, softclamp_qk_sim=softclamp, softclamp_value=2.0, **size
        )
        out.mean().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for ours, regular in zip(*results):
        assert relative_error(ours, regular) < 1e-5


def test_ring_flash_attn_underscore_is_the_same_function() -> None:
    q = torch.randn(1, 6, 2, 4)
    assert torch.equal(ring_flash_attn_(q, q, q, None, True), ring_flash_attn(q, q, q, None, True))


def tree_against_softmax(seq_len: int) -> float:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn((1, 8, 1, 64), generator=draw)
    k, v = (torch.randn((1, 8, seq_len, 64), generator=draw) for _ in range(2))
    want = ((q @ k.transpose(-1, -2)) * 64**-0.5).softmax(-1) @ v
    return relative_error(tree_attn_decode(q, k, v), want)


@pytest.mark.parametrize("seq_len", [31, 5, 3])
def test_assert_tree_attn_holds_to_a_hundred_thousandth(pools: Callable, seq_len: int) -> None:
    assert max(pools(4).run(tree_against_softmax, seq_len)) < 1e-5


X, HEADS = torch.zeros(2, 4, 6), torch.zeros(1, 2, 3, 4)
SLIPS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "mask must be bool [2, 4]": (
        lambda mask: sharded_batch_to_sharded_seq(X, mask, 2),
        {"mask": torch.ones(2, 4).bool()}, {"mask": torch.ones(2, 3).bool()},
    ),
    "x must be [b, n, ...], got [4]": (
        lambda x: sharded_batch_to_sharded_seq(x, None, 2), {"x": X}, {"x": X[0, :, 0]}
    ),
    "sizes must be of 4 samples in each of 1 rings, got [2, 3]": (
        lambda sizes: sharded_seq_to_sharded_batch(torch.zeros(4, 2, 6), sizes),
        {"sizes": torch.tensor([2, 2])}, {"sizes": torch.tensor([2, 3])},
    ),
    "sizes, an int for each of 2 ranks, got [4, 2, 6] and torch.float32 [2]": (
        lambda sizes: sharded_seq_to_sharded_batch(torch.zeros(4, 2, 6), sizes),
        {"sizes": torch.tensor([2, 2])}, {"sizes": torch.tensor([2.0, 2.0])},
    ),
    "sizes must be every rank's length along dim, got [2]": (
        lambda sizes: all_gather(X, 0, sizes),
        {"sizes": torch.tensor([2, 2])}, {"sizes": torch.tensor(2)},
    ),
    "receive_buffers must be one for each of 2, got 1": (
        lambda some: [*all_ring_pass(X, X, receive_buffers=some)], {"some": None}, {"some": (X,)}
    ),
    "attn_mask must be bool or torch.float32, got torch.int64": (
        lambda mask: zig_zag_attn(HEADS, HEADS, HEADS, attn_mask=mask),
        {"mask": torch.ones(3, 6)}, {"mask": torch.ones(3, 6).long()},
    ),
    "or broadcast to [1, 2, 3, 6], got [5, 3, 6]": (
        lambda mask: zig_zag_attn(HEADS, HEADS, HEADS, attn_mask=mask),
        {"mask": torch.ones(3, 6)}, {"mask": torch.ones(5, 3, 6)},
    ),
    "with h a multiple of h_kv, of one dtype": (
        lambda q: zig_zag_attn(q, HEADS, HEADS), {"q": HEADS}, {"q": HEADS.double()}
    ),
    "t must be [..., n, d], got [6]": (
        lambda t: zig_zag_shard(t, all_gather_batch=True), {"t": X}, {"t": X[0, 0]}
    ),
}  # fmt: skip


def slipped() -> dict[str, str]:
    """For a pool: what each rank is told where rank 1 alone gives something wrong."""
    told = {}
    for words, (function, right, wrong) in SLIPS.items():
        try:
            function(**(wrong if dist.get_rank() == 1 else right))
            told[words] = "nothing"
        except ValueError as error:
            told[words] = str(error)
    return told


def test_functions_that_gather_tell_all_ranks_of_one_s_mistake(pools: Callable) -> None:
    first, second = pools(2).run(slipped)
    assert first == second
    for words, text in first.items():
        assert words in text
        assert "(on rank 1)" in text


def test_functions_of_one_rank_say_what_they_need() -> None:
    for wrong in (torch.tensor(1.0), torch.ones(1), [torch.tensor(1.0)]):
        with pytest.raises(ValueError, match=r"split_by_rank: x must be \[ranks, n, \.\.\.\]"):
            split_by_rank(wrong)
    for function in (zig_zag_pad_seq, zig_zag_shard):
        with pytest.raises(ValueError, match=r"t must be \[\.\.\., n, d\], got \[3\]"):
            function(torch.ones(3))
    with pytest.raises(ValueError, match="null_ring_pass: receive_buffers must be one for each"):
        null_ring_pass(X, X, receive_buffers=(X,))
