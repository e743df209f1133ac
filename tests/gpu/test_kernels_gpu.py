"""The kernels on a GPU: the interpreter's cases and longer ones, in every dtype."""

from dataclasses import replace

import pytest
import torch

from ring_attention_pytorch import RingPlan, explain_kernel, ring_attn
from ring_attention_pytorch.kernels import KERNELS, flex, refusal
from ring_attention_pytorch.kernels._configs import Config, configured
from tests.support.kernel_cases import (
    CASES,
    NAMES,
    STRIDED,
    WIDE,
    Data,
    KernelCase,
    asked,
    disturbed,
    faults,
    random_cases,
    results,
    unrepeated,
)
from tests.support.reference import dense_attention, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LONG = [
    KernelCase(700, 700, ((0, 700, 0, 700, None, 0),), d=(128, 128)),
    KernelCase(1024, 640, d=(128, 128), heads=(8, 2), pieces=2),
    KernelCase(900, 900, ((0, 900, 0, 900, 200, 0),), d=(64, 64), masked=True, pieces=3),
    KernelCase(513, 777, d=(96, 40), softclamp=5.0, heads=(6, 2)),
    KernelCase(
        600, 600, ((0, 300, 0, 300, None, 0), (300, 600, 0, 600, None, 300)), d=(256, 256),
        heads=(2, 1), scale=-0.1,
    ),
    KernelCase(333, 459, ((0, 333, 0, 333, None, 0), (100, 333, 333, 459, None, None)), d=(80, 80)),
    KernelCase(280, 340, ((15, 280, 0, 340, None, None), (0, 15, 1, 9, None, 3)), d=(128, 128)),
    KernelCase(512, 512, ((128, 512, 0, 512, None, None),), d=(128, 64), laid="sliced"),
]  # fmt: skip

CAUSAL = (None, 0)


def documents(length: int, each: int) -> tuple[tuple[int | None, ...], ...]:
    """The tiles of causal documents of `each` tokens."""
    starts = range(0, length, each)
    return tuple((i, min(i + each, length)) * 2 + CAUSAL for i in starts)


LONG += [  # head sizes of today's models, and the widest
    KernelCase(300, 333, ((0, 300, 0, 333, None, 33),), d=d, heads=(4, 2))
    for d in ((96, 96), (192, 192), (192, 128), (256, 64), (320, 320), (512, 512))
]
LONG += [
    KernelCase(length, length, documents(length, each), d=(d, d), heads=(4, 2))
    for d in (64, 128) for length, each in ((1600, 100), (1500, 301), (700, 250))
]  # fmt: skip
EVEN = [  # head sizes that every kernel has
    KernelCase(200, 200, ((0, 200, 0, 200, *CAUSAL),), d=(64, 64)),
    KernelCase(130, 300, d=(128, 128), pieces=3, heads=(8, 2), batch=2),
    KernelCase(300, 170, ((0, 300, 0, 170, *CAUSAL),), d=(64, 64), heads=(3, 1)),
    KernelCase(150, 210, ((0, 150, 0, 210, None, 60),), d=(64, 64)),
    KernelCase(
        200, 200, ((0, 100, 0, 100, *CAUSAL), (100, 200, 0, 200, None, 100)), d=(128, 128),
    ),
    KernelCase(1, 64, d=(64, 64), heads=(8, 1)),
    KernelCase(64, 1, d=(64, 64), heads=(4, 4), batch=2),
    KernelCase(1, 1, d=(128, 128), pieces=1),
    KernelCase(3, 2, ((0, 1, 0, 1, None, None), (1, 3, 0, 2, None, 1)), d=(64, 64)),
    KernelCase(200, 200, ((0, 200, 0, 200, 40, 0),), d=(64, 64), pieces=2),
    KernelCase(180, 200, ((0, 180, 0, 200, 20, 25),), d=(128, 128), heads=(6, 2)),
    KernelCase(257, 257, ((0, 257, 0, 257, *CAUSAL),), d=(64, 64), softclamp=3.0),
    KernelCase(129, 129, ((0, 129, 0, 129, *CAUSAL),), d=(64, 64), laid="heads first", batch=2),
    KernelCase(129, 131, d=(64, 64), laid="sliced", batch=2),
    KernelCase(65, 67, d=(128, 128), laid="columns", batch=2, scale=0.3),
    KernelCase(300, 260, d=(128, 64), heads=(4, 1)),
    KernelCase(
        200, 170, ((0, 170, 0, 170, *CAUSAL), (170, 200, 0, 170, None, None)), d=(192, 128),
        laid="heads first", batch=2,
    ),
    KernelCase(130, 300, d=(64, 128), pieces=3, heads=(8, 2), batch=2),
    # packed documents, with gaps between them on either side
    KernelCase(
        600, 600,
        ((3, 90, 3, 90, *CAUSAL), (90, 91, 90, 91, *CAUSAL), (99, 300, 99, 300, *CAUSAL),
         (300, 303, 310, 313, *CAUSAL), (320, 600, 320, 600, *CAUSAL)),
        d=(128, 128), heads=(8, 2), batch=2, pieces=2,
    ),
    KernelCase(
        400, 500,
        ((0, 100, 10, 170, None, None), (110, 111, 200, 203, None, None),
         (130, 260, 203, 330, None, None), (260, 400, 340, 500, None, None)),
        d=(64, 64), heads=(3, 3), batch=2,
    ),
    KernelCase(
        500, 500, tuple((i, i + 125, i, i + 125, 40, 0) for i in range(0, 500, 125)), d=(64, 64),
        softclamp=3.0,
    ),
    # more than a call takes, keys the other way round, windows on one side of rectangles
    KernelCase(
        900, 900, tuple((i, i + 3, i, i + 3, *CAUSAL) for i in range(0, 900, 3)), d=(64, 64),
    ),
    KernelCase(
        400, 400, tuple((i, i + 80, 320 - i, 400 - i, None, None) for i in range(0, 400, 80)),
        d=(128, 128), heads=(4, 1),
    ),
    KernelCase(
        300, 420,
        tuple((i, i + 100, i * 7 // 5, i * 7 // 5 + 140, 30, None) for i in range(0, 300, 100)),
        d=(64, 64),
    ),
]  # fmt: skip
ALL = CASES + LONG + EVEN + STRIDED + WIDE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("i", range(len(ALL)))
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ("sdpa", "flex")])
def test_every_kernel_is_right_by_the_dtypes_rule(kernel, i, dtype):
    case = replace(ALL[i], dtype=dtype)
    if (why := refusal(kernel, asked(case))) is not None:
        pytest.skip(why)
    assert not faults(case, kernel, "cuda"), case


