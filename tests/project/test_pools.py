"""The processes that tests share answer the case that asks."""

import gc

import pytest

from tests.support import ranks


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones(monkeypatch) -> None:
    def out_of_time(*_: object) -> None:
        pytest.fail("a test took too long")

    pool = ranks.Pool(1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "wait", out_of_time)
            with pytest.raises(pytest.fail.Exception):
                pool.run(str, 1)
        assert pool.run(str, 2) == ["2"]
    finally:
        pool.stop()


def test_ranks_wait_longer_on_a_busy_machine_but_not_for_ever(monkeypatch):
    assert ranks.unhurried(2.0) >= 2.0
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    assert ranks.unhurried(2.0) == 20.0


def test_ranks_collect_garbage_but_what_they_were_forked_with():
    assert gc.isenabled()
    pool = ranks.Pool(1)
    try:
        assert pool.run(gc.isenabled) == [True]
        assert pool.run(gc.get_freeze_count)[0] > 100_000
    finally:
        pool.stop()
