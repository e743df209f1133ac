"""Deferred work runs once, in order, and what it defers itself runs too."""

import pytest

from ring_attention_pytorch.runtime.deferred import Deferred


def test_it_runs_once_in_order_with_what_is_deferred_meanwhile():
    done: list[str] = []
    deferred = Deferred(
        [lambda: done.append("a"), lambda: deferred.append(lambda: done.append("c"))]
    )
    deferred.append(lambda: done.append("b"))
    deferred.do()
    deferred.do()
    assert done == ["a", "b", "c"]


def test_after_an_error_the_rest_is_still_to_do():
    done: list[str] = []
    deferred = Deferred([lambda: 1 / 0, lambda: done.append("rest")])
    with pytest.raises(ZeroDivisionError):
        deferred.do()
    assert done == []
    deferred.do()
    assert done == ["rest"]
