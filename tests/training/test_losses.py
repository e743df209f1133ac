"""Losses over ranks: weights, a head's terms, and values that are wrong, against one process."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch import (
    ring_cross_entropy,
    ring_token_logprobs,
    shard_batch,
    shard_sequence,
)
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.training import loss_inputs
from ring_attention_pytorch.training.losses import counted_cross_entropy
from tests.support import threads
from tests.support.late_losses import check_told_later, logprobs_told_later, told_later
from tests.support.reference import relative_error
from tests.support.training import batch_of


def one_without_dimensions() -> str:
    x = torch.tensor(1.0) if dist.get_rank() else torch.zeros(1, 3, 4)
    try:
        ring_cross_entropy(x, torch.zeros(1, 3, dtype=torch.long))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_all_ranks_hear_of_logits_without_dimensions(pools):
    assert all("[b, n, d]" in told for told in pools(2).run(one_without_dimensions))


def logprobs_of_a_wrong_type(what: str, group: Ring | None = None) -> str:
    """For a pool or a ring of threads: what all ranks hear of an argument of the second one."""
    batch = shard_batch(batch_of("plain"), group=group)
    x, batch_without = torch.randn(2, batch.labels.shape[1], 50), dict(batch.tensors)
    del batch_without["shift_labels"]
    given: dict[str, Any] = {"x": x, "batch": batch}
    if batch.rank == 1:
        given |= {"x": [x]} if what == "x" else {}
        given |= {"chunk": "8"} if what == "chunk" else {}
        given |= {"chunks": 8} if what == "chunks" else {}
        given |= {"batch": dict(batch)} if what in ("batch", "batch in its block") else {}
        given |= {"batch": replace(batch, tensors=batch_without)} if what == "labels" else {}
    try:
        with batch if what == "batch in its block" else nullcontext():
            ring_token_logprobs(**given)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["x", "chunk", "chunks", "batch", "batch in its block", "labels"])
def test_all_ranks_hear_of_an_argument_of_a_wrong_type(what, pools):
    told = pools(2).run(logprobs_of_a_wrong_type, what)
    assert all("(on rank 1)" in text and what.split()[0] in text for text in told), told


EXACT = 1e-12
B, N, D, CLASSES = 2, 7, 6, 9  # N tokens on each rank
IGNORED = (float("nan"), float("inf"), -2.0, 3.0)  # weights of labels that are ignored

TERMS: dict[str, dict[str, float]] = {
    "none": {},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.3},
    "all": {"softcap": 0.7, "scale": 2.5, "bias": 1.0},
}


def drawn(ranks: int) -> dict[str, Tensor]:
    """Draw what all ranks hold together: hidden states, labels, weights, a head and its bias."""
    draw = torch.Generator().manual_seed(3)
    wide = dict(generator=draw, dtype=torch.float64)
    labels = torch.randint(CLASSES, (B, ranks * N), generator=draw)
    labels[:, ::3] = -100
    weights = torch.rand(labels.shape, **wide)
    ignored = labels == -100
    weights[ignored] = torch.tensor(IGNORED, dtype=torch.float64).repeat(9)[: int(ignored.sum())]
    return {
        "x": torch.randn(B, ranks * N, D, **wide), "labels": labels, "weights": weights,
        "head": torch.randn(CLASSES, D, **wide), "bias": torch.randn(CLASSES, **wide),
    }  # fmt: skip


def dense_logits(x: Tensor, head: Tensor, bias: Tensor | None, terms: dict[str, float]) -> Tensor:
    """As models write it: a bias, then a factor, then a cap."""
    logits = x @ head.T
    if bias is not None:
        logits = logits + bias
    logits = logits * terms.get("scale", 1.0)
    if "softcap" in terms:
        logits = terms["softcap"] * torch.tanh(logits / terms["softcap"])
    return logits


def summed(grad: Tensor, ring: Ring) -> Tensor:
    if ring.size > 1:
        ring.total(grad)
    return grad


def split(terms: str, whole: dict[str, Tensor]) -> tuple[dict[str, float], Tensor | None]:
    numbers = dict(TERMS[terms])
    return numbers, whole["bias"] if numbers.pop("bias", None) else None


def mean_errors(terms: str, chunk: int | None, weighted: bool, group: Group = None) -> dict:
    """The error of a mean and of each of its gradients, for a random cotangent."""
    ring = as_ring(group)
    whole = drawn(ring.size)
    mine = slice(ring.rank * N, ring.rank * N + N)
    own = {name: whole[name][:, mine].clone() for name in ("x", "labels", "weights")}
    own |= {name: whole[name].clone() for name in ("head", "bias")}
    learned = ["x", "head", *(["weights"] if weighted else [])]
    learned += ["bias"] if "bias" in TERMS[terms] else []
    for name in learned:
        own[name].requires_grad_()
        whole[name].requires_grad_()
    numbers, bias = split(terms, own)
    loss = ring_cross_entropy(
        own["x"], own["labels"], head=own["head"], weights=own["weights"] if weighted else None,
        chunk=chunk, group=group, bias=bias, **numbers,
    )  # fmt: skip
    (loss * -1.7).backward()

    _, bias = split(terms, whole)
    logits, real = dense_logits(whole["x"], whole["head"], bias, numbers), whole["labels"] != -100
    losses = -logits[real].log_softmax(-1).gather(1, whole["labels"][real][:, None])[:, 0]
    weights = whole["weights"][real] if weighted else torch.ones_like(losses)
    want = (losses * weights).sum() / weights.sum()
    grads = dict(zip(learned, torch.autograd.grad(want * -1.7, [whole[n] for n in learned])))
    found = {"loss": relative_error(loss, want)}
    for name in learned:
        got = own[name].grad
        if name in ("x", "weights"):  # a mean over ranks is to be taken of it
            got, grads[name] = got / ring.size, grads[name][:, mine]
        else:
            got = summed(got, ring) / ring.size
        found[name] = relative_error(got, grads[name])
    return found


MEANS = [
    ("none", None, True), ("none", 5, True), ("softcap", 5, False), ("scale", 64, True),
    ("all", 3, True), ("all", None, False),
]  # fmt: skip


def all_means() -> dict[Any, dict]:
    return {case: mean_errors(*case) for case in MEANS}


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_and_each_of_its_gradients_are_those_of_one_process(size: int, pools: Callable):
    for rank in pools(size).run(all_means):
        for case, found in rank.items():
            assert max(found.values()) < EXACT, (case, found)


@pytest.mark.parametrize("case", MEANS)
def test_a_mean_of_this_process_alone_is_right(case):
    found = mean_errors(*case)
    assert max(found.values()) < EXACT, found


def logprob_errors(terms: str, group: Group = None) -> dict[str, float]:
    """The error of log-probabilities and of gradients of a loss that every rank computes."""
    ring = as_ring(group)
    whole = drawn(ring.size)
    ids = whole["labels"].clamp(min=0)
    given = {"input_ids": ids, "labels": whole["labels"], "x": whole["x"]}
    batch = shard_batch(given, group=group, shift_labels=False)
    own = {"x": batch["x"].clone(), "head": whole["head"].clone(), "bias": whole["bias"].clone()}
    numbers, bias = split(terms, own)
    learned = ["x", "head", *(["bias"] if bias is not None else [])]
    for name in learned:
        own[name].requires_grad_()
        whole[name].requires_grad_()
    got = ring_token_logprobs(own["x"], batch, head=own["head"], bias=bias, chunk=4, **numbers)
    cotangent = torch.randn(got.shape, generator=torch.Generator().manual_seed(5)).double()
    (got * cotangent).sum().backward()

    _, bias = split(terms, whole)
    logits = dense_logits(whole["x"], whole["head"], bias, numbers).log_softmax(-1)
    want = logits.gather(2, ids[..., None])[..., 0].masked_fill(whole["labels"] == -100, 0)
    grads = dict(zip(learned, torch.autograd.grad(want, [whole[n] for n in learned], cotangent)))
    found = {"logprobs": relative_error(got, want)}
    for name in learned:
        grad = own[name].grad
        if name == "x":
            grad, want = batch.unshard(grad) / ring.size, grads[name]
        else:
            grad, want = summed(grad, ring) / ring.size, grads[name]
        found[name] = relative_error(grad, want)
    return found


def penalty_of_logprobs(ring: Ring) -> Tensor:
    """The gradient of a penalty on the gradient of a loss of a whole sequence."""
    ids = torch.arange(2 * N)[None] % CLASSES
    batch = shard_batch({"input_ids": ids, "labels": ids}, layout="zigzag", group=ring)
    draw = torch.Generator().manual_seed(7)
    whole = torch.randn(1, 2 * N, CLASSES, generator=draw, dtype=torch.float64)
    x = shard_sequence(whole, layout="zigzag", group=ring).requires_grad_()
    loss = ring_token_logprobs(x, batch).cumsum(1).sin().sum()
    (grad,) = torch.autograd.grad(loss / ring.size, x, create_graph=True)
    return batch.unshard(torch.autograd.grad(grad.square().sum(), x)[0])


def test_penalties_on_gradients_of_logprobs_are_of_the_whole_sequence():
    want = penalty_of_logprobs(Ring.alone())
    for found in threads.run(2, penalty_of_logprobs)[0]:
        assert relative_error(found, want) < EXACT


def all_logprobs() -> dict[str, dict[str, float]]:
    return {terms: logprob_errors(terms) for terms in TERMS}


def test_logprobs_by_a_head_with_terms_are_those_of_one_process(pools):
    for rank in pools(2).run(all_logprobs):
        for terms, found in rank.items():
            assert max(found.values()) < EXACT, (terms, found)


def test_a_cap_bounds_what_16_bits_hold():
    """Logits are widened before scale and cap, which 16 bits would round."""
    draw = torch.Generator().manual_seed(0)
    x, head = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((1, 50, 8), (CLASSES, 8))
    )
    labels = torch.arange(50)[None] % CLASSES
    got = ring_cross_entropy(x, labels, head=head, scale=0.37, softcap=2.0)
    logits = F.linear(x, head).double() * 0.37
    want = F.cross_entropy((2 * torch.tanh(logits / 2))[0], labels[0])
    assert got.dtype == torch.float32
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("name", ["head", "bias"])
@pytest.mark.parametrize("each", [False, True], ids=["mean", "logprobs"])
def test_a_head_that_changes_before_backward_is_an_error(name: str, each: bool) -> None:
    """Backward computes logits again: with another head its gradients would be of other logits."""
    ids = torch.tensor([[1, 2, 0, 3]])
    x = torch.randn(1, 4, 5, requires_grad=True)
    terms = {"head": torch.randn(6, 5).requires_grad_(), "bias": torch.randn(6).requires_grad_()}
    if each:
        batch = shard_batch({"input_ids": ids, "labels": ids})
        found = ring_token_logprobs(x, batch, **terms).sum()
    else:
        found = ring_cross_entropy(x, ids, **terms)
    with torch.no_grad():
        terms[name].mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def given_to(rank: int, change: str) -> dict[str, Any]:
    """Arguments of a loss; rank 1's are wrong in one thing."""
    draw = torch.Generator().manual_seed(rank)
    given: dict[str, Any] = {
        "x": torch.randn(B, N, D, generator=draw).requires_grad_(),
        "labels": torch.randint(CLASSES, (B, N), generator=draw),
        "head": torch.randn(CLASSES, D), "weights": torch.rand(B, N, generator=draw),
        "bias": torch.zeros(CLASSES), "softcap": 3, "scale": 2.0,
    }  # fmt: skip
    given["labels"][0, 2] = -100
    if rank == 1:
        _CHANGES[change](given)
    return given


