"""Functions are told apart by all that they read, on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.runtime.digests import digest, digest_of_function
from tests.support import threads

Q = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0))


def nearer_than(n: int) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (i - j).abs() < n


def of_table(table: Tensor) -> Callable[..., Tensor]:
    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return table[i] == table[j]

    return same


def both(*mods: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *at: mods[0](*at) & mods[1](*at)


class Within:
    """A predicate that is an object, of which some attributes are a rank's own."""

    def __init__(self, reach: int, rank: int) -> None:
        self.reach, self.rank = reach, rank

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.near(i, j)

    def near(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < self.reach


TABLE = torch.arange(8) // 3
# name -> predicates that must be taken for one another, and one that must not
PREDICATES: dict[str, tuple[Any, Any, Any]] = {
    "a number": (nearer_than(3), nearer_than(3), nearer_than(4)),
    "code": (lambda b, h, i, j: i >= j, lambda b, h, i, j: i >= j, lambda b, h, i, j: i <= j),
    "a constant": (lambda b, h, i, j: i > 1, lambda b, h, i, j: i > 1, lambda b, h, i, j: i > 2),
    "a table": (of_table(TABLE), of_table(TABLE.clone()), of_table(TABLE.flip(0))),
    "an inner one": (
        both(nearer_than(3), of_table(TABLE)), both(nearer_than(3), of_table(TABLE)),
        both(nearer_than(2), of_table(TABLE)),
    ),
    "an attribute": (Within(3, 0), Within(3, 1), Within(2, 0)),
    "a method": (Within(3, 0).__call__, Within(3, 1).__call__, Within(2, 0).__call__),
    "what is bound": (
        partial(torch.where, TABLE), partial(torch.where, TABLE.clone()),
        partial(torch.where, TABLE + 1),
    ),
    "a default": (
        lambda b, h, i, j, n=3: i - j < n, lambda b, h, i, j, n=3: i - j < n,
        lambda b, h, i, j, n=4: i - j < n,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PREDICATES)
def test_functions_are_told_apart_by_all_that_they_read(what):
    first, same, other = (digest_of_function(each) for each in PREDICATES[what])
    assert first.split()[-1] == same.split()[-1] != other.split()[-1]


def test_a_table_that_was_changed_in_place_is_another():
    table = TABLE.clone()
    before = digest_of_function(of_table(table))
    assert digest_of_function(of_table(table)) == before
    table[0] = 7
    assert digest_of_function(of_table(table)) != before


def test_functions_that_call_themselves_are_told_once():
    def odd(i: int) -> bool:
        return i > 0 and not odd(i - 1)

    assert digest_of_function(odd) == digest_of_function(odd)


@pytest.mark.parametrize("what", ["a number", "a table", "an attribute"])
def test_another_predicate_on_one_rank_is_an_error_on_all(what):
    first, same, other = PREDICATES[what]

    def main(ring: threads.ThreadRing) -> str:
        out = ring_attn(Q, Q, Q, mask_mod=(first, same)[ring.rank], group=ring)
        assert out.isfinite().all()
        try:
            ring_attn(Q, Q, Q, mask_mod=(first, other)[ring.rank], group=ring)
        except ValueError as error:
            return str(error)
        return "nothing"

    for told in threads.run(2, main)[0]:
        assert "mask_mod must be the same on every rank" in told


def test_a_digest_is_of_values_wherever_they_lie():
    t = torch.arange(12.0).view(3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        of = t.to(dtype)
        assert digest(of) == digest(of.T.contiguous().T) == digest(of.clone())
        assert digest(of) != digest(of.view(4, 3))
        changed = of.clone()
        changed[0, 0] = 1
        assert digest(changed) != digest(of)
    assert len({digest(t.to(dtype)) for dtype in (torch.float32, torch.float64, torch.int64)}) == 3
