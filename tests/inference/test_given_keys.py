"""How keys that are given lie, in rows; what a call without a plan of its own is refused."""

import pytest
import torch

from ring_attention_pytorch.inference import given_keys
from ring_attention_pytorch.inference.given_keys import GivenKeys, refuse_capture
from ring_attention_pytorch.ranks.ring import Ring


def test_rows_are_found_where_they_are_said_to_lie() -> None:
    """By the numbers that stand there."""
    b, h, n, d = 2, 3, 5, 8
    for t in (
        torch.arange(b * h * n * d).float().view(b, h, n, d),
        torch.arange(b * n * h * d).float().view(b, n, h, d).transpose(1, 2),
        torch.arange(b * 9 * h * n * d).float().view(b, 9 * h, n, d)[:, :h],
        torch.arange(b * h * n * d).float().view(b, h, n, d)[:, :1, :1],
    ):
        laid = given_keys._rows(t)
        assert laid is not None
        between, among, step = laid
        rows = t.as_strided(((t.untyped_storage().nbytes() // 4) // d, d), (d, 1), 0)
        for i, j, k in torch.cartesian_prod(*map(torch.arange, t.shape[:3])).tolist():
            assert torch.equal(rows[i * between + j * among + k * step], t[i, j, k])


@pytest.mark.parametrize(
    "t",
    [
        torch.ones(2, 3, 5, 16)[..., ::2],
        torch.ones(2, 3, 10, 8)[:, :, ::2],
        torch.ones(2, 3, 5, 9)[..., :8],
        torch.ones(481)[1:].view(2, 3, 5, 16),
    ],
    ids=["every other number", "every other token", "rows of 9", "no multiple of 16 bytes"],
)
def test_what_lies_otherwise_is_copied(t: torch.Tensor) -> None:
    assert given_keys._rows(t) is None
    given = GivenKeys(Ring.alone(), torch.empty(2, 1, 6, t.shape[-1]), 3, t.shape[-1])
    given._take(t, t)
    assert torch.equal(given.pools.keys[0], t)
    assert given.pools.keys[0].is_contiguous()
    assert given.pools.given == t.shape[2]


def test_no_keys_are_none() -> None:
    given = GivenKeys(Ring.alone(), torch.empty(2, 1, 6, 8), 3, 8)
    k = torch.empty(2, 3, 4, 8)
    given._take(k, k)
    for none in (None, k[:, :, :0]):
        given._take(none, none)
        assert given.pools.given == 0


def test_on_a_cpu_nothing_is_captured() -> None:
    refuse_capture(torch.empty(1))
