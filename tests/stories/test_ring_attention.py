"""Ring attention equals dense attention over the whole: over threads, and over processes."""

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.kernels import KERNELS, refusal
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.interfaces import KernelRequest
from tests.support import threads
from tests.support.cases import (
    CPU_KERNELS,
    NAMES,
    TOLERANCES,
    Attention,
    check,
    check_in_processes,
    check_in_threads,
    errors,
    oracle,
    process_case,
    shard,
)
from tests.support.crossed import CROSS, cross
from tests.support.ranks import alone
from tests.support.reference import dense_attention, relative_error

LENGTH = 29
HEADS = ((4, 4), (4, 2), (3, 1))


def kernels(case: Attention) -> list[str]:
    asked = KernelRequest("cpu", case.dtype, case.softclamp is not None)
    return [name for name in KERNELS if refusal(name, asked) is None]


def matrix(layout: str, **kinds) -> list[Attention]:
    """Every combination of options."""
    options = product((False, True), (None, 0, 6), (False, True), HEADS, (None, 1.5))
    cases = [
        Attention(
            LENGTH, layout, causal=causal, window=window, masked=masked, softclamp=softclamp,
            heads=h, key_heads=h_kv, **kinds,
        )
        for causal, window, masked, (h, h_kv), softclamp in options
    ]  # fmt: skip
    return [replace(case, kernel=name) for case in cases for name in kernels(case)]


# --- the matrix: all of it over three threads in one layout, every so many of its cases elsewhere;
# every value of every option is among these, for they come in twos and threes, and a step is prime
# to both ---


@pytest.mark.parametrize(("size", "step"), [(1, 11), (2, 7), (3, 1), (4, 7), (8, 13)])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_combinations_of_options_over_threads(layout, size, step):
    for case in matrix(layout)[:: 5 if step == 1 and layout != "zigzag" else step]:
        check_in_threads(case, size)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_single_precision_over_threads(layout, size):
    for case in matrix(layout, dtype=torch.float32, d_v=5)[::7]:
        check_in_threads(case, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_combinations_of_options_over_processes(layout, size, pools):
    check_in_processes(matrix(layout)[size % 5 :: 11], pools(size))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_eight_processes(layout, pools):
    check_in_processes(matrix(layout)[::23], pools(8))


def test_single_precision_and_odd_lengths_over_processes(pools):
    cases = [
        Attention(length, layout, causal=True, window=window, masked=masked, dtype=dtype, d_v=3)
        for length, layout, window, masked, dtype in product(
            (0, 1, 2, 3, 5, 8, 31), sorted(LAYOUTS), (None, 2), (False, True), TOLERANCES
        )
    ]
    check_in_processes(cases[::5], pools(3))


attention = st.builds(
    Attention,
    length=st.integers(0, 40),
    layout=st.sampled_from(sorted(LAYOUTS)),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 45),
    masked=st.booleans(),
    softclamp=st.none() | st.sampled_from([0.5, 3.0]),
    scale=st.none() | st.sampled_from([0.2, 1.0]),
    batch=st.integers(1, 2),
    d=st.integers(1, 9),
    d_v=st.integers(1, 9),
    bucket_size=st.integers(1, 20),
    seed=st.integers(0, 3),
)


@settings(deadline=None, max_examples=80)
@given(attention, st.integers(1, 9))
def test_any_length_any_ring_any_mask(case, size):
    check_in_threads(case, size)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_shards_longer_than_a_kernels_own_blocks(layout, kernel):
    for window in (None, 50):
        case = Attention(
            531, layout, causal=True, window=window, masked=True, kernel=kernel, bucket_size=64,
            batch=1, heads=2, key_heads=1,
        )  # fmt: skip
        check_in_threads(case, 3)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_results_of_different_ring_sizes_agree(layout):
    case, wholes = Attention(37, layout, causal=True, window=9, masked=True), []
    for size in (1, 2, 3, 4, 8):
        got, _ = threads.run(size, lambda ring: shard(case, ring))
        order = torch.cat([case.places(r, size)[0] for r in range(size)]).argsort()
        parts = [torch.cat(p, 2 if name == "lse" else 1) for name, p in zip(NAMES, zip(*got))]
        wholes.append([t.index_select(2 if n == "lse" else 1, order) for n, t in zip(NAMES, parts)])
    for other in wholes[1:]:
        assert max(map(relative_error, other, wholes[0])) < 1e-12


@pytest.mark.parametrize(("queries", "keys"), CROSS)
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_with_shards_of_any_lengths(queries, keys, masked):
    for softclamp in (None, 2.0):
        check_in_threads(cross(queries, keys, masked=masked, softclamp=softclamp), 3)


def test_cross_attention_over_processes(pools):
    cases = [cross(q, k, masked=masked) for (q, k), masked in product(CROSS, (False, True))]
    check_in_processes(cases, pools(3))


# --- numbers ---


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_huge_logits_stay_finite_and_err_by_their_size(kernel, dtype):
    case = Attention(23, "zigzag", causal=True, kernel=kernel, dtype=dtype, logits=1e5)
    got, _ = threads.run(3, lambda ring: shard(case, ring))
    largest = max(t.abs().max().item() for t in oracle(case)[1:2])
    allowed = 10 * torch.finfo(dtype).eps * largest
    for rank, mine in enumerate(got):
        assert all(t.isfinite().all() for t in mine)
        assert max(errors(case, rank, 3, mine, oracle(case)).values()) < allowed


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_logits_below_any_sentinel_are_still_logits(kernel):
    torch.manual_seed(0)
    q = torch.ones(1, 12, 2, 4, dtype=torch.float64) * -1e5
    k = torch.ones(1, 12, 2, 4, dtype=torch.float64) + torch.randn(1, 12, 2, 4).double() * 1e-5
    v = torch.randn(1, 12, 2, 4, dtype=torch.float64)
    want, _ = dense_attention(q, k, v, causal=True)

    def main(ring: Ring) -> Tensor:
        at = slice(4 * ring.rank, 4 * ring.rank + 4)
        return ring_attn(q[:, at], k[:, at], v[:, at], causal=True, kernel=kernel, group=ring)

    got, _ = threads.run(3, main)
    assert relative_error(torch.cat(got, 1), want) < 1e-9


