"""Routed modules: right on one process, and on a ring the same in results and all gradients."""

import doctest
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import routing
from ring_attention_pytorch.geometry.layouts import positions
from tests.support import routing_reference, threads
from tests.support.reference import relative_error
from tests.support.routing_cases import (
    DIM,
    HEADS,
    LAYOUTS,
    LIGHT,
    MODULES,
    SOFT,
    Case,
    by_loops,
    call,
    check_in_processes,
    check_in_threads,
    results,
    worst,
)
from tests.support.sampling import grid

CAUSAL = ("causal feedforward", "autoregressive", "causal block")


def length_of(module: str) -> int:
    return 21 if module == "image" else 23


# --- right on one process ---


def plain(name: str, **over) -> nn.Module:
    """A module with soft gates, so that the choice and the gates have a say, and no rotary."""
    options = {**HEADS, **LIGHT, **SOFT, **over}
    makers = {
        "attention": lambda: routing.ConditionalRoutedAttention(
            DIM, num_heavy_tokens_q=5, num_heavy_tokens_kv=0.4, num_routed_kv=2, **options
        ),
        "autoregressive": lambda: routing.ConditionalRoutedAutoregressiveAttention(
            DIM, num_heavy_tokens_q=2, num_heavy_tokens_kv=3, num_routed_kv=2,
            heavy_window_size=5, **options,
        ),
        "feedforward": MODULES["feedforward"],
        "causal feedforward": MODULES["causal feedforward"],
    }  # fmt: skip
    return makers[name]()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 4, 17])
@pytest.mark.parametrize(
    "name", ["attention", "autoregressive", "feedforward", "causal feedforward"]
)
def test_a_module_equals_loops_over_its_tokens(name: str, length: int, masked: bool) -> None:
    case = Case("feedforward", length=length)
    module, data = plain(name).double(), case.data()
    mask = data["mask"] if masked else torch.ones(case.batch, length, dtype=torch.bool)
    oracle = getattr(routing_reference, name.removeprefix("causal "))
    x = data["x"].requires_grad_()
    inputs = [x, *module.parameters()]
    got = module(x, mask=mask if masked else None)
    want = oracle(module, x, mask, LIGHT["light_window_size"])
    assert relative_error(got, want) < 1e-12
    pairs = [
        torch.autograd.grad(out, inputs, data["dout"], allow_unused=True) for out in (got, want)
    ]
    for p, g, w in zip(inputs, *pairs):
        zero = torch.zeros_like(p)
        assert relative_error(zero if g is None else g, zero if w is None else w) < 1e-10


@pytest.mark.parametrize("module", MODULES)
def test_gradients_are_those_of_finite_differences(module: str) -> None:
    """Gates are soft here: a straight-through gradient is by intent not the function's own."""
    case = Case(module, length=9, batch=1, context=8, masked=False, seed=1)
    made, data = case.make(), case.data()
    for router in made.modules():
        if isinstance(router, routing.CoordinateDescentRouter):
            router.straight_through = False
    names = [n for n, _ in made.named_parameters() if "routing_token" in n or "null" in n]
    tensors = [made.get_parameter(n).detach().clone().requires_grad_() for n in names]

    def f(x: Tensor, context: Tensor, *values: Tensor) -> Tensor:
        given = data | {"x": x, "context": context}

        class Whole(nn.Module):  # functional_call wants a module whose forward takes tensors
            def __init__(self) -> None:
                super().__init__()
                self.m = made

            def forward(self) -> Tensor:
                return call(made, case, given)

        return torch.func.functional_call(Whole(), {f"m.{n}": v for n, v in zip(names, values)})

    inputs = [data["x"].requires_grad_(), data["context"].requires_grad_(), *tensors]
    assert torch.autograd.gradcheck(f, inputs, fast_mode=True)


# --- on a ring the same ---


