"""Faults planted into what 0.5 had beside, and a battery that must find each."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch

from ring_attention_pytorch.ranks.ring import Ring
from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("ORIGINAL")
ANSWERS_FOR = ("compat/",)

_here = threading.local()
_one_at_a_time = threading.Lock()


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    from tests.compat import (
        test_distributed,
        test_ring,
        test_triton_flash_attn,
        test_zig_zag_attention,
    )
    from tests.nn import test_rotary

    torch.set_num_threads(1)
    yield partial(test_rotary.test_in_16_bits_all_is_rounded_once, torch.bfloat16)
    yield partial(over_threads, 4, test_distributed.gathered)
    yield partial(over_threads, 4, test_distributed.split)
    yield partial(over_threads, 4, test_ring.passed, 4)
    yield partial(over_threads, 4, test_ring.passed, 2)
    yield partial(over_threads, 4, test_ring.went_round, 4, None)
    yield partial(over_threads, 2, test_distributed.sizes_that_are_wrong)
    yield partial(
        over_threads, 2, test_zig_zag_attention.zig_zag_against_dense, 7, True, True, 2, True, True
    )
    for case in test_triton_flash_attn.BLOCKS[1:]:
        yield partial(
            test_triton_flash_attn.test_blocks_of_a_striped_ring_merge_and_sum_by_any_kernel, case
        )


def over_threads(size: int, case: Callable, *args: object) -> None:
    """A case of the default group's ranks on threads, which are its ranks."""
    from ring_attention_pytorch import distributed, zig_zag_attention
    from ring_attention_pytorch import ring as ring_module
    from tests.compat import test_zig_zag_attention as modules
    from tests.support import original, threads

    def ring_of(group: None = None, size: int | None = None) -> Ring:
        whole = _here.ring
        return whole if size in (None, whole.size) else threads.PartRing(whole, size)

    def made(*how: object) -> object:
        with _one_at_a_time:  # of PyTorch's generator
            return modules_made(*how)

    def main(ring: threads.ThreadRing) -> dict[str, float]:
        _here.ring = ring
        found = case(*args)
        return {name: e for name, e in found.items() if "." not in name}  # nobody sums parameters'

    modules_made = modules.made
    with ExitStack() as patches:
        for module in (distributed, ring_module, zig_zag_attention):
            patches.enter_context(mock.patch.object(module, "Ring", ring_of))
        patches.enter_context(mock.patch.object(modules, "made", made))
        original.check(threads.run(size, main)[0])


if __name__ == "__main__":
    hunt.main("tests.faults.original")
