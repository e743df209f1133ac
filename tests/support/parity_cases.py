"""Models that share sequences as users write them, each with one thing forgotten, or none."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ring_attention_pytorch import (
    RingAttention,
    RingTransformer,
    check_parity,
    ring_attn,
    ring_cross_entropy,
    shard_batch,
    shard_sequence,
)
from ring_attention_pytorch.doctor.parity import ParityReport
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.training.labels import documents_of_positions, next_of_whole
from tests.support.hf import WORDS, batch_of, model_of

LENGTH = 41


class Wrong(NamedTuple):
    """A program with a mistake, and the one that must be named, with words of it."""

    make: Callable[[], nn.Module]
    kind: str  # of the batch
    mistake: str | None
    words: str = ""


class ByHand(nn.Module):
    """A model of transformers with an adapter written by hand; one line is forgotten."""

    def __init__(self, forgotten: str = "", name: str = "Llama"):
        super().__init__()
        self.forgotten, self.told = forgotten, {}
        mask = "" if forgotten == "mask" else "with mask"
        AttentionInterface.register(f"by hand {mask}", self.attend)
        if mask:
            AttentionMaskInterface.register(f"by hand {mask}", lambda **_: None)
        self.model = model_of(name, f"by hand {mask}", torch.float32)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _: Any, **given: Any):
        window = given.get("sliding_window")
        if window is not None and self.forgotten != "window":
            window -= 1
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return ring_attn(
            q, k, v, causal=True, window=window, scale=given["scaling"], **self.told
        ), None

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        def cut(t: Tensor) -> Tensor:
            return shard_sequence(t, layout="zigzag")

        layout = "contiguous" if self.forgotten == "layout" else "zigzag"
        self.told = {"layout": layout}
        documents, given = None, {}
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        elif self.forgotten != "documents":
            documents = documents_of_positions(position_ids, None)
            self.told["documents"] = cut(documents)
        if attention_mask is not None:
            given = {"attention_mask": cut(attention_mask)}
            labels = labels.masked_fill(attention_mask == 0, -100)
            if self.forgotten != "mask":
                self.told["key_mask"] = given["attention_mask"].bool()
        ids = cut(input_ids)
        if self.forgotten == "positions":
            given["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids)
        else:
            given["position_ids"] = cut(position_ids)
        logits = self.model(input_ids=ids, use_cache=False, **given).logits
        return self.loss(logits, cut, labels)

    def loss(self, logits: Tensor, cut: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
        if self.forgotten == "labels":
            labels = F.pad(cut(labels)[:, 1:], (0, 1), value=-100)
            return ring_cross_entropy(logits, labels)
        labels = cut(next_of_whole(labels, None, -100))
        entropies = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum()
        if self.forgotten == "mean of means":
            return entropies / count
        dist.all_reduce(count) if dist.is_initialized() else None
        if self.forgotten == "sum":
            return entropies / count
        return entropies * dist.get_world_size() / count


class Layer(nn.Module):
    """A layer that is given vectors, with a loss of its own."""

    def __init__(self, forgotten: str):
        super().__init__()
        self.forgotten, self.to_q = forgotten, nn.Linear(16, 16)
        whole = forgotten == "whole sequences"
        self.layer = RingAttention(
            16, dim_head=4, heads=4, causal=True, ring_attn=True, auto_shard_seq=not whole,
            rotary_embed=False,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.forgotten == "heads first":
            x = shard_sequence(x)
            q = self.to_q(x).unflatten(2, (4, 4)).transpose(1, 2)
            return ring_attn(q, q, q).square().mean()
        return self.layer(x).square().mean()


class OfTheLibrary(nn.Module):
    """A model of transformers as the guide has it: nothing can be forgotten."""

    def __init__(self, name: str):
        super().__init__()
        register()
        self.model = model_of(name, "ring", torch.float32)

    def forward(self, **batch: Tensor) -> Any:
        with ring_forward(shard_batch(batch)) as inputs:
            return self.model(**inputs)


class Learned(nn.Module):
    """Positions that are embedded, and rotations that are computed inside."""

    def __init__(self, rotates: bool):
        super().__init__()
        self.words, self.head, self.rotates = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS), rotates
        self.places = nn.Embedding(LENGTH, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        ids = shard_sequence(input_ids)
        x = self.words(ids)
        at = torch.arange(ids.shape[1]).expand_as(ids)
        if self.rotates:
            q = (x * at.unsqueeze(2).cos()).unflatten(2, (4, 4))
        else:
            x = x + self.places(at)
            q = x.unflatten(2, (4, 4))
        out = ring_attn(q, q, x.unflatten(2, (4, 4)), causal=True).flatten(2)
        labels = shard_sequence(next_of_whole(labels, None, -100))
        return ring_cross_entropy(self.head(out), labels)


def transformer() -> nn.Module:
    """The library's own, which shards by itself."""
    return RingTransformer(
        num_tokens=WORDS, dim=16, depth=1, dim_head=4, heads=4, causal=True, ring_attn=True
    )


class ItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = transformer()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids, return_loss=True)


CASES: dict[str, Wrong] = {
    "by hand": Wrong(ByHand, "plain", None),
    "by hand, packed": Wrong(ByHand, "packed", None),
    "by hand, padded": Wrong(ByHand, "padded left", None),
    "by hand, windows": Wrong(lambda: ByHand(name="Mistral"), "plain", None),
    "of the library": Wrong(lambda: OfTheLibrary("Llama"), "packed", None),
    "of the library, padded": Wrong(lambda: OfTheLibrary("Mistral"), "padded left", None),
    "shards by itself": Wrong(ItsLoss, "plain", None),
    "positions": Wrong(lambda: ByHand("positions"), "plain", "positions", "are 0 to"),
    "positions, embedded": Wrong(lambda: Learned(False), "plain", "positions", "places's input"),
    "positions, rotated": Wrong(lambda: Learned(True), "plain", "positions", "q and k are not"),
    "labels": Wrong(lambda: ByHand("labels"), "plain", "labels", "next one on its rank"),
    "mean of means": Wrong(
        lambda: ByHand("mean of means"), "padded left", "mean of means", "own 32, 40 labels"
    ),
    "sum": Wrong(lambda: ByHand("sum"), "plain", "gradient size", "2 times too small"),
    "mask": Wrong(lambda: ByHand("mask"), "padded left", "mask", "9 tokens of padding"),
    "documents": Wrong(lambda: ByHand("documents"), "packed", "documents", "begin anew 3 times"),
    "layout": Wrong(
        lambda: ByHand("layout"), "plain", "layout", "tokens are zigzag, attention takes them as "
    ),
    "window": Wrong(
        lambda: ByHand("window", "Mistral"), "plain", "window", "sliding_window=6 counts"
    ),
    "heads first": Wrong(lambda: Layer("heads first"), "vectors", "heads first", "[2, 4, 40, 4]"),
    "whole sequences": Wrong(
        lambda: Layer("whole sequences"), "vectors", "whole sequences", "all 40 tokens"
    ),
}  # fmt: skip


def batch(kind: str) -> Mapping[str, Any]:
    if kind == "vectors":
        return {"x": torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))}
    return batch_of(kind, LENGTH)


def reports(names: list[str]) -> dict[str, ParityReport]:
    """For a pool: what is said of each case."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        found[name] = check_parity(CASES[name].make(), batch(CASES[name].kind))
    return found
