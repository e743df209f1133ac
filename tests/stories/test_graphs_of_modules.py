"""Modules whose calls are captured: which batches share graphs, and which changes end that."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ring_attention_pytorch import RingAttention, RingPlan, RingTransformer, ring_attn
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.plan.plan_cache import GraphCache
from ring_attention_pytorch.runtime import graphs
from ring_attention_pytorch.runtime.graphs import has_graphs, with_graphs
from ring_attention_pytorch.runtime.uncopied import replaced
from tests.support import threads
from tests.support.graphs import again, stand_in
from tests.support.reference import dense_attention, relative_error

MODEL = dict(num_tokens=32, dim=16, depth=2, dim_head=8, heads=2, causal=True, kernel="eager")


def modules_graphs_on_cpu(patch: pytest.MonkeyPatch) -> list[None]:
    """Every capture from now on."""
    captures: list[None] = []
    stand_in(patch)
    patch.setattr(RingPlan, "in_graphs", with_graphs)
    no_messages = lambda plan: None if plan.transport.fabric.replay.graph else "messages"  # noqa: E731
    patch.setattr(plan_cache, "graphs_refusal", no_messages)
    patch.setattr(graphs, "captured", lambda *a: captures.append(None) or again(*a))
    return captures


def stepped(model: RingTransformer, *given: Tensor) -> list[Tensor]:
    """The loss, and every gradient."""
    loss = model(*given, return_loss=True)
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


def batches_alike_share_graphs(patch: pytest.MonkeyPatch) -> None:
    """All layers'. Others, those that come once and masked ones have nothing of theirs."""
    captures = modules_graphs_on_cpu(patch)
    torch.manual_seed(0)
    model, plain_one = RingTransformer(**MODEL, in_graphs=True), RingTransformer(**MODEL)
    plain_one.load_state_dict(model.state_dict())
    lengths = (7, 7, 5, 7, 9, 11, 13, 5, 7, 13, 13)  # 7 goes with the second 5, and comes anew
    batches = [(torch.randint(0, 32, (2, n)),) for n in lengths]
    batches += [(batches[0][0], torch.rand(2, 7) > 0.3) for _ in range(3)]
    for given in batches:
        for got, want in zip(stepped(model, *given), stepped(plain_one, *given)):
            torch.testing.assert_close(got, want)
    assert len(captures) == 2 * 2  # of 7 and of 13, forward and backward
    keeping = [attn.kept for attn, _ in model.layers if attn.kept]
    assert [len(kept) for kept in keeping] == [4]


def test_batches_alike_share_graphs(monkeypatch):
    batches_alike_share_graphs(monkeypatch)


def what_is_changed_on_a_module_counts(patch: pytest.MonkeyPatch) -> None:
    captures = modules_graphs_on_cpu(patch)
    how = dict(dim_head=8, heads=2, kernel="eager")  # another would be another kind
    attn, want = RingAttention(16, **how, in_graphs=True), RingAttention(16, **how)
    want.load_state_dict(attn.state_dict())
    for softclamp in (None, 0.05):
        attn.softclamp = want.softclamp = softclamp
        for _ in range(4):
            x = torch.randn(1, 5, 16)
            torch.testing.assert_close(attn(x), want(x))
    assert len(captures) == 2
    attn.dropout = 0.5
    x = torch.randn(1, 5, 16)
    assert not any(torch.equal(attn(x), attn(x)) for _ in range(3))


def test_what_is_changed_on_a_module_counts(monkeypatch):
    what_is_changed_on_a_module_counts(monkeypatch)


def test_a_layer_by_itself_has_graphs_too(monkeypatch):
    captures = modules_graphs_on_cpu(monkeypatch)
    attn = RingAttention(16, dim_head=8, heads=2, in_graphs=True)
    want = RingAttention(16, dim_head=8, heads=2)
    want.load_state_dict(attn.state_dict())
    for _ in range(5):
        x, context = torch.randn(1, 5, 16), torch.randn(1, 6, 16)
        torch.testing.assert_close(attn(x), want(x))
        torch.testing.assert_close(attn(x, context=context), want(x, context=context))
    assert len(captures) == 2
    assert has_graphs(attn.plan(torch.randn(1, 5, 16)))


