"""Messages: one for each hop, which holds its tensors."""

from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch.comm.messages import Form
from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.cases import Attention


def test_a_hop_of_the_ring_is_one_message(pools):
    for forward, both in pools(3).run(messages_of_each_exchange, "ring"):
        assert forward == [2, 2]  # one out, one in
        assert both == [2, 2, 2, 2]


def messages_of_each_exchange(transport: str) -> tuple[list[int], list[int]]:
    """For a pool: operations of each batch, forward and backward."""
    case, ring = Attention(32, masked=True, transport=transport), Ring()
    (q, k, v), mask, dout, _ = case.data()
    at, _ = case.places(ring.rank, ring.size)
    mine = [t[:, at].requires_grad_() for t in (q, k, v)]
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as sent:
        out = ring_attn(*mine, key_mask=mask[:, at], transport=transport)
        forward = [len(call.args[0]) for call in sent.call_args_list]
        torch.autograd.grad(out, mine, dout[:, at])
        both = [len(call.args[0]) for call in sent.call_args_list]
    return forward, both[len(forward) :]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from([2, 4, 8]))
def test_a_message_holds_its_tensors(lengths, size):
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[size]
    tensors = [torch.randn(2, 3, n).to(dtype) for n in lengths] + [torch.rand(2, 3) < 0.5]
    form = Form.of(tensors, 3)
    message = form.pack(tensors, form.empty(torch.device("cpu")))
    assert message.numel() == form.nbytes
    for t, found in zip(tensors, form.open(message)):
        assert torch.equal(t, found)
        assert t.numel() == 0 or (found.data_ptr() - message.data_ptr()) % 16 == 0
