"""A ring generates what one process does; what cannot be is refused on all ranks."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch import RingCache, Summaries, shard_batch
from ring_attention_pytorch.nn.generation import Sampling
from tests.support.generation_cases import CASES, HYBRID, ROUTED, WORDS, Case
from tests.support.reference import relative_error


def generated(cases: list[Case]) -> list[Any]:
    return [case.over() for case in cases]


@cache
def wanted() -> list[Any]:
    return [case.anew() for case in CASES + ROUTED + HYBRID]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_of_any_size_generates_the_same(pools: Callable, size: int) -> None:
    """Every second case over three ranks, the others over one to four."""
    some = slice(0, None, 2) if size == 3 else slice((1, 3, 5)[size // 2], None, 6)
    cases = (CASES + ROUTED + HYBRID)[some]
    for found in pools(size).run(generated, cases):
        for case, got, right in zip(cases, found, wanted()[some], strict=True):
            assert case.same(got, right), case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_generates_by_its_weights(case: Case) -> None:
    """Angles are of float32. Where tokens are the largest, they are the oracle's, too."""
    tokens, logits = case.over()
    exact = case.by_weights(tokens, len(logits))
    for got, want in zip(logits.double(), exact, strict=True):
        for one, right in zip(got, want):
            assert relative_error(one, right) < 1e-5
    if "temperature" not in case.call:
        chosen = torch.tensor(tokens)[:, case.length :]
        assert torch.equal(chosen, exact.argmax(-1).T)


def generated_by_weights(case: Case) -> float:
    tokens, logits = case.over()
    if logits is None:
        return 0.0
    return relative_error(logits.double(), case.by_weights(tokens, len(logits)))


