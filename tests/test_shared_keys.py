"""Keys that all ranks hold: one softmax with the ring's, and gradients equal on all ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingPlan, explain_plan, ring_attn, ulysses_attn
from ring_attention_pytorch.comm.collectives import replicated
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.kernels import eager
from ring_attention_pytorch.plan.placement import Placement
from ring_attention_pytorch.ranks.ring import Caller, Ring
from ring_attention_pytorch.runtime.accumulate import GradAccumulator
from ring_attention_pytorch.runtime.interfaces import Grads
from ring_attention_pytorch.runtime.uncopied import replaced
from ring_attention_pytorch.schedule import relays
from tests.support import threads
from tests.support.over_machines import SHUFFLED, UNEVEN, far
from tests.support.over_machines import TWO as TWO_MACHINES
from tests.support.reference import relative_error

B, N, S, H, G, D, D_V = 2, 23, 5, 4, 2, 8, 3
LAYOUTS = ("contiguous", "striped", "zigzag")
QKV, SHARED, COTANGENTS = slice(0, 3), slice(3, 5), slice(6, 8)


def drawn() -> list[Tensor]:
    """q, k, v; the shared k and v; sinks; dout and dlse."""
    draw = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(B, N, H, D), (B, N, G, D), (B, N, G, D_V)]
    shapes += [(B, S, G, D), (B, S, G, D_V), (H,), (B, N, H, D_V), (B, H, N)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


MASK = torch.tensor([[True] * S, [True, False, False, True, False]])
SEEN = torch.rand(B, N, generator=torch.Generator().manual_seed(1)) < 0.6


def wanted(options: dict[str, Any]) -> list[Tensor]:
    """By one softmax over all keys: out, lse, and the gradients of q, k, v, shared keys, sinks."""
    leaves = [t.clone().requires_grad_() for t in drawn()]
    q, k, v, sk, sv, sinks, dout, dlse = leaves
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    seen = torch.ones(B, N, N, dtype=torch.bool)
    if options.get("causal"):
        seen = seen & (j <= i)
    if options.get("window") is not None:
        seen = seen & ((i - j).abs() <= options["window"])
    if options.get("key_mask") is not None:
        seen = seen & options["key_mask"][:, None]
    if (ends := options.get("cu_seqlens")) is not None:
        document = torch.bucketize(torch.arange(N), torch.tensor(ends), right=True)
        seen = seen & (document[:, None] == document[None])
    mask = options.get("shared_key_mask")
    beside = torch.ones(B, S, dtype=torch.bool) if mask is None else mask
    seen = torch.cat((seen, beside[:, None].expand(B, N, S)), 2)
    keys, values = torch.cat((k, sk), 1), torch.cat((v, sv), 1)
    keys, values = (t.repeat_interleave(H // G, 2) for t in (keys, values))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * options.get("scale", D**-0.5)
    if (most := options.get("softclamp")) is not None:
        scores = most * torch.tanh(scores / most)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sink = sinks[None, :, None, None].expand(B, H, N, 1)
    if not options.get("sinks"):
        sink = sink * 0 - torch.inf
    scores = torch.cat((scores, sink), -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()[..., :-1]
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    given = leaves[:6] if options.get("sinks") else leaves[:5]
    grads = torch.autograd.grad((out, lse), given, (dout, dlse))
    return [out.detach(), lse.detach(), *grads]


def results(ring: Ring, options: dict[str, Any], layout: str) -> list[Tensor]:
    """One rank's."""
    at = positions(layout, rank=ring.rank, ring_size=ring.size, length=N)
    given = drawn()
    qkv = [t[:, at].clone().requires_grad_() for t in given[QKV]]
    shared = [t.clone().requires_grad_() for t in given[SHARED]]
    leaves = [*qkv, *shared]
    how = {**options, "group": ring, "layout": layout, "return_lse": True}
    if "key_mask" in how:
        how["key_mask"] = how["key_mask"][:, at]
    if how.pop("sinks", False):
        how["sinks"] = given[5].clone().requires_grad_()
        leaves.append(how["sinks"])
    out, lse = ring_attn(*qkv, shared_keys=(shared[0], shared[1]), **how)
    dout, dlse = given[COTANGENTS]
    grads = torch.autograd.grad((out, lse), leaves, (dout[:, at], dlse[..., at]))
    return [out.detach(), lse.detach(), *grads]


