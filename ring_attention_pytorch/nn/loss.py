"""Next-token loss over a sharded sequence: one mean over the real tokens of all ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.comm.collectives import all_reduce, all_to_all
from ring_attention_pytorch.geometry.documents import BatchDocuments, last_of_document
from ring_attention_pytorch.geometry.layouts import Segments, segment_positions
from ring_attention_pytorch.operators import Ranks, TracedRing
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype


def next_tokens(
    ids: Tensor, segments: tuple[Segments, ...], ring: Ring, nothing: int, ahead: int = 1
) -> Tensor:
    """Return for each local token the id of the token `ahead` places later, from its owner.

    The sequence's last tokens get `nothing`. No positions are sent: every layout holds tokens in
    ascending order of position, so sender and receiver go through them in the same order.
    """
    mine = segment_positions(segments[ring.rank], ids.device)
    places, pieces, shapes = [], [], []
    for owned in segments:
        held = segment_positions(owned, ids.device)
        is_next_there = torch.isin(mine + ahead, held)
        is_wanted_there = torch.isin(mine - ahead, held)
        pieces.append(ids[:, is_wanted_there])
        columns = is_next_there.nonzero().flatten()
        places.append(columns)
        shapes.append((ids.shape[0], len(columns)))
    labels, caller = torch.full_like(ids, nothing), Caller(ring, "next tokens", 0)
    for columns, part in zip(places, all_to_all(pieces, shapes, caller)):
        labels[:, columns] = part
    return labels


def shifted(
    ids: Tensor, mask: Tensor | None, packing: BatchDocuments | None, nothing: int
) -> tuple[Tensor, Tensor | None, Tensor, BatchDocuments | None]:
    """Split whole sequences `[b, n]` into inputs, without the last token, and their labels.

    Returns ids, mask, labels and packing of `n - 1` tokens; a label is `nothing` if the next
    token is padding or belongs to another document.
    """
    labels = ids[:, 1:].long()
    if mask is not None:
        labels, mask = labels.masked_fill(~mask[:, 1:], nothing), mask[:, :-1]
    ids = ids[:, :-1]
    if packing is not None:
        n = ids.shape[1]
        is_last = last_of_document(packing, torch.arange(n, device=ids.device))
        labels = labels.masked_fill(is_last, nothing)
        packing = tuple(documents.head(n) for documents in packing)
    return ids, mask, labels, packing


def mean_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, ring: Ranks) -> Tensor:
    """Compute the mean cross entropy over the real tokens of all ranks; 0 if there are none.

    logits `[b, n, classes]`, labels `[b, n]`; the result is the same on every rank. Gradients
    averaged over ranks, as by DDP and FSDP, equal the gradients on one process.
    """
    logits = logits.to(accumulation_dtype(logits.dtype)).flatten(0, 1)
    labels = labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    real = (labels != ignore_index).sum()
    return mean_over_ranks(total, real, ring)


def mean_over_ranks(total: Tensor, held: Tensor, ring: Ranks) -> Tensor:
    """Divide the ranks' sum of `total` by their sum of `held`; 0 if that is 0.

    Both travel together, in float64, which counts tokens exactly. Backward sums all ranks'
    gradients, also of `held` if it requires one.
    """
    if isinstance(ring, TracedRing) or ring.size > 1:
        both = torch.cat((total.flatten().double(), held.flatten().double()))
        if isinstance(ring, TracedRing):
            summed = ring.total(both)
        else:
            (summed,) = all_reduce([both], Caller(ring, "mean over ranks", 0))
        sums, counts = summed.split((total.numel(), held.numel()))
        total, held = sums.view_as(total).to(total.dtype), counts.view_as(held)
    return total / torch.where(held == 0, torch.ones_like(held), held).to(total.dtype)
