"""Packed documents: from ids or borders to runs of positions, the same on every rank.

The input is ids of tokens, gathered from all ranks by `plan.packing`, or borders (`cu_seqlens`) of
whole sequences, which need no exchange. The output is one `Documents` for each sample, from which
`tiles` makes tiles.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import (
    Documents,
    Run,
)

Borders = Tensor | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]]
BatchDocuments = tuple[Documents, ...]  # one for each sample

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def documents_problem(
    documents: Tensor | BatchDocuments | None,
    cu_seqlens: Borders | None,
    shape: Sequence[int],
    whole: int | None = None,
) -> str | None:
    """Say what is wrong with what one rank gave for tokens of shape `[b, n, ...]`; None if nothing.

    `whole` is the length of the whole sequence, where one rank knows it.
    """
    if documents is not None and cu_seqlens is not None:
        return "documents and cu_seqlens say the same thing; pass one or the other"
    b, n = shape[:2]
    if isinstance(documents, Tensor):
        right = documents.dtype in _INTEGERS and list(documents.shape) == [b, n]
        if right and not documents.is_meta:
            return None
        return (
            f"documents must be int [{b}, {n}], equal where tokens are of one document, "
            f"got {documents.dtype} {list(documents.shape)} on {documents.device}"
        )
    if cu_seqlens is None:
        return None
    if (problem := cu_seqlens_problem(cu_seqlens)) is not None:
        return problem
    if (samples := len(as_lists(cu_seqlens))) not in (1, b):
        return f"cu_seqlens must be one list for all samples or {b}, got {samples}"
    return None if whole is None else end_problem(cu_seqlens, whole)


def end_problem(cu_seqlens: Borders | None, length: int) -> str | None:
    """Say what is wrong with where borders end, for a sequence of that length; None if nothing."""
    samples = [] if cu_seqlens is None else as_lists(cu_seqlens)
    if all(borders[-1] == length for borders in samples):
        return None
    return f"cu_seqlens must end with the length of the whole, {length}, got {samples[0][-1]}"


def cu_seqlens_problem(cu_seqlens: Borders) -> str | None:
    """Say what is wrong with borders by themselves; None if nothing is."""
    try:
        samples = as_lists(cu_seqlens)
    except (TypeError, ValueError) as error:
        return f"cu_seqlens must be ascending ints, or such a list for each sample: {error}"
    for borders in samples:
        ascending = all(a <= z for a, z in pairwise(borders))
        if not borders or borders[0] != 0 or not ascending:
            shown = str(borders[:8])[1:-1] + (", ..." if len(borders) > 8 else "")
            return f"cu_seqlens must ascend from 0 to the length of the whole, got [{shown}]"
    if len({borders[-1] for borders in samples}) > 1:
        return f"cu_seqlens must end alike, got {[borders[-1] for borders in samples][:8]}"
    return None


def as_lists(cu_seqlens: Borders) -> list[list[int]]:
    """Return the borders of each sample as lists of ints; one list if they are shared."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.is_floating_point() or cu_seqlens.ndim not in (1, 2):
            raise TypeError(f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.tolist()
    plain = [each.tolist() if isinstance(each, Tensor) else each for each in cu_seqlens]
    shared = plain and all(isinstance(each, int) for each in plain)
    samples = [plain] if shared else plain
    if not all(isinstance(c, int) for borders in samples for c in borders):
        raise TypeError("got something else than ints")
    return [list(borders) for borders in samples]


def digest(cu_seqlens: Borders | None) -> str | None:
    """Return a digest of borders for comparing notes: borders may be longer than a note."""
    if cu_seqlens is None:
        return None
    samples = as_lists(cu_seqlens)
    mark = sha256(json.dumps(samples).encode()).hexdigest()[:12]
    last = max((borders[-1] for borders in samples), default=0)
    return f"{sum(map(len, samples))} borders up to {last}, {mark}"


def of_borders(borders: Sequence[int]) -> Documents:
    """Return the documents between borders. Empty ones leave no trace.

    >>> [tuple(run) for run in of_borders([0, 2, 2, 5]).runs]
    [(0, 0, 2), (1, 2, 5)]
    """
    spans = [(a, z) for a, z in pairwise(borders) if a < z]
    return Documents(tuple(Run(number, a, z) for number, (a, z) in enumerate(spans)))


def of_ids(ids: Tensor) -> Documents:
    """Return the documents of a whole sequence `[n]` of ids, numbered in order of appearance.

    >>> [tuple(run) for run in of_ids(torch.tensor([7, 7, 2, 7])).runs]
    [(0, 0, 2), (1, 2, 3), (0, 3, 4)]
    """
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    ends = counts.cumsum(0).tolist()
    numbers: dict[int, int] = {}
    named = [numbers.setdefault(value, len(numbers)) for value in values.tolist()]
    return Documents(tuple(map(Run, named, [0, *ends[:-1]], ends)))


def last_of_document(packing: BatchDocuments, at: Tensor) -> Tensor:
    """Tell where other documents, or nothing, follow tokens at positions `[n]`: bool `[b, n]`."""
    ends = (torch.tensor([run.stop - 1 for run in d.runs], dtype=torch.long) for d in packing)
    found = [torch.isin(at, end.to(at.device)) for end in ends]
    return torch.stack(found) if found else at.new_empty((0, len(at)), dtype=torch.bool)