def test_twenty_repeats_are_equal_in_every_bit():
    case = Attention(37, "zigzag", causal=True, masked=True, dtype=torch.float32)
    first, _ = threads.run(4, lambda ring: shard(case, ring))
    for _ in range(19):
        again, _ = threads.run(4, lambda ring: shard(case, ring))
        assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))


# --- processes: groups, checkpoints, beginnings and ends ---


def repeated(case: Attention, times: int) -> int:
    """For a pool: how many different results the repeats gave."""
    ring, first, different = Ring(), None, set()
    for i in range(times):
        got = shard(case, ring)
        first = first or got
        if not all(torch.equal(a, b) for a, b in zip(first, got)):
            different.add(i)
    return len(different)


def test_repeats_over_processes_are_equal_in_every_bit(pools):
    case = Attention(37, "zigzag", causal=True, masked=True, dtype=torch.float32)
    assert pools(4).run(repeated, case, 20) == [0] * 4


def checkpointed(case: Attention, use_reentrant: bool) -> tuple[dict[str, float], int]:
    """For a pool: two checkpointed layers; the gradients' errors, and batches of messages."""
    ring, (tensors, _, dout, _) = Ring(), case.data()

    def layers(q: Tensor, k: Tensor, v: Tensor, attend, remember) -> Tensor:
        first = remember(attend, q, k, v)
        return remember(attend, first, k, v)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attn(q, k, v, causal=True, layout=case.layout)

    def remember(f, *args: Tensor) -> Tensor:
        return checkpoint(f, *args, use_reentrant=use_reentrant)

    whole = [t.clone().requires_grad_() for t in tensors]
    out = layers(
        *whole, lambda q, k, v: dense_attention(q, k, v, causal=True)[0], lambda f, *args: f(*args)
    )
    want = torch.autograd.grad(out, whole, dout)
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in tensors]
    send = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=send) as sent:
        layers(*mine, attend, remember).backward(dout[:, at])
    found = zip(NAMES[2:], mine, want)
    return {name: relative_error(t.grad, w[:, at]) for name, t, w in found}, sent.call_count


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_run_their_messages_again(use_reentrant, pools):
    case = Attention(21, "zigzag", causal=True)
    found, sent = zip(*pools(3).run(checkpointed, case, use_reentrant))
    check(case, 3, found)
    assert max(sent) <= 2 * (2 + 2 + 4)


def in_subgroups(case: Attention, kind: str) -> list[list[dict[str, float]]]:
    """For a pool of four: rings of two at once, each with another sequence."""
    rank = dist.get_rank()
    if kind == "new_group":
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
        rings = [Ring(groups[0 if rank in (0, 2) else 1])]
    elif kind == "size":
        rings = [Ring(dist.group.WORLD, size=2)]
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        rings = [Ring(mesh["dp"]), Ring(mesh["cp"])]
    found = []
    for ring in rings:
        # every ring its own data: what goes astray is found
        members = ring.gather_notes("members", str(rank).encode())
        members = members[ring.first : ring.first + ring.size]
        mine = replace(case, seed=int(b"".join(members)))
        found.append(errors(mine, ring.rank, ring.size, shard(mine, ring), oracle(mine)))
    return found


@pytest.mark.parametrize("kind", ["new_group", "size", "mesh"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_several_rings_at_once_do_not_meet(kind, layout, pools):
    case = Attention(15, layout, causal=True, masked=True)
    for found in zip(*pools(4).run(in_subgroups, case, kind)):
        check(case, 2, found)


def alone_in_a_group(case: Attention) -> dict[str, float]:
    """For a pool: a ring of one inside an initialised group; no message may be sent."""
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("a message")):
        found = [
            errors(case, 0, 1, shard(case, ring), oracle(case))
            for ring in (Ring(group), Ring(size=1), Ring.alone())
        ]
    return {name: max(each[name] for each in found) for name in NAMES}


def test_a_ring_of_one_in_a_larger_world_sends_nothing(pools):
    check(Attention(9), 1, pools(2).run(alone_in_a_group, Attention(9, causal=True)))


def before_and_after(rank: int, folder: str) -> list[list[dict[str, float]]]:
    """Three processes: alone, then a ring of three, alone again, then two of them a ring."""
    cases = [Attention(11, "zigzag", causal=True, masked=True)]

    def begin(name: str, size: int) -> None:
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"file://{folder}/{name}"
        )

    assert not dist.is_initialized()
    found = [process_case(cases)[0]]
    begin("three", 3)
    found.append(process_case(cases)[0])
    dist.destroy_process_group()
    found.append(process_case(cases)[0])
    if rank < 2:
        begin("two", 2)
        found.append(process_case(cases)[0])
        dist.destroy_process_group()
    return found


def test_groups_may_begin_and_end_between_calls(tmp_path):
    by_rank = alone(before_and_after, 3, str(tmp_path))
    assert [len(found) for found in by_rank] == [4, 4, 3]
    for found in by_rank:
        check(Attention(), 3, found)
