"""A step of training over a spread batch is that of one process; what is forgotten raises."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import (
    RingAttention,
    RingPlan,
    RingTransformer,
    ShardedBatch,
    positions,
    ring_attn,
    ring_cross_entropy,
    ring_token_logprobs,
    shard_batch,
)
from ring_attention_pytorch.plan import placement
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads, training
from tests.support.reference import relative_error
from tests.support.training import KINDS, LENGTH, Model, batch_of, spread, spread_attention

EXACT = 1e-10


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def all_kinds(how: str, checkpointed: bool, layout: str) -> dict[str, float]:
    """For a pool: the worst error of each kind of batch."""
    return {
        kind: errors(
            spread(kind, how, checkpointed, layout=layout), training.one_process(kind)
        )
        for kind in KINDS
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "how", "checkpointed", "layout"),
    [
        (2, "logits", False, "auto"), (3, "head", True, "auto"), (4, "logits", True, "auto"),
        (2, "head", False, "striped"), (3, "logits", False, "contiguous"),
    ],
)  # fmt: skip
def test_a_step_is_that_of_one_process(size, how, checkpointed, layout, pools):
    for found in pools(size).run(all_kinds, how, checkpointed, layout):
        assert max(found.values()) < EXACT, found


def test_a_step_of_a_ring_of_one_is_that_of_one_process():
    for kind in KINDS:
        batch = shard_batch(batch_of(kind))
        model = Model(spread_attention)
        with batch:
            logits = model(batch["input_ids"], batch["position_ids"])
            loss = ring_cross_entropy(
                logits, batch.labels, weights=batch.get("loss_weights")
            )  # fmt: skip
            loss.backward()
        found = loss.detach(), [p.grad for p in model.parameters()]
        assert errors(found, training.one_process(kind)) < EXACT, kind


def unequal_rings() -> float:
    """Two rings of two, whose batches have unequal numbers of real tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    kinds = ["labels for some", "padded right"]
    model = Model(None)
    here = kinds[mesh["dp"].get_local_rank()]
    batch = shard_batch(batch_of(here, seed=1), group=mesh["cp"])
    model.attend = lambda *qkv: ring_attn(*qkv, causal=True, group=mesh["cp"])
    with batch:
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = ring_cross_entropy(logits, batch.labels)
        loss.backward()
    whole = Model(None)
    sums = [training.alone(kind, 1, whole)[:2] for kind in kinds]
    want = sum(total for total, _ in sums) / sum(held for _, held in sums)
    grads = torch.autograd.grad(want, [*whole.parameters()])
    return errors((loss.detach(), training.averaged(model)), (want.detach(), [*grads]))


def test_a_mean_over_rings_with_unequal_tokens_is_that_of_one_process(pools):
    assert max(pools(4).run(unequal_rings)) < EXACT


def rolled(group: Ring | None = None) -> bool:
    """Labels of the next but one token, and beyond."""
    right = []
    for kind in ("plain", "borders"):
        whole = shard_batch(batch_of(kind), rank=0, ring_size=1)
        batch = shard_batch(batch_of(kind), group=group)
        documents = training.documents_of(kind)
        for ahead in (0, 1, 3):
            want = torch.full_like(whole.labels, -100)
            stop = LENGTH - ahead
            same = documents[:, ahead:] == documents[:, :stop]
            want[:, :stop] = whole.labels[:, ahead:].masked_fill(~same, -100)
            got = batch.unshard(batch.roll(batch.labels, ahead, -100))
            right.append(torch.equal(got, want))
    return all(right)


def test_rolling_reaches_over_shards_and_ends_with_documents(pools):
    for size in (2, 3):
        assert all(pools(size).run(rolled))


