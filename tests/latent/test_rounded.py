"""`rounded_ring_attn`: attention to keys in 8 bits, and what it sends."""

import pytest
import torch

from ring_attention_pytorch import explain_plan, ring_attn, rounded_plan, rounded_ring_attn
from tests.support import threads
from tests.support.latent_cases import D_V, Case, D, G, H, to_8_bits
from tests.support.reference import relative_error

MACHINES = (0, 0, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_ranks_attend_to_the_same_rounded_keys(dtype):
    """To keys that were rounded before; forward to the bit, whatever passes them on."""
    case = Case(4, rounded=True)
    whole = {name: t.to(dtype) for name, t in case.tensors().items() if name in case.names}

    def of_rank(ring, call, rounded, transport):
        mine = [t.chunk(4, 1)[ring.rank] for t in whole.values()]
        q, k, v = [mine[0], *(to_8_bits(t).to(dtype) for t in mine[1:])] if rounded else mine
        how = dict(group=ring, causal=True, layout="contiguous", transport=transport)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = call(*leaves, kernel="eager", **how)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for transport, machines in (("ring", ()), ("gather", ()), ("gather", MACHINES)):
        found, _ = threads.run(
            4, lambda ring, t=transport: of_rank(ring, rounded_ring_attn, False, t), machines
        )
        want, _ = threads.run(
            4, lambda ring, t=transport: of_rank(ring, ring_attn, True, t), machines
        )
        for got, right in zip(found, want):
            assert torch.equal(got[0], right[0]), (transport, machines)
            errors = [*map(relative_error, got[1:], right[1:])]
            assert max(errors) < 4 * torch.finfo(dtype).eps, (transport, machines, errors)


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_a_key_takes_a_byte_for_each_number_and_its_gradient_what_it_always_took(transport):
    case = Case(2, 1, 24, rounded=True, options=dict(transport=transport))
    _, hub = threads.run(2, case.of_rank)
    tokens, keys, grads = 24 // 2, G * (D + D_V + 2), G * (D + D_V) * 8
    padding = [sent - tokens * (2 * keys + grads) for sent in hub.sent_bytes]
    assert all(0 <= most <= 2 * 3 * 15 for most in padding)  # each part begins aligned


def test_the_plan_says_what_a_token_takes():
    q, k = torch.empty(1, 64, H, 128).bfloat16(), torch.empty(1, 64, G, 128).bfloat16()
    said = explain_plan(rounded_plan(q, k, k))
    assert "RoundedKeys(d=128, d_v=128): 516 B a token instead of 1.02 kB" in said


def test_how_far_it_is_from_attention_to_the_keys_themselves():
    q, k, v = torch.randn(3, 1, 256, 4, 64, dtype=torch.float64)
    error = relative_error(rounded_ring_attn(q, k, v, causal=True), ring_attn(q, k, v, causal=True))
    assert 0.01 < error < 0.05