# few: each is compiled for seconds
FLEX = [
    replace(LONG[0], dtype=torch.bfloat16),
    replace(LONG[2], dtype=torch.float16),
    replace(LONG[3], dtype=torch.float32),
    KernelCase(150, 150, ((0, 150, 0, 150, *CAUSAL),), d=(256, 256), dtype=torch.bfloat16),
    KernelCase(150, 150, ((0, 150, 0, 150, *CAUSAL),), d=(256, 256), dtype=torch.float32),
]


@pytest.mark.parametrize("case", FLEX, ids=lambda case: f"{case.d}-{case.dtype}")
def test_flex_attention_is_right_by_the_dtypes_rule(case):
    assert refusal("flex", asked(case)) is None
    assert not faults(case, "flex", "cuda"), case


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_any_predicate_is_fused(dtype, bound):
    """Against the eager kernel in float64; of sample, head, and a tensor of its own."""
    draw, strangers = torch.Generator().manual_seed(0), torch.arange(1000, device="cuda") // 70
    shapes = [(2, 1000, 8, 64), (2, 1000, 2, 64), (2, 1000, 2, 64), (2, 1000, 8, 64)]
    q, k, v, dout = (torch.randn(s, generator=draw).to("cuda", dtype) for s in shapes)
    mask = (torch.rand((2, 1000), generator=draw) < 0.7).cuda()
    options = dict(
        causal=True, key_mask=mask, alibi_slopes=torch.linspace(0, 0.1, 8, device="cuda"),
        mask_mod=lambda b, h, i, j: (strangers[i] != strangers[j]) & ((b + h + i * j) % 3 != 0),
    )  # fmt: skip
    told = {name: given for name, given in options.items() if name != "causal"}
    assert explain_kernel(q, k, v, **told).endswith("flex: runs")

    def results(dtype, kernel):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        out, lse = ring_attn(*leaves, **options, kernel=kernel, return_lse=True)
        size = torch.where(lse.isinf(), 0.0, 0.1).to(lse)
        return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout.to(dtype), size))]

    got, want = results(dtype, "flex"), results(torch.float64, "eager")
    assert max(map(relative_error, got, want)) < bound


