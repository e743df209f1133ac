"""Faults planted into schedules, and a battery on ints that must find each."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests import hunt
from tests.faults import Mutant

STEPS = "schedule/steps.py:"

MUTANTS = [
    Mutant("a hop is left out", STEPS + "ring", "pairwise(distances)", "pairwise(distances[:-1])"),
    Mutant(
        "keys come from the other neighbour", STEPS + "Program.copies",
        "peers = [(rank - distance) % size", "peers = [(rank + distance) % size",
    ),
    Mutant(
        "keys are handed on before they came", STEPS + "ring",
        "wait = (number - 1,) if number else ()", "wait = ()",
    ),
    Mutant(
        "own keys are handed on at each hop", STEPS + "ring",
        "Transfer(KEYS, number, number + 1,", "Transfer(KEYS, 0, number + 1,",
    ),
    Mutant(
        "gradients are sent on before others' came", STEPS + "ring",
        "before = (last + number - 2,) if number > 1 else ()", "before = ()",
    ),
    Mutant(
        "gradients stay with the last rank", STEPS + "ring",
        "[*distances[1:], len(workload.keys)]", "distances[1:]",
    ),
    Mutant(
        "gradients that come home are not waited for", STEPS + "ring",
        "backward.append(Step((2 * last - 1,)))", "pass",
    ),
    Mutant(
        "gradients are added to the next owner's", STEPS + "ring",
        "into = number + 1 if", "into = number if",
    ),
    Mutant(
        "the second stage is not waited for", STEPS + "_gathered",
        "enumerate(waits)", "enumerate(waits[:1] * len(waits))",
    ),
    Mutant(
        "a round is never started", STEPS + "_gathered", "following = [*starts, ()]",
        "following = [*starts[:1], *[() for _ in starts]]",
    ),
    Mutant(
        "own keys are computed on twice", STEPS + "gather",
        "back.append(Step(compute=Part(0, stage=1)))", "back.append(Step(compute=Part(0)))",
    ),
    Mutant(
        "half of own keys is forgotten", STEPS + "gather",
        "back.append(Step(compute=Part(0, stage=1)))", "pass",
    ),
    Mutant(
        "gradients go to owners in front", STEPS + "_from_users",
        "-distance % len(workload.keys)", "distance",
    ),
    Mutant(
        "gradients go home before they are computed", STEPS + "gather",
        "back += [step, Step(going, (len(transfers) - 1,))]",
        "back += [Step(going, (len(transfers) - 1,)), step]",
    ),
    Mutant(
        "the last gradients are not waited for", STEPS + "gather",
        "back.append(Step(going))", "pass",
    ),
    Mutant(
        "own keys' gradients stay", STEPS + "gather_first",
        "home = Transfer(GRADS, 1, 0, _from_users(workload, workload.distances))",
        "home = Transfer(GRADS, 1, 0, _from_users(workload, workload.distances[1:]))",
    ),
    Mutant(
        "keys go where they lie at their owner", STEPS + "Program.copies",
        "copies.append(Copy(peer, chunk.first, at.start, chunk.segment.length))",
        "copies.append(Copy(peer, chunk.first, chunk.first, chunk.segment.length))",
    ),
    Mutant(
        "the first stage is as long as both", STEPS + "Program.spans", "start = stop", "pass",
    ),
    Mutant(
        "halves of own keys overlap", STEPS + "Program.spans",
        "return [slice(0, half), slice(half, length)]",
        "return [slice(0, half), slice(length - half, length)]",
    ),
]  # fmt: skip


def battery() -> Iterator[Callable[[], object]]:
    """Cases that fail where something is wrong."""
    from ring_attention_pytorch.geometry.tiles import Mask
    from tests import test_schedule as walked

    torch.set_num_threads(1)
    pairs = walked.test_each_pair_is_computed_once_and_its_gradient_comes_home_once
    for size, layout in ((4, "zigzag"), (5, "contiguous"), (2, "striped")):
        yield partial(pairs, size, layout, Mask(causal=True))
    yield partial(pairs, 5, "zigzag", Mask())
    for back in (False, True):
        for how in (dict(transport="ring"), dict(transport="gather")):
            yield partial(
                walked.test_transports_send_what_the_schedule_says_when_it_says, how, back
            )


if __name__ == "__main__":
    hunt.main("tests.schedule_mutants")
