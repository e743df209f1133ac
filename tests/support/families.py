"""Every text class of the installed transformers over rings, against transformers in one process.

    python -m tests.support.families                        all of them, some ten minutes
    python -m tests.support.families --kinds causal,masked --only Qwen
    python -m tests.support.families --part 1/4 --file build/part1.json

Each class computes with tiny random weights in float64: plain, left padded and packed, with labels
and without, in rings of one and of three. Its outputs, its loss and all its gradients are those of
one process, or it is refused by a ValueError of ours on all ranks alike; else it is a fault, and
the command fails. One process is transformers' own eager attention over the whole sequence; of
packed documents over each document by itself. What is found is kept in a file, class by class; a
class that is in it is not tried again.
"""

import argparse
import inspect
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.hf import in_double, ring_of
from tests.support.ranks import Pool, RankFailed
from tests.support.tiny_models import FIRST, KINDS, PAD, WORDS, Family, families, model_of

RANKS, LENGTH, EXACT = 3, 29, 1e-6  # ranks have 9 and 10 tokens, which is no width
BATCHES = ("plain", "padded left", "packed")
PADDING = (6, 0)  # of each sample
STARTS = (0, 7, 16)  # of documents
MOVED = ("causal", "multimodal")  # their labels are of the next token, but those of these classes
IN_PLACE = ("WhisperForCausalLM",)
FILE = Path("build/families.json")
Found = dict[str, str]  # of each cell: what came of it


class Step(NamedTuple):
    """Results of one call of a model, by name; the gradient of each parameter, or None."""

    loss: Tensor | None
    outputs: dict[str, Tensor]
    grads: list[Tensor | None]
    wide: bool  # what is asked for in float32 was in float64