def logprobs(how: str, group: Ring | None = None) -> float:
    """A loss of whole sequences' log-probabilities, the same on every rank."""
    model = Model(partial(spread_attention, group=group))
    batch = shard_batch(batch_of("borders"), group=group)
    with batch:
        given = batch["input_ids"], batch["position_ids"]
        if how == "head":
            found = ring_token_logprobs(
                model.hidden(*given), batch, head=model.head.weight, chunk=7
            )  # fmt: skip
        else:
            found = ring_token_logprobs(model(*given), batch)
        loss = found.sum(1).exp().sqrt().sum() + (found * torch.arange(LENGTH)).sum()
        loss.backward()
    documents = training.documents_of("borders")
    whole = Model(lambda *qkv: training.dense_attention(*qkv, causal=True, documents=documents)[0])
    alone = shard_batch(batch_of("borders"), rank=0, ring_size=1)
    logits = whole(alone["input_ids"], alone["position_ids"]).log_softmax(-1)
    labels = alone.labels.clamp(min=0)[..., None]
    want = logits.gather(2, labels)[..., 0].masked_fill(alone.labels == -100, 0)
    loss = want.sum(1).exp().sqrt().sum() + (want * torch.arange(LENGTH)).sum()
    grads = torch.autograd.grad(loss, [*whole.parameters()])
    return errors((found, training.averaged(model, group)), (want, [*grads]))


@pytest.mark.parametrize("how", ["logits", "head"])
def test_logprobs_of_whole_sequences_are_those_of_one_process(how, pools):
    assert max(pools(3).run(logprobs, how)) < EXACT


def test_a_batch_has_what_its_tokens_need():
    batch = {
        "input_ids": torch.arange(10, 16)[None], "labels": torch.arange(10, 16)[None],
        "cu_seqlens": [0, 4, 6], "colours": torch.arange(12).view(1, 6, 2), "name": "one",
        "of sample": torch.ones(1, 3),
    }  # fmt: skip
    found = shard_batch(batch, rank=1, ring_size=2, layout="contiguous")
    assert found["input_ids"].tolist() == [[13, 14, 15]]
    assert found["position_ids"].tolist() == [[3, 0, 1]]
    assert found.labels.tolist() == [[-100, 15, -100]]
    assert found["colours"].tolist() == [[[6, 7], [8, 9], [10, 11]]]
    assert found["name"] == "one"
    assert found["of sample"].shape == (1, 3)
    assert found.num_items.item() == 4
    assert {*found} == {*batch, "position_ids", "shift_labels"} - {"labels", "cu_seqlens"}
    moved = shard_batch(batch, rank=1, ring_size=2, layout="contiguous", shift_labels=False)
    assert moved.labels.tolist() == [[13, 14, 15]]
    assert found.to("cpu").labels.tolist() == found.labels.tolist()


def test_auto_is_zigzag_or_balanced():
    ids = {"input_ids": torch.arange(16)[None]}
    assert shard_batch(ids, rank=0, ring_size=2).layout == "zigzag"
    packed = shard_batch({**ids, "cu_seqlens": [0, 12, 16]}, rank=0, ring_size=2)
    assert not isinstance(packed.layout, str)
    for length in (1, 2, 3, 5, 7):  # nothing is padded
        ids = {"input_ids": torch.arange(length)[None]}
        parts = [shard_batch(ids, rank=r, ring_size=3)["input_ids"] for r in range(3)]
        assert sorted(torch.cat(parts, 1)[0].tolist()) == [*range(length)]


