"""`check_parity`: a model that shards sequences, compared with itself in one process.

all ranks                        model(**batch)      loss, gradients of all ranks, averaged
each rank for itself             model(**batch)      loss, gradients of whole sequences
    in `one_process()`
records of both runs             mistakes.KNOWN      which mistake explains the difference
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from ring_attention_pytorch.doctor.evidence import Evidence, watched
from ring_attention_pytorch.doctor.mistakes import KNOWN, Case, RankNumbers
from ring_attention_pytorch.doctor.shards import whole_tokens
from ring_attention_pytorch.ranks.agreement import agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.alone import one_process
from ring_attention_pytorch.ranks.failures import ranks_of
from ring_attention_pytorch.ranks.notes import read_json
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring, as_ring
from ring_attention_pytorch.runtime.digests import digest

_CALLER = "check_parity"
# the largest relative error that rounding explains, after many layers
_ALLOWED = {
    torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
_OF_ALL = 1e-3  # least denominator of a gradient's error, as a share of all gradients' norm
_THEIRS = ("eager", "sdpa", "flash_attention", "flex_attention", "paged", "ring")  # no adapters


class GradientError(NamedTuple):
    """The relative error of a parameter's gradient."""

    name: str
    error: float


class Explanation(NamedTuple):
    """A known mistake that was found: name, description, ranks with traces of it, advice."""

    name: str
    seen: str
    ranks: tuple[int, ...]
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen} (on {ranks_of([*self.ranks])})\n  -> {self.advice}"


@dataclass(frozen=True)
class ParityReport:
    """How a model over several ranks differs from the same model in one process.

    The same on all ranks. `print` it.

    Attributes:
        ring_size: number of ranks that share a sequence.
        loss, loss_of_one: the mean of all ranks' losses, and the loss in one process.
        logits: the largest relative error of a rank's logits; None if the model returns none, or
            their positions are unknown.
        gradients: for each parameter the relative error of the average over all ranks, the worst
            first. The denominator is at least a thousandth of all gradients' norm.
        allowed: the largest error that counts as rounding.
        mistakes: known mistakes that left traces.
    """

    ring_size: int
    loss: float
    loss_of_one: float
    logits: float | None
    gradients: tuple[GradientError, ...]
    allowed: float
    mistakes: tuple[Explanation, ...]

    @property
    def right(self) -> bool:
        """True if all numbers are the same, and there is no trace of a mistake."""
        return self.same and not self.mistakes

    @property
    def same(self) -> bool:
        """True if all numbers are equal up to rounding; False for NaN."""
        errors = [self.loss_error, self.logits or 0.0, *(g.error for g in self.gradients)]
        return all(error <= self.allowed for error in errors)

    @property
    def loss_error(self) -> float:
        """The relative error of the loss."""
        return abs(self.loss - self.loss_of_one) / max(abs(self.loss_of_one), 1e-30)

    def __str__(self) -> str:
        lines = [
            f"loss {self.loss:.6g} on {self.ring_size} ranks, {self.loss_of_one:.6g} on one: "
            f"relative error {self.loss_error:.1e}, {self.allowed:.0e} is allowed"
        ]
        if self.logits is not None:
            lines.append(f"logits: relative error {self.logits:.1e}")
        lines += [f"gradient of {name}: {error:.1e}" for name, error in self.gradients[:5]]
        if not (self.same or self.mistakes):
            lines.append("No known mistake explains this.")
        first = "The same as one process." if self.same else "Not the same as one process."
        return "\n".join([first, *lines, *map(str, self.mistakes)])


class _Run(NamedTuple):
    """Results of a run: loss, logits if there are any, gradients by name."""

    loss: float
    logits: Tensor | None
    gradients: dict[str, Tensor]
    seen: Evidence


