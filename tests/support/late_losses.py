"""Losses whose wrong values nobody waits for, as on a GPU: NaN at once, and told by the next."""

from typing import Any

import pytest
import torch

from ring_attention_pytorch import ring_cross_entropy, ring_token_logprobs, shard_batch
from ring_attention_pytorch.ranks.ring import as_ring
from ring_attention_pytorch.training import loss_inputs

N, CLASSES = 7, 9


def told_later(what: str, device: str = "cpu") -> list[Any]:
    """For a pool: of a wrong loss, of the next one, which raises, and of a third one."""
    ring = as_ring(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_inputs, "reads_at_once", lambda t: False)
        given = _given_later(what, device)
        if ring.rank == ring.size - 1:
            given[what][0, 1] = CLASSES if what == "labels" else -1.0
        loss = ring_cross_entropy(**given)
        loss.backward()
        found: list[Any] = [loss.isnan().item(), given["x"].grad[0, 2:].isnan().all().item()]
        if device == "cuda":
            torch.cuda.synchronize()
        given = _given_later(what, device)
        try:
            ring_cross_entropy(**given)
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
        got = ring_cross_entropy(**given)
    return [*found, got.item() == ring_cross_entropy(**given).item()]


def _given_later(what: str, device: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(as_ring(None).rank)
    given: dict[str, Any] = {
        "x": torch.randn(1, N, CLASSES, generator=draw, dtype=torch.float64),
        "labels": torch.randint(CLASSES, (1, N), generator=draw),
        "weights": torch.rand(1, N, generator=draw) if what == "weights" else None,
    }
    given["labels"][0, 0] = -100
    given = {name: t if t is None else t.to(device) for name, t in given.items()}
    given["x"].requires_grad_()
    return given


def check_told_later(found: list[list[Any]], what: str) -> None:
    for nan, nan_gradients, told, right in found:
        assert nan
        assert nan_gradients
        assert f"{what} of an earlier loss were" in told
        assert right


def logprobs_told_later(device: str = "cpu") -> list[Any]:
    """For a pool: where NaN is, and what the next call raises."""
    ring = as_ring(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_inputs, "reads_at_once", lambda t: False)
        ids = torch.arange(8)[None] % 4
        batch = shard_batch({"input_ids": ids, "labels": ids}, layout="contiguous").to(device)
        if ring.rank == ring.size - 1:
            batch.labels[0, 1] = -7
        x = torch.zeros(1, batch.labels.shape[1], 4, device=device)
        found: list[Any] = [ring_token_logprobs(x, batch).isnan().nonzero().tolist()]
        if device == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(ValueError, match="labels of an earlier loss") as told:
            ring_token_logprobs(x, batch)
    return [*found, str(told.value)]