def test_no_mask_of_pairs_is_ever_in_memory():
    n, tokens = 2**15, torch.arange(2**15, device="cuda", dtype=torch.int32)
    shown = flex._shown(
        torch.zeros_like(tokens), tokens + 1, None, lambda b, h, i, j: (i + j) % 3 > 0
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mask = flex._mask(shown, (1, 8, n, n), tokens.device)
    assert torch.cuda.max_memory_allocated() - before < 2**27  # the pairs were 2 ** 30
    assert mask.shape == (1, 1, n, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_cases(dtype):
    """With small blocks: several in each tile, and one compilation for many cases."""
    small = {name: Config(16, 16, 4, 1, pack=4) for name in ("forward", "keys", "queries")}
    for case in random_cases(20, dtype):
        with configured(**(small if dtype == torch.float32 else {})):
            assert not (found := faults(case, "triton", "cuda")), (found, case)


@pytest.mark.parametrize("i", range(4, 7))
def test_what_sees_nothing_stays_to_the_bit(i):
    assert not disturbed(CASES[i], "triton", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_five_hundred_runs_give_the_same_bits(dtype):
    case = replace(LONG[0], dtype=dtype, masked=True)
    assert not unrepeated(case, "triton", "cuda", times=500)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("i", [0, *range(-7, 0)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_claims_a_deterministic_backward_repeats(kernel, i, dtype):
    """All memory is NaN until it is written, too: so PyTorch makes it then."""
    case = replace(EVEN[i], dtype=dtype)
    if (why := refusal(kernel, asked(case)._replace(deterministic=True))) is not None:
        pytest.skip(why)
    torch.use_deterministic_algorithms(True)
    try:
        assert not faults(case, kernel, "cuda")
        assert not unrepeated(case, kernel, "cuda", times=50)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("far", ["batches", "rows"])
def test_offsets_may_pass_32_bits(far):
    case = KernelCase(20, 20, ((0, 20, 0, 20, None, 0),), d=(32, 32), dtype=torch.float16, batch=2)
    near = Data(case, "cuda")
    want = results(case, near, "triton")
    stretched = Data(case, "cuda")
    stretched.given = [_stretched(t, 0 if far == "batches" else 1) for t in near.given]
    got = results(case, stretched, "triton")
    assert not [name for name in NAMES if not torch.equal(got[name], want[name])]


def _stretched(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy t so that the last along `dim` is more than 2^31 elements behind the first."""
    stride = list(t.stride())
    stride[dim] = 2**31 // (t.shape[dim] - 1) + 16
    stride[dim] -= stride[dim] % 16
    memory = torch.empty(stride[dim] * (t.shape[dim] - 1) + 2**22, dtype=t.dtype, device="cuda")
    far = memory.as_strided(t.shape, stride)
    return far.copy_(t)


def compiled() -> list[int]:
    """Return how many variants of each kernel there are by now."""
    from tests.support.triton_ir import KERNELS

    here = torch.cuda.current_device()
    return [len(kernel.device_caches[here][0]) for kernel in KERNELS]


def test_after_warm_up_nothing_is_compiled(caplog):
    """All kernels were by then, at the same time; and what was not launched has done no harm."""
    q, k, v, dout = (
        torch.randn(1, 400, heads, 48, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    mine = [t.requires_grad_() for t in (q, k, v)]
    before, plan = compiled(), RingPlan.make(*mine, causal=True, kernel="triton")
    with caplog.at_level("INFO"):
        plan.warm_up()
    after = compiled()
    assert all(a > b for a, b in zip(after, before))
    for name in ("forward_kernel", "keys_kernel", "queries_kernel"):
        assert f"{name} is compiled" in caplog.text
    exact = [t.detach().double().requires_grad_() for t in mine]
    with torch.device("cuda"):
        want, _ = dense_attention(*exact, causal=True)
    wanted = [want, *torch.autograd.grad(want, exact, dout.double())]
    for _ in range(3):
        out = ring_attn(*mine, plan=plan)
        got = [out, *torch.autograd.grad(out, mine, dout)]
        assert max(map(relative_error, got, wanted)) < 1.5e-2
    assert compiled() == after


def test_a_first_backward_compiles_its_kernels_together(caplog):
    q = torch.randn(1, 70, 2, 24, device="cuda", dtype=torch.float16, requires_grad=True)
    with caplog.at_level("INFO"):
        ring_attn(q, q, q, kernel="triton").sum().backward()
    for name in ("keys_kernel", "queries_kernel"):
        assert f"{name} is compiled" in caplog.text
