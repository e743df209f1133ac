"""Models of images and text: merged while whole, then spread, they are those of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from ring_attention_pytorch import ring_cross_entropy, shard_batch
from ring_attention_pytorch.integrations.heads import head_of
from ring_attention_pytorch.integrations.multimodal import merged, text_states
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.families import widened
from tests.support.hf import ring_of
from tests.support.tiny_models import FIRST, PAD, WORDS, family_of, model_of

LENGTH, IMAGE = 26, 4  # tokens, and those of an image
QWENS = [
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
]


def batch_of(model: nn.Module, padded: bool) -> dict[str, Tensor]:
    """Two whole sequences, as a processor makes them, with an image in each."""
    draw, config = torch.Generator().manual_seed(5), model.config
    ids = torch.randint(FIRST, WORDS, (2, LENGTH), generator=draw)
    for row, at in enumerate((9, 15)):
        ids[row, at : at + IMAGE] = config.image_token_id
    vision = config.vision_config
    found = {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).int()}
    if hasattr(vision, "spatial_merge_size"):
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        found["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
        shape = (2 * IMAGE * vision.spatial_merge_size**2, width)
    else:
        shape = (2, 3, vision.image_size, vision.image_size)
    found["pixel_values"] = torch.randn(shape, generator=draw, dtype=torch.float64)
    labels = ids.masked_fill(ids == config.image_token_id, -100)
    if padded:
        mask = torch.arange(LENGTH) >= torch.tensor([[6], [0]])
        ids.masked_fill_(~mask, PAD)
        found["attention_mask"] = mask.long()
        labels = labels.masked_fill(~mask, -100)
        labels[0, 6] = -100  # padding would predict it
    return found | {"labels": labels}


def alone(name: str, padded: bool) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of one process, by transformers."""
    model = model_of(family_of(name), "eager")
    with widened():
        loss = model(**batch_of(model, padded)).loss
        loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def spread(name: str, padded: bool, ring: Ring) -> tuple[Tensor, list[Tensor]]:
    """Return a ring's results; those of the image's layers are of embeddings that were merged."""
    register()
    model = model_of(family_of(name), "ring")
    with widened():
        batch = shard_batch(merged(model, batch_of(model, padded)), group=ring)
        with ring_forward(batch, loss_group=ring, labels=False) as inputs:
            hidden = text_states(model, inputs)
            loss = ring_cross_entropy(hidden, batch.labels, group=ring, **head_of(model))
            loss.backward()
    grads = gradients(model)
    for grad in grads:
        ring.total(grad)
        grad /= ring.size
    return loss.detach(), grads


def errors_of(names: list[str]) -> dict[Any, float]:
    """For a pool: the worst error of each model, of the loss and each gradient by itself."""
    found = {}
    for number, name in enumerate(names):
        padded = number % 2 == 1
        want = alone(name, padded)
        for size in (3, 1):
            got = spread(name, padded, ring_of(size))
            least = 1e-4 * max(float(g.norm()) for g in want[1])
            pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
            found[name, size] = max(
                float((a - b).norm()) / max(float(b.norm()), least) for a, b in pairs
            )
    return found


def test_the_text_of_a_model_of_images_is_that_of_one_process(pools):
    for found in pools(4).run(errors_of, QWENS):
        assert max(found.values()) < 1e-9, found


def test_positions_of_rows_are_cut_along_the_tokens():
    rows = torch.arange(3 * 2 * 12).view(3, 2, 12)
    whole = {"input_ids": rows[0].clone(), "position_ids": rows}
    rows[0] //= 3  # an image is at one time
    for rank in range(3):
        batch = shard_batch(whole, rank=rank, ring_size=3)
        assert batch.packing is None
        held = batch["input_ids"][0]
        assert torch.equal(batch["position_ids"], rows[:, :, held])
    counted = torch.cat([torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]).expand(1, 2, 12), rows])
    batch = shard_batch(whole | {"position_ids": counted}, rank=0, ring_size=2)
    assert [run.stop for run in batch.packing[0].runs] == [4, 12]
    for wrong in (rows[:2], rows[:, :1], rows.flatten(0, 1)):
        with pytest.raises(ValueError, match="position_ids must be"):
            shard_batch(whole | {"position_ids": wrong}, rank=0, ring_size=2)


def test_tokens_of_several_choices_are_no_sequence():
    with pytest.raises(ValueError, match=r"got input_ids \[2, 4, 9\]"):
        shard_batch({"input_ids": torch.zeros(2, 4, 9, dtype=torch.long)}, rank=0, ring_size=2)


def test_what_can_not_be_merged_is_refused():
    register()
    model = model_of(family_of("Gemma3ForConditionalGeneration"), "ring")
    ids = torch.randint(FIRST, WORDS, (1, 9))
    kinds = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]])
    with pytest.raises(ValueError, match="see one another both ways"):
        merged(model, {"input_ids": ids, "token_type_ids": kinds, "mm_token_type_ids": kinds})
    assert model.config.text_config._attn_implementation == "ring"
    with pytest.raises(ValueError, match="with a text model in it, got LlamaModel"):
        merged(model_of(family_of("LlamaForCausalLM"), "ring").model, {"input_ids": ids})