WRONG = {
    "no tokens": (dict(labels=torch.ones(1, 4)), "input_ids"),
    "both": (dict(inputs_embeds=torch.ones(1, 4, 2)), "one of them"),
    "labels of others": (dict(labels=torch.ones(1, 3, dtype=torch.long)), r"labels must be \[1, 4"),
    "mask of scores": (dict(attention_mask=torch.ones(1, 1, 4, 4)), "attention_mask must be"),
    "numbers as a mask": (dict(attention_mask=torch.tensor([[0.0, -9, 1, 1]])), "1 or True"),
    "two masks": (
        dict(attention_mask=torch.ones(1, 4), key_mask=torch.ones(1, 4)), "say the same thing",
    ),
    "positions back": (dict(position_ids=torch.tensor([[0, 1, 1, 2]])), "begin at 0"),
    "borders short": (dict(cu_seqlens=[0, 3]), "must end with"),
    "tokens elsewhere": (dict(scores=torch.ones(1, 2, 4)), "elsewhere"),
    "shifted labels beside labels": (
        dict(labels=torch.ones(1, 4), shift_labels=torch.ones(1, 4)), "shift_labels is made of",
    ),
    "a number of labels": (dict(num_items_in_batch=500), "num_items_in_batch is made of"),
    "borders of others": (dict(cu_seq_lens_q=torch.tensor([0, 4])), "say the borders"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_batch_that_contradicts_itself_raises(case):
    more, text = WRONG[case]
    batch = {"input_ids": torch.arange(4)[None], **more}
    if case == "no tokens":
        del batch["input_ids"]
    with pytest.raises(ValueError, match=text):
        shard_batch(batch, rank=0, ring_size=2)


def refused(name: str) -> str:
    """For a pool: what a mistake raises on this rank."""
    try:
        mistakes()[name]()
    except ValueError as error:
        return str(error)
    return "nothing"


def mistakes() -> dict[str, Any]:
    rank = dist.get_rank()
    batch = shard_batch(batch_of("borders"))
    q = torch.randn(2, batch["input_ids"].shape[1], 2, 8)
    whole = torch.randn(2, LENGTH, 2, 8)
    at = dict(layout="zigzag", rank=rank, ring_size=dist.get_world_size(), length=LENGTH)
    plain, other = shard_batch(batch_of("plain")), shard_batch(batch_of("plain"), layout="striped")
    local = torch.randn(2, len(positions(**at)), 2, 8)
    documents = torch.zeros(2, q.shape[1], dtype=torch.long)

    def inside(of: Any, run: Any) -> Any:
        def call() -> None:
            with of:
                run()

        return call

    def checkpointed(backward_inside: Any) -> Any:
        def call() -> None:
            model = Model(spread_attention, checkpointed=True)
            with plain:
                loss = model(plain["input_ids"], plain["position_ids"]).sum()
            if backward_inside is None:
                loss.backward()
            else:
                with backward_inside:
                    loss.backward()

        return call

    def of_another() -> None:
        leaf = local.clone().requires_grad_()
        with plain:
            loss = ring_attn(leaf, leaf, leaf, causal=True).sum()
        with other:
            loss.backward()

    layer = dict(dim=16, dim_head=8, heads=2, causal=True, ring_attn=True)
    transformer = RingTransformer(num_tokens=training.WORDS, depth=1, **layer)
    x = torch.randn(2, q.shape[1], 16)
    loader = shard_batch(batch_of("plain", seed=rank), rank=rank, ring_size=2)
    plan = RingPlan.make(local, local, local, causal=True, layout="zigzag")
    return {
        "another layout": inside(
            plain, lambda: ring_attn(local, local, local, causal=True, layout="striped")
        ),
        "whole sequences": inside(plain, lambda: ring_attn(whole, whole, whole, causal=True)),
        "a module of another layout": inside(
            batch, lambda: RingAttention(**layer, layout="zigzag")(x)
        ),
        "a module that shards": inside(plain, lambda: transformer(plain["input_ids"])),
        "a module without the ring": inside(
            plain, lambda: RingAttention(**(layer | dict(ring_attn=False)))(torch.randn(
                2, plain["input_ids"].shape[1], 16))
        ),
        "documents, too": inside(
            batch, lambda: ring_attn(q, q, q, causal=True, documents=documents)
        ),
        "borders, too": inside(
            batch, lambda: ring_attn(q, q, q, causal=True, cu_seqlens=[0, LENGTH])
        ),
        "a plan without documents": inside(
            batch, lambda: ring_attn(q, q, q, plan=plan) if len(q[0]) == len(local[0]) else
            ring_attn(q, q, q, causal=True, layout="zigzag")
        ),
        "different batches": lambda: shard_batch(batch_of("plain", seed=rank)),
        "different batches of loaders": inside(loader, lambda: None),
        "another rank": inside(shard_batch(batch_of("plain"), rank=0, ring_size=2), lambda: None),
        "backward outside": checkpointed(None),
        "backward in another block": checkpointed(other),
        "backward of another batch": of_another,
        "loss of a part": inside(
            plain,
            lambda: ring_cross_entropy(
                torch.randn(2, plain.labels.shape[1], 5), plain.labels.clamp(max=4),
                group=_alone()[rank],
            ),
        ),
    }  # fmt: skip


def _alone() -> list[Any]:
    """A group of each rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())]


TEXTS = {
    "another layout": "'striped' was given in the block of a batch with 'zigzag'",
    "whole sequences": "not whole sequences",
    "a module of another layout": "'zigzag' was given in the block",
    "a module that shards": "sharded already",
    "a module without the ring": "lies on 2 ranks",
    "documents, too": "documents was given beside",
    "borders, too": "cu_seqlens were given beside",
    "a plan without documents": "in the block|in whose block",
    "different batches": "their digest",
    "different batches of loaders": "their digest",
    "another rank": r"batch\.over\(group\)",
    "backward outside": "inside `with batch:`",
    "backward in another block": "'striped'|another one|not whole",
    "backward of another batch": "another one",
    "loss of a part": "averaged",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_mistake_raises_on_all_ranks(name, pools):
    told = pools(2).run(refused, name)
    assert all(re.search(TEXTS[name], text) for text in told), told


def transformers_loss() -> float:
    """Our own model takes layout, documents and mask from the block, and shifts labels by them."""
    worst = 0.0
    for kind in ("plain", "borders", "padded right"):
        whole = batch_of(kind)
        options = dict(
            num_tokens=training.WORDS, dim=16, depth=2, dim_head=8, heads=2, causal=True,
            ignore_index=-100,
        )  # fmt: skip
        torch.manual_seed(0)
        alone = RingTransformer(**options).double()
        torch.manual_seed(0)
        model = RingTransformer(**options, ring_attn=True, auto_shard_seq=False).double()
        mask = whole.get("attention_mask")
        ids = torch.cat((whole["input_ids"], whole["input_ids"][:, :1]), 1)  # is cut off again
        borders = None if kind != "borders" else [*whole["cu_seqlens"], LENGTH + 1]
        if mask is not None:
            mask = torch.cat((mask, mask[:, :1] & False), 1)
        if kind == "plain":
            borders = [0, LENGTH, LENGTH + 1]
        want = alone(ids, mask, return_loss=True, cu_seqlens=borders)
        batch = shard_batch(whole)
        with batch:
            for labels in (None, batch.labels):
                model.zero_grad()
                loss = model(batch["input_ids"], labels=labels, return_loss=True)
                loss.backward()
                grads = torch.autograd.grad(want, [*alone.parameters()], retain_graph=True)
                got = loss.detach(), training.averaged(model)
                worst = max(worst, errors(got, (want.detach(), [*grads])))
    return worst


def test_our_own_model_is_right_in_a_block(pools):
    assert max(pools(2).run(transformers_loss)) < EXACT


def compared_before_all_else(kind: str) -> str:
    """Digests see one token, wherever it is."""
    batch = batch_of(kind)
    if dist.get_rank():
        batch["input_ids"][1, LENGTH - 1] += 1
    try:
        shard_batch(batch)
    except ValueError as error:
        return str(error)
    shard_batch(batch, check_same=False)
    return "nothing"


def test_one_token_makes_another_batch(pools):
    assert all("digest" in told for told in pools(2).run(compared_before_all_else, "plain"))


def recomputed_without_batches(reentrant: bool) -> str:
    """Attention that is of no batch, in a process where there was one."""
    step = partial(spread, "plain", checkpointed=True)
    step()
    recomputed_after_evaluation(reentrant)
    step()
    return "right"


def recomputed_after_evaluation(reentrant: bool) -> None:
    batch = shard_batch(batch_of("plain"))
    x = torch.randn(2, batch["input_ids"].shape[1], 2, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with batch, mode():
            ring_attn(x, x, x, causal=True)
    q = torch.randn(1, 8, 2, 4, dtype=torch.float64, requires_grad=True)
    out = checkpoint(partial(ring_attn, causal=True), q, q, q, use_reentrant=reentrant)
    out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_who_has_no_batch_may_recompute(reentrant, pools):
    assert pools(2).run(recomputed_without_batches, reentrant) == ["right"] * 2


def reentrant_outside() -> str:
    """Forward without autograd leaves no trace but that there was a block."""
    batch = shard_batch(batch_of("plain"))
    x = torch.randn(2, batch["input_ids"].shape[1], 2, 8, requires_grad=True)
    with batch:
        out = checkpoint(partial(ring_attn, causal=True), x, x, x, use_reentrant=True)
    try:
        out.sum().backward()
    except ValueError as error:
        return str(error)
    finally:
        placement._unseen.clear()
    return "nothing"


def test_recomputing_outside_of_the_block_raises_in_any_way_of_checkpointing(pools):
    assert all("inside `with batch:`" in told for told in pools(2).run(reentrant_outside))


def told_otherwise(what: str) -> str:
    """Return each rank's error where one asks for something else."""
    batch, options, odd = batch_of("borders"), {}, dist.get_rank() == 1
    if odd:
        if what == "borders":
            batch["cu_seqlens"] = [0, 5, LENGTH]
        elif what == "type":
            options["shift_labels"] = "yes"
        else:
            options |= {"layout": dict(layout="striped"), "labels": dict(shift_labels=False)}[what]
    try:
        shard_batch(batch, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["borders", "layout", "labels", "type"])
def test_ranks_must_ask_for_the_same(what, pools):
    text = {"type": "shift_labels", "labels": "digest"}.get(what, "layout must be the same")
    assert all(text in told for told in pools(2).run(told_otherwise, what))


def over_other_ranks() -> str:
    """Attention over as many ranks as the batch lies on, but not the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    batch = shard_batch(batch_of("plain"), group=mesh["cp"])
    q = torch.randn(2, batch["input_ids"].shape[1], 2, 8)
    with batch:
        try:
            ring_attn(q, q, q, causal=True, group=mesh["dp"])
        except ValueError as error:
            return str(error)
    return "nothing"


def test_attention_over_other_ranks_raises(pools):
    assert all("or others" in told for told in pools(4).run(over_other_ranks))


def short(length: int) -> float:
    """A step of fewer tokens than ranks: some have none, and all take part."""
    size = dist.get_world_size()
    ids = torch.arange(length)[None] + 1
    whole = {"input_ids": ids, "labels": ids}
    model, alone = Model(spread_attention), Model(None)
    batch = shard_batch(whole)
    with batch:
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = ring_cross_entropy(logits, batch.labels)
        loss.backward()
        found = ring_token_logprobs(logits.detach().requires_grad_(), batch)
        found.sum().backward()
    alone.attend = lambda *qkv: training.dense_attention(*qkv, causal=True)[0]
    logits = alone(ids, torch.arange(length)[None])[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    want = want / max(1, length - 1)
    grads = torch.autograd.grad(want, [*alone.parameters()])
    assert found.shape == (1, length)
    assert size > length
    return errors((loss.detach(), training.averaged(model)), (want.detach(), [*grads]))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_ranks_may_have_no_token(length, pools):
    assert max(pools(4).run(short, length)) < EXACT


def test_a_plan_without_the_mask_of_a_batch_raises():
    q = torch.randn(2, LENGTH, 2, 8)
    plan = RingPlan.make(q, q, q, causal=True, layout="zigzag")
    with shard_batch(batch_of("padded right")), pytest.raises(ValueError, match="and mask"):
        ring_attn(q, q, q, plan=plan)


def masked_batch(padding: list[int], ring: Ring | None = None, seed: int = 0) -> ShardedBatch:
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[0, padding] = False
    ids = torch.randint(9, (1, 8), generator=torch.Generator().manual_seed(seed))
    whole = {"input_ids": ids, "attention_mask": mask}
    return shard_batch(whole, layout="contiguous", group=ring)


@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_plan_is_for_batches_of_an_equal_mask_only(ulysses):
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 2, 4, generator=draw, dtype=torch.float64)
    seen = torch.ones(1, 8, dtype=torch.bool)
    seen[0, 6:] = False
    want, _ = training.dense_attention(q, k, v, key_mask=seen)

    def main(ring: Ring) -> float:
        here = slice(4 * ring.rank, 4 * ring.rank + 4)
        qkv = [t[:, here] for t in (q, k, v)]
        first, equal, other = (
            masked_batch(padding, ring, seed)
            for seed, padding in enumerate(([6, 7], [6, 7], [5, 6]))  # rank 0's masks are equal
        )
        with first:
            plan = RingPlan.make(*qkv, ulysses=ulysses)
            ring_attn(*qkv, plan=plan)
        with equal:
            out = ring_attn(*qkv, plan=plan)
        with other:
            for _ in range(2):  # it is no more right the second time
                with pytest.raises(ValueError, match="its own documents and mask"):
                    ring_attn(*qkv, plan=plan)
        return relative_error(out, want[:, here])

    assert max(threads.run(2, main)[0]) < EXACT


def test_a_plan_whose_mask_was_given_is_for_batches_of_equal_values():
    q = torch.randn(1, 8, 2, 4)
    batch, other = masked_batch([6, 7]), masked_batch([0, 7])
    plan = RingPlan.make(q, q, q, key_mask=batch.key_mask.clone())
    with batch:
        ring_attn(q, q, q, plan=plan)
    with other, pytest.raises(ValueError, match="its own documents and mask"):
        ring_attn(q, q, q, plan=plan)


def test_a_plan_of_other_ranks_than_the_batch_is_an_error():
    q = torch.randn(1, 4, 2, 4)

    def main(ring: Ring) -> None:
        plan = RingPlan.make(q, q, q, group=ring)
        batch = shard_batch({"input_ids": torch.zeros(1, 4).long()}, layout="contiguous")
        with batch, pytest.raises(ValueError, match="of other ranks than the batch"):
            ring_attn(q, q, q, plan=plan)

    threads.run(2, main)


def test_ranks_compare_a_batch_only_when_it_is_first_entered():
    def main(ring):
        batch = shard_batch({"input_ids": torch.arange(8)[None]}, rank=ring.rank, ring_size=2)
        notes = []
        for _ in range(2):
            with batch.over(ring):
                notes.append(ring.steps.notes)
        batch = batch.over(ring)
        for _ in range(2):
            with batch:
                notes.append(ring.steps.notes)
        return notes

    for first, second, third, fourth in threads.run(2, main)[0]:
        assert second == first + 1  # another object
        assert fourth == third == second + 1


def told_of_items() -> tuple[str, str]:
    """The error of a batch with an item more on rank 1, and of the item "labels"."""
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    with pytest.raises(KeyError, match=r"as batch\.labels") as no_item:
        shard_batch(batch)["labels"]
    assert "labels" not in shard_batch(batch)
    with pytest.raises(ValueError, match=r"tensors \(samples\) must be the same") as more:
        shard_batch(batch | ({"more": batch["labels"]} if dist.get_rank() else {}))
    return str(no_item.value), str(more.value)


def test_ranks_whose_batches_have_other_tensors_are_told_which(pools):
    told = {more for _, more in pools(2).run(told_of_items)}
    assert len(told) == 1
    assert "more: [1] of torch.int64" in told.pop()