@typed(report_to_group(_CALLER), apart=True)
def check_parity(
    model: nn.Module, batch: Mapping[str, Any], *, group: Group = None
) -> ParityReport:
    """Compare a model whose ranks share sequences with the same model in one process.

    The model is called as `model(**batch)`, with whole sequences. It shards them itself, and
    returns its loss, or an object or mapping with `loss` and optionally `logits`. If your training
    step prepares the batch outside of the model, wrap both in a module and pass that.

    It runs twice, forward and backward: once on all ranks, and once more on each rank alone. In the
    second run all rings have one rank, and torch.distributed reports a world of one. A transformers
    model with an adapter of yours as attention uses "sdpa" or "eager" in it. Each rank needs memory
    for whole sequences, so use a short batch. The model itself is not changed.

    If the loss is over more ranks than the ring, pass the same batch to all rings.

    Gradients are averaged over the ranks, as DDP and FSDP2 do. Pass the model before FSDP2 shards
    it: sharded parameters are refused.

    Args:
        model: the same weights on all ranks.
        batch: whole sequences by name, the same on all ranks.
        group: the ring; None is the default group.

    Raises:
        ValueError: batches or weights differ between ranks, torchrun started several processes
            but there is no process group, parameters are sharded, or the model returns no loss;
            on all ranks.

    >>> class Squares(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(3))
    ...     def forward(self, x):
    ...         return (x @ self.weight).square().mean()
    >>> check_parity(Squares(), {"x": torch.randn(2, 5, 3)}).right
    True
    """
    ring = as_ring(group)
    wrong = error_of(lambda: _check(model, ring))
    same = {"batch (its digest)": None if wrong else _digest(batch)}
    agree(ring, _CALLER, same, check=wrong)
    weights = [(name, digest(p)) for name, p in _parameters(model).items()]
    agree(ring, _CALLER, {"parameters (their digest)": crc32(repr(weights).encode())})
    with _as_it_was(model):
        alone: list[_Run] = []
        agree(ring, _CALLER, {}, check=lambda: alone.append(_alone(model, batch)))
        here = _step(model, batch)
    return _compared(model, batch, ring, here, alone[0])


def _compared(
    model: nn.Module, batch: Mapping[str, Any], ring: Ring, here: _Run, alone: _Run
) -> ParityReport:
    mine = {
        "loss": here.loss, "entropy": here.seen.entropy, "counted": here.seen.counted
    }  # fmt: skip
    ranks = [RankNumbers(**each) for each in _gathered(ring, mine)]
    errors, size = _gradients(here.gradients, alone.gradients, ring)
    allowed = _ALLOWED.get(next(iter(alone.gradients.values())).dtype, 1e-3)
    case = Case(
        model, batch, ring, here.seen, alone.seen, ranks, alone.loss, size, allowed
    )  # fmt: skip
    logits = _logits(here.logits, alone.logits, case)
    found = {m.name: seen for m in KNOWN if (seen := m.find(case)) is not None}
    of_ranks = _gathered(ring, {"logits": logits, "found": found})
    known = [each["logits"] for each in of_ranks if each["logits"] is not None]
    return ParityReport(
        ring_size=ring.size,
        loss=sum(r.loss for r in ranks) / len(ranks),
        loss_of_one=alone.loss,
        logits=max(known, default=None),
        gradients=errors,
        allowed=allowed,
        mistakes=_explanations([each["found"] for each in of_ranks]),
    )


def _explanations(found: list[dict[str, str]]) -> tuple[Explanation, ...]:
    """Join the ranks' findings: each mistake once, with the first rank's description."""
    explanations = []
    for name, _, advice in KNOWN:
        ranks = tuple(rank for rank, mistakes in enumerate(found) if name in mistakes)
        if ranks:
            explanations.append(Explanation(name, found[ranks[0]][name], ranks, advice))
    return tuple(explanations)


def _gathered(ring: Ring, mine: Mapping[str, Any]) -> list[Any]:
    notes = ring.gather_notes(_CALLER, json.dumps(mine).encode())
    return [read_json(_CALLER, rank, note) for rank, note in enumerate(notes)]


def _alone(model: nn.Module, batch: Mapping[str, Any]) -> _Run:
    """Run the model in a world of one; raise ValueError if it fails, or gets only some tokens."""
    try:
        with one_process(), _their_attention(model):
            run = _step(model, batch)
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(f"in one process the model raises {kind}: {error}") from error
    tokens = whole_tokens(batch)
    longest = max((t.shape[1] for t in run.seen.inputs.values()), default=None)
    if tokens is not None and longest is not None and longest < tokens.shape[1] - 1:
        raise ValueError(
            f"in one process the model was given {longest} of {tokens.shape[1]} tokens: it must "
            "ask torch.distributed.get_world_size(group) or this library how many ranks there are, "
            "and not an object of its own"
        )
    return run