@grid(
    "module, size, layout",
    [
        (module, *how)
        for module in MODULES
        for how in ((1, "zigzag"), *itertools.product((2, 3, 4), LAYOUTS))
    ],
    always=4 * len(MODULES),
    drawn=12,
)
def test_a_ring_of_threads_gives_one_process_results(module: str, size: int, layout: str) -> None:
    check_in_threads(Case(module, length_of(module), layout, masked=size != 3), size)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("module", sorted({*MODULES} - {"heavy attention", "cross by blocks"}))
def test_a_ring_of_threads_gives_what_loops_over_tokens_do(module: str, masked: bool) -> None:
    case = Case(module, length=17, layout="striped" if masked else "zigzag", masked=masked)
    want = results(case.make(), case, case.data(), by_loops)
    by_rank, _ = threads.run(3, case.shard)
    assert max(worst(case, by_rank, want).values()) < 1e-10


@grid(
    "module, length",
    itertools.product(MODULES, (0, 1, 2, 5, 7)),
    always=2 * len(MODULES),
    drawn=8,
)
def test_short_sequences_some_ranks_empty(module: str, length: int) -> None:
    if module == "image" and length == 0:
        return
    layout = LAYOUTS[(length + len(module)) % 3]
    check_in_threads(Case(module, length, layout, context=max(length - 2, 0)), 4)


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_of_processes_gives_one_process_results(pools: Callable, size: int) -> None:
    layout = {2: "striped", 4: "zigzag"}[size]
    cases = [Case(module, length_of(module), layout, masked=size == 4) for module in MODULES]
    check_in_processes(cases, pools(size))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_tokens_are_routed_alike_on_any_ring(layout: str) -> None:
    """All scores are ties: the earlier token wins, wherever it is."""
    x = torch.randn(1, 1, DIM, dtype=torch.float64).expand(1, 19, DIM)
    case = Case("attention", 19, layout)
    want = case.make()(x)

    def main(ring: threads.ThreadRing) -> tuple[Tensor, Tensor]:
        at = positions(layout, rank=ring.rank, ring_size=ring.size, length=19)
        return at, case.make(ring_attn=True, layout=layout, group=ring)(x[:, at])

    for at, got in threads.run(3, main)[0]:
        assert relative_error(got, want[:, at]) < 1e-12


def test_tokens_in_equal_surroundings_are_ties_on_any_ring() -> None:
    """As in a run of blanks: what attention makes of them differs by rounding, by rings too."""
    case, n = Case("rotary causal block", 96), 96
    few = torch.randn(4, DIM, dtype=torch.float64)
    lengths = torch.tensor([25, 3, 19, 1, 28, 20])
    x = few[torch.tensor([0, 1, 2, 3, 0, 1]).repeat_interleave(lengths)].expand(1, n, DIM)
    want = case.make()(x)
    for size, layout in itertools.product((2, 4), LAYOUTS):

        def main(ring: threads.ThreadRing, layout: str = layout) -> tuple[Tensor, Tensor]:
            at = positions(layout, rank=ring.rank, ring_size=ring.size, length=n)
            return at, case.make(ring_attn=True, layout=layout, group=ring)(x[:, at])

        for at, got in threads.run(size, main)[0]:
            assert relative_error(got, want[:, at]) < 1e-10


def test_activation_checkpointing_on_a_ring() -> None:
    """Backward then makes the exchanges of forward again, on all ranks alike."""
    case = Case("causal block", layout="zigzag", masked=False)
    x, dout = case.data()["x"].requires_grad_(), case.data()["dout"]
    want = case.make()(x)
    (dx,) = torch.autograd.grad(want, x, dout)

    def main(ring: threads.ThreadRing) -> None:
        at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=case.length)
        module = case.make(ring_attn=True, layout="zigzag", group=ring)
        mine = x[:, at].detach().requires_grad_()
        out = checkpoint(module, mine, use_reentrant=False)
        assert relative_error(out, want[:, at]) < 1e-12
        (got,) = torch.autograd.grad(out, mine, dout[:, at])
        assert relative_error(got, dx[:, at]) < 1e-12

    threads.run(3, main)


