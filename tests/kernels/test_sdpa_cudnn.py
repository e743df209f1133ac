"""The adapter of cuDNN's attention, over a stand-in."""

from tests.support.stand_ins import wrong_over_stand_in


def test_tiles_parts_and_the_gradient_of_lse(monkeypatch):
    assert not wrong_over_stand_in("sdpa-cudnn", monkeypatch)