def test_a_ring_generates_by_its_weights(pools: Callable) -> None:
    for case in (CASES[1], CASES[3], CASES[7]):
        assert max(pools(3).run(generated_by_weights, case)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_logits_are_as_exact_as_those_of_one_process(
    pools: Callable, dtype: torch.dtype
) -> None:
    case = Case(call=dict(prefill_chunk_size=9), dtype=dtype, new=1)
    exact = case.model().double()(case.prompt())[:, -1]
    allowed = 2 * relative_error(case.anew()[1][0].double(), exact)
    (_, logits), *_ = pools(3).run(case.over)
    assert relative_error(logits[0].double(), exact) < allowed


SMALL = [CASES[1], ROUTED[0]]


def in_fewer_bits() -> list[Any]:
    dtypes = torch.float8_e4m3fn, torch.bfloat16
    return [case.over(cache_dtype=dtype) for case in SMALL for dtype in dtypes]


def test_keys_that_are_kept_in_fewer_bits_are_close() -> None:
    right = [case.anew()[1][0] for case in SMALL]
    errors = [relative_error(got[0], right[i // 2]) for i, (_, got) in enumerate(in_fewer_bits())]
    assert 1e-3 < min(errors[::2]) < max(errors[::2]) < 0.1
    assert 1e-5 < min(errors[1::2]) < max(errors[1::2]) < 0.01


def test_a_ring_rounds_as_one_process_does(pools: Callable) -> None:
    want = [tokens for tokens, _ in in_fewer_bits()]
    for found in pools(3).run(in_fewer_bits):
        assert [tokens for tokens, _ in found] == want


def in_two_rings() -> tuple[Any, Any]:
    seed = dist.get_rank() // 2
    return CASES[0].over(seed=seed, ring_size=2), CASES[0].anew(seed)


def test_several_rings_generate_each_its_own(pools: Callable) -> None:
    found = pools(4).run(in_two_rings)
    assert all(CASES[0].same(got, want) for got, want in found)
    assert found[0][0][0] != found[2][0][0]


def held() -> tuple[int, int, int]:
    """Bytes of keys and values on this rank, in one process, and with windows and in 8 bits."""
    found = []
    make = RingCache.__init__

    def noting(cache: RingCache, *args: Any, **given: Any) -> None:
        make(cache, *args, **given)
        found.append(cache.nbytes)

    RingCache.__init__ = noting
    try:
        case = Case(length=500, new=12, call=dict(prefill_chunk_size=100))
        case.over()
        case.model().generate(case.prompt(), case.new)
        short = replace(case, options=dict(max_lookback_seq_len=(None, 9)))
        short.over(cache_dtype=torch.float8_e4m3fn)
    finally:
        RingCache.__init__ = make
    return found[0], found[1], found[2]


def test_each_rank_holds_its_share(pools: Callable) -> None:
    for share, whole, small in pools(4).run(held):
        assert share <= 1.1 * whole / 4
        assert small <= 0.76 * share * 12 / 64  # bytes of eight numbers


def sampled_apart() -> list[Any]:
    """Without a seed, and with ranks whose own random numbers differ."""
    torch.manual_seed(dist.get_rank())
    case = Case(call=dict(temperature=1.0, eos=[5, 9, 12, 30]))
    return [case.over()[0] for _ in range(3)]


def test_ranks_with_random_numbers_of_their_own_go_on_alike(pools: Callable) -> None:
    first, *others = pools(3).run(sampled_apart)
    assert others == [first, first]


def misuse(name: str) -> None:
    model, ids = CASES[0].model(ring_attn=True), CASES[0].prompt()
    odd = dist.get_rank() == 1
    routed = ROUTED[0].model(ring_attn=True)
    right = torch.ones_like(ids, dtype=torch.bool)
    right[0, 4] = False
    deeds: dict[str, Callable[[], Any]] = {
        "cache_dtype must be the same": lambda: model.generate(
            ids, 2, cache_dtype=torch.float8_e4m3fn if odd else None
        ),
        "dtype must be one of": lambda: model.generate(ids, 2, cache_dtype=torch.int8),
        "values of ids must be the same": lambda: model.generate(ids + odd * (ids < 9), 2),
        "seed must be the same": lambda: model.generate(ids, 2, 1.0, seed=3 + odd),
        "max_new_tokens must be at least 1": lambda: model.generate(ids, 0 if odd else 2),
        "top_p need a temperature": lambda: model.generate(ids, 2, top_p=0.5),
        "top_k must be at least 1": lambda: model.generate(ids, 2, 1.0, top_k=0),
        "top_p must be above 0": lambda: model.generate(ids, 2, 1.0, top_p=1.5),
        "finite, got inf": lambda: model.generate(ids, 2, float("inf")),
        "finite, got nan": lambda: model.generate(ids, 2, float("nan")),
        "finite, got 1e-39": lambda: model.generate(ids, 2, 1e-39 if odd else 1.0),
        "finite, got -1.0": lambda: model.generate(ids, 2, -1.0),
        "eos must be from 0 to 30": lambda: model.generate(ids, 2, eos=WORDS),
        "padding on the left": lambda: model.generate(ids, 2, mask=right),
        "take no mask": lambda: routed.generate(ids, 2, mask=right | True),
        "ids must be 0 to 30": lambda: model.generate(ids + odd * WORDS, 2),
        "there must be a prompt": lambda: model.generate(ids[:, :0], 2),
        "parameter max_new_tokens": lambda: model.generate(ids, "2" if odd else 2),
        "kernel must be None": lambda: model.generate(ids, 2, kernel="cudnn"),
        "prefill_chunk_size must be at least 1": lambda: model.generate(
            ids, 2, prefill_chunk_size=0
        ),
        "the block of a batch": lambda: in_a_block(model, ids),
        "must be causal": lambda: not_causal(ids),
        "logits are NaN": lambda: broken(model, ids),
        "logits are NaN or inf": lambda: broken(model, ids, torch.inf),
        "are the model's weights finite": lambda: broken_after_its_end(model, ids),
    }
    deeds[name]()


def in_a_block(model: Any, ids: torch.Tensor) -> None:
    with shard_batch({"input_ids": ids}):
        model.generate(ids, 2)


def not_causal(ids: torch.Tensor) -> None:
    model = Case().model(ring_attn=True)
    model.causal = False
    model.generate(ids, 2)


def broken(model: Any, ids: torch.Tensor, value: float = torch.nan) -> None:
    model.to_logits[1].weight.data[3] = value
    model.generate(ids, 4, temperature=1.0, seed=3, eos=3)


def broken_after_its_end(model: Any, ids: torch.Tensor) -> None:
    """A sequence ends, reads its end, and has no numbers from there on; the other goes on."""
    for words in ids[:, :20].split(2, dim=1):
        end, other = model.generate(words, 1)[:, -1].tolist()
        if end not in (other, *words.flatten().tolist()):
            model.token_emb.weight.data[end] = torch.nan
            model.generate(words, 3, eos=end)
            return


REFUSED = [
    "cache_dtype must be the same", "dtype must be one of",
    "values of ids must be the same", "seed must be the same", "max_new_tokens must be at least 1",
    "top_p need a temperature", "top_k must be at least 1", "top_p must be above 0",
    "finite, got inf", "finite, got nan", "finite, got 1e-39", "finite, got -1.0",
    "eos must be from 0 to 30", "padding on the left",
    "take no mask", "ids must be 0 to 30", "there must be a prompt", "parameter max_new_tokens",
    "kernel must be None", "prefill_chunk_size must be at least 1", "the block of a batch",
    "must be causal", "logits are NaN", "logits are NaN or inf", "are the model's weights finite",
]  # fmt: skip


def all_misuse() -> dict[str, str]:
    found = {}
    for name in REFUSED:
        try:
            misuse(name)
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_cannot_be_is_refused_in_the_same_words_on_all_ranks(pools: Callable) -> None:
    start = time.monotonic()
    first, second = pools(2).run(all_misuse)
    for name in REFUSED:
        assert name in first[name], (name, first[name])
    assert first == second
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("break_it", [broken, broken_after_its_end])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_that_are_no_numbers_are_told(break_it: Callable, seed: int) -> None:
    """All ranks hear of NaN logits, also of a sequence that has ended."""
    with pytest.raises(ValueError, match="are the model's weights finite"):
        break_it(CASES[0].model(), CASES[0].prompt(seed))


@pytest.mark.parametrize("temperature", [1.3e-38, 1e-30, 1e-3])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e35])
def test_the_coldest_draw_is_the_largest(temperature: float, size: float) -> None:
    logits = torch.tensor([[0.1, 0.4, -0.2], [-3.0, -torch.inf, -4.0], [2.0, 2.5, 3.0]]) * size
    for how in (Sampling(temperature, None, None), Sampling(temperature, 2, 0.5)):
        sure = size / temperature > 1e3  # else several may be drawn
        for _ in range(20):
            drawn = how.choose(logits)
            assert drawn.tolist() == [1, 0, 2] if sure else (drawn >= 0).all()


def test_temperatures_that_no_float32_has_are_refused() -> None:
    for temperature in (1e-39, 5e-324, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be 0"):
            Sampling(temperature, None, None).check(None)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_seeds_that_no_generator_takes_are_refused(seed: int) -> None:
    how = Sampling(1.0, None, None)
    with pytest.raises(ValueError, match="seed must be from"):
        how.check(seed)
    with pytest.raises((ValueError, RuntimeError)):
        torch.Generator().manual_seed(seed)
    for right in ((1 << 64) - 1, -(1 << 63)):
        how.check(right)
        torch.Generator().manual_seed(right)


@pytest.mark.parametrize("row", [[1.0, torch.nan], [torch.inf, 1.0], [-torch.inf] * 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_has_no_token(row: list[float], temperature: float) -> None:
    logits = torch.tensor([row, [1.0, 1e4]])
    assert Sampling(temperature, None, None).choose(logits).tolist() == [-1, 1]


def test_a_token_is_drawn_among_the_largest() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(20000, 4)

    def shares(how: Sampling) -> list[float]:
        drawn = how.choose(logits, torch.Generator().manual_seed(1))
        return (drawn.bincount(minlength=4) / len(drawn)).tolist()

    expected = {
        Sampling(1.0, None, None): [0.1, 0.4, 0.2, 0.3],
        Sampling(0.5, None, None): [1 / 30, 16 / 30, 4 / 30, 9 / 30],
        Sampling(1.0, 2, None): [0, 4 / 7, 0, 3 / 7],
        Sampling(1.0, None, 0.65): [0, 4 / 7, 0, 3 / 7],
        Sampling(1.0, None, 0.75): [0, 4 / 9, 2 / 9, 3 / 9],
        Sampling(1.0, 3, 0.5): [0, 4 / 7, 0, 3 / 7],
        Sampling(0.0, None, None): [0, 1, 0, 0],
        Sampling(1.0, 9, 1.0): [0.1, 0.4, 0.2, 0.3],
    }
    for how, want in expected.items():
        assert shares(how) == pytest.approx(want, abs=0.02), how


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_of_equal_logits_the_first_are_among_the_k_largest(k: int) -> None:
    logits = torch.tensor([[1.0, 3, 3, 2, 3, 3], [2, -torch.inf, -torch.inf, 2, -torch.inf, 0]])
    drawn = Sampling(4.0, k, None).choose(logits.repeat(400, 1)).view(400, 2)
    for row, tokens in zip(logits.tolist(), drawn.unbind(1)):
        best = sorted(range(6), key=lambda token, row=row: (-row[token], token))[:k]
        assert {*tokens.tolist()} == {token for token in best if row[token] > -torch.inf}


@pytest.mark.parametrize(
    ("options", "call", "text"),
    [
        (dict(softclamp=2.0), {}, "without softclamp and select"),
        (dict(attn_summaries=Summaries(4, 2, select=1)), {}, "without softclamp and select"),
        ({}, dict(prefill_chunk_size=3), "leave out prefill_chunk_size=3, kernel=None"),
        ({}, dict(cache_dtype=torch.float8_e4m3fn), "cache_dtype=torch.float8_e4m3fn"),
        ({}, dict(kernel="eager"), "leave out prefill_chunk_size=None, kernel='eager'"),
    ],
)
def test_what_layers_with_summaries_do_not_generate_by(options, call, text) -> None:
    case = Case(dict(attn_summaries=Summaries(4, 2)) | options)
    with pytest.raises(ValueError, match=text):
        case.model().generate(case.prompt(), 2, **call)