@pytest.mark.parametrize("module", ["block", "causal block"])
def test_a_nan_stays_in_its_sample_and_nobody_hangs(module: str) -> None:
    case = Case(module, masked=False)

    def main(ring: threads.ThreadRing) -> Tensor:
        at = positions("contiguous", rank=ring.rank, ring_size=ring.size, length=case.length)
        x = case.data()["x"][:, at].clone()
        if ring.rank == 0:
            x[0, 0] = torch.nan
        return case.make(ring_attn=True, layout="contiguous", group=ring)(x).isnan()

    first, _ = threads.run(2, main)[0]
    assert first[0, 0].all()
    assert not first[1].any()


# --- nothing leaks ---


def moved(module: nn.Module, case: Case, change: Callable[[dict[str, Tensor]], None]) -> Tensor:
    """Return which tokens of the result a change of the data moves: bool `[b, n]`."""
    data = case.data()
    with torch.no_grad():
        before = call(module, case, data)
        data = {n: t.clone() for n, t in data.items()}
        change(data)
        return (call(module, case, data) != before).any(-1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("module", CAUSAL)
def test_no_token_is_moved_by_a_later_one(module: str, masked: bool) -> None:
    """Every token is changed by itself, in a sample of its own."""
    for seed, by in ((0, 1.0), (1, -30.0), (2, 5.0)):
        case = Case(module, masked=masked, seed=seed)
        n, data = case.length, case.data()
        x, mask = (
            data[name][:1].repeat(n + 1, *[1] * (data[name].ndim - 1)) for name in ("x", "mask")
        )
        x[torch.arange(n), torch.arange(n)] += by
        with torch.no_grad():
            out = call(case.make(), case, {"x": x, "mask": mask})
        touched = (out[:-1] - out[-1]).abs().amax(-1) > 1e-12
        assert not touched.tril(-1).any()
        changes_itself = touched.diagonal()  # but a masked one, which nobody sees, needs not
        assert (changes_itself | ~mask[0] & masked).all()
        assert touched.triu(1).any()


@pytest.mark.parametrize("module", CAUSAL)
def test_gradients_reach_no_later_token(module: str) -> None:
    case = Case(module, masked=False)
    made, x = case.make(), case.data()["x"].requires_grad_()
    out = call(made, case, case.data() | {"x": x})
    for token in range(case.length):
        (grad,) = torch.autograd.grad(out[:, token].sum(), x, retain_graph=True)
        assert not grad[:, token + 1 :].any()


@pytest.mark.parametrize("module", CAUSAL)
def test_decoding_token_by_token_gives_what_training_gave(module: str) -> None:
    case = Case(module, masked=False)
    made, x = case.make(), case.data()["x"]
    want = made(x)
    for n in range(1, case.length + 1):
        assert relative_error(made(x[:, :n])[:, -1], want[:, n - 1]) < 1e-12


@pytest.mark.parametrize("module", MODULES)
def test_samples_of_a_batch_know_nothing_of_each_other(module: str) -> None:
    case = Case(module, length_of(module), masked=False, batch=3)
    made = case.make()
    for sample in range(3):

        def change(data: dict[str, Tensor], sample: int = sample) -> None:
            data["x"][sample] = torch.randn_like(data["x"][sample]) * 3
            data["context"][sample] = torch.randn_like(data["context"][sample]) * 3

        touched = moved(made, case, change)
        assert touched[sample].any()
        assert not touched[[s for s in range(3) if s != sample]].any()


@pytest.mark.parametrize("module", MODULES)
def test_masked_tokens_are_never_seen_or_routed(module: str) -> None:
    case = Case(module, length_of(module))
    mask, context = case.data()["mask"], case.data()["context_mask"]

    def change(data: dict[str, Tensor]) -> None:
        data["x"][~mask] += 50.0
        data["context"][~context] += 50.0

    assert not moved(case.make(), case, change)[mask].any()


@pytest.mark.parametrize("module", MODULES)
def test_a_sample_without_a_real_token_gives_no_nan(module: str) -> None:
    case = Case(module, length_of(module))
    data = case.data()
    data["mask"][0] = False
    data["context_mask"][0] = False
    for found in results(case.make(), case, data).values():
        assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", ["block", "causal block", "cross", "image"])
def test_other_dtypes(module: str, dtype: torch.dtype) -> None:
    case = Case(module, length_of(module))
    data = {n: t.to(dtype) if t.is_floating_point() else t for n, t in case.data().items()}
    out = call(case.make().to(dtype), case, data)
    assert out.dtype == dtype
    assert out.isfinite().all()


def test_under_autocast() -> None:
    case = Case("causal block")
    module = case.make().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(case.data()["x"].float())
    out.sum().backward()
    want = case.make()(case.data()["x"])
    # a choice may tip in 16 bits; most tokens are as they were
    near = (out - want).norm(dim=-1) < 0.1 * want.norm(dim=-1)
    assert near.float().mean() > 0.7


# --- failing well ---

WRONG = {
    "num_heavy_tokens must be at least 1": lambda: routing.ConditionalRoutedFeedForward(
        8, num_heavy_tokens=0
    ),
    "as a share must be above 0": lambda: routing.ConditionalRoutedFeedForward(
        8, num_heavy_tokens=1.5
    ),
    "need n_iters": lambda: routing.CoordinateDescentRouter(8, eps_init=4.0),
    "triton_checkpoint_segments": lambda: routing.CoordinateDescentRouter(
        8, triton_checkpoint_segments=4
    ),
    "eps must be positive": lambda: routing.CoordinateDescentRouter(8, eps=0.0),
    "multiple of the 3 routed sets": lambda: routing.ConditionalRoutedAttention(
        8, num_heavy_tokens_q=1, num_heavy_tokens_kv=1, num_routed_kv=3
    ),
    "kernel must be None or one of": lambda: routing.ConditionalRoutedAttention(
        8, num_heavy_tokens_q=1, num_heavy_tokens_kv=1, kernel="x"
    ),
    "use_flash_attn=True": lambda: routing.ConditionalRoutedAttention(
        8, num_heavy_tokens_q=1, num_heavy_tokens_kv=1, kernel="eager", use_flash_attn=True
    ),
    "num_sets_kv must be 1 or": lambda: routing.ConditionalRoutedCrossAttention(
        8, num_tokens_q=1, num_tokens_kv=1, num_sets_kv=2
    ),
    "heavy_window_size is of a causal block": lambda: routing.ConditionalRoutedTransformerBlock(
        8, num_heavy_attn_tokens_q=1, num_heavy_attn_tokens_kv=1, num_heavy_ff_tokens=1,
        heavy_window_size=4,
    ),
    "already chooses by": lambda: routing.ConditionalRoutedFeedForward(
        8, num_heavy_tokens=1, heavy_window_size=4, router_kwargs=dict(route_block_size=2)
    ),
    "needs ring_attn=True": lambda: routing.ConditionalRoutedFeedForward(
        8, num_heavy_tokens=1, layout="zigzag"
    ),
    "depth must be at least 1": lambda: routing.ConditionalRoutedTransformer(
        num_tokens=2, dim=8, depth=0, num_heavy_attn_tokens_q=1, num_heavy_attn_tokens_kv=1,
        num_heavy_ff_tokens=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_every_public_name_has_an_example() -> None:
    finder = doctest.DocTestFinder()
    for name in routing.__all__:
        thing = getattr(routing, name)
        text = "".join(t.docstring for t in finder.find(thing, name) if t.examples)
        assert ">>>" in text, name
