"""The Triton kernels through Triton's interpreter, and where they say that they can't.

The interpreter is in processes of its own (`interpreter.py`). Its bf16 products are wrong, so that
dtype is for the GPU's tests.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from einops import repeat
from torch import Tensor

from ring_attention_pytorch import RingPlan, kernels, ring_attn
from ring_attention_pytorch.geometry.tiles import Tile
from ring_attention_pytorch.kernels import choose, refusal, triton
from ring_attention_pytorch.kernels._configs import Config, apart, config_for, configured
from ring_attention_pytorch.runtime.accumulate import GradAccumulator, OutputAccumulator
from ring_attention_pytorch.runtime.dropout import Dropout
from ring_attention_pytorch.runtime.interfaces import (
    Grads,
    KernelRequest,
    KVBlock,
    Residuals,
    ScoreMods,
    Tiles,
)
from ring_attention_pytorch.runtime.launches import KernelCall, compile_only
from tests.support import threads
from tests.support.cases import Attention, errors, oracle, over_shared_memory, shard
from tests.support.features import Problem, drawn, together
from tests.support.interpreter import interpreters, needs_triton
from tests.support.kernel_cases import (
    CASES,
    FAR_CASES,
    STRIDED,
    WIDE,
    KernelCase,
    disturbed,
    faults,
    random_cases,
    unrepeated,
)
from tests.support.reference import dense_attention, relative_error
from tests.support.sampling import grid


def dq_is_launched_early(patch: pytest.MonkeyPatch) -> None:
    """Where GPUs can, after a kernel that lets it begin."""
    from ring_attention_pytorch.kernels import triton

    q = torch.randn(1, 4, 2, 8)
    plan, lse = RingPlan.make(q, q, q, kernel="eager"), torch.zeros(1, 2, 4)
    keys = plan.keys(q, q)
    ((_, tiles),) = plan.tiles(keys.segments)
    for able in (False, True):
        patch.setattr(triton, "can_begin_early", lambda device, able=able: able)
        grads = Grads(*(GradAccumulator(q) for _ in range(3)))
        with compile_only() as calls:
            saved = Residuals(q, q, lse, q, None)
            triton.backward(saved, keys, tiles, plan.terms, grads)
        dk, dq = calls.values()
        assert (dk.constants["EARLY"], dq.constants["EARLY"]) == (able, able)
        assert dq.constants.get("launch_pdl", False) == able
        assert "launch_pdl" not in dk.constants


@needs_triton
def test_dq_is_launched_early(monkeypatch):
    dq_is_launched_early(monkeypatch)


ON_A_GPU = KernelRequest("cuda", torch.bfloat16, False, capability=(9, 0))
SMALL = dict(
    forward=Config(32, 16, 4, 1), keys=Config(16, 32, 4, 1), queries=Config(32, 16, 4, 1)
)  # several blocks in a short sequence
PACKED = {name: config._replace(pack=4) for name, config in SMALL.items()}
BY_DESCRIPTOR = {name: config._replace(tma=True, pack=2) for name, config in SMALL.items()}

RIGHT = [(case, SMALL) for case in CASES]
# where heads share a block: each number of them, masks, pieces and tiles, and sizes of heads alone
RIGHT += [(CASES[i], PACKED) for i in (1, 2, 3, 5, 6, 10, 13)]
RIGHT += [
    (case, (SMALL, BY_DESCRIPTOR)[i % 2]) for i, case in enumerate(random_cases(14, torch.float32))
]
RIGHT += [(case, {}) for case in (*CASES[2:4], WIDE[0])]
RIGHT += list(zip(WIDE, (BY_DESCRIPTOR, PACKED, SMALL)))
RIGHT += [(case, PACKED) for case in (*FAR_CASES, *STRIDED)]
RIGHT += [
    (replace(case, dtype=torch.float16), (BY_DESCRIPTOR, PACKED)[i % 2])
    for i, case in enumerate(CASES[:5] + random_cases(8, torch.float32)[4:])
]
# head sizes of keys and of values, with the blocks that Hopper has for them
ON_HOPPER = ((64, 64), (128, 128), (192, 128), (512, 448))
OTHERS = [(disturbed, case) for case in CASES[4:7]] + [(unrepeated, CASES[6])]


TURNS = ((1, 7), (2, 5), (3, 1))  # samples, and key heads of each
FEATURES_HERE = (("alibi",), ("cu_seqlens",), ("dropout", "cu_seqlens", "alibi"))


def _with(configs: dict[str, Config], check: Callable, *args: object) -> object:
    with configured(**configs):
        return check(*args, "triton", "cpu")


def _as_on_hopper(d: int, d_v: int) -> dict[str, str]:
    names = ("forward", *(("dk", "dv") if apart(d) else ("keys",)), "queries")
    sizes = (d, d_v), torch.float16, (9, 0)
    configs = {name: config_for(name, *sizes) for name in names}
    causal = ((0, 150, 0, 150, None, 0),)
    case = KernelCase(150, 150, causal, heads=(2, 1), d=(d, d_v), dtype=torch.float16)
    return _with(configs, faults, case)


def _alone() -> dict[str, float]:
    """Through the public function, as a ring of one."""
    from ring_attention_pytorch.ranks.ring import Ring

    case = Attention(21, causal=True, masked=True, dtype=torch.float32, kernel="triton", batch=1)
    return errors(case, 0, 1, shard(case, Ring.alone()), oracle(case))


def _feature(*names: str) -> dict[str, float]:
    with configured(**PACKED):
        return Problem(together(names), torch.float32).errors(1, "contiguous", "triton")


def _dropped(kernel: str) -> Tensor:
    """Where nothing is left of a probability: v is the identity and all of them are alike."""
    q, k = torch.zeros(1, 37, 4, 8), torch.zeros(1, 37, 2, 8)
    v = repeat(torch.eye(37), "m d -> 1 m h d", h=2)
    with configured(**SMALL):
        return ring_attn(q, k, v, dropout=0.4, dropout_seed=2**63 + 1, kernel=kernel) == 0


def _dropped_in_halves() -> float:
    """Keys that come in two calls, by the numbers of their tokens: merged as if in one."""
    q, k, v = (drawn(1, 37, 2, 8, seed=s).float() for s in (1, 2, 3))
    terms, result = (
        ScoreMods(0.3, None, 64, dropout=Dropout(0.4, 5)),
        OutputAccumulator(q, v.shape[-1]),
    )
    numbers = torch.arange(37, dtype=torch.int32)
    for cols in (slice(0, 20), slice(20, 37)):
        tiles = Tiles([Tile(slice(0, 37), slice(0, cols.stop - cols.start), None, None)])
        tiles.row_numbers, tiles.col_numbers = numbers, numbers[cols]
        with configured(**SMALL):
            triton.forward(q, KVBlock(k[:, cols], v[:, cols], None, ()), tiles, terms, result)
    want = ring_attn(q, k, v, scale=0.3, dropout=0.4, dropout_seed=5, kernel="eager")
    return relative_error(result.finalize()[0], want)


def _in_turns(batch: int, key_heads: int) -> list[float]:
    """Errors of out and gradients where few heads run side by side, and the last turn has fewer."""
    tensors = [torch.randn(batch, 37, h, 8) for h in (2 * key_heads, key_heads)]
    found = []
    for kernel in ("triton", "eager"):
        q, k = (t.clone().requires_grad_() for t in tensors)
        with configured(**SMALL), mock.patch.object(triton, "_FULL", 4):
            out = ring_attn(q, k, k * 2, causal=True, kernel=kernel)
            found.append([out, *torch.autograd.grad((out * tensors[0]).sum(), (q, k))])
    return [relative_error(*pair) for pair in zip(*found)]


STEPS = [(5, PACKED), (8, BY_DESCRIPTOR)]


def _in_steps(step: int, config: dict[str, Config]) -> list[float]:
    """Errors where queries stand at the ends of blocks, and before them; keys hidden from some."""
    n = 70
    q, k, v, dout = (drawn(1, n, h, 8, seed=i).float() for i, h in enumerate((4, 1, 1, 4)))
    first = torch.arange(n // 2) // step * step
    at = torch.cat((first - 1, first + step - 1)) + 20, torch.arange(n)
    mask = drawn(1, n, seed=9) < 0.8
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        if dtype == torch.float64:
            out, lse = dense_attention(*leaves, causal=True, positions=at, key_mask=mask)
        else:
            how = dict(zip(("query_positions", "key_positions"), at), causal=True, cross=True)
            with configured(**config):
                out, lse = ring_attn(
                    *leaves, key_mask=mask, kernel="triton", return_lse=True, **how
                )
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        grads = torch.autograd.grad((out * dout.to(dtype)).sum() + seen.sum(), leaves)
        found.append([out, lse, *grads])
    return [relative_error(*pair) for pair in zip(*found)]


def _wrong_spans() -> list[tuple[int, ...]]:
    from tests.support.triton_spans import wrong_spans

    return wrong_spans(150)


def _taped() -> list[bool]:
    """Over shared memory by tapes and without, each rank: is all the same, and was it taped."""

    def main(ring: threads.ThreadRing) -> bool:
        given = [torch.randn(1, 8, h, 16, requires_grad=True) for h in (2, 1, 1)]
        made = RingPlan.make(*given, causal=True, layout="zigzag", kernel="triton", group=ring)
        plan, direct = (over_shared_memory(made, given, ring, 9, own_apart=True) for _ in range(2))
        object.__setattr__(direct, "tapes", None)
        found = []
        for each in (plan, plan, plan, plan, direct):
            out, lse = ring_attn(*given, plan=each, return_lse=True)
            found.append([out, *torch.autograd.grad(out.sum() + lse.sum(), given)])
        taped = all(known.replay for known in plan.tapes.by_kind.values())
        return taped and all(torch.equal(*pair) for pair in zip(*found[-2:]))

    alone, launch = threading.Lock(), KernelCall.launch

    def launched(call: KernelCall) -> None:  # the interpreter is for one thread at a time
        with alone:
            launch(call)

    with configured(**SMALL), mock.patch.object(KernelCall, "launch", launched):
        return threads.run(2, main)[0]


@pytest.fixture(scope="module")
def found(request):
    """Return what each check finds; two processes work on it from the start on."""
    run = {
        str(item.nodeid).partition("test_right_by_the_dtypes_rule")[2]
        for item in request.session.items
    }
    pool = interpreters(2)
    futures: dict[object, Future] = {"alone": pool.submit(_alone)}
    for case in FEATURES_HERE:
        futures["feature", case] = pool.submit(_feature, *case)
    futures |= {("on Hopper", *sizes): pool.submit(_as_on_hopper, *sizes) for sizes in ON_HOPPER}
    futures["dropped"] = pool.submit(_dropped, "triton")
    futures["spans"] = pool.submit(_wrong_spans)
    futures |= {("steps", i): pool.submit(_in_steps, *case) for i, case in enumerate(STEPS)}
    futures["taped"] = pool.submit(_taped)
    futures |= {("in turns", *heads): pool.submit(_in_turns, *heads) for heads in TURNS}
    futures["in halves"] = pool.submit(_dropped_in_halves)
    for i, (case, configs) in enumerate(RIGHT):
        if f"[{i}]" in run:
            futures["right", i] = pool.submit(_with, configs, faults, case)
    for i, (check, case) in enumerate(OTHERS):
        futures["other", i] = pool.submit(_with, SMALL, check, case)
    yield lambda *key: futures[key if len(key) > 1 else key[0]].result()
    pool.shutdown(cancel_futures=True)


@needs_triton
def test_they_are_code_for_a_gpu():
    """The interpreter knows nothing of this: types that stay, and what is left out.

    Nor does it know of kernels that begin early: those of keys let the next begin, those of queries
    wait for the one before.
    """
    from tests.support.triton_ir import module_of, variants

    early = dict(keys_kernel="launch_dependents", queries_kernel="wait")
    for kernel, constants in variants():
        code = module_of(kernel, constants)
        assert "tt.func public" in code
        for word in ("launch_dependents", "wait"):
            expected = constants["EARLY"] and word == early.get(kernel.fn.__name__)
            assert (f"griddepcontrol.{word}" in code) == expected


@needs_triton
def test_numbers_that_vary_compile_no_kernel_anew():
    """Counts and strides of a batch are no constants: each would be compiled for three values."""
    from ring_attention_pytorch.kernels._triton_parts import VARYING
    from tests.support.triton_ir import KERNELS

    for kernel in KERNELS:
        varying = {each.name for each in kernel.params if each.do_not_specialize}
        assert {"count", "at_once", "mask_b", "lse_b", "lse_h"} <= varying
    assert {*VARYING} <= {name for kernel in KERNELS for name in kernel.arg_names}


@needs_triton
@grid("i", range(len(RIGHT)), always=19, drawn=10)
def test_right_by_the_dtypes_rule(found, i):
    assert not found("right", i), RIGHT[i]


@needs_triton
@pytest.mark.parametrize("sizes", ON_HOPPER)
def test_right_in_the_blocks_of_hopper(found, sizes):
    assert not found("on Hopper", *sizes)


@needs_triton
@pytest.mark.parametrize("i", range(len(OTHERS)))
def test_what_sees_nothing_stays_to_the_bit_and_backward_repeats(found, i):
    assert not found("other", i), OTHERS[i]


@needs_triton
def test_by_name_through_the_public_function(found):
    assert max(found("alone").values()) < 1e-5


@needs_triton
@pytest.mark.parametrize("case", FEATURES_HERE, ids=str)
def test_features_that_its_code_knows(found, case):
    assert max(found("feature", case).values()) < 1e-5


@needs_triton
def test_it_drops_what_the_eager_kernel_drops_to_the_bit(found):
    assert torch.equal(found("dropped"), _dropped("eager"))


@needs_triton
def test_tapes_launch_what_was_launched_to_the_bit(found):
    assert found("taped") == [True, True]


@needs_triton
@pytest.mark.parametrize("heads", TURNS)
def test_heads_take_turns(found, heads):
    assert max(found("in turns", *heads)) < 1e-5


@needs_triton
def test_dropout_merges_with_what_came_before(found):
    assert found("in halves") < 1e-5


@needs_triton
def test_blocks_hold_all_that_is_seen_and_start_where_tma_can(found):
    assert not found("spans")


@needs_triton
@pytest.mark.parametrize("i", range(len(STEPS)))
def test_steps_of_positions_are_in_the_tiles(found, i):
    assert max(found("steps", i)) < 1e-5


def test_without_tiles_nothing_is_launched():
    q, kv = torch.randn(1, 3, 2, 8), torch.randn(1, 5, 1, 8)
    result, grads = (
        OutputAccumulator(q, kv.shape[-1]),
        Grads(GradAccumulator(q), GradAccumulator(kv), GradAccumulator(kv)),
    )
    keys, terms = KVBlock(kv, kv, None, ()), ScoreMods(1.0, None, 1)
    triton.forward(q, keys, [], terms, result)
    out, lse = result.finalize()
    triton.backward(Residuals(q, out, lse, q, None), keys, [], terms, grads)
    assert not out.any()
    assert not any(total.finalize().any() for total in grads)


# --- what it can't do ---


@needs_triton
def test_it_runs_on_cuda():
    assert refusal("triton", ON_A_GPU) is None
    assert (
        refusal(
            "triton", KernelRequest("cuda", torch.float32, True, d=256, d_v=1, capability=(8, 0))
        )
        is None
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(device="cpu"), "runs on CUDA, the tensors are on cpu"),
        (dict(device="mps"), "runs on CUDA, the tensors are on mps"),
        (dict(dtype=torch.float64), "has no torch.float64"),
        (dict(d=513), "no head size above 512, got 513"),
        (dict(d_v=600), "no head size above 512, got 64 and 600"),
        (dict(capability=(7, 5)), "8.0 or later, got 7.5"),
    ],
)
def test_what_it_cannot_do_it_says(change, why):
    assert why in refusal("triton", ON_A_GPU._replace(**change))


@pytest.fixture
def installed(monkeypatch):
    """`installed(version)`: as if that were the Triton here; None is none."""
    kernels.forget()

    def pretend(version: str | None) -> None:
        fake = None if version is None else SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "triton", fake)

    yield pretend
    kernels.forget()


@pytest.mark.parametrize("version", [None, "2.1.0", "3.3.1"])
def test_a_missing_or_old_package_is_named_with_how_to_get_it(installed, version):
    installed(version)
    how = r'needs triton 3.4 or later \(pip install "triton>=3.4"\)'
    with pytest.raises(ValueError, match=f"kernel='triton' {how}"):
        choose("triton", ON_A_GPU)


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0+git1234", "4.0"])
def test_newer_packages_are_taken(installed, version):
    installed(version)
    assert choose("triton", ON_A_GPU).forward is triton.forward


def test_on_the_cpu_it_is_never_chosen_and_only_interpreted_by_name(monkeypatch):
    softclamped = KernelRequest("cpu", torch.float32, softclamp=True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="kernel='triton' runs on CUDA"):
        choose("triton", softclamped)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(None, softclamped).name == "eager"
    assert choose(None, softclamped._replace(softclamp=False)).name == "sdpa"


def test_rows_count_beside_the_keys_they_see(monkeypatch):
    """As a call has them, in what it asks for."""
    asked = []
    monkeypatch.setattr(
        triton, "config_for", lambda *given: asked.append(given) or Config(1, 1, 1, 1)
    )
    q, v = torch.zeros(1, 12, 2, 16), torch.zeros(1, 12, 2, 8)
    tiles = [Tile(slice(i, i + 6), slice(i, i + 6), None, None) for i in (0, 6)]
    triton._config("forward", q, SimpleNamespace(v=v), tiles)
    assert asked == [("forward", (16, 8), torch.float32, None, 6.0, 12, 1)]


def test_tiles_that_are_used_again_know_how_many_heads_share_their_blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    tiles = Tiles([Tile(slice(0, 64), slice(0, 64), None, 0)])
    v = SimpleNamespace(shape=(1, 64, 2, 128))
    for heads, pack in ((16, 8), (8, 4), (4, 1)):
        q = SimpleNamespace(
            shape=(1, 64, heads, 128), dtype=torch.bfloat16, device="cuda", is_cuda=True
        )
        assert triton._config("queries", q, SimpleNamespace(v=v), tiles).pack == pack