def others_lengths_make_another_kind(patch: pytest.MonkeyPatch) -> None:
    """Where neighbours swap heads a rank's own and the ring's may be the same, but not theirs."""
    modules_graphs_on_cpu(patch)

    def main(ring: threads.ThreadRing) -> list[bool]:
        kept, found = GraphCache(), []
        for lengths in ((5, 3, 4, 4), (5, 3, 4, 4), (4, 4, 4, 4), (5, 3, 4, 4)):
            q = torch.zeros(1, lengths[ring.rank], 4, 8)
            k = torch.zeros(1, 4, 4, 8)
            plan = RingPlan.make(
                q, k, k, group=ring, cross=True, kernel="eager", transport="gather", ulysses=4
            )
            found.append(kept.in_place_of(plan).ulysses.queries == plan.ulysses.queries)
            found.append(kept.in_place_of(plan) is not plan)
        return found

    each, _ = threads.run(4, main)
    assert each == [[True, True] * 4] * 4


def test_others_lengths_make_another_kind(monkeypatch):
    others_lengths_make_another_kind(monkeypatch)


def test_graphs_of_another_group_or_device_go(monkeypatch):
    modules_graphs_on_cpu(monkeypatch)
    kept, q = GraphCache(), torch.zeros(1, 4, 2, 8)
    plan = RingPlan.make(q, q, q, kernel="eager")
    for group, left in (("first", 1), ("first", 1), ("second", 1), (None, 2), ("second", 2)):
        ring = SimpleNamespace(group=group, first=0, size=1, rank=0)
        kept.in_place_of(replaced(plan, ring=ring))
        assert len(kept) == left


def test_copies_of_a_module_have_graphs_of_their_own(monkeypatch):
    modules_graphs_on_cpu(monkeypatch)
    attn, x = RingAttention(16, dim_head=8, heads=2, in_graphs=True), torch.randn(1, 5, 16)
    want = attn(x)
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        assert other.kept is not attn.kept
        assert not other.kept
        torch.testing.assert_close(other(x), want)


def test_modules_whose_calls_can_never_be_captured_are_refused():
    """Where they can't be here, on a CPU, they go as ever."""
    for how in (dict(dropout=0.1), dict(force_regular_attn=True),
                dict(ring_attn=True, transport="ring")):  # fmt: skip
        with pytest.raises(ValueError, match="in_graphs=True needs"):
            RingAttention(16, dim_head=8, heads=2, in_graphs=True, **how)
    attn = RingAttention(16, dim_head=8, heads=2, in_graphs=True)
    for _ in range(3):
        attn(torch.randn(1, 4, 16))
    assert not attn.kept


def layouts_make_another_kind(patch: pytest.MonkeyPatch) -> None:
    """Where all ranks swap heads each has the whole sequence, whatever the layout; its queries go
    home to other places."""
    modules_graphs_on_cpu(patch)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16, 2, 8, generator=draw) for _ in range(3))

    def main(ring: threads.ThreadRing) -> list[float]:
        kept, found = GraphCache(), []
        for layout in ("zigzag", "zigzag", "striped", "zigzag", "striped", "contiguous"):
            at = positions(layout, rank=ring.rank, ring_size=2, length=16)
            mine = [t[:, at] for t in (q, k, v)]
            how = dict(causal=True, layout=layout, kernel="eager", transport="gather", ulysses=2)
            plan = kept.in_place_of(RingPlan.make(*mine, group=ring, **how))
            # graphs of threads would wait for one another
            out = ring_attn(*mine, plan=replaced(plan))
            want = dense_attention(q, k, v, causal=True)[0][:, at]
            found.append(relative_error(out, want))
        return found

    for found in threads.run(2, main)[0]:
        assert max(found) < 1e-5, found


def test_layouts_make_another_kind(monkeypatch):
    layouts_make_another_kind(monkeypatch)