def errors(
    size: int, options: dict[str, Any], layout: str, machines: tuple[int, ...] = ()
) -> list[float]:
    """The worst of each result; gradients of shared keys must be the whole's on every rank."""
    found, _ = threads.run(size, partial(results, options=options, layout=layout), machines)
    want, worst = wanted(options), []
    for name, whole in enumerate(want):
        each = [rank[name] for rank in found]
        at = [positions(layout, rank=r, ring_size=size, length=N) for r in range(size)]
        if name < 5:
            held = [whole.index_select(2 if name == 1 else 1, places) for places in at]
        elif name < 7:
            held = [whole] * size
            assert all(torch.equal(each[0], other) for other in each)  # to the last bit
        else:
            each, held = [sum(each, torch.zeros(()))], [whole]
        worst.append(max(map(relative_error, each, held)))
    return worst


OPTIONS: dict[str, dict[str, Any]] = {
    "all see all": {},
    "causal": dict(causal=True),
    "padded text": dict(shared_key_mask=MASK),
    "both masked": dict(causal=True, key_mask=SEEN, shared_key_mask=MASK),
    "window, eager": dict(causal=True, window=3, kernel="eager"),
    "documents": dict(cu_seqlens=[0, 4, 15, N], causal=True),
    "sinks": dict(sinks=True, causal=True),
    "softclamp": dict(softclamp=1.5, scale=0.7, shared_key_mask=MASK),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ring_and_shared_keys_are_in_one_softmax(options):
    number = [*OPTIONS.values()].index(options)
    for size in (1 + number % 2, 3 + number // 2 % 2):
        layout = LAYOUTS[(number + size) % 3]
        for how in ({}, dict(transport="gather")):
            worst = errors(size, options | how, layout)
            assert max(worst) < 1e-12, (size, layout, how, worst)


def test_heads_are_swapped_for_sequence_and_shared_keys_stay():
    for size in (2, 4):
        worst = errors(size, dict(causal=True, sinks=True, ulysses=2), "zigzag")
        assert max(worst) < 1e-12, worst


@pytest.mark.parametrize("machines", [TWO_MACHINES, UNEVEN, SHUFFLED])
def test_their_gradients_cross_to_a_machine_once(machines, monkeypatch):
    monkeypatch.setattr(relays, "_EXCHANGE", 0)

    def crossed(ring: threads.ThreadRing) -> int:
        shared = [t.requires_grad_() for t in drawn()[SHARED]]
        held = replicated(shared, Caller(ring, "a test", 0))
        torch.autograd.grad(sum(t.sum() for t in held), shared)
        return far(ring)

    number, nbytes = len({*machines}), sum(t.nbytes for t in drawn()[SHARED])
    found, _ = threads.run(len(machines), crossed, machines)
    assert found == [number * (number - 1) * nbytes] * len(machines)
    worst = errors(len(machines), dict(causal=True, sinks=True), "zigzag", machines)
    assert max(worst) < 1e-12, worst


def in_a_block(ring: Ring) -> bool:
    """True if swapped heads in a batch's block, with nothing said, give what they do outside."""
    at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=N)
    q, k, v = (t[:, at] for t in drawn()[QKV])
    sk, sv = drawn()[SHARED]
    how = dict(causal=True, shared_keys=(sk, sv), ulysses=2)
    outside = ring_attn(q, k, v, layout="zigzag", group=ring, **how)
    with Placement(ring, layout="zigzag", length=N):
        return torch.equal(ring_attn(q, k, v, **how), outside)


def test_a_batchs_block_says_nothing_of_shared_keys():
    assert threads.run(2, in_a_block)[0] == [True] * 2
    q, k, v, sk, sv = drawn()[:5]

    def attend(q: Tensor) -> Tensor:
        return ring_attn(q, k, v, causal=True, shared_keys=(sk, sv), kernel="eager")

    outside = torch.func.jvp(attend, (q,), (q,))
    with Placement(Ring.alone(), layout="zigzag", length=N):
        assert all(map(torch.equal, torch.func.jvp(attend, (q,), (q,)), outside))


def with_a_plan(ring: Ring) -> list[Tensor]:
    """With heads first, and a bias of the ring's keys, by a plan that is used twice."""
    at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=N)
    q, k, v = (t[:, at] for t in drawn()[QKV])
    a, b = drawn()[SHARED]
    bias = torch.zeros(B, len(at)).double()
    how = dict(causal=True, layout="zigzag", group=ring, shared_key_mask=MASK)
    plan = RingPlan.make(q, k, v, shared_keys=(a, b), key_bias=bias, **how)
    assert "shared keys: 5 on every rank, kernel" in explain_plan(plan)
    first = [t.transpose(1, 2) for t in (q, k, v, a, b)]
    for _ in range(2):
        out = ring_attn(
            *first[:3], shared_keys=(first[3], first[4]), key_bias=bias, plan=plan, heads_first=True
        )
    return [out.transpose(1, 2), at]


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_them_can_be_frozen(frozen):
    want = wanted({"causal": True})[5 + 1 - frozen]

    def main(ring: Ring) -> Tensor:
        at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=N)
        given = drawn()
        shared = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(given[SHARED])]
        how: dict[str, Any] = dict(causal=True, layout="zigzag", group=ring, return_lse=True)
        qkv = [t[:, at] for t in given[QKV]]
        out, lse = ring_attn(*qkv, shared_keys=(shared[0], shared[1]), **how)
        dout, dlse = given[COTANGENTS]
        cotangents = dout[:, at], dlse[..., at]
        return torch.autograd.grad((out, lse), shared[1 - frozen], cotangents)[0]

    for found in threads.run(3, main)[0]:
        assert relative_error(found, want) < 1e-12