def _without_head(given: dict[str, Any]) -> None:
    given.update(head=None, bias=None, scale=None, x=torch.randn(B, N, CLASSES))


def _set(name: str, value: float) -> Callable[[dict[str, Any]], None]:
    return lambda given: given[name][1].__setitem__(3, value)


_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "labels must be 0 to 8, or ignore_index=-100": _set("labels", CLASSES),
    "labels must be 0 to 8, .* got -1 ": _set("labels", -1),
    "weights must be finite and at least 0, got nan": _set("weights", float("nan")),
    "weights must be finite and at least 0, got -0.5": _set("weights", -0.5),
    "weights must be finite and at least 0, got inf": _set("weights", float("inf")),
    r"weights must be real \[2, 7\] on cpu": lambda g: g.update(weights=torch.rand(B, N - 1)),
    "labels must be int64 .* on meta": lambda g: g.update(labels=g["labels"].to("meta")),
    r"head must be \[classes, 6\] .* torch.float32 .* torch.float64": lambda g: g.update(
        head=g["head"].double()
    ),
    r"head must be \[classes, 6\] .* on meta": lambda g: g.update(head=g["head"].to("meta")),
    r"bias must be \[9\]": lambda g: g.update(bias=torch.zeros(CLASSES + 1)),
    "softcap must be None, or positive and finite, got 0": lambda g: g.update(softcap=0),
    "softcap must be None, or positive and finite, got nan": lambda g: g.update(
        softcap=float("nan")
    ),
    "scale must be finite and not 0, got inf": lambda g: g.update(scale=float("inf")),
    "bias, scale and softcap make logits of hidden states": _without_head,
    "softcap of logits must be the same": lambda g: g.update(softcap=4),
    "scale of logits must be the same": lambda g: g.update(scale=None),
    "bias of the head must be the same": lambda g: g.update(bias=None),
    "requires_grad of x or head, of weights must be the same": lambda g: g[
        "weights"
    ].requires_grad_(),
}


