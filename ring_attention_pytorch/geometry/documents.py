"""Packed documents: from ids or borders to runs of positions, the same on every rank.

The input is ids of tokens, gathered from all ranks by `plan.packing`, or borders (`cu_seqlens`) of
whole sequences, which need no exchange. The output is one `Documents` for each sample, from which
`tiles` makes tiles.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.segments import Documents, Run

Borders = Tensor | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]]
BatchDocuments = tuple[Documents, ...]  # one for each sample

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_documents(
    documents: Tensor | BatchDocuments | None,
    cu_seqlens: Borders | None,
    shape: Sequence[int],
    whole: int | None = None,
) -> None:
    """Raise ValueError if one rank's ids or borders do not fit tokens of shape `[b, n, ...]`.

    `whole` is the length of the whole sequence, if this rank knows it.
    """
    if documents is not None and cu_seqlens is not None:
        raise ValueError("documents and cu_seqlens say the same thing; pass one or the other")
    b, n = shape[:2]
    if isinstance(documents, Tensor):
        fits = documents.dtype in _INTEGERS and list(documents.shape) == [b, n]
        if not fits or documents.is_meta:
            raise ValueError(
                f"documents must be int [{b}, {n}], equal where tokens are of one document, "
                f"got {documents.dtype} {list(documents.shape)} on {documents.device}"
            )
    if cu_seqlens is None:
        return
    samples = len(check_cu_seqlens(cu_seqlens))
    if samples not in (1, b):
        raise ValueError(f"cu_seqlens must be one list for all samples or {b}, got {samples}")
    if whole is not None:
        check_end(cu_seqlens, whole)


def check_end(cu_seqlens: Borders | None, length: int) -> None:
    """Raise ValueError if the borders do not end at `length`, the whole sequence's."""
    if cu_seqlens is None:
        return
    samples = as_lists(cu_seqlens)
    if any(borders[-1] != length for borders in samples):
        raise ValueError(
            f"cu_seqlens must end with the length of the whole, {length}, got {samples[0][-1]}"
        )


def check_cu_seqlens(cu_seqlens: Borders) -> list[list[int]]:
    """Return borders as lists; raise ValueError if they are not valid borders."""
    try:
        samples = as_lists(cu_seqlens)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"cu_seqlens must be ascending ints, or such a list for each sample: {error}"
        ) from None
    for borders in samples:
        if not borders or borders[0] != 0 or borders != sorted(borders):
            shown = str(borders[:8])[1:-1]
            if len(borders) > 8:
                shown += ", ..."
            raise ValueError(
                f"cu_seqlens must ascend from 0 to the length of the whole, got [{shown}]"
            )
    ends = [borders[-1] for borders in samples]
    if len(set(ends)) > 1:
        raise ValueError(f"cu_seqlens must end alike, got {ends[:8]}")
    return samples


def as_lists(cu_seqlens: Borders) -> list[list[int]]:
    """Return the borders of each sample as lists of ints; one list if they are shared."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.is_floating_point() or cu_seqlens.ndim not in (1, 2):
            raise TypeError(f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.tolist()
    plain: list[Any] = []
    for each in cu_seqlens:
        plain.append(each.tolist() if isinstance(each, Tensor) else each)
    if plain and _all_ints(plain):
        return [plain]
    if not all(map(_all_ints, plain)):
        raise TypeError("got something else than ints")
    return [list(borders) for borders in plain]


def _all_ints(values: Iterable[object]) -> bool:
    return all(isinstance(value, int) for value in values)


def digest(cu_seqlens: Borders | None) -> str | None:
    """Return a digest of borders for the note that ranks compare: borders can be longer."""
    if cu_seqlens is None:
        return None
    samples = as_lists(cu_seqlens)
    tokens = max((borders[-1] for borders in samples), default=0)
    digits = sha256(json.dumps(samples).encode()).hexdigest()[:12]
    return f"{sum(map(len, samples))} borders up to {tokens}, {digits}"


def of_borders(borders: Sequence[int]) -> Documents:
    """Return the documents between borders, without empty ones.

    >>> [tuple(run) for run in of_borders([0, 2, 2, 5]).runs]
    [(0, 0, 2), (1, 2, 5)]
    """
    runs: list[Run] = []
    for start, stop in pairwise(borders):
        if start < stop:
            runs.append(Run(len(runs), start, stop))
    return Documents(tuple(runs))


def of_ids(ids: Tensor) -> Documents:
    """Return the documents of a whole sequence `[n]` of ids, numbered in order of appearance.

    >>> [tuple(run) for run in of_ids(torch.tensor([7, 7, 2, 7])).runs]
    [(0, 0, 2), (1, 2, 3), (0, 3, 4)]
    """
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    numbers: dict[int, int] = {}  # by id
    runs = []
    start = 0
    for value, length in zip(values.tolist(), counts.tolist()):
        number = numbers.setdefault(value, len(numbers))
        runs.append(Run(number, start, start + length))
        start += length
    return Documents(tuple(runs))


def last_of_document(packing: BatchDocuments, positions: Tensor) -> Tensor:
    """Return where positions `[n]` are the last of a document, or of a run of it: bool `[b, n]`."""
    last = positions.new_empty((len(packing), len(positions)), dtype=torch.bool)
    for sample, documents in enumerate(packing):
        ends = torch.tensor([run.stop - 1 for run in documents.runs], dtype=torch.long)
        last[sample] = torch.isin(positions, ends.to(positions.device))
    return last
