"""Known mistakes in sharding a sequence: one function for each looks for its traces.

A function gets the records of a rank's runs, and compares them with the records that a correct or
a wrong program would leave. It returns a description of the mistake, or None without a trace.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch.doctor.evidence import Evidence
from ring_attention_pytorch.doctor.shards import (
    EVERYTHING,
    Held,
    held,
    tokens_of,
    whole_tokens,
)
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.training.labels import documents_of_positions


class RankNumbers(NamedTuple):
    """Numbers of a rank that all ranks know: its loss, and sum and count of its cross entropies."""

    loss: float
    entropy: float
    counted: int


@dataclass(frozen=True)
class Case:
    """A rank's run (`here`), the run in one process (`whole`), and the numbers of all ranks.

    Attributes:
        size: the mean of all ranks' gradients, as a multiple of the gradients in one process.
        close: the relative error up to which numbers count as equal.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    ring: Ring
    here: Evidence
    whole: Evidence
    ranks: list[RankNumbers]
    want: float
    size: float
    close: float

    @cached_property
    def tokens(self) -> Tensor | Any:
        """The whole sequences."""
        return whole_tokens(self.batch)

    @cached_property
    def mine(self) -> Tensor | None:
        """This rank's tokens, as passed to the model."""
        return None if self.tokens is None else tokens_of(self.here, self.whole, self.tokens)

    @cached_property
    def held(self) -> Held | None:
        """Positions and layout of this rank's tokens; None if they fit no layout."""
        if self.tokens is None or self.mine is None:
            return None
        found = held(self.mine, self.tokens, self.ring, self.here)
        return None if found is None or found.layout == EVERYTHING else found

    def alike(self, a: float, b: float) -> bool:
        """Return True if two numbers are equal up to rounding."""
        return math.isclose(a, b, rel_tol=self.close)


class Mistake(NamedTuple):
    """A known mistake: `find` returns a description of its traces, `advice` is the remedy."""

    name: str
    find: Callable[[Case], str | None]
    advice: str


def _whole_sequences(case: Case) -> str | None:
    if case.mine is None or not case.here.plans:
        return None
    if case.ring.size == 1 or case.mine.shape != case.tokens.shape:
        return None
    if not torch.equal(case.mine, case.tokens):
        return None
    n = case.tokens.shape[1]
    return f"each of {case.ring.size} ranks was given all {n} tokens, and attends to its {n} times"


def _layout(case: Case) -> str | None:
    if case.held is None:
        return None
    other = [p.layout for p in case.here.plans if p.layout != case.held.layout]
    if not other:
        return None
    return f"tokens are {_named(case.held.layout)}, attention takes them as {_named(other[0])}"


def _heads_first(case: Case) -> str | None:
    if case.tokens is None or not case.whole.attention:
        return None
    n, shape = case.tokens.shape[1], list(case.whole.attention[0][1][0].shape)
    if shape[1] == n or shape[2] != n:
        return None
    return f"in one process q is {shape}, [batch, tokens, heads, head size] by its place, of {n}"


def _positions(case: Case) -> str | None:
    if case.held is None:
        return None
    at = case.held.positions
    for name, want, got in _same_inputs(case):
        if got is case.mine or got.shape[-1] != len(at) or want.ndim != 2:
            continue
        right = want[:, at.to(want.device)]
        local = torch.arange(len(at), device=got.device).expand_as(got)
        if not torch.equal(right, got) and torch.equal(local, got):
            return f"{name} are 0 to {len(at) - 1} on each rank"
        if not torch.equal(right, got) and name.endswith("position_ids"):
            return f"{name} are not those that one process has for these tokens"
    return _rotated(case, at)


