"""Documents of sequences that are spread over ranks: ids travel as runs, over the host."""

import json
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.documents import (
    BatchDocuments,
    Borders,
    as_lists,
    of_borders,
    of_ids,
)
from ring_attention_pytorch.geometry.segments import (
    Documents,
    Run,
    Segment,
    Segments,
    count,
    segment_positions,
)
from ring_attention_pytorch.ranks.notes import read_json
from ring_attention_pytorch.ranks.ring import Ring


def gather_ids(ring: Ring, ids: Tensor, segments: tuple[Segments, ...]) -> BatchDocuments:
    """Exchange ids `[b, n]` that ranks of a ring hold; return the documents of each sample."""
    runs = []
    for row in ids.cpu():
        values, counts = torch.unique_consecutive(row, return_counts=True)
        runs.append([values.tolist(), counts.tolist()])
    notes = exchange_json(ring, "ids of documents", runs)
    all_ids = torch.empty((len(ids), sum(map(count, segments))), dtype=torch.long)
    for held, note in zip(segments, notes):
        positions = segment_positions(held)
        for row, (values, counts) in zip(all_ids, note):
            values = torch.tensor(values, dtype=torch.long)
            counts = torch.tensor(counts, dtype=torch.long)
            row[positions] = values.repeat_interleave(counts)
    return tuple(of_ids(row) for row in all_ids)


def gather_packings(ring: Ring, packing: BatchDocuments) -> BatchDocuments:
    """Gather documents of every rank's samples; each rank has samples of its own."""
    notes = exchange_json(ring, "documents", [documents.runs for documents in packing])
    samples = []
    for runs in chain.from_iterable(notes):
        samples.append(Documents(tuple(Run(*run) for run in runs)))
    return tuple(samples)


def exchange_json(ring: Ring, subject: str, note: Any) -> list[Any]:
    """Exchange notes; return the notes of the ring's ranks. All ranks of the group take part."""
    notes = ring.gather_notes(subject, json.dumps(note).encode())
    ranks = range(ring.first, ring.first + ring.size)
    return [read_json(subject, rank, notes[rank]) for rank in ranks]


def whole_packing(
    ring: Ring,
    documents: Tensor | BatchDocuments | None,
    cu_seqlens: Borders | None,
    segments: tuple[Segments, ...],
    batch: int,
) -> BatchDocuments | None:
    """Return the documents of each sample, once all ranks have agreed on the arguments."""
    if isinstance(documents, Tensor):
        return gather_ids(ring, documents, segments)
    if cu_seqlens is None:
        return documents
    samples = as_lists(cu_seqlens)
    packing = tuple(of_borders(borders) for borders in samples)
    if len(samples) == 1:
        return packing * batch
    return packing


def local_packing(
    documents: Tensor | None, cu_seqlens: Borders | None, x: Tensor
) -> BatchDocuments | None:
    """Return the documents of each whole sequence x `[b, n, ...]` that this rank has."""
    segments = ((Segment(0, 1, x.shape[1]),),)
    return whole_packing(Ring.alone(), documents, cu_seqlens, segments, x.shape[0])
