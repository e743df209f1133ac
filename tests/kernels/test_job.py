"""The constant argument of our kernels: tapes know it by identity, not by its values."""

import torch

from ring_attention_pytorch.kernels._job import Job, Rows, opened
from ring_attention_pytorch.runtime.interfaces import Residuals, ScoreMods, Tiles


def test_a_job_is_another_one_of_equal_tiles():
    tiles, terms = Tiles([]), ScoreMods(1.0, None, 64)
    job, again = Job(tiles, terms), Job(tiles, terms)
    assert job == again
    assert hash(job) == hash(again)
    assert job != Job(Tiles([]), terms)
    assert job != Job(tiles, ScoreMods(1.0, None, 64))
    assert job != (tiles, terms)


def test_keys_and_mask_are_taken_off_and_the_rest_stays():
    job = Job(Tiles([]), ScoreMods(1.0, None, 64))
    k, v, mask, more = (torch.zeros(i + 1) for i in range(4))
    tiles, terms, keys, rest = opened(job, (k, v, mask, more, None))
    assert tiles is job.tiles
    assert terms is job.terms
    assert keys.k is k
    assert keys.v is v
    assert keys.key_mask is mask
    assert [*rest] == [more, None]


def test_rows_are_what_backward_reads_of_queries():
    q, out, dout = (torch.randn(1, 5, 2, 8, dtype=torch.float64) for _ in range(3))
    lse = torch.randn(1, 2, 5, dtype=torch.float64)
    rows = Rows.of(Residuals(q, out, lse, dout, None))
    assert rows.q is q
    assert rows.dout is dout
    assert rows.lse is lse
    want = torch.einsum("bnhd,bnhd->bhn", out, dout)
    torch.testing.assert_close(rows.delta, want)