def _rotated(case: Case, at: Tensor) -> str | None:
    """Report a first layer whose v is right and q, k wrong: rotary angles of other positions."""
    if not (case.here.attention and case.whole.attention):
        return None
    errors = []
    for got, want in zip(case.here.attention[0][1], case.whole.attention[0][1]):
        if want.shape[1] != case.tokens.shape[1] or got.shape[1] != len(at):
            return None
        right = want[:, at.to(want.device)]
        errors.append(float((got - right).norm() / right.norm().clamp_min(1e-30)))
    of_q, of_k, of_v = errors
    if of_v > case.close or max(of_q, of_k) <= case.close:
        return None
    return f"v of the first layer is right, q and k are not, by {max(of_q, of_k):.1e}"


def _labels(case: Case) -> str | None:
    want, got = _labels_of(case.whole, case), _labels_of(case.here, case)
    if case.held is None or want is None or got is None or want.shape[1] != case.tokens.shape[1]:
        return None
    at, ignored = case.held.positions.to(want.device), case.here.ignored
    right = want[:, at]
    if got.shape != right.shape or torch.equal(got, right):
        return None
    own = F.pad(want[:, :-1], (1, 0), value=ignored)[:, at]  # each token's own id as label
    local = F.pad(own[:, 1:], (0, 1), value=ignored)
    wrong = int((got != right).sum())
    if torch.equal(got, local):
        return f"each token has that of the next one on its rank: {wrong} labels here are wrong"
    return f"{wrong} labels here are not those that one process has for these tokens"


def _labels_of(seen: Evidence, case: Case) -> Tensor | None:
    """Return the labels of a run `[b, n]`, whether or not the last token was left out."""
    if not seen.labels or case.tokens is None or case.mine is None:
        return None
    flat = torch.cat([labels.flatten() for labels in seen.labels])
    rows = len(case.tokens)
    n = (case.tokens if seen is case.whole else case.mine).shape[1]
    if len(flat) == rows * (n - 1):
        return F.pad(flat.view(rows, -1), (0, 1), value=seen.ignored)
    return flat.view(rows, n) if len(flat) == rows * n else None


def _mean_of_means(case: Case) -> str | None:
    counted = sum(r.counted for r in case.ranks)
    total = sum(r.entropy for r in case.ranks if r.counted)
    if len({r.counted for r in case.ranks}) == 1 or not counted:
        return None
    counts = ", ".join(str(r.counted) for r in case.ranks)
    got, right = _mean([r.loss for r in case.ranks]), total / counted
    own = [r.entropy / r.counted if r.counted else math.nan for r in case.ranks]
    alone = [_is_own_mean(case, r.loss, mean, right) for r, mean in zip(case.ranks, own)]
    if all(alone) and any(mean != right for mean in own):
        return (
            f"each rank's loss is the mean over its own {counts} labels; over all labels it is "
            f"{right:.6g}, and the mean of the losses is {got:.6g}"
        )
    of_means = _mean(own)
    if case.alike(got, right) or not case.alike(got, of_means):
        return None
    return (
        f"{got:.6g} is the mean of each rank's mean over its own {counts} labels; over all labels "
        f"it is {right:.6g}"
    )


def _is_own_mean(case: Case, loss: float, mean: float, right: float) -> bool:
    """Return whether a rank's loss is the mean over its labels, and not over all ranks' labels."""
    if math.isnan(mean):  # of no labels
        return math.isnan(loss)
    return case.alike(loss, mean) and abs(loss - mean) <= abs(loss - right)


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _gradients(case: Case) -> str | None:
    size = case.ring.size
    for factor, words in ((size, "too large"), (1 / size, "too small")):
        if size > 1 and case.alike(case.size, factor):
            return f"averaged over ranks they are {size} times {words}"
    return None


def _mask(case: Case) -> str | None:
    mask = _first_of(case.batch, "attention_mask", "key_mask")
    if mask is None or mask.ndim != 2 or bool(mask.all()):
        return None
    real = mask.bool()
    after = (~real).cumsum(1) > 0  # tokens with padding before them
    lost = [p for p in case.here.plans if p.key_mask is None and p.terms.mask_mod is None]
    if not lost or (all(p.visible.causal for p in lost) and not bool((real & after).any())):
        return None
    return f"the batch has {int((~real).sum())} tokens of padding, attention has no key_mask"