def test_a_plan_has_them_too():
    want = wanted(dict(causal=True, shared_key_mask=MASK))[0]
    for out, at in threads.run(3, with_a_plan)[0]:
        assert relative_error(out, want[:, at]) < 1e-12


def test_few_keys_and_none():
    q, k, v, *_ = drawn()
    none = k[:, :0], v[:, :0]
    assert torch.equal(ring_attn(q, k, v, shared_keys=none), ring_attn(q, k, v))
    hidden = torch.zeros(B, N, dtype=torch.bool)
    both = ring_attn(q, k, v, key_mask=hidden, shared_keys=(k, v), causal=True)
    assert relative_error(both, ring_attn(q, k, v)) < 1e-14
    neither = dict(key_mask=hidden, shared_key_mask=hidden, shared_keys=(k, v), return_lse=True)
    out, lse = ring_attn(q, k, v, **neither)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert ulysses_attn(q, k, v, shared_keys=(k, v)).shape == out.shape


def test_they_can_be_differentiated_twice():
    given = [t[:1, :2, :2, :2].clone().requires_grad_() for t in drawn()[:5]]

    def attend(q, k, v, sk, sv):
        return ring_attn(q, k[:, :, :1], v[:, :, :1], shared_keys=(sk[:, :, :1], sv[:, :, :1]),
                         kernel="eager", causal=True)  # fmt: skip

    assert torch.autograd.gradcheck(attend, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, given)


def test_first_derivatives_are_the_same_where_there_will_be_second_ones():
    given = [t.clone().requires_grad_() for t in drawn()[:5]]
    out = ring_attn(*given[:3], shared_keys=(given[3], given[4]), kernel="eager", causal=True)
    grads = [
        torch.autograd.grad(out.sin().sum(), given, retain_graph=True, create_graph=twice)
        for twice in (False, True)
    ]
    assert max(map(relative_error, *grads)) < 1e-14


def second(ring: Ring) -> list[Tensor]:
    """The gradient of a penalty on gradients of shared keys, which is the whole's."""
    at = positions("contiguous", rank=ring.rank, ring_size=ring.size, length=N)
    qkv = [t[:, at].clone().requires_grad_() for t in drawn()[QKV]]
    shared = [t.clone().requires_grad_() for t in drawn()[SHARED]]
    out = ring_attn(*qkv, shared_keys=(shared[0], shared[1]), group=ring, kernel="eager")
    of_shared = torch.autograd.grad(out.sin().sum(), shared, create_graph=True)
    # of which each rank has the whole: a share of it each
    penalty = sum(((g * g).sum() for g in of_shared), torch.zeros(())) / ring.size
    return [*torch.autograd.grad(penalty, [*qkv, *shared])]


def test_penalties_on_their_gradients_are_the_wholes():
    whole = second(Ring.alone())
    for rank, found in enumerate(threads.run(2, second)[0]):
        at = positions("contiguous", rank=rank, ring_size=2, length=N)
        want = [*(t[:, at] for t in whole[QKV]), *whole[SHARED]]
        assert max(map(relative_error, found, want)) < 1e-11


