"""Calls of attention to encoded keys: what is refused, on which ranks, casts, compiled code."""

import pytest
import torch

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.latent import mla_plan, mla_ring_attn, tied_ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.latent_cases import RANK, Case, expanded


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
        (lambda a: [*a[:2], a[2].to_sparse(), *a[3:]], "must be dense"),
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
    with pytest.raises(ValueError, match=r"no option casual \(did you mean causal"):
        mla_ring_attn(*args, plan=plan, casual=True)
    defaults = dict(dropout=0.0 * len(args), bucket_size=int("1024"), kernel=None)
    assert torch.equal(mla_ring_attn(*args, plan=plan, **defaults), mla_ring_attn(*args, plan=plan))
    with pytest.raises(ValueError, match="key_bias need keys and values"):
        mla_ring_attn(*args, key_bias=torch.zeros(2, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="must be dense and have values"):
        mla_ring_attn(*(t.to("meta") for t in args))
    with pytest.raises(ValueError, match="warm_up has no parameters"):
        plan.warm_up()


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


def test_compiled_code_breaks_its_graph_around_it():
    case = Case(1)
    args = [case.tensors()[name] for name in case.names]
    compiled = torch.compile(lambda *a: mla_ring_attn(*a, causal=True) * 2, backend="eager")
    assert torch.equal(compiled(*args), 2 * mla_ring_attn(*args, causal=True))


def test_ranks_that_wait_hear_of_options_beside_a_plan(monkeypatch):
    args = [Case(1).tensors()[name] for name in Case(1).names]
    plan, heard = mla_plan(*args), []
    monkeypatch.setattr(Ring, "report_failure", lambda _, error: heard.append(str(error)))
    with pytest.raises(ValueError, match="already decides window"):
        mla_ring_attn(*args, plan=plan, window=3)
    assert "already decides window" in heard.pop()
