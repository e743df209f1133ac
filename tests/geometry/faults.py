"""Faults planted into `geometry/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "causal off by one", "geometry/tiles.py:_tile_of_pair",
        "right = gap // q.stride",
        "right = gap // q.stride - 1",
    ),
    Mutant(
        "causal off by one in strides", "geometry/tiles.py:_tile_of_pair",
        "right = gap // q.stride",
        "right = -(-gap // q.stride)",
    ),
    Mutant(
        "window off by one", "geometry/tiles.py:_tile_of_pair",
        "left = (mask.window - gap) // q.stride",
        "left = (mask.window + 1 - gap) // q.stride",
    ),
    Mutant(
        "window forgotten in one direction", "geometry/tiles.py:_tile_of_pair",
        "(mask.window + gap) // q.stride",
        "None",
    ),
    Mutant(
        "window forgotten under causal", "geometry/tiles.py:_tile_of_pair",
        "if mask.window is not None: left",
        "if mask.window is not None and not mask.causal: left",
    ),
    Mutant(
        "buckets forget how far down they are", "geometry/tiles.py:buckets",
        "None if right is None else right + above", "right",
    ),
    Mutant(
        "staircase joined whatever lies below", "geometry/tiles.py:_is_staircase",
        "if not (below and beside and b[2:] == _FULL)", "if not beside",
    ),
    Mutant(
        "a needed distance forgotten", "geometry/tiles.py:_needed_distances",
        "for t in ranks[1:]", "for t in ranks[1:-1]",
    ),
    Mutant(
        "zigzag without its mirror", "geometry/layouts.py:zigzag",
        "[rank, 2 * ring_size - 1 - rank]",
        "[rank, ring_size + rank]",
    ),
    Mutant(
        "longer chunks counted twice", "geometry/layouts.py:_chunks",
        "chunk * size + min(chunk, longer)",
        "chunk * size + longer",
    ),
    Mutant(
        "documents see one another", "geometry/tiles.py:_visible_tiles",
        "of_keys.get(document, ())",
        "sum(of_keys.values(), [])",
    ),
    Mutant(
        "a document's last token left out", "geometry/segments.py:Documents._cut",
        "-(-(stop - position) // stride)", "(stop - position) // stride",
    ),
    Mutant(
        "a document that goes on starts anew", "geometry/segments.py:Documents.offsets",
        "before = lengths.get(document, 0)", "before = 0",
    ),
    Mutant(
        "later tokens are seen from the prefix", "geometry/tiles.py:_tile_of_pair",
        "max(q.start, k.start) < mask.prefix", "q.start < mask.prefix",
    ),
    Mutant(
        "the heaviest to who has most", "geometry/balance.py:_dealt", "key=loads.__getitem__)",
        "key=loads.__getitem__, reverse=True)",
    ),
    Mutant(
        "work of the whole sequence, not of documents", "geometry/balance.py:visible_keys",
        "- offsets.repeat_interleave(lengths)", "- 0 * offsets.repeat_interleave(lengths)",
    ),
]  # fmt: skip

SILENT = [
]  # fmt: skip