def whole_batch(kind: str, batch: str) -> dict[str, Tensor]:
    """Return a batch of two whole sequences, as a user has it, with labels."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(FIRST, WORDS, (2, LENGTH), generator=draw)
    at, found = torch.arange(LENGTH), {"input_ids": ids}
    real = torch.ones_like(ids, dtype=torch.bool)
    if batch == "padded left":
        real = at >= torch.tensor(PADDING)[:, None]
        found |= {"input_ids": ids.masked_fill(~real, PAD), "attention_mask": real.long()}
    elif batch == "packed":
        starts = torch.zeros_like(at)
        starts[list(STARTS)] = torch.tensor(STARTS)
        found["position_ids"] = (at - starts.cummax(0).values).repeat(2, 1)
    if kind == "token":
        found["labels"] = (ids % 2).masked_fill(~real, -100)
    elif kind == "sequence":
        found["labels"] = torch.tensor([1, 0])
    elif kind == "question":
        found |= {"start_positions": torch.tensor([9, 3]), "end_positions": torch.tensor([14, 8])}
    elif kind == "choice":
        found = {name: torch.stack([t, t.roll(1, 0)], 1) for name, t in found.items()}
        found["labels"] = torch.tensor([1, 0])
    elif kind != "base":
        # padding before the first token predicts it, and sees what nobody says
        first = (real.cumsum(1) == 1) & (found["input_ids"] != ids).any(1, keepdim=True)
        found["labels"] = ids.masked_fill(~real | first, -100)
    if kind == "encoder-decoder":
        found["decoder_input_ids"] = found["input_ids"]
    return found


LABELS = ("labels", "start_positions", "end_positions")


def _given(kind: str, batch: str, labelled: bool) -> dict[str, torch.Tensor]:
    """Return what a model is given: without labels, or with labels that say what is decoded."""
    whole = whole_batch(kind, batch)
    if not labelled:
        return {name: t for name, t in whole.items() if name not in LABELS}
    if kind == "encoder-decoder":
        del whole["decoder_input_ids"]
    return whole


def alone(model: nn.Module, kind: str, batch: str, labelled: bool) -> Step:
    """Return a step of one process, by transformers alone.

    Few models insist on float32 here and there: they are left with it.
    """
    try:
        return _alone(model, kind, batch, labelled, wide=True)
    except RuntimeError:
        return _alone(model, kind, batch, labelled, wide=False)


def _alone(model: nn.Module, kind: str, batch: str, labelled: bool, wide: bool) -> Step:
    whole = _given(kind, batch, labelled)
    model.zero_grad()
    model.config.use_cache = False
    if batch != "packed":
        parts = [whole]
    else:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            del whole["position_ids"]
        bounds = zip(STARTS, (*STARTS[1:], LENGTH))
        parts = [{name: _cut(t, a, b) for name, t in whole.items()} for a, b in bounds]
    with widened() if wide else nullcontext():
        made = [model(**part) for part in parts]
        outputs = _joined([_tensors(each) for each in made], [_length(p) for p in parts])
        if not labelled:
            total = sum((t * _cotangent(t, name, batch)).sum() for name, t in outputs.items())
            loss = None
        else:
            moved = kind in MOVED and type(model).__name__ not in IN_PLACE
            counts = [_predictions(part, moved) for part in parts]
            if kind in ("sequence", "question", "choice"):
                counts = [0] * (len(parts) - 1) + [1]
            loss = sum(each.loss * n for each, n in zip(made, counts)) / sum(counts)
            total = loss
        total.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    kept = {name: t.detach() for name, t in outputs.items()}
    return Step(None if loss is None else loss.detach(), kept, grads, wide)


@contextmanager
def widened() -> Iterator[None]:
    """Inside it softmaxes that are asked for in float32 are in float64: masks are -1.8e308."""
    of = F.softmax

    def softmax(x: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return of(x, dim, _stacklevel, torch.float64 if dtype is torch.float32 else dtype)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with in_double(), mock.patch.object(F, "softmax", softmax):
            yield
    finally:
        torch.set_default_dtype(before)


def _cut(t: Tensor, start: int, stop: int) -> Tensor:
    return t[..., start:stop].contiguous() if t.shape[-1] == LENGTH else t


def _length(part: dict[str, Tensor]) -> int:
    return part["input_ids"].shape[-1]


def _predictions(part: dict[str, Tensor], moved: bool) -> int:
    labels = part.get("labels", torch.zeros(1, 1))
    return int((labels[..., moved:] != -100).sum())


def _tensors(output: Any) -> dict[str, Tensor]:
    """Return what a model gives of its tokens, by name, without its loss and what it keeps."""
    found = output.items() if hasattr(output, "items") else {"output": output[0]}.items()
    return {
        name: t
        for name, t in found
        if isinstance(t, Tensor) and t.is_floating_point() and t.ndim and "loss" not in name
    }


def _joined(parts: list[dict[str, Tensor]], lengths: list[int]) -> dict[str, Tensor]:
    """Join what has the tokens of documents; of what is of whole ones the last one's counts."""
    found = {}
    for name, last in parts[-1].items():
        each = [part[name] for part in parts]
        of_tokens = all(t.ndim > 1 and t.shape[1] == n for t, n in zip(each, lengths))
        found[name] = torch.cat(each, 1) if of_tokens else last
    return found


def _cotangent(t: Tensor, name: str, batch: str) -> Tensor:
    """Return a random cotangent of a whole output, 0 at padding."""
    draw = torch.Generator().manual_seed(len(name))
    cotangent = torch.randn(t.shape, generator=draw, dtype=t.dtype)
    if t.ndim < 2 or t.shape[1] != LENGTH:
        return cotangent
    return cotangent * _real(batch).view(2, LENGTH, *[1] * (t.ndim - 2))


def _real(batch: str) -> Tensor:
    padding = torch.tensor(PADDING if batch == "padded left" else (0, 0))
    return torch.arange(LENGTH) >= padding[:, None]


def spread(
    model: nn.Module, kind: str, batch: str, labelled: bool, ring: Ring, want: Step | None
) -> str:
    """Return what comes of the same step over a ring: in this rank's words, or an error."""
    whole = _given(kind, batch, labelled)
    model.zero_grad()
    mine = shard_batch(whole, group=ring, shift_labels=kind in MOVED)
    index = torch.arange(LENGTH).expand(2, -1)
    more = {name: whole[name] for name in ("position_ids",) if name in whole}
    held = shard_batch({"input_ids": index, **more}, group=ring)["input_ids"][0]
    problems: list[str] = []
    precision = widened() if want is None or want.wide else nullcontext()
    with precision, ring_forward(mine, loss_group=ring, labels=labelled) as inputs:
        made = model(**inputs)
        if want is None:
            return ""
        total = made.loss if labelled else torch.zeros((), dtype=torch.float64)
        for name, t in _tensors(made).items():
            problems += _output_problem(name, t, want.outputs.get(name), held, batch)
            if not labelled and name in want.outputs:
                cotangent = _cotangent(want.outputs[name], name, batch)
                if t.ndim > 1 and t.shape[1] == len(held):
                    total = total + (t * cotangent[:, held]).sum() * ring.size
                elif t.shape == cotangent.shape:
                    total = total + (t * cotangent).sum()
        total.backward()
    if labelled:
        problems += _wrong("loss", total.detach(), want.loss)
    grads = _of_all(model, ring)
    return "; ".join(problems + _grads_problem(model, grads, want.grads))


def _output_problem(
    name: str, got: Tensor, want: Tensor | None, held: Tensor, batch: str
) -> list[str]:
    if want is None:
        return [f"{name} {list(got.shape)} is not there in one process"]
    if want.ndim > 1 and want.shape[1] == LENGTH and got.ndim > 1 and got.shape[1] == len(held):
        real = _real(batch)[:, held]
        return _wrong(name, got.detach()[real], want[:, held][real])
    if got.shape != want.shape:
        return [f"{name} {list(got.shape)}, in one process {list(want.shape)}"]
    return _wrong(name, got.detach(), want)


def _wrong(name: str, got: Tensor, want: Tensor, least: float = 1e-12) -> list[str]:
    """Say by how much something is wrong, if it is."""
    error = float((got - want).norm() / max(float(want.norm()), least)) if want.numel() else 0.0
    return [] if error <= EXACT else [f"{name} wrong by {error:.1e}"]  # NaN is wrong, too


def _of_all(model: nn.Module, ring: Ring) -> list[Tensor]:
    """Return the mean of all ranks' gradients, as DDP makes it."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    together = torch.cat([g.flatten() for g in grads])
    ring.total(together)
    together /= ring.size
    parts = together.split([g.numel() for g in grads])
    return [part.view_as(g) for part, g in zip(parts, grads)]


def _grads_problem(model: nn.Module, got: list[Tensor], want: list[Tensor | None]) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    size = float(torch.stack([g.norm() for g in want if g is not None]).norm())
    found = []
    for name, a, b in zip(names, got, want, strict=True):
        b = torch.zeros_like(a) if b is None else b
        found += _wrong(f"gradient of {name}", a, b, least=1e-2 * size)
    return [f"{len(found)} gradients wrong, such as that of {found[0][12:]}"] if found else []


def cells_of(kind: str) -> list[tuple[str, bool]]:
    """Return the batches of a kind of class, without labels and with them."""
    return [(b, labelled) for b in BATCHES for labelled in (False, True)[: 2 - (kind == "base")]]


def examined(family: Family) -> Found:
    """For a pool: what becomes of each cell on this rank; each rank has one batch by itself."""
    _quiet()
    rank, cells = dist.get_rank(), cells_of(family.kind)
    try:
        model = model_of(family, "eager")
    except Exception as error:
        return {"": f"not made: {type(error).__name__}: {error}"}
    wanted: dict[Any, Step | str] = {}
    for cell in cells:
        if BATCHES.index(cell[0]) == rank % RANKS:
            wanted[cell] = _tried(lambda: alone(model, family.kind, *cell))  # noqa: B023
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wanted)
    wanted = {cell: step for each in everywhere for cell, step in each.items()}
    register()
    model = _tried(lambda: model_of(family, "ring"))
    found = {}
    for size in (1, RANKS):
        for cell in cells:
            if size == 1 and BATCHES.index(cell[0]) != rank % RANKS:
                continue
            name = f"{cell[0]}, {'labels' if cell[1] else 'no labels'}, {size}"
            want = wanted[cell]
            if isinstance(model, str):
                found[name] = model
                continue
            step = None if isinstance(want, str) else want
            came = _tried(lambda: spread(model, family.kind, *cell, ring_of(size), step))  # noqa: B023
            if step is None and not came.startswith("refused"):
                came = f"not in one process: {want}"
            found[name] = came
    return found


def _tried(act: Callable[[], Any]) -> Any:
    """Return what it returns; of an error a text, which says whether it is one of ours."""
    try:
        return act()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        if isinstance(error, ValueError) and "/ring_attention_pytorch/" in where.filename:
            return f"refused: {text}"
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {text[:300]}"


def _quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def together(answers: list[tuple[str, Any]]) -> Found:
    """Return what the ranks of a pool have found, as one; ranks that differ are a fault."""
    failed = [f"fault: {text.splitlines()[0]}" for kind, text in answers if kind == "error"]
    if failed:
        return {"": failed[0]}
    found: Found = {}
    for cell in dict.fromkeys(cell for _, each in answers for cell in each):
        texts = {each[cell] for _, each in answers if cell in each}
        if texts == {""}:
            found[cell] = "equal"
        elif len(texts) == 1 and next(iter(texts)).startswith(("refused", "not ")):
            (found[cell],) = texts
        elif all(text.startswith("not ") for text in texts):
            found[cell] = min(texts)
        else:
            alike = "" if len(texts) == 1 else f"ranks differ, {sorted(texts)[0][:60]!r}; "
            found[cell] = f"fault: {alike}{sorted(texts)[-1]}"
    return found


def verdict(found: Found) -> str:
    """Return what a class is: "equal", "refused", "both" by cells, "fault" or "untried"."""
    kinds = {text.split(":")[0] for text in found.values()}
    if "fault" in kinds:
        return "fault"
    kinds = {kind for kind in kinds if not kind.startswith("not ")}
    return {frozenset(): "untried", frozenset({"equal"}): "equal"}.get(
        frozenset(kinds), "refused" if kinds == {"refused"} else "both"
    )


def sweep(
    chosen: list[Family], pool: Pool, kept: dict[str, Found], tell: Callable[[str], None]
) -> dict[str, Found]:
    """Examine classes that are not in what is kept yet, and keep what is found."""
    for number, family in enumerate(chosen, 1):
        if family.name in kept:
            continue
        begun = time.monotonic()
        try:
            found = together(pool.answers(examined, family))
        except RankFailed as error:
            found = {"": f"fault: {str(error).splitlines()[0]}"}
        if any(text.startswith("fault") for text in found.values()) and "" in found:
            pool.stop()  # its ranks may wait for one another
        kept[family.name] = found
        tell(
            f"{number}/{len(chosen)} {family.kind} {family.name}: {verdict(found)} "
            f"({time.monotonic() - begun:.1f} s)"
        )
        if verdict(found) in ("fault", "untried"):
            for text, cells in _by_text(found).items():
                tell(f"    {text[:400]}  [{len(cells)}: {cells[0]}]")
    return kept


def _by_text(found: Found) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for cell, text in found.items():
        if text.startswith(("fault", "not ")):
            texts.setdefault(text, []).append(cell)
    return texts


def _chosen(kinds: str | None, only: str | None, part: str) -> Iterator[Family]:
    at, parts = map(int, part.split("/"))
    wanted = kinds.split(",") if kinds else list(KINDS)
    names = only.lower().split(",") if only else [""]
    for number, family in enumerate(families()):
        named = any(name in family.name.lower() for name in names)
        if named and family.kind in wanted and number % parts == at - 1:
            yield family


def main() -> int:
    """Examine classes; return 1 if any has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--only", help="parts of classes' names, with commas between")
    parser.add_argument("--part", default="1/1", help="2/4 is the second of four parts")
    parser.add_argument("--file", type=Path, default=FILE, help="what is found is kept there")
    parser.add_argument("--again", action="store_true", help="try those that are in it again")
    parser.add_argument("--faults", action="store_true", help="try those again that had faults")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one class")
    given = parser.parse_args()
    chosen = list(_chosen(given.kinds, given.only, given.part))
    kept = json.loads(given.file.read_text()) if given.file.exists() else {}
    for family in chosen:
        failed = verdict(kept.get(family.name, {})) == "fault"
        if given.again or (given.faults and failed):
            kept.pop(family.name, None)
    given.file.parent.mkdir(parents=True, exist_ok=True)
    pool = Pool(RANKS, given.seconds)

    def tell(line: str) -> None:
        print(line, flush=True)
        given.file.write_text(json.dumps(kept, indent=1))

    try:
        sweep(chosen, pool, kept, tell)
    finally:
        pool.stop()
    count = Counter(verdict(kept[family.name]) for family in chosen)
    print(f"{len(chosen)} classes: " + ", ".join(f"{n} {what}" for what, n in count.items()))
    return 1 if count["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
