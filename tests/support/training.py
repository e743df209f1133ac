"""A small language model in plain PyTorch, and one step of it: spread, or in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import ring_attn, ring_cross_entropy, shard_batch
from ring_attention_pytorch.ranks.ring import Ring, as_ring
from tests.support.reference import dense_attention

WORDS, LENGTH = 23, 37
Attend = Callable[..., Tensor]


class Model(nn.Module):
    """Embeddings of words and positions, attention twice, and a head. It knows of no ranks."""

    def __init__(self, attend: Attend, checkpointed: bool = False, dim: int = 16):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, dim), nn.Embedding(LENGTH + 1, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(2))
        self.head = nn.Linear(dim, WORDS, bias=False)
        self.attend, self.checkpointed = attend, checkpointed
        self.double()
        draw = torch.Generator().manual_seed(7)  # of its own, for ranks may be threads
        for p in self.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=draw)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return F.linear(self.hidden(ids, positions), self.head.weight)

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.words(ids) + self.places(positions)
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else (
                self.block(layer, x)
            )  # fmt: skip
        return x

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        qkv = layer(x).unflatten(-1, (4, 8))
        return x + self.attend(qkv[:, :, :2], qkv[:, :, 2:3], qkv[:, :, 3:]).flatten(2)


def spread_attention(q: Tensor, k: Tensor, v: Tensor, group: Ring | None = None) -> Tensor:
    return ring_attn(q, k, v, causal=True, group=group)


def batch_of(kind: str, seed: int = 0) -> dict[str, Any]:
    """Whole sequences of one kind, two samples of 37 tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (2, LENGTH), generator=draw)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    at = torch.arange(LENGTH)
    if kind == "padded left":
        batch["attention_mask"] = (at >= torch.tensor([[9], [0]])).long()
    elif kind == "padded right":
        batch["attention_mask"] = at < torch.tensor([[LENGTH], [20]])
    elif kind == "borders":
        batch["cu_seqlens"] = [0, 5, 6, 30, LENGTH]
    elif kind == "documents":
        batch["documents"] = torch.stack((at // 10, at // 17))
    elif kind == "restarting positions":
        batch["position_ids"] = torch.stack((at % 11, at))
    elif kind == "padding between documents":
        batch["position_ids"] = torch.stack((at % 11, at))
        batch["attention_mask"] = ((at % 11 < 8) | (at > 30)).expand(2, -1)
    elif kind == "weights":
        batch["loss_weights"] = torch.rand(ids.shape, generator=draw, dtype=torch.float64)
    elif kind == "labels for some":
        batch["labels"][:, :15] = -100
    return batch


KINDS = [
    "plain", "padded left", "padded right", "borders", "documents", "restarting positions",
    "padding between documents", "weights", "labels for some",
]  # fmt: skip


def documents_of(kind: str) -> Tensor:
    """The documents of its samples, by other means than the library's."""
    at = torch.arange(LENGTH)
    one = torch.zeros_like(at)
    return {
        "borders": torch.stack([torch.bucketize(at, torch.tensor([5, 6, 30]), right=True)] * 2),
        "documents": torch.stack((at // 10, at // 17)),
        "restarting positions": torch.stack((at // 11, one)),
        "padding between documents": torch.stack((at // 11, one)),
    }.get(kind, torch.stack((one, one)))


def one_process(kind: str, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) by dense attention, where every token's successor is at hand."""
    total, held, model = alone(kind, seed)
    loss = total / held
    return loss.detach(), list(torch.autograd.grad(loss, [*model.parameters()]))


def alone(kind: str, seed: int = 0, model: Model | None = None) -> tuple[Tensor, Tensor, Model]:
    """The sum of losses, the sum of weights, and the model."""
    batch, documents = batch_of(kind, seed), documents_of(kind)
    mask = batch.get("attention_mask")
    mask = None if mask is None else mask.bool()

    def attend(*qkv: Tensor) -> Tensor:
        return dense_attention(*qkv, causal=True, documents=documents, key_mask=mask)[0]

    model = Model(attend) if model is None else model
    model.attend = attend
    at = torch.arange(LENGTH).expand(2, -1)
    starts = (documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0) * at
    logits = model(batch["input_ids"], at - starts.cummax(dim=1).values)
    follows = documents[:, 1:] == documents[:, :-1]
    labels = batch["labels"][:, 1:].masked_fill(~follows, -100)
    if mask is not None:
        labels = labels.masked_fill(~mask[:, 1:], -100)
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
    weights = batch.get("loss_weights", torch.ones(2, LENGTH).double())[:, 1:].flatten()
    return (losses * weights).sum(), (weights * (labels.flatten() != -100)).sum(), model


def averaged(model: nn.Module, group: Ring | None = None) -> list[Tensor]:
    """Gradients averaged over all ranks, as DDP does."""
    ring, grads = as_ring(group), [p.grad.clone() for p in model.parameters()]
    for grad in grads:
        ring.total(grad)
        grad /= ring.size
    return grads


def spread(
    kind: str,
    how: str = "logits",
    checkpointed: bool = False,
    group: Ring | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of the same step over the ranks of a group."""
    model = Model(partial(spread_attention, group=group), checkpointed).to(device)
    batch = shard_batch(batch_of(kind), group=group, **options).to(device)
    with batch:
        given = batch["input_ids"], batch["position_ids"]
        more = dict(weights=batch.get("loss_weights"), group=group)
        if how == "head":
            hidden = model.hidden(*given)
            loss = ring_cross_entropy(
                hidden, batch.labels, head=model.head.weight, chunk=5, **more
            )  # fmt: skip
        else:
            loss = ring_cross_entropy(model(*given), batch.labels, **more)
        loss.backward()
    return loss.detach(), averaged(model, group)
