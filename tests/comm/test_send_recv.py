"""The ring sends what its hops need, and no more."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.cases import Attention
from tests.support.counted import forward_only, hops


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_messages_are_as_many_as_hops(layout, size):
    case = Attention(32, layout, causal=True)
    forward = forward_only(case, size).exchanges
    both, _ = zip(*hops(case, size))
    assert forward == [size - 1] * size
    assert all(b - f <= 2 * (size - 1) for b, f in zip(both, forward))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_sent_are_keys_there_and_keys_and_gradients_back(masked, dtype):
    size, n = 4, 6
    case = Attention(size * n, masked=masked, dtype=dtype, d=8, d_v=5)
    elements = case.batch * n * case.key_heads * (case.d + case.d_v)
    keys = elements * dtype.itemsize + (case.batch * n if masked else 0)
    grads = elements * max(4, dtype.itemsize)
    assert forward_only(case, size).sent_bytes == [(size - 1) * keys] * size
    _, sent = zip(*hops(case, size))
    assert max(sent) <= (size - 1) * (2 * keys + grads)


@pytest.mark.parametrize(
    ("layout", "window", "distances"),
    [
        ("zigzag", 3, 2), ("contiguous", 3, 1), ("contiguous", 7, 1), ("contiguous", 9, 2),
        ("striped", 2, 2),
    ],
)  # fmt: skip
def test_a_window_sends_only_what_somebody_can_see(layout, window, distances):
    case = Attention(64, layout, causal=True, window=window)
    assert forward_only(case, 8).exchanges == [distances] * 8
    both, _ = zip(*hops(case, 8))
    assert max(both) <= 3 * distances


def test_a_ring_of_one_sends_nothing():
    assert hops(Attention(11), 1) == [(0, 0)]


def counted(case: Attention) -> tuple[int, int]:
    """For a pool: batches of messages forward, and forward and backward together."""
    ring, (tensors, _, dout, _) = Ring(), case.data()
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in tensors]
    send = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=send) as sent:
        out = ring_attn(*mine, **case.options(), layout=case.layout)
        forward = sent.call_count
        torch.autograd.grad(out, mine, dout[:, at])
        return forward, sent.call_count


@pytest.mark.parametrize("size", [2, 4])
def test_processes_send_as_many_messages_as_threads(size, pools):
    for case, many in ((Attention(32), size - 1), (Attention(32, causal=True, window=2), 1)):
        for forward, both in pools(size).run(counted, case):
            assert forward == many
            assert both - forward <= 2 * many
