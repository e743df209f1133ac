"""Runs cut into shorter ones, so that kernels follow several at once.

A kernel follows the states of a run chunk by chunk, in a program for each head and some columns. A
few runs don't fill a GPU. So long runs are cut into pieces, which are runs of their own: each has a
map, which ranks exchange.
"""

from dataclasses import replace

from ring_attention_pytorch.recurrent.runs import HeldRun, Runs

_MAPS = 8  # about as many are sent by all ranks together
_SHORTEST = 2048  # tokens


def longest_of(tokens: int, ranks: int, unit: int) -> int:
    """Return the most tokens of a piece, a multiple of `unit`, for the most tokens of a rank.

    >>> longest_of(16384, 2, 64), longest_of(16384, 8, 64), longest_of(5000, 2, 64)
    (4096, 16384, 2048)
    """
    pieces = max(1, _MAPS // ranks)
    return max(_SHORTEST, -(-tokens // (pieces * unit)) * unit)


def cut(runs: Runs, longest: int, unit: int) -> Runs:
    """Return runs of which none is longer, cut at multiples of `unit` tokens from its start.

    A document that is whole on its rank stays one run.

    >>> runs = Runs.of((((0, 1, 9),), ((9, 1, 2),)), None, 1)
    >>> [[run.position for run in held] for held in cut(runs, 4, 2).held]
    [[0, 4, 8], [9]]
    """
    alone = {chain[0] for chain in runs.chains if len(chain) == 1}
    held = []
    for of_rank in runs.held:
        pieces: list[HeldRun] = []
        for run in of_rank:
            pieces += [run] if run in alone else _pieces(run, longest, unit)
        held.append(tuple(pieces))
    return replace(runs, held=tuple(held))


def _pieces(run: HeldRun, longest: int, unit: int) -> list[HeldRun]:
    count = -(-run.length // longest)
    size = -(-run.length // (count * unit)) * unit
    return [
        run._replace(
            start=run.start + begin,
            length=min(size, run.length - begin),
            position=run.position + begin,
        )
        for begin in range(0, run.length, size)
    ]
