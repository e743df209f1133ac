"""Modules over a pool of processes against one process, on every rank and in every gradient.

The functions here run in the pool's processes. Data is drawn from seeds, the same on all ranks,
so each rank works out by itself what one process makes of everyone's batches.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch import (
    RingAttention,
    RingTransformer,
    shard_sequence,
    unshard_sequence,
)
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from tests.support import case as language
from tests.support.ranks import Pool
from tests.support.reference import relative_error

Errors = dict[str, float]
Options = Mapping[str, Any]

ATTENTION = dict(dim=12, dim_head=4, heads=4, num_grouped_query_heads=2)
TRANSFORMER = dict(ATTENTION, num_tokens=11, depth=2, ff_mult=2)
RING_ONLY = {
    "ring_attn", "auto_shard_seq", "ring_seq_size", "layout", "striped_ring_attn", "group",
    "kernel", "bucket_size",
}  # fmt: skip
EXACT = 1e-12


@dataclass(frozen=True)
class Case(language.Case):
    """A module's options, and the batches that it is given.

    Sharded automatically, `batches` are what each rank brings, as (samples, length); by hand,
    what each ring shares. `context` is then the context's length, one for each batch or, by
    hand, what lies on each rank of a ring.
    """

    options: Options = field(default_factory=dict)
    batches: tuple[tuple[int, int], ...] = ()
    by_hand: bool = False
    masked: bool = False
    angles: bool = False
    context: tuple[int, ...] | None = None
    loss: str | None = None  # "next" or "labels"; None is logits
    call: Options = field(default_factory=dict)

    def ring_options(self) -> Options:
        return dict(ring_attn=True, auto_shard_seq=not self.by_hand) | dict(self.options)

    def whole_options(self) -> Options:
        """Options of the module that is right by construction: one process, dense attention."""
        kept = {name: value for name, value in self.options.items() if name not in RING_ONLY}
        return dict(kept, force_regular_attn=True)

    @property
    def layout(self) -> str:
        striped = "striped" if self.options.get("striped_ring_attn") else "contiguous"
        return self.options.get("layout") or striped

    def of(self, batch: int) -> "Case":
        """Return the case whose tensors are those of one batch."""
        return replace(self, seed=1000 * self.seed + batch + 1)

    def context_length(self, batch: int) -> int:
        assert self.context is not None
        return sum(self.context) if self.by_hand else self.context[batch]


def made(kind: type[nn.Module], options: Options) -> Any:
    """A module in float64, none of whose parameters is a neutral one."""
    torch.manual_seed(0)
    defaults = ATTENTION if kind is RingAttention else TRANSFORMER
    module = kind(**(defaults | dict(options))).double()
    draw = torch.Generator().manual_seed(7)
    for name, p in module.named_parameters():
        if name.endswith("gamma"):
            p.data += 0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return module


def pair(kind: type[nn.Module], case: Case) -> tuple[Any, Any]:
    """The module over a ring, and one that needs none, with the same weights."""
    ring, whole = made(kind, case.ring_options()), made(kind, case.whole_options())
    whole.load_state_dict(ring.state_dict())
    return ring, whole


def random_mask(shape: tuple[int, int], draw: torch.Generator) -> Tensor:
    """Padding left and right and holes, and a sample of nothing but padding at the end."""
    mask = torch.rand(shape, generator=draw) < 0.75
    mask[::2, : shape[1] // 3] = False
    mask[1::2, shape[1] // 2 :] = False
    if shape[0] > 1:
        mask[-1] = False
    return mask


def gradient_errors(module: nn.Module, whole: nn.Module, *, ranks: str = "sum") -> Errors:
    """Compare each parameter's gradient, "sum" or "mean" over ranks or "own", with one process'."""
    names = [name for name, _ in module.named_parameters()]
    got, want = gradients(module), gradients(whole)
    if ranks != "own" and dist.is_initialized():
        flat = torch.cat([g.flatten() for g in got])  # one message
        dist.all_reduce(flat)
        flat /= dist.get_world_size() if ranks == "mean" else 1
        got = [g.view_as(w) for g, w in zip(flat.split([w.numel() for w in want]), want)]
    return {name: relative_error(g, w) for name, g, w in zip(names, got, want)}


def gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


def place(case: Case) -> tuple[int, Ring]:
    """Return which batch is mine, and the ring that shares it (by hand) or this process."""
    if not case.by_hand:
        return dist.get_rank(), Ring.alone()
    ring = Ring(None, dist.get_world_size() // len(case.batches))
    return dist.get_rank() // ring.size, ring


# RingAttention


@dataclass
class Sample:
    """One batch of a case of RingAttention, whole."""

    x: Tensor
    context: Tensor | None
    mask: Tensor | None
    angles: Tensor | None
    cotangent: Tensor


def attention_batch(case: Case, i: int, dim: int) -> Sample:
    of, (b, n) = case.of(i), case.batches[i]
    x, cotangent = of.normal("x", b, n, dim), of.normal("dout", b, n, dim)
    angles = None
    if case.angles:
        everyones = torch.Generator().manual_seed(n)  # one sequence has one set of angles
        angles = torch.randn((n, ATTENTION["dim_head"] // 2), generator=everyones).repeat(1, 2)
    context = None
    if case.context is not None:
        context = of.normal("context", b, case.context_length(i), dim).requires_grad_()
    keys = x if context is None else context
    mask = random_mask((b, keys.shape[1]), of.drawing("mask")) if case.masked else None
    return Sample(x.requires_grad_(), context, mask, angles, cotangent)


def attend(module: nn.Module, sample: Sample, call: Options) -> Tensor:
    named = "mask" if sample.context is None else "context_mask"
    given = {"rotary_emb": sample.angles, "context": sample.context, named: sample.mask}
    return module(sample.x, **given, **call)


def attend_to_all(module: nn.Module, samples: list[Sample]) -> list[Tensor]:
    """Attend to whole batches: to those of one length in one call, which is faster."""
    first, lengths = samples[0], {s.x.shape[1] for s in samples}
    if first.context is not None or len(lengths) > 1:
        return [attend(module, s, {}) for s in samples]
    masks = [s.mask for s in samples if s.mask is not None]
    together = replace(
        first, x=torch.cat([s.x for s in samples]), mask=torch.cat(masks) if masks else None
    )
    return list(attend(module, together, {}).split([len(s.x) for s in samples]))


def by_hand(case: Case, whole: Sample, ring: Ring) -> tuple[Sample, Callable[[Tensor], Tensor]]:
    """This rank's part of a batch, and what takes its part of any other such tensor."""

    def of_context(t: Tensor) -> Tensor:
        assert case.context is not None
        return t.split(case.context, dim=1)[ring.rank]

    def mine(t: Tensor, dim: int = 1) -> Tensor:
        return shard_sequence(t, dim=dim, layout=case.layout, group=ring)

    def variable(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_()

    cross = whole.context is not None
    return Sample(
        variable(mine(whole.x)),
        variable(of_context(whole.context)) if cross else None,
        None if whole.mask is None else (of_context if cross else mine)(whole.mask),
        None if whole.angles is None else mine(whole.angles, 0),
        mine(whole.cotangent),
    ), of_context


def attention_errors(case: Case) -> Errors:
    module, reference = pair(RingAttention, case)
    dim = case.options.get("dim", ATTENTION["dim"])
    samples = [attention_batch(case, i, dim) for i in range(len(case.batches))]
    outs = attend_to_all(reference, samples)
    torch.autograd.backward(outs, [s.cotangent for s in samples])

    at, ring = place(case)
    whole, want = samples[at], [outs[at], samples[at].x.grad]
    if case.by_hand:
        sample, of_context = by_hand(case, whole, ring)
        want = [shard_sequence(t, layout=case.layout, group=ring) for t in want]
    else:
        sample, of_context = attention_batch(case, at, dim), lambda t: t
    out = attend(module, sample, case.call)
    out.backward(sample.cotangent)
    found = {"out": relative_error(out, want[0]), "dx": relative_error(sample.x.grad, want[1])}
    if sample.context is not None:
        of_context_grad = of_context(whole.context.grad)
        found["dcontext"] = relative_error(sample.context.grad, of_context_grad)
    return found | gradient_errors(module, reference)


# RingTransformer


@dataclass
class Ids:
    """One batch of a case of RingTransformer, whole."""

    x: Tensor
    mask: Tensor | None
    labels: Tensor | None
    cotangent: Tensor


def ids_batch(case: Case, i: int) -> Ids:
    of, (b, n) = case.of(i), case.batches[i]
    classes = TRANSFORMER["num_tokens"]
    x = torch.randint(0, classes, (b, n), generator=of.drawing("x"))
    cotangent = of.normal("dout", b, n, classes)
    mask = random_mask((b, n), of.drawing("mask")) if case.masked else None
    labels = None
    if case.loss == "labels":
        labels = torch.randint(0, classes, (b, n), generator=of.drawing("labels"))
        labels[:, ::3] = case.options.get("ignore_index", -1)
    return Ids(x, mask, labels, cotangent)


def targets(ids: Ids, ignored: int) -> Tensor:
    """Return the target of each token, `ignored` where there is none."""
    if ids.labels is None:
        end = torch.full_like(ids.x[:, :1], ignored)
        labels = torch.cat((ids.x[:, 1:], end), dim=1)[:, : ids.x.shape[1]]
        real = None if ids.mask is None else F.pad(ids.mask[:, 1:], (0, 1))[:, : ids.x.shape[1]]
    else:
        labels, real = ids.labels, ids.mask
    return labels if real is None else labels.masked_fill(~real, ignored)


def whole_loss(reference: nn.Module, batches: list[Ids], ignored: int) -> Tensor:
    """The mean over every real token of every batch, by the definition."""
    # when the next token is the target, the last is no input, and causal or not nobody sees it
    last = None if batches[0].labels is not None else -1
    logits = torch.cat([out.flatten(0, 1) for out in logits_of_all(reference, batches, last)])
    labels = torch.cat([targets(b, ignored)[:, :last].flatten() for b in batches])
    real = labels != ignored
    return F.cross_entropy(logits[real], labels[real]) if real.any() else (logits * 0).sum()


def logits_of_all(
    reference: nn.Module, batches: list[Ids], last: int | None = None
) -> list[Tensor]:
    """Return the logits of whole batches: of those of one length by one call, which is faster."""
    if len({b.x.shape[1] for b in batches}) > 1:
        return [logits for b in batches for logits in logits_of_all(reference, [b], last)]
    masks = [b.mask[:, :last] for b in batches if b.mask is not None]
    x = torch.cat([b.x for b in batches])[:, :last]
    return list(
        reference(x, torch.cat(masks) if masks else None).split([len(b.x) for b in batches])
    )


def hand_sharded(case: Case, ids: Ids, ring: Ring) -> Ids:
    def mine(t: Tensor | None) -> Tensor | None:
        return None if t is None else shard_sequence(t, layout=case.layout, group=ring)

    return Ids(mine(ids.x), mine(ids.mask), mine(ids.labels), mine(ids.cotangent))


def transformer_errors(case: Case) -> Errors:
    module, reference = pair(RingTransformer, case)
    batches = [ids_batch(case, i) for i in range(len(case.batches))]
    at, ring = place(case)
    mine = hand_sharded(case, batches[at], ring) if case.by_hand else batches[at]
    if case.loss is None:
        logits = logits_of_all(reference, batches)
        torch.autograd.backward(logits, [b.cotangent for b in batches])
        want = logits[at]
        if case.by_hand:
            want = shard_sequence(want, layout=case.layout, group=ring)
        got = module(mine.x, mine.mask, **case.call)
        got.backward(mine.cotangent)
    else:
        want = whole_loss(reference, batches, case.options.get("ignore_index", -1))
        want.backward()
        got = module(
            mine.x, mine.mask, labels=mine.labels, return_loss=mine.labels is None, **case.call
        )
        got.backward()
    found = {"out": relative_error(got, want)}
    found |= gradient_errors(module, reference, ranks="mean" if case.loss else "sum")
    return found | ({} if case.loss is None else {"same on all ranks": spread_of(got)})


def spread_of(x: Tensor) -> float:
    """By how much ranks differ."""
    high, low = x.detach().clone(), x.detach().clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return (high - low).abs().max().item()


def attention_cases(cases: list[Case]) -> list[Errors]:
    return [attention_errors(case) for case in cases]


def transformer_cases(cases: list[Case]) -> list[Errors]:
    return [transformer_errors(case) for case in cases]


def assert_all_exact(errors: Errors) -> None:
    assert errors
    bad = {name: e for name, e in errors.items() if not e < EXACT}
    assert not bad


def assert_exact(cases: list[Any], by_rank: list[list[Errors]], limit: float = EXACT) -> None:
    """Every result of every case on every rank."""
    assert by_rank
    for rank, found in enumerate(by_rank):
        assert len(found) == len(cases) > 0
        for case, errors in zip(cases, found):
            assert errors
            bad = {name: e for name, e in errors.items() if not e < limit}
            assert not bad, f"rank {rank} of {len(by_rank)}: {bad} in {case}"


def check(
    pool: Pool, function: Callable[..., list[Errors]], cases: list[Any], limit: float = EXACT
) -> None:
    """The cases over all ranks of the pool, each against one process."""
    assert_exact(cases, pool.run(function, cases), limit)


# refusals


def refusals(function: Callable[[str], None], names: list[str]) -> list[tuple[str, float]]:
    """The text of each ValueError, and the seconds it took."""
    found = []
    for name in names:
        start = time.perf_counter()
        try:
            function(name)
        except ValueError as error:
            found.append((str(error), time.perf_counter() - start))
        else:
            raise AssertionError(f"{name} was accepted")
    return found


def check_refused(pool: Pool, function: Callable[[str], None], wanted: Mapping[str, str]) -> None:
    """Each is refused, soon, in the same words on all ranks, and they say what is wrong."""
    names = list(wanted)
    by_rank = pool.run(refusals, function, names)
    for name, *found in zip(names, *by_rank):
        texts = {text for text, _ in found}
        assert len(texts) == 1, f"{name}: ranks differ: {texts}"
        assert wanted[name] in texts.pop(), f"{name}: {found[0][0]}"
        assert max(s for _, s in found) < 60.0, f"{name}: {found}"


# what travels


@dataclass
class Traffic:
    sent: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    received: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)  # bytes a rank, of each collective

    def floats_received(self) -> list[int]:
        """Return how many of each message; one of bytes holds float64."""
        return [
            shape.numel() // (8 if dtype == torch.uint8 else 1)
            for shape, dtype in self.received
            if dtype.is_floating_point or dtype == torch.uint8
        ]


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Whatever this rank sends and receives."""
    seen = Traffic()
    pairs, gather = dist.batch_isend_irecv, Ring.gather_bytes

    def noted_pairs(ops: list[dist.P2POp]) -> Any:
        for op in ops:
            kept = seen.sent if op.op is dist.isend else seen.received
            kept.append((op.tensor.shape, op.tensor.dtype))
        return pairs(ops)

    def noted_gather(ring: Ring, message: bytes, size: int) -> list[bytes]:
        seen.gathered += [] if ring.group is None else [size]
        return gather(ring, message, size)

    dist.batch_isend_irecv, Ring.gather_bytes = noted_pairs, noted_gather
    try:
        yield seen
    finally:
        dist.batch_isend_irecv, Ring.gather_bytes = pairs, gather


def whole_again(module: nn.Module, x: Tensor, layout: str, group: Group = None) -> Tensor:
    """Shard by hand, apply, and bring together."""
    ring = as_ring(group)
    out = module(shard_sequence(x, layout=layout, group=ring))
    return unshard_sequence(out, length=x.shape[1], layout=layout, group=ring)


def before_within_and_after(rank: int, size: int, folder: str) -> None:
    """For processes of their own: groups may come and go while a module lives."""
    model = made(RingTransformer, dict(causal=True, ring_attn=True, ring_seq_size=4))
    x = torch.randint(0, 11, (1, 7), generator=torch.Generator().manual_seed(rank))
    alone = model(x)
    for attempt in range(2):
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"file://{folder}/{attempt}",
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        with traffic() as seen:
            within = model(x)
        assert len(seen.received) > 0, "nothing went over the ring"
        assert relative_error(within, alone) < EXACT
        dist.destroy_process_group()
        assert torch.equal(model(x), alone)