def test_shapes_follow_without_values():
    given = [t.to("meta") for t in drawn()]
    q, k, v, sk, sv = given[:5]
    out = ring_attn(q, k, v, shared_keys=(sk.requires_grad_(), sv), causal=True)
    assert out.shape == (B, N, H, D_V)
    out.sum().backward()
    assert sk.grad is not None


def test_traced_code_breaks_around_them():
    q, k, v, sk, sv = (t.clone().requires_grad_() for t in drawn()[:5])

    def attend(q):
        return ring_attn(q * 2, k, v, shared_keys=(sk, sv), causal=True).sin()

    found, want = torch.compile(attend, backend="eager")(q), attend(q)
    assert torch.equal(found, want)
    grads = (torch.autograd.grad(each.sum(), (q, sk)) for each in (found, want))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


Q, K = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 1, 4)
TWO = K[:, :2], K[:, :2]


def test_a_plan_is_for_such_shared_keys():
    plan, none = RingPlan.make(Q, K, K, shared_keys=TWO), RingPlan.make(Q, K, K)
    for given, of, said in (
        (None, plan, "with shared_keys, got none"),
        (TWO, none, "without shared_keys, got some"),
        ((K, K), plan, "shared_keys: the plan was made for"),
    ):
        with pytest.raises(ValueError, match=said):
            ring_attn(Q, K, K, shared_keys=given, plan=of)


def differ(ring: Ring, what: str, options: dict[str, Any]) -> str:
    """Return this rank's error where rank 1 has something else."""
    more = ring.rank == 1
    k = K[:, : 2 + (more and what == "lengths")].clone()
    if more and what == "values":
        k[0, 1] = 1
    k.requires_grad_(more and what == "gradients")
    mask = torch.ones(1, k.shape[1], dtype=torch.bool)
    mask[0, 0] = more or what != "masks"
    given = dict(shared_keys=(k, k.detach()), shared_key_mask=mask, group=ring, **options)
    try:
        ring_attn(Q, K, K, **given)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        ("lengths", {}, "shared_keys must be the same on every rank"),
        ("gradients", {}, "shared_keys must be the same on every rank"),
        ("values", dict(check="always"), "the values of shared_keys must be the same"),
        ("masks", dict(check="always"), "the values of shared_key_mask must be the same"),
        ("values", {}, "nothing"),  # would take time in each call
    ],
)
def test_ranks_that_give_others_are_found_out(what, options, said):
    told = threads.run(2, partial(differ, what=what, options=options))[0]
    assert len({*told}) == 1
    assert said in told[0]


def leaving_dq(saved: Any, keys: Any, tiles: Any, terms: Any, grads: Grads) -> None:
    """Compute eager gradients, but write dq later over all that was before, as Triton's kernel."""
    own = GradAccumulator(saved.q)
    eager.backward(saved, keys, tiles, terms, grads._replace(dq=own))
    before, total = grads.dq.update_memory()

    def rest() -> None:
        total.copy_(own.begin_update() + (0 if before is None else before))

    assert grads.dq.deferred is not None
    grads.dq.deferred.append(rest)


@pytest.mark.parametrize("shared_leave", [False, True])
def test_a_kernel_can_leave_dq_where_another_has_shared_keys(shared_leave):
    given = [t.clone().requires_grad_() for t in drawn()[:5]]
    how: dict[str, Any] = dict(shared_keys=(given[3], given[4]), causal=True, kernel="eager")
    plan, found = RingPlan.make(*given[:3], **how), []
    assert plan.shared is not None
    which = plan.shared if shared_leave else plan
    changed = replaced(which, kernel=which.kernel._replace(backward=leaving_dq))
    changed = replaced(plan, shared=changed) if shared_leave else changed
    for each in (plan, changed):
        out = ring_attn(*given[:3], shared_keys=(given[3], given[4]), plan=each)
        found.append(torch.autograd.grad(out.sin().sum(), given))
    assert max(map(relative_error, *found)) < 1e-14


def test_plans_of_calls_are_cached_without_a_layers_keys():
    from ring_attention_pytorch.plan import plan_cache

    plan_cache.forget()
    for _ in range(2):
        q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
        ring_attn(q, k, v, shared_keys=(k[:, :2], v[:, :2]))
    ((proposal, plan),) = plan_cache._plans.values()
    assert plan.shared is not None
    held = *proposal.options.shared_keys, *proposal.shared.shaped
    assert all(t.untyped_storage().nbytes() == 4 for t in held)
    plan_cache.forget()
