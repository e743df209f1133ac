"""The kernels of decoding: by Triton's interpreter, in processes that share memory."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.given_keys import GivenKeys
from ring_attention_pytorch.inference.programs import Cut, Tuning
from ring_attention_pytorch.inference.pushed_rows import PushedRows
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.launches import Launch
from ring_attention_pytorch.runtime.processors import Processors
from tests.support.cache_stories import Story, Teller, told
from tests.support.interpreter import interpreters, needs_triton
from tests.support.ranks import unhurried
from tests.support.reference import dense_attention, relative_error

pytestmark = needs_triton
CPU = torch.device("cpu")
RANKS = 3
SLOT = 1 << 12
ALONE = Story(dtype=torch.float32, kernel="triton", steps=6, most=3, deeds=("attend",))


@pytest.fixture(scope="module")
def ranks():
    """Three processes that have Triton's interpreter."""
    with interpreters(RANKS) as pool:
        yield pool


CASES = {
    "pages that hold a block of keys": replace(ALONE, page=64, steps=4, most=20),
    "small pages": replace(ALONE, page=3),
    "windows": replace(ALONE, options={"window": 2}, given=("starts",)),
    "scores": replace(ALONE, options={"softclamp": 1.5}, given=("sinks", "alibi_slopes")),
    "appended before": replace(ALONE, deeds=("append", "attend", "rollback")),
    "a circle of pages": replace(
        ALONE, page=4, windows=(3,), deeds=("attend", "attend", "rollback", "reorder"), steps=12
    ),
    "values in keys": replace(ALONE, page=3, tied=True, deeds=("append", "attend", "rollback")),
    "8 bits": replace(
        ALONE, page=3, kept=torch.float8_e4m3fn, given=("sinks",), options={"window": 9}
    ),
    "8 bits, for queries of 16": replace(
        ALONE, page=64, most=20, kept=torch.float8_e4m3fn, dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_dense_attention(name: str, ranks: ProcessPoolExecutor) -> None:
    (error,) = ranks.submit(told, [CASES[name]]).result(timeout=900.0)
    assert error < (1.5e-2 if CASES[name].dtype == torch.bfloat16 else 1e-5)


def terms(name: str) -> float:
    """How far sinks and slopes that lie in memory in some way are from the same ones in a row."""
    drawn = torch.arange(8.0)[1:]
    each = {"every other": drawn[::2], "one for all": drawn[:1].expand(4)}[name]
    q, outs = torch.ones(1, 1, 4, 16), []
    for lying in (each, each.clone(memory_format=torch.contiguous_format)):
        cache = RingCache(1, 2, 16)
        for n in (1.0, 2.0):
            k = torch.full((1, 1, 2, 16), n)
            options = dict(kernel="triton", sinks=lying, alibi_slopes=lying)
            outs.append(ring_attn_with_cache(q / 16, k, k, cache, **options))
    return (outs[1] - outs[3]).abs().max().item()


@pytest.mark.parametrize("name", ["every other", "one for all"])
def test_terms_may_lie_anyhow(name: str, ranks: ProcessPoolExecutor) -> None:
    assert ranks.submit(terms, name).result(timeout=900.0) == 0.0


def as_captured() -> tuple[bool, list[Any], list[str]]:
    """Take steps as if a CUDA graph were captured; errors of steps that no graph can hold."""
    draw, outs, texts = torch.Generator().manual_seed(0), [], []
    plain, graphed = (RingCache(2, 1, 16, windows=(3,), spare=2, capacity=64) for _ in range(2))
    for step in range(4):
        q, k = (torch.randn(2, 1, h, 16, generator=draw) for h in (2, 1))
        for cache in (plain, graphed):
            with mock.patch.object(RingCache, "in_graph", cache is graphed and step > 1):
                outs.append(ring_attn_with_cache(q, k, k, cache, window=3, kernel="triton"))
    same = all(map(torch.equal, outs[::2], outs[1::2]))
    counted = [graphed._lengths, graphed.captured, graphed.lengths, graphed._lengths]
    with mock.patch.object(RingCache, "in_graph", True):
        for n in (2, 3):
            q, k = torch.ones(2, n, 2, 16), torch.ones(2, n, 1, 16)
            with pytest.raises(ValueError, match="attention to a cache: ") as error:
                ring_attn_with_cache(q, k, k, graphed, window=3, kernel="triton")
            texts.append(str(error.value))
    return same, counted, texts


def test_a_captured_step_is_a_step_that_the_device_counts(ranks: ProcessPoolExecutor) -> None:
    same, counted, texts = ranks.submit(as_captured).result(timeout=900.0)
    assert same
    assert counted == [[[2, 2]], True, [4, 4], [[4, 4]]]
    assert "before a CUDA graph is captured, the same call must have run once" in texts[0]
    assert "a CUDA graph appends at most `spare` tokens to this layer, 2" in texts[1]


def given(name: str) -> list[float]:
    """Attend to keys that are given, as `tree_attn_decode` does on a GPU; errors by length."""
    draw, errors = torch.Generator().manual_seed(0), []
    q, held = torch.randn(2, 1, 4, 16, generator=draw), None
    for n in (5, 0, 70, 1):
        k = torch.randn(2, 2, n, 16, generator=draw)
        v = torch.randn(2, 2, n, 8, generator=draw)
        if name == "tokens before heads":
            k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        if name == "a part of a tensor":
            k, v = (torch.cat((t, t), dim=2)[:, :, n:] for t in (k, v))
        if name == "an address that kernels don't take":
            k = torch.cat((torch.zeros(1), k.flatten()))[1:].view_as(k)
        if name == "strides of their own":
            k = torch.stack((k, k), dim=-1)[..., 0]
        mask = torch.rand(2, n, generator=draw) < 0.5 if name == "masked" else None
        held = held or GivenKeys(Ring.alone(), q, 2, 8)
        out = held.attend(q, k, v, mask, 0)
        by_token = (t.transpose(1, 2).double() for t in (k, v))
        want, _ = dense_attention(q.double(), *by_token, key_mask=mask)
        errors.append((out - want).abs().max().item())
    return errors


@pytest.mark.parametrize(
    "name",
    [
        "heads first",
        "tokens before heads",
        "a part of a tensor",
        "an address that kernels don't take",
        "strides of their own",
        "masked",
    ],
)
def test_keys_that_are_given_are_read_where_they_lie(name: str, ranks: ProcessPoolExecutor) -> None:
    assert max(ranks.submit(given, name).result(timeout=900.0)) < 1e-5


# ---- ranks that exchange messages


def chunks(rank: int, folder: str) -> float:
    """The worst error of a prompt in three chunks, of a window, slopes and sinks."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    machine = mock.patch.dict("os.environ", RING_ATTENTION_MACHINE=str(rank // 2))
    with machine, mock.patch.object(decode_plan, "PUSH", False):
        worst = worst_of_chunks(Ring(), 7)
    dist.destroy_process_group()
    return worst


def worst_of_chunks(ring: Ring, n: int) -> float:
    draw, heads = torch.Generator().manual_seed(3), ((4, 8), (2, 8), (2, 6))
    whole = [torch.randn(2, 3 * n, *shape, generator=draw) for shape in heads]
    cache, worst = RingCache(2, 2, 8, value_dim=6, page=3, group=ring), 0.0
    terms = dict(window=9, sinks=torch.full((4,), 0.3), alibi_slopes=torch.full((4,), 0.1))
    want, want_lse = dense_attention(*whole, causal=True, **terms)
    for start in range(0, 3 * n, n):
        at = start + positions("zigzag", rank=ring.rank, ring_size=ring.size, length=n)
        out, lse = ring_attn_with_cache(
            *[t[:, at] for t in whole], cache, layout="zigzag", kernel="triton", return_lse=True,
            **terms,
        )  # fmt: skip
        errors = relative_error(out, want[:, at]), relative_error(lse, want_lse[..., at])
        worst = max(worst, *errors)
    return worst


def test_a_chunk_of_a_window_gets_its_own_results_alone(
    ranks: ProcessPoolExecutor, tmp_path: Path
) -> None:
    futures = [ranks.submit(chunks, rank, str(tmp_path)) for rank in range(RANKS)]
    assert max(future.result(timeout=900.0) for future in futures) < 1e-5


# ---- ranks that share memory


class Sharing(Ring):
    """A rank of several that are no process group, but share memory."""

    def __init__(self, rank: int, memories: list[Tensor], patience: float) -> None:
        self.group, self.size, self.rank, self.first = None, len(memories), rank, 0
        self.rows = PushedRows(CPU, rank, memories, SLOT, patience)
        self.steps.watch(self.rows)


def sharing(rank: int, memories: list[Tensor], patience: float = 60.0) -> Sharing:
    from ring_attention_pytorch.inference import _triton_merge

    _triton_merge.globaltimer = time.monotonic_ns
    decode_plan.PUSH = True
    decode_plan.pushed_rows = lambda ring, device: ring.rows if ring.size > 1 else None
    return Sharing(rank, memories, patience)


def together(pool: ProcessPoolExecutor, run: Any, *each: Any) -> list[Any]:
    words = PushedRows.words_for(SLOT, RANKS)
    memories = [torch.zeros(words, dtype=torch.int64).share_memory_() for _ in range(RANKS)]
    futures = [pool.submit(run, rank, memories, given) for rank, given in enumerate(each)]
    return [future.result(timeout=900.0) for future in futures]


def tell(rank: int, memories: list[Tensor], story: Story) -> float:
    return Teller(story, sharing(rank, memories)).tell()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_ranks_that_share_memory_merge_in_one_kernel(seed: int, ranks: ProcessPoolExecutor) -> None:
    story = replace(ALONE, seed=seed, sequences=1, page=2, steps=6, given=("sinks",))
    for error in together(ranks, tell, *[story] * RANKS):
        assert error < 1e-5


def decode(rank: int, memories: list[Tensor], given: tuple[str, float]) -> tuple[Any, str | None]:
    """Decode so many tokens at a time; whether each result is NaN, and what was found wrong.

    All ranks begin in their own time; after that each waits so many seconds for others.
    """
    ring, (tokens, patience) = sharing(rank, memories), given
    cache, nan, trouble = RingCache(1, 1, 16, page=2, group=ring), [], None
    for n in map(int, tokens):
        if nan:
            ring.rows.patience = int(patience * 1e9)
            cache.plans.clear()
        if not n:
            ring.rows.fail()
            break
        q = torch.ones(1, n, 2, 16)
        try:
            out = ring_attn_with_cache(q, q[:, :, :1], q[:, :, :1], cache, kernel="triton")
            nan.append(bool(out.isnan().all()))
        except RingError as error:
            trouble = str(error)
            break
    return nan, trouble or ring.steps.trouble()


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout(
    ranks: ProcessPoolExecutor,
) -> None:
    seconds = unhurried(1.5)  # in which the others spin
    found = together(ranks, decode, ("11", seconds), ("1", seconds), ("11", seconds))
    for nan, trouble in (found[0], found[2]):
        assert nan == [False, True]
        assert f"rank 1 did not come within {seconds:g} s" in trouble


def test_a_rank_that_fails_is_waited_for_by_nobody(ranks: ProcessPoolExecutor) -> None:
    begin = time.monotonic()
    found = together(ranks, decode, ("11", 600.0), ("10", 600.0), ("11", 600.0))
    for nan, trouble in (found[0], found[2]):
        assert nan == [False, True]
        assert "rank 1 has failed" in trouble
    assert time.monotonic() - begin < 500.0


def mismatched(rank: int, memories: list[Tensor], window: int) -> tuple[bool, str | None]:
    ring = sharing(rank, memories, patience=60.0)
    cache, q = RingCache(1, 1, 16, page=2, group=ring), torch.ones(1, 1, 2, 16)
    options = dict(kernel="triton", window=window)
    out = ring_attn_with_cache(q, q[:, :, :1], q[:, :, :1], cache, **options)
    return bool(out.isnan().all()), ring.steps.trouble()


def test_a_rank_that_calls_with_other_options_is_found(ranks: ProcessPoolExecutor) -> None:
    found = together(ranks, mismatched, 3, 4, 3)
    assert all(nan for nan, _ in found)
    assert "with other shapes or options" in str(found[0][1])


def changed(rank: int, memories: list[Tensor], deed: str | None) -> tuple[bool, str | None, bool]:
    """Do something to the cache on one rank; whether results are NaN, and what was found wrong.

    Last, whether there was a result before that.
    """
    ring = sharing(rank, memories, patience=60.0)
    cache, outs = RingCache(2, 1, 16, page=2, group=ring), []
    q = torch.ones(2, 1, 2, 16)
    for step in range(2):
        if step and deed is not None:
            DEEDS[deed](cache)
        outs.append(ring_attn_with_cache(q, q[:, :, :1], q[:, :, :1], cache, kernel="triton"))
    nan = [bool(out.isnan().all()) for out in outs]
    return nan[1], ring.steps.trouble(), not nan[0]


DEEDS: dict[str, Callable[[RingCache], object]] = {
    "rollback": lambda cache: cache.rollback([0, 1]),
    "reorder": lambda cache: cache.reorder([1, 0]),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_rank_whose_cache_has_other_sequences_is_found(
    deed: str, ranks: ProcessPoolExecutor
) -> None:
    for nan, trouble, right in together(ranks, changed, None, deed, None):
        assert right
        assert nan
        assert "its cache has sequences of other lengths, order or padding" in str(trouble)


def test_ranks_that_do_the_same_to_their_caches_are_in_step(ranks: ProcessPoolExecutor) -> None:
    for nan, trouble, _ in together(ranks, changed, *["reorder"] * RANKS):
        assert not nan
        assert trouble is None


def test_sequences_that_have_less_tokens_than_queries_are_nan(ranks: ProcessPoolExecutor) -> None:
    """Where the host can't see it: in a graph."""
    assert ranks.submit(too_many).result(timeout=900.0) == [True, False, False]


def too_many() -> list[bool]:
    cache, k = RingCache(3, 1, 16, group=Ring.alone()), torch.ones(3, 3, 1, 16)
    cache.append(k, k)
    cache.rollback([2, 0, 3])
    cache.check_last = lambda *_: None
    out = ring_attn_with_cache(k[:, :2], None, None, cache, kernel="triton")
    assert not out[2].any()
    return [bool(each.isnan().all()) for each in out]


def whole(rank: int, memories: list[Tensor], n: int) -> tuple[bool, str | None]:
    """Attend to given keys, whose number in all ranks' eyes is n."""
    ring, q = sharing(rank, memories, patience=60.0), torch.ones(1, 1, 2, 16)
    k = torch.ones(1, 1, 5, 16)
    out = GivenKeys(ring, q, 1, 16).attend(q, k, k, None, n)
    return bool(out.isnan().all()), ring.steps.trouble()


def test_a_rank_that_shares_other_keys_is_found(ranks: ProcessPoolExecutor) -> None:
    found = together(ranks, whole, 15, 16, 15)
    assert all(nan for nan, _ in found)
    assert "with other shapes or options" in str(found[0][1])


# ---- launches


def test_what_is_compiled_is_launched_with_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    active = SimpleNamespace(get_current_device=lambda: 1, get_current_stream=lambda device: 5)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    run = lambda *args: seen.append(args)  # noqa: E731
    made = SimpleNamespace(run=run, function="code", packed_metadata="more")
    kernel = {(7,): lambda *args, **options: [seen.append(args), made][1]}
    fixed = torch.zeros(4)
    launch = Launch(kernel, 7, (fixed, 2.5), num_warps=1, SIZE=3)
    for n in range(3):
        t = torch.zeros(2)
        launch(t, n)
        if n == 0:
            assert seen.pop() == (t, 0, fixed, 2.5)
        else:
            how = 7, 1, 1, 5, "code", "more", None, None, None
            assert seen.pop() == (*how, t.data_ptr(), n, fixed.data_ptr(), 2.5, 3)


# ---- code for GPUs


ATTEND = dict(
    q="*bf16", k_new="*bf16", v_new="*bf16", slopes="*bf16", key_mask="*u8", keys="*bf16",
    values="*bf16", key_scales="*fp32", value_scales="*fp32", tables="*i32", lengths="*i32",
    width="i32", page_rows="i64", head_rows="i64", given="i64", starts="*i32", capacities="*i32",
    acc_of="*fp32", lse_of="*fp32", next_lengths="*i32", state="*i64", factor="fp32", clamp="fp32",
    window="i32",
)  # fmt: skip
ATTEND_SIZES = dict(
    N=1, ROWS_IN_ALL=32, SPLITS=33, BLOCKS=1, KV=8, GROUP=4, D=128, D_V=128, ROW_V=128, WIDTH=128,
    WIDTH_V=128, ROWS=16, COLS=64, NEW_COLS=16, STEP=1, PAGE=64, RANKS=2, RANK=1, NEW=True,
    CAUSAL=True, SCALED=False, MASKED=False, WINDOW=False, STARTS=False, CLAMP=False, ALIBI=False,
    SHARED=True, PDL=True, PRECISION="tf32",
)  # fmt: skip
MERGE = dict(
    out="*bf16", out_lse="*fp32", sinks="*bf16", lengths="*i32", acc_of="*fp32", lse_of="*fp32",
    purpose="i64", next_lengths="*i32", overflown="*i32", lineage="*i32", state="*i64",
    acc_split="i64", acc_row="i64", lse_split="i64", lse_row="i64", parts="i32", rows="i32",
    sequences="i32", patience="i64", slot="i64",
)  # fmt: skip
MERGE_SIZES = dict(
    ROWS_EACH=32,
    HEADS=32,
    D=128,
    COLS=32,
    PARTS=64,
    SEQUENCES=16,
    RANKS=1,
    RANK=0,
    ADVANCE=True,
    SINKS=False,
    PDL=True,
)
APPEND = dict(
    k="*bf16", v="*bf16", keys="*bf16", values="*bf16", key_scales="*fp32", value_scales="*fp32",
    tables="*i32", lengths="*i32",
    capacities="*i32", n="i32", width="i32",
)  # fmt: skip
APPEND_SIZES = dict(
    PAGE=16, RANKS=2, RANK=1, KV=8, D=80, D_V=64, ROW_V=64, ROWS=16, WIDTH=128, WIDTH_V=64,
    SCALED=False,
)  # fmt: skip
H100 = Processors(132, 232448)
LATENTS = Cut.of((1, 1, 128, 576), (1, 512, 2), True, H100, Tuning())
IN_8_BITS = dict(keys="*fp8e4nv", values="*fp8e4nv")
VARIANTS = {
    "decode": ("_triton_attend", "attend_kernel", ATTEND, ATTEND_SIZES, {}),
    "all terms": (
        "_triton_attend", "attend_kernel", ATTEND, ATTEND_SIZES,
        dict(WINDOW=True, STARTS=True, CLAMP=True, ALIBI=True, PAGE=3, D=80, SHARED=False),
    ),
    "drafts, appended before": (
        "_triton_attend", "attend_kernel", ATTEND, ATTEND_SIZES,
        dict(
            NEW=False, MASKED=True, CAUSAL=False, N=40, ROWS=64, BLOCKS=3, ROWS_IN_ALL=1280,
            NEW_COLS=64,
        ),
    ),
    "merge": ("_triton_merge", "merge_kernel", MERGE, MERGE_SIZES, {}),
    "merge ranks": (
        "_triton_merge", "merge_kernel", MERGE, MERGE_SIZES, dict(RANKS=4, RANK=2, SINKS=True),
    ),
    "append": ("_triton_append", "append_kernel", APPEND, APPEND_SIZES, {}),
    "decode, 8 bits": (
        "_triton_attend", "attend_kernel", ATTEND | IN_8_BITS, ATTEND_SIZES, dict(SCALED=True),
    ),
    "decode of DeepSeek V3's latents": (
        "_triton_attend", "attend_kernel", ATTEND, ATTEND_SIZES,
        dict(
            KV=1, GROUP=128, D=576, D_V=512, ROW_V=576, WIDTH=1024, WIDTH_V=512, ROWS_IN_ALL=128,
            ROWS=LATENTS.rows, COLS=LATENTS.cols, BLOCKS=LATENTS.blocks, SPLITS=LATENTS.splits,
        ),
    ),
    "append, 8 bits": (
        "_triton_append", "append_kernel", APPEND | IN_8_BITS, APPEND_SIZES, dict(SCALED=True),
    ),
}  # fmt: skip


THOROUGH = pytest.param("decode of DeepSeek V3's latents", marks=pytest.mark.thorough)


@pytest.mark.parametrize("name", [*sorted(VARIANTS.keys() - {*THOROUGH.values}), THOROUGH])
def test_kernels_are_code_for_a_gpu(name: str) -> None:
    """Down to what the GPU's assembler takes, which no interpreter knows; it must fit an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, function, types, sizes, changes = VARIANTS[name]
    kernel = getattr(import_module(f"ring_attention_pytorch.inference.{module}"), function)
    sizes = {**sizes, **changes}
    assert [*types, *sizes] == kernel.arg_names
    source = ASTSource(kernel, {**types, **dict.fromkeys(sizes, "constexpr")}, sizes)
    options = dict(num_warps=1 if "merge" in name else 4)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".entry" in made.asm["ptx"]
    assert made.metadata.shared <= H100.shared