def refusal(change: str, group: Group = None) -> str:
    """For a pool or a ring of threads: what a rank hears of a wrong argument of rank 1."""
    try:
        ring_cross_entropy(**given_to(as_ring(group).rank, change), group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals() -> dict[str, str]:
    return {change: refusal(change) for change in _CHANGES}


def test_all_ranks_hear_of_a_wrong_value_or_argument(pools):
    for rank in pools(2).run(refusals):
        for change, told in rank.items():
            with pytest.raises(ValueError, match=change):
                raise ValueError(told)
            assert "must be the same" in told or "(on rank 1)" in told


def logprobs_of_no_class(group: Group = None) -> str:
    ring = as_ring(group)
    batch = shard_batch({"input_ids": torch.zeros(1, 8).long(), "labels": torch.ones(1, 8).long()},
                        group=group)  # fmt: skip
    if ring.rank == 1:
        batch.labels[0, 0] = 4
    try:
        ring_token_logprobs(torch.zeros(1, batch.labels.shape[1], 4), batch)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_all_ranks_hear_of_a_label_that_has_no_probability(pools):
    for told in pools(2).run(logprobs_of_no_class):
        assert "labels must be 0 to 3" in told


def test_logprobs_ignore_what_the_batch_has_for_no_label():
    ids = torch.ones(1, 8, dtype=torch.long)
    batch = shard_batch({"input_ids": ids, "labels": ids}, ignore_index=0)
    with pytest.raises(ValueError, match=r"have ignore_index=0 .* the loss ignores -100"):
        ring_token_logprobs(torch.zeros(1, 8, 4), batch)
    assert ring_token_logprobs(torch.zeros(1, 8, 4), batch, ignore_index=0)[0, -1] == 0


# where reading a value would keep the host waiting, as on GPUs


@pytest.mark.parametrize("what", ["labels", "weights"])
def test_where_nobody_waits_a_wrong_value_is_nan_everywhere_and_then_an_error(what, pools):
    found = pools(2).run(told_later, what)
    check_told_later(found, what)
    assert all("(on rank 1)" in told for _, _, told, _ in found)


@pytest.mark.parametrize("what", ["labels", "weights"])
def test_alone_a_wrong_value_is_nan_and_then_an_error(what):
    check_told_later([told_later(what)], what)


def test_where_nobody_waits_a_label_that_is_no_class_has_nan(pools):
    for where, told in pools(2).run(logprobs_told_later):
        assert where == [[0, 5]]
        assert "(on rank 1)" in told


def test_alone_a_label_that_is_no_class_has_nan_where_nobody_waits():
    assert logprobs_told_later()[0] == [[0, 1]]


def counted(at_once: bool) -> tuple[str, float, list[float]]:
    """For a pool: the error, the loss and its gradient, where a label of rank 1 is no class."""
    ring, whole = as_ring(None), drawn(2)
    mine = slice(ring.rank * N, ring.rank * N + N)
    x, labels = whole["x"][:, mine].clone().requires_grad_(), whole["labels"][:, mine] % D
    labels[0, 1] = D if ring.rank else 0
    given = x, labels, torch.tensor(10), None, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_inputs, "reads_at_once", lambda t: at_once)
        try:
            loss = counted_cross_entropy(*given)
            loss.backward()
            counted_cross_entropy(*given)
        except ValueError as error:
            told = str(error)
    return (told, 0.0, []) if at_once else (told, loss.item(), x.grad.flatten().tolist())


