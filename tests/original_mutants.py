"""Faults planted into what 0.5 had beside, and a battery that must find each."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch

from ring_attention_pytorch.comm.ring import Ring
from tests import hunt
from tests.faults import Mutant

MUTANTS = [
    Mutant(
        "gathered gradients are a rank's own alone", "nn/sharding.py:_Gather.backward",
        "for part in mine[1:]:", "for part in mine[:0]:",
    ),
    Mutant(
        "sizes are not compared", "compat/distributed.py:gather_as",
        "expected[ring.rank] != t.shape[dim]", "False",
    ),
    Mutant(
        "everyone takes the first part", "compat/distributed.py:split_by_rank",
        "mine = x[ring.rank]", "mine = x[0]",
    ),
    Mutant(
        "a pass goes one rank, however many it should", "compat/ring.py:_Pass.forward",
        "(ring.rank + by) % ring.size, (ring.rank - by)",
        "(ring.rank + 1) % ring.size, (ring.rank - 1)",
    ),
    Mutant(
        "gradients go on the way that tensors went", "compat/ring.py:_Pass.backward",
        "-ctx.by", "ctx.by",
    ),
    Mutant(
        "owners are taken for neighbours", "compat/ring.py:all_ring_pass",
        "circular_index_left(ring.rank, ring.size, hop)",
        "circular_index_left(ring.rank, ring.size, min(hop, 1))",
    ),
    Mutant(
        "neighbours are those of the first ring", "compat/ring.py:circular_rank_right",
        "return rank - rank % size + place", "return place",
    ),
    Mutant(
        "key heads go round", "compat/zig_zag_attention.py:zig_zag_attn",
        "both.repeat_interleave(queries_per_key, 1)", "both.repeat(1, queries_per_key, 1, 1)",
    ),
    Mutant(
        "keys stand in order", "compat/zig_zag_attention.py:zig_zag_shard",
        "torch.cat(by_rank)", "torch.cat(by_rank).sort().values",
    ),
    Mutant(
        "the diagonal is always seen", "compat/triton_flash_attn.py:_block",
        "torch.arange(k.shape[1]) + diagonal", "torch.arange(k.shape[1])",
    ),
    Mutant(
        "blocks before are forgotten", "compat/triton_flash_attn.py:flash_attn_forward",
        "merge_(out, out_lse, before, _infinite(old_lse))", "pass",
    ),
    Mutant(
        "a row that saw nothing is no number", "compat/triton_flash_attn.py:flash_attn_forward",
        "out_lse.masked_fill(out_lse == -torch.inf, _NOTHING_SEEN)", "out_lse",
    ),
]  # fmt: skip

_here = threading.local()
_one_at_a_time = threading.Lock()


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    from tests import test_original_modules as modules
    from tests import threads

    torch.set_num_threads(1)
    threads.PATIENCE = 10.0
    yield partial(over_threads, 4, modules.gathered)
    yield partial(over_threads, 4, modules.split)
    yield partial(over_threads, 4, modules.passed, 4)
    yield partial(over_threads, 4, modules.passed, 2)
    yield partial(over_threads, 4, modules.went_round, 4, None)
    yield partial(over_threads, 2, modules.sizes_that_are_wrong)
    yield partial(over_threads, 2, modules.zig_zag_against_dense, 7, True, True, 2, True, True)
    for case in modules.BLOCKS[1:]:
        yield partial(modules.test_blocks_of_a_striped_ring_merge_and_sum_by_any_kernel, case)


def over_threads(size: int, case: Callable, *args: object) -> None:
    """A case of the default group's ranks on threads, which are its ranks."""
    from ring_attention_pytorch import distributed, zig_zag_attention
    from ring_attention_pytorch import ring as ring_module
    from tests import test_original_modules as modules
    from tests import threads

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
        modules.check(threads.run(size, main)[0])


if __name__ == "__main__":
    hunt.main("tests.original_mutants")
