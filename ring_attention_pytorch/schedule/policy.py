"""Decisions that depend on the speeds of GPUs: stages, one gather or several, overlap or not.

Each is a pure function of the workload and of a machine's speeds, so all ranks decide alike.
"""

from collections.abc import Sequence
from itertools import pairwise

from ring_attention_pytorch.geometry.segments import Segment, Segments, count
from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs
from ring_attention_pytorch.schedule.hardware import H200, Hardware
from ring_attention_pytorch.schedule.pieces import (
    KVShape,
    Round,
    Workload,
    all_together,
    cached,
    joined,
    returning_keys,
    rounds_of,
    tokens,
)

_SMALL, _SMALL_UNDIVIDED = 334, 3340  # bounds of unmasked forward time, in units of `machine.call`
# host time of calls of cuDNN's kernel or of flash-attn 4's, two each way, in launches of small
# operations: on two H100 at 2k tokens the GPU computes 0.55 ms, a call takes 1.2, and Triton's of
# one call each way 0.78; at 3k both take as long
_CALLS = 120
# keys that a query sees of its document, on average, where our Triton kernel is faster than
# flash-attn 4 on H100s, with heads of 128: both are as fast at some 560 where eight query heads
# read a key head, at some 900 where four do; with a key head for each it was slower on two GPUs
_FEW_SEEN, _SHARED = 500, 2
# more steps of positions than this, of fewer queries each, are one launch rather than many calls
_FEW_STEPS, _SHORT_STEP = 8, 512
_SOON_COPIED = 1.6e-5  # seconds to read own keys: copying them and their gradients takes 0.1 ms


def is_small(
    workload: Workload, shape: KVShape, machine: Hardware, undivided: bool = False
) -> bool:
    """True if a rank has so little to compute that the tails of kernel calls matter.

    On H200s the bound is 16384 queries per rank, with 32 heads of size 128, over four ranks: 10 ms.
    It is ten times as high if own keys stay `undivided` backward, because that saves kernel calls.
    """
    pairs = max(map(count, workload.queries)) * sum(map(count, workload.keys))
    most = _SMALL_UNDIVIDED if undivided else _SMALL
    return pairs * shape.pair_flops <= most * machine.call * machine.forward


def is_few(workload: Workload, shape: KVShape, machine: Hardware) -> bool:
    """True if a GPU computes no longer than the host takes to launch calls that overlap.

    Own keys must be fast to copy, too. On H200s the bound is 4096 queries per rank, with 32 heads
    of size 128, over four ranks, causal; with short documents and 8 key heads it is 16384.
    """
    copied = max(map(count, workload.keys)) * shape.token_bytes <= _SOON_COPIED * machine.memory
    return copied and _seconds(workload, shape, machine) <= machine.host


def launches_decide(workload: Workload, shape: KVShape, machine: Hardware) -> bool:
    """True if launches take so long that a kernel with few calls beats one that computes faster.

    All keys are gathered at once. With cuDNN on H100s the bound is 3370 queries per rank, with 32
    heads of size 128, over two ranks, causal; 2390 over four. False without a causal mask, where
    every kernel needs one call, and with documents, for which no kernel needs many.
    """
    masks = workload.visible, *workload.apart
    if not workload.visible.causal or any(mask.documents is not None for mask in masks):
        return False
    return _seconds(workload, shape, machine) <= _CALLS * machine.launch


def documents_are_short(workload: Workload, shape: KVShape) -> bool:
    """True if documents are so short that our Triton kernel is faster than flash-attn 4.

    The measure is the number of keys of its document that a query sees, averaged over all samples;
    a window is ignored.

    >>> from ring_attention_pytorch.geometry.documents import of_borders
    >>> one, shape = ((Segment(0, 1, 8000),),), KVShape(1, 32, 8, 128, 128, itemsize=2)
    >>> cut = [Mask(causal=True, documents=of_borders(range(0, 8001, n))) for n in (800, 1600)]
    >>> [documents_are_short(Workload(one, one, mask), shape) for mask in cut]
    [True, False]
    """
    lengths: list[int] = []
    for mask in workload.apart or (workload.visible,):
        if mask.documents is None or shape.heads < _SHARED * shape.key_heads:
            return False
        lengths += mask.documents.lengths
    pairs = sum(n * n for n in lengths) / (1 + workload.visible.causal)
    return pairs <= _FEW_SEEN * sum(lengths)


def calls_of_documents_pay(
    workload: Workload, shape: KVShape, machine: Hardware, slower: Hardware
) -> bool:
    """True if a kernel with a call for each document can beat a slower one with few calls for all.

    It counts the fewest calls there can be, one forward and one backward for each document, however
    ranks cut documents. False if samples have different documents, and except on H200s: on one H100
    our Triton kernel was as fast as cuDNN's in one document of 8k tokens (494 and 485 TF/s forward
    and backward), and faster in two (471 and 392).

    >>> from ring_attention_pytorch.geometry.documents import of_borders
    >>> from ring_attention_pytorch.schedule.hardware import hardware
    >>> one, shape = ((Segment(0, 1, 16000),),), KVShape(1, 32, 8, 128, 128, itemsize=2)
    >>> cut = [Mask(causal=True, documents=of_borders(range(0, 16001, n))) for n in (8000, 500)]
    >>> works = [Workload(one, one, mask) for mask in cut]
    >>> [calls_of_documents_pay(work, shape, H200, hardware("triton")) for work in works]
    [True, False]
    """
    documents = workload.visible.documents
    if documents is None or workload.apart or machine.device != H200.device:
        return False
    saved = _seconds(workload, shape, slower) - _seconds(workload, shape, machine)
    return 2 * len(documents.lengths) / len(workload.queries) * machine.call < saved


