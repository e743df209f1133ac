"""Faults planted into schedules, and a battery on ints that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("SCHEDULES")
ANSWERS_FOR = ("schedule/steps.py",)


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    from ring_attention_pytorch.geometry.tiles import Mask
    from tests.comm import test_scheduled_transport
    from tests.schedule import test_steps

    torch.set_num_threads(1)
    pairs = test_steps.test_each_pair_is_computed_once_and_its_gradient_comes_home_once
    for size, layout in ((4, "zigzag"), (5, "contiguous"), (2, "striped")):
        yield partial(pairs, size, layout, Mask(causal=True))
    yield partial(pairs, 5, "zigzag", Mask())
    for back in (False, True):
        for how in (dict(transport="ring"), dict(transport="gather")):
            yield partial(
                test_scheduled_transport.test_transports_send_what_the_schedule_says_when_it_says,
                how,
                back,
            )


if __name__ == "__main__":
    hunt.main("tests.faults.schedules")