def test_a_loss_that_is_counted_by_others_raises_on_all_ranks_for_a_label_that_is_no_class(pools):
    for told, *_ in pools(2).run(counted, True):
        assert "labels must be 0 to 5, or ignore_index=0" in told
        assert "(on rank 1)" in told
    _, second = pools(2).run(counted, False)
    told, loss, gradient = second
    assert "labels of an earlier loss were" in told
    assert math.isnan(loss)
    assert math.isnan(sum(gradient))


def test_a_loss_that_is_counted_by_others_is_a_sum_divided_by_their_number():
    x, labels = drawn(1)["x"].requires_grad_(), drawn(1)["labels"]
    for items, ignore in ((7, -100), (0, -100)):
        kept = labels if items else torch.full_like(labels, ignore)
        loss = counted_cross_entropy(x, kept.clamp(max=D - 1), torch.tensor(items), None, ignore)
        (grad,) = torch.autograd.grad(loss, x)
        each = -x.log_softmax(-1).gather(2, kept.clamp(0, D - 1)[..., None])[..., 0]
        want = each[kept != ignore].sum() / max(1, items)
        assert relative_error(loss, want) < EXACT
        assert relative_error(grad, torch.autograd.grad(want, x)[0]) < EXACT


def test_ranks_in_blocks_of_different_batches_are_told_by_the_loss():
    """As where one rank makes a step more than the others, whose next one it meets."""

    def main(ring: threads.ThreadRing) -> str:
        ids = torch.arange(8)[None] % 4
        batches = [
            shard_batch({"input_ids": ids + more, "labels": ids}, group=ring) for more in (0, 1)
        ]
        x = torch.zeros(1, 4, 4)
        with batches[0]:
            ring_cross_entropy(x, batches[0].labels, group=ring)
        with batches[ring.rank] as mine, pytest.raises(ValueError, match="different") as told:
            ring_cross_entropy(x, mine.labels, group=ring)
        with pytest.raises(ValueError, match=r"batch \(its digest\) must be the same"):
            ring_token_logprobs(x, batches[ring.rank])
        return str(told.value)

    (told,) = {*threads.run(2, main)[0]}
    assert "ranks of one ring are in the blocks of different batches" in told