def _documents(case: Case) -> str | None:
    lost = [p for p in case.here.plans if p.packing is None and p.terms.mask_mod is None]
    borders = _first_of(case.batch, "cu_seqlens", "documents")
    at = case.batch.get("position_ids")
    if not lost:
        return None
    if borders is not None:
        return "the batch has borders of documents, attention was not told"
    if not (isinstance(at, Tensor) and at.ndim == 2):
        return None
    mask = _first_of(case.batch, "attention_mask", "key_mask")
    try:
        found = documents_of_positions(at, None if mask is None else mask.bool())
    except ValueError:
        return None
    if found is None:
        return None
    many = int(found.max()) + 1
    return f"position_ids begin anew {many - 1} times, attention sees one document of all"


def _window(case: Case) -> str | None:
    windows = {plan.visible.window for plan in case.here.plans}
    for module in case.model.modules():
        config = getattr(module, "config", None)
        asked = getattr(config, "sliding_window", None)
        if not isinstance(asked, int) or getattr(config, "use_sliding_window", True) is False:
            continue
        if asked in windows and asked - 1 not in windows:
            return f"window={asked}, and transformers' sliding_window={asked} counts the token"
        if windows == {None} and case.tokens is not None and asked < case.tokens.shape[1]:
            return f"there is none, and the model has sliding_window={asked}"
    return None


def _averaged(case: Case) -> str | None:
    for module in case.model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            over = Ring(module.process_group).ranks
            if not set(case.ring.ranks) <= set(over):
                return f"DDP averages over ranks {over}, the ring has {case.ring.ranks}"
    return None


def _dropout(case: Case) -> str | None:
    drops = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    for name, module in case.model.named_modules():
        if isinstance(module, drops) and module.training and module.p > 0:
            return f"{name} drops at random, on each rank otherwise: nothing can be compared"
    return None


def _same_inputs(case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield arguments that both runs recorded: name, tensor in one process, tensor here."""
    for (module, parameter), want in case.whole.inputs.items():
        got = case.here.inputs.get((module, parameter))
        if got is not None and got.ndim == want.ndim == 2 and want.shape[1] > 1:
            yield f"{module}'s {parameter}", want, got


def _first_of(batch: Mapping[str, Any], *names: str) -> Any:
    return next((batch[name] for name in names if batch.get(name) is not None), None)


def _named(layout: object) -> str:
    return layout if isinstance(layout, str) else "balanced"


KNOWN = (
    Mistake("whole sequences", _whole_sequences, "shard_sequence, or auto_shard_seq=True"),
    Mistake("layout", _layout, "give attention the layout by which the sequence was cut"),
    Mistake("heads first", _heads_first, "ring_attn(..., heads_first=True)"),
    Mistake("positions", _positions, "take plan.positions(), or shard_batch's position_ids"),
    Mistake("labels", _labels, "move labels while the sequence is whole, as shard_batch does"),
    Mistake(
        "mean of means",
        _mean_of_means,
        "ring_cross_entropy in place of F.cross_entropy, or one count for all ranks",
    ),
    Mistake("gradient size", _gradients, "average what a mean gives, sum what shares of it give"),
    Mistake("mask", _mask, "ring_attn(key_mask=); in transformers register a mask function, too"),
    Mistake("documents", _documents, "ring_attn(cu_seqlens=), or shard_batch, which finds them"),
    Mistake("window", _window, "window=sliding_window - 1"),
    Mistake("averaging", _averaged, 'average over all ranks of the ring: mesh["dp", "cp"]'),
    Mistake("dropout", _dropout, "model.eval() first"),
)  # fmt: skip
