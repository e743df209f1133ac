"""Speeds that every decision about time goes by: known by a device's name, never above its own."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.schedule.hardware import (
    H200,
    hardware,
    number_of,
    share_one_host,
    with_another,
)
from tests.support.positions import quickly

NAMES = ("A100", "H100", "H200")


@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_is_faster_than_its_device(name):
    for pair in product(KERNELS, repeat=2):
        slow, fast = hardware("+".join(pair), number_of(name)), hardware("+".join(pair))
        assert slow.device == name
        assert slow.forward <= fast.forward
        assert slow.backward <= fast.backward
        assert slow.memory <= fast.memory
        assert slow.pull <= fast.pull


def test_a_device_that_is_not_known_is_the_slowest():
    assert number_of("some GPU of tomorrow") == number_of("A100") == 0
    assert [number_of(name) for name in NAMES] == [0, 1, 2]
    assert hardware("triton", -1) == hardware("triton", number_of("H200"))


def test_another_kernel_and_back_is_the_machine():
    machine = H200._replace(forward=250e12, backward=200e12)
    other = with_another(machine, "triton", "flash-attn-4")
    assert other.forward > machine.forward
    again = with_another(other, "flash-attn-4", "triton")
    assert again.forward == pytest.approx(machine.forward)
    assert again.backward == pytest.approx(machine.backward)


def test_ranks_that_are_further_apart_share_a_smaller_domain():
    assert [H200.every(degree).domain for degree in (1, 2, 8, 16)] == [8, 4, 1, 1]


@quickly
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_ranks_share_a_host_in_blocks_of_one_size(hosts):
    size = share_one_host(hosts)
    blocks = [hosts[i : i + size] for i in range(0, len(hosts), size)]
    assert len(hosts) % size == 0
    assert all(len({*block}) == 1 for block in blocks)
    for larger in range(size + 1, len(hosts) + 1):
        blocks = [hosts[i : i + larger] for i in range(0, len(hosts), larger)]
        assert len(hosts) % larger or any(len({*block}) > 1 for block in blocks)