@contextmanager
def _their_attention(model: nn.Module) -> Iterator[None]:
    """In this block, use transformers' own attention in place of an adapter."""
    with ExitStack() as block:
        for module in model.modules():
            config = getattr(module, "config", None)
            name = getattr(config, "_attn_implementation", None)
            change = getattr(module, "set_attn_implementation", None)
            if change is None or not isinstance(name, str) or name.startswith(_THEIRS):
                continue
            change("sdpa" if getattr(module, "_supports_sdpa", False) else "eager")
            block.callback(change, name)
        yield


def _step(model: nn.Module, batch: Mapping[str, Any]) -> _Run:
    """Run forward and backward; return the gradients of all parameters, 0 where there is none."""
    parameters = _parameters(model)
    for p in parameters.values():
        p.grad = None
    devices = {p.device.index for p in parameters.values() if p.device.type == "cuda"}
    with torch.random.fork_rng([*devices]), watched(model) as seen:
        torch.manual_seed(0)
        outcome = model(**batch)
        loss = outcome if isinstance(outcome, Tensor) else _of(outcome, "loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError("the model must return its loss, a scalar that requires a gradient")
        loss.backward()
    gradients = {}
    for name, p in parameters.items():
        gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
    logits = None if isinstance(outcome, Tensor) else _of(outcome, "logits")
    return _Run(
        float(loss.detach()),
        logits.detach() if isinstance(logits, Tensor) else None,
        gradients,
        seen,
    )


def _of(outcome: Any, name: str) -> Any:
    return outcome.get(name) if isinstance(outcome, Mapping) else getattr(outcome, name, None)


def _gradients(
    here: Mapping[str, Tensor], alone: Mapping[str, Tensor], ring: Ring
) -> tuple[tuple[GradientError, ...], float]:
    """Return the errors of gradients averaged over ranks, and the factor by which all are off.

    The factor is 0 if the gradients differ by more than a common factor.
    """
    norm = float(sum(g.double().square().sum() for g in alone.values())) ** 0.5
    errors, along, across = [], 0.0, 0.0
    for name, want in alone.items():
        got, want = here[name].double(), want.double()
        if ring.size > 1:
            got = Caller(ring, "comparing gradients", 0).total(got) / ring.size
        least = max(float(want.norm()), _OF_ALL * norm, 1e-30)
        errors.append(GradientError(name, float((got - want).norm()) / least))
        along += float((got * want).sum())
        across += float(got.square().sum())
    errors.sort(key=lambda each: -or_infinite(each.error))
    size = along / norm**2 if norm else 0.0
    straight = along**2 >= (1 - 1e-6) * across * norm**2
    return tuple(errors), size if straight else 0.0


def or_infinite(error: float) -> float:
    """Return an error that can be compared: NaN is larger than any number."""
    return float("inf") if error != error else error


def _logits(got: Tensor | None, want: Tensor | None, case: Case) -> float | None:
    if got is None or want is None or case.held is None:
        return None
    at = case.held.positions.to(want.device)
    if want.shape[1] != case.tokens.shape[1] or got.shape[1] != len(at):
        return None
    right = want[:, at].double()
    return float((got.double() - right).norm() / right.norm().clamp_min(1e-30))


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _digest(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {k: digest(v) if isinstance(v, Tensor) else repr(v) for k, v in batch.items()}


def _check(model: nn.Module, ring: Ring) -> None:
    if ring.several:
        raise ValueError(f"group must be a ring, got one of several rings of {ring.size}")
    if not _parameters(model):
        raise ValueError("the model has no parameters that require gradients")
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    if sharded:
        raise ValueError(
            f"{sharded[0]} is sharded over a mesh: give the model before FSDP2 shards it"
        )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore the gradients at the end of the block."""
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad
