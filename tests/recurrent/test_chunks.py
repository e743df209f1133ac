"""The chunks of runs, as fla's kernels read them."""

import random

import torch

from ring_attention_pytorch.recurrent.chunks import CHUNK, How


def test_chunks_cover_each_run_from_its_first_token() -> None:
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.randrange(1, 3 * CHUNK) for _ in range(draw.randrange(1, 6))]
        spans = [(sum(lengths[:run]), length) for run, length in enumerate(lengths)]
        how = How.of(spans, torch.device("cpu"))
        found = []
        for run, number in how.chunk_indices.tolist():
            first, end = how.spans[run].tolist()
            start = first + number * CHUNK
            found += range(start, min(start + CHUNK, end))
        assert found == [*range(sum(lengths))]
        assert how.cu_seqlens.diff().tolist() == lengths
        assert how.chunk_offsets[-1] == len(how.chunk_indices)
        starts = how.chunk_indices[:, 1] == 0
        assert starts.nonzero().flatten().tolist() == how.chunk_offsets[:-1].tolist()
