"""`mla_ring_attn` and `tied_ring_attn`, over rings of threads, against dense attention."""

from dataclasses import replace

import pytest
import torch

from ring_attention_pytorch import RingPlan, explain_plan, ring_attn
from ring_attention_pytorch.latent import mla_plan, mla_ring_attn, tied_ring_attn
from tests.support import threads
from tests.support.latent_cases import RANK, Case, expanded
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
    assert "for 32 heads at once, at most 168 MB" in said


def wrong_on_one_rank(ring, wrong: int, change) -> str:
    given = Case().tensors()
    args = [given[name] for name in Case().names]
    if ring.rank == wrong:
        args = change(args)
    with pytest.raises(ValueError, match=r"ring attention|mla_ring_attn") as error:
        mla_ring_attn(*args, group=ring, causal=True, layout="zigzag")
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: [*a[:4], a[4][:, :, :-1]], "w_up .* must agree, got"),
        (lambda a: [*a[:2], a[2].float(), *a[3:]], "one dtype and one device"),
        (lambda a: [*a[:4], a[4].clone().requires_grad_()], "requires_grad of w_up"),
        (lambda a: [*a[:4], torch.cat((a[4], a[4][:, :1]), 1)], "codec"),
    ],
)
def test_all_ranks_raise_for_wrong_tensors_of_one(change, text):
    texts, _ = threads.run(2, lambda ring: wrong_on_one_rank(ring, 1, change))
    for found in texts:
        with pytest.raises(ValueError, match=text):
            raise ValueError(found)


def test_a_plan_is_of_one_codec_and_excludes_options():
    case = Case(1)
    given = case.tensors()
    args = [given[name] for name in case.names]
    plan = mla_plan(*args, causal=True)
    q, k, v = expanded(given)
    first = torch.empty(2, 24, 1, RANK, dtype=torch.float64)
    with pytest.raises(ValueError, match="must agree in b, m, h_kv"):
        ring_attn(q, first, first[..., :4], plan=plan)
    with pytest.raises(ValueError, match="was made for keys as they are, got LatentKeys"):
        mla_ring_attn(*args, plan=RingPlan.make(q, k, v))
    with pytest.raises(ValueError, match=r"was made for LatentKeys.*got TiedKeys"):
        tied_ring_attn(q, k, plan=plan)
    with pytest.raises(ValueError, match="already decides causal"):
        mla_ring_attn(*args, plan=plan, causal=True)
    with pytest.raises(ValueError, match="key_bias need keys and values"):
        mla_ring_attn(*args, key_bias=torch.zeros(2, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="must have values"):
        mla_ring_attn(*(t.to("meta") for t in args))
    with pytest.raises(ValueError, match="warm_up has no parameters"):
        plan.warm_up()
    with pytest.raises(ValueError, match="CUDA graphs need"):
        plan.in_graphs()


def test_equal_shapes_do_not_make_a_plan_of_encoded_keys_one_of_plain_keys():
    q = torch.randn(1, 8, 1, 4)
    w_up = torch.randn(1, 3 + 1, 4)
    plan = mla_plan(q[..., :3], q[..., 3:], q[:, :, 0], q[:, :, 0, :1], w_up)
    with pytest.raises(ValueError, match="the plan was made for"):
        ring_attn(q, q, q[..., :1], plan=plan)


def test_autocast_casts_all_of_them():
    case = Case(1, options={})
    given = [case.tensors()[name].float().requires_grad_() for name in case.names]
    with torch.autocast("cpu", torch.bfloat16):
        out = mla_ring_attn(*given, causal=True)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), given)
    assert {g.dtype for g in grads} == {torch.float32}


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


def test_compiled_code_breaks_its_graph_around_it():
    case = Case(1)
    args = [case.tensors()[name] for name in case.names]
    compiled = torch.compile(lambda *a: mla_ring_attn(*a, causal=True) * 2, backend="eager")
    assert torch.equal(compiled(*args), 2 * mla_ring_attn(*args, causal=True))
