"""Find the positions that a model really uses, in its rotary embeddings and position tables.

    rotary_emb(hidden_states, position_ids)     the batch's positions
    wpe(position_ids)                           the batch's positions
    embed_positions(attention_mask, ...)        OPT counts real tokens
    position_embeddings(position_ids)           RoBERTa counts real tokens, from padding_idx + 1 on,
                                                if the table has a padding_idx

Positions that a model passes to attention don't show which positions it used.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ring_attention_pytorch.geometry.layouts import all_segments, segment_positions
from ring_attention_pytorch.training.batches import ShardedBatch

_TABLES = {
    "wpe", "embed_positions", "pos_emb", "pos_embed", "pos_embeddings", "position_embedding",
    "position_embeddings", "positions_embed",
}  # fmt: skip


def places_of(modules: Mapping[str, nn.Module]) -> dict[nn.Module, int | None]:
    """Return a model's modules that take token positions, each with the number of that parameter.

    The number is None if the module computes its own positions.

    Args:
        modules: by name, from `named_modules`.
    """
    found: dict[nn.Module, int | None] = {}
    for name, module in modules.items():
        kind = type(module).__name__
        if "Vision" in kind or "Audio" in kind:
            continue
        if isinstance(module, nn.Embedding):
            if name.rpartition(".")[2] in _TABLES:
                found[module] = _parameter(module)
        elif "Rotary" in kind and (at := _parameter(module)) is not None:
            found[module] = at
    return found


def _parameter(module: nn.Module) -> int | None:
    """Return the number of the parameter that takes positions; None if there is none."""
    if type(module) is nn.Embedding:
        return 0
    names = [*inspect.signature(module.forward).parameters]
    return names.index("position_ids") if "position_ids" in names else None


def given_at(at: int | None, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor | None:
    """Return the positions in a call's arguments, at parameter `at`; None without any."""
    if at is None:
        return None
    return args[at] if at < len(args) else given.get("position_ids", given.get("input"))


def with_positions(
    module: nn.Module,
    at: int | None,
    args: tuple[Any, ...],
    given: dict[str, Any],
    positions: Tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's call with the positions replaced."""
    assert at is not None  # it takes positions
    if at < len(args):
        return (*args[:at], positions, *args[at + 1 :]), given
    name = "input" if type(module) is nn.Embedding else "position_ids"
    return args, {**given, name: positions}


def counted_by(module: nn.Module, batch: ShardedBatch) -> Tensor | None:
    """Return the positions `[b, n]` of a module that counts in its own way; None for others.

    All ranks of the ring call this: real tokens are counted over the whole sequence.
    """
    if not isinstance(module, nn.Embedding) or batch.positions_given:
        return None
    if type(module).__name__ == "OPTLearnedPositionalEmbedding":  # BioGPT has it, too
        return None if batch.key_mask is None else _count(batch, batch.key_mask) - 1
    if module.padding_idx is None:
        return None
    ids = batch.get("input_ids")
    if ids is None:  # padding is unknown
        return batch["position_ids"] + 1 + module.padding_idx
    return _count(batch, ids != module.padding_idx) + module.padding_idx


def _count(batch: ShardedBatch, real: Tensor) -> Tensor:
    """Number this rank's real tokens in their documents, from 1; padding gets 0."""
    whole = batch.unshard(real.long())
    counts = whole.cumsum(1)
    if batch.packing is not None:
        (everywhere,) = all_segments("contiguous", 1, batch.length)
        within = torch.stack([each.positions(everywhere) for each in batch.packing])
        begins = torch.arange(batch.length) - within
        counts = counts - (counts - whole).gather(1, begins.to(counts.device))
    segments = all_segments(batch.layout, batch.ring_size, batch.length)[batch.rank]
    return (counts * whole).index_select(1, segment_positions(segments, counts.device))


def check_positions(model: str, given: Any, mine: Tensor) -> None:
    """Raise ValueError if positions that a model uses are not the batch's."""
    if isinstance(given, Tensor) and any(_same(given, rows) for rows in _rows_of(mine)):
        return
    raise ValueError(
        f"position_ids are not the batch's: {model} uses others, or makes its own, and a rank's "
        "tokens are not the first ones of the sequence; call model(**inputs)"
    )


def _rows_of(positions: Tensor) -> list[Tensor]:
    """List the positions a model can use: of four rows, the last three, the first, or all.

    The first row counts tokens; the others place images in time, height and width.
    """
    if positions.ndim == 3 and len(positions) == 4:
        return [positions[1:], positions[0], positions]
    return [positions]


def _same(given: Tensor, mine: Tensor) -> bool:
    if given is mine:
        return True
    if given.shape[-1:] != mine.shape[-1:]:
        return False
    try:
        given, mine = torch.broadcast_tensors(given, mine)
    except RuntimeError:
        return False
    if given.data_ptr() == mine.data_ptr() and given.stride() == mine.stride():
        return given.dtype == mine.dtype or torch.equal(given.to(mine.dtype), mine)
    return torch.equal(given.to(mine.device, mine.dtype), mine)