def steps_are_short(workload: Workload) -> bool:
    """True if positions of queries are in so many steps that kernels with a call each lose time.

    Queries at one position, and runs that ascend by one, are a step. Our Triton kernel takes all
    steps in one launch.

    >>> keys = ((Segment(0, 1, 4096),),)
    >>> cut = [[Segment(i // n * n, 1, 1) for i in range(4096)] for n in (32, 1024)]
    >>> [steps_are_short(Workload((tuple(each),), keys, Mask(causal=True))) for each in cut]
    [True, False]
    """
    if not workload.visible.causal:
        return False
    for segments in workload.queries:
        steps = 1 + sum(a.start != b.start for a, b in pairwise(segments))
        if steps > _FEW_STEPS and count(segments) < _SHORT_STEP * steps:
            return True
    return False


def _seconds(workload: Workload, shape: KVShape, machine: Hardware) -> float:
    """Return the seconds that the kernel computes for a rank, forward and backward."""
    queries, keys, mask, _ = workload
    if mask.documents is not None:
        sequence = (Segment(0, 1, sum(mask.documents.lengths)),)  # an average needs no layout
        pairs = visible_pairs(tiles(sequence, sequence, mask)) / len(queries)
    else:
        keys_seen = sum(map(count, keys)) / (1 + mask.causal)
        if mask.window is not None:
            keys_seen = min(keys_seen, (2 - mask.causal) * mask.window + 1)
        pairs = max(map(count, queries)) * keys_seen
    seconds_a_flop = 1 / machine.forward + 2.5 / machine.backward
    return pairs * shape.pair_flops * seconds_a_flop


@cached
def own_keys_apart(workload: Workload, square: bool) -> bool:
    """True if own keys should be a block by themselves, where nothing overlaps.

    They should for a kernel limited to `square` causal tiles, if that takes no more calls: a tile
    whose diagonal begins further right takes two. Gradients of own keys in a block by themselves
    need no transfer. Other kernels take one call for all keys.

    >>> from ring_attention_pytorch.geometry.layouts import all_segments
    >>> two = all_segments("zigzag", 2, 64)  # two calls instead of four on rank 1
    >>> own_keys_apart(Workload(two, two, Mask(causal=True)), square=True)
    True
    """
    if not square:
        return False
    together = all_together(workload)
    others = rounds_of(workload, max(1, len(workload.keys) - 1))
    mask = workload.visible
    most_apart = most_together = 0
    for rank, queries in enumerate(workload.queries):
        apart = _square_calls(queries, workload.keys[rank], mask)
        for each in others:
            apart += _square_calls(queries, joined(each.pieces[rank]), mask)
        all_keys = joined(together.pieces[rank])
        most_apart = max(most_apart, apart)
        most_together = max(most_together, _square_calls(queries, all_keys, mask))
    return most_apart <= most_together


def _square_calls(queries: Segments, keys: Segments, mask: Mask) -> int:
    """Count the calls of a kernel that computes only full tiles and square causal ones."""
    calls = 0
    for _, _, _, right in tiles(queries, keys, mask):
        calls += 1 if right is None or right <= 0 else 2
    return calls


@cached
def keys_arrive_late(workload: Workload, at_once: int, shape: KVShape, machine: Hardware) -> bool:
    """True if a rank finishes on own keys before the keys of several other owners have arrived.

    False unless all ranks have work on own keys, and the others' keys arrive in one round.
    """
    mask = workload.visible
    if mask != Mask(mask.causal) or workload.apart:
        return False  # few keys, or large tiles only in the order of positions
    rounds = rounds_of(workload, at_once)
    if len(rounds) != 1 or len(rounds[0].distances) < 2:
        return False
    late = False
    for queries, keys, chunks in zip(workload.queries, workload.keys, rounds[0].pieces):
        own = shape.pair_flops * visible_pairs(tiles(queries, keys, mask))
        if own == 0:
            return False
        late |= own < machine.forward_flops_per_byte * shape.token_bytes * tokens(chunks)
    return late


def reduce_by_copy_engine(
    workload: Workload,
    rounds: Sequence[Round],
    shape: KVShape,
    machine: Hardware,
    own_low_priority: bool,
) -> bool:
    """True if copy engines should fetch gradients while kernels still compute.

    At least half of the transfer must hide behind compute that is left on every rank: the rest of
    the call for own keys, if it runs at low priority (`own_low_priority`), and dq, if the kernel
    makes dk and dv first. With several rounds the gradients of each round but the last are sent
    while the next round computes.
    """
    if len(rounds) != 1:
        return True
    returning = max(returning_keys(rounds[0]).values(), default=0)
    fetched = max(map(tokens, rounds[0].pieces)) if own_low_priority else 0
    pairs_left = []
    for queries, keys, chunks in zip(*workload[:2], rounds[0].pieces):
        pairs = 0.0
        if own_low_priority:
            pairs += visible_pairs(tiles(queries, keys, workload.visible))
        if machine.keys_first:
            others = tiles(queries, joined(chunks), workload.visible)
            pairs += machine.deferred_share * visible_pairs(others)
        pairs_left.append(pairs)
    moved = machine.backward_flops_per_byte * shape.grad_bytes * (2 * fetched + returning / 2)
    return 2.5 * shape.pair_flops * min(pairs_left) >= moved
