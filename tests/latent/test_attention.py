"""`mla_ring_attn` and `tied_ring_attn`, over rings of threads, against dense attention."""

from dataclasses import replace

import pytest
import torch

from ring_attention_pytorch import explain_plan, ring_attn
from ring_attention_pytorch.latent import mla_plan, mla_ring_attn
from tests.support import threads
from tests.support.latent_cases import RANK, Case, H, expanded
from tests.support.sampling import grid


def check(case: Case) -> None:
    errors = case.errors()
    assert max(errors.values()) < 1e-10, (case, errors)


@pytest.mark.parametrize("seed", range(24))
def test_random_cases_equal_dense_attention_to_expanded_keys(seed):
    check(Case.drawn(seed))


@grid("seed", range(100, 400), always=0, drawn=60)
def test_many_random_cases(seed):
    check(Case.drawn(seed))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("memory", ["copies", "together"])
def test_swapped_heads_and_shared_memory_and_groups_of_heads(tied, memory):
    check(Case(4, memory=memory, tied=tied, most=1, options=dict(causal=True, ulysses=2)))


def test_terms_that_count_heads_get_all_of_them_in_one_group():
    slopes = torch.linspace(0.1, 1, H).double()
    check(Case(2, most=1, options=dict(causal=True, alibi_slopes=slopes, kernel="eager")))


@pytest.mark.parametrize("transport", ["ring", "gather"])
def test_a_token_sends_its_latent_and_its_rotated_key_and_their_gradients(transport):
    case = Case(2, 1, 24, options=dict(transport=transport))
    _, hub = threads.run(2, case.of_rank)
    tokens, token = 24 // 2, (RANK + 4) * 8
    assert hub.sent_bytes == [3 * tokens * token] * 2  # forward, backward, and gradients


def test_the_plan_says_what_a_token_takes_and_what_is_decoded_at_once():
    shapes = (1, 8192, 128, 128), (1, 8192, 128, 64), (1, 8192, 512), (1, 8192, 64), (128, 256, 512)
    given = [torch.empty((), dtype=torch.bfloat16).expand(shape) for shape in shapes]
    said = explain_plan(mla_plan(*given, causal=True))
    assert "1.15 kB a token instead of 81.9 kB" in said
    assert "for 128 heads at once, at most 671 MB" in said


def test_half_precision_is_as_exact_as_attention_to_expanded_keys():
    case = replace(Case(2), options=dict(causal=True))
    given = {name: t.half().requires_grad_() for name, t in case.tensors().items()
             if name in case.names}  # fmt: skip
    out = mla_ring_attn(*given.values(), causal=True)
    q, k, v = expanded({name: t.double() for name, t in given.items()})
    want = ring_attn(q, k, v, causal=True)
    assert (out.double() - want).norm() < 3e-3 * want.norm()
    g = torch.randn_like(want)
    found = torch.autograd.grad(out, [*given.values()], g.half())
    right = torch.autograd.grad(want, [*given.values()], g)
    for got, exact in zip(found, right):
        assert (got.double() - exact.double()).norm() < 5e-3 * exact.double().norm()


def test_a_batch_without_samples_has_gradients_without_values():
    case = Case(2, 0, options=dict(causal=True))
    for found in threads.run(2, case.of_rank)[0]:
        assert all(not found[f"d{name}"].any() for name in case.names)


def of_one() -> list[torch.Tensor]:
    case = Case(1)
    return [case.tensors()[name].requires_grad_() for name in case.names]


def test_second_derivatives_and_forward_mode():
    args = of_one()
    assert torch.autograd.gradcheck(mla_ring_attn, args, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(mla_ring_attn, args, fast_mode=True)


def test_only_what_needs_a_gradient_gets_one():
    args = [t.detach() for t in of_one()]
    assert not mla_ring_attn(*args).requires_grad
    args[4].requires_grad_()
    out = mla_ring_attn(*args)
    (grad,) = torch.autograd.grad(out.sum(), args[4:])
    assert grad.shape == args[4].shape
    with torch.no_grad():
        assert torch.equal(mla_ring_attn(*args), out)
