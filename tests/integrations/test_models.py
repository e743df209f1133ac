"""Models that are registered: what is forgotten raises on all ranks; modules may be replaced."""

import gc
import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers
from transformers import AttentionInterface

from benchmarks.reading_path import walks_of_transformers
from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import hf
from tests.support.hf import batch_of, model_of, raised, ring_of
from tests.support.reference import relative_error

EXACT = 1e-10


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def forward(
    name: str = "Llama",
    kind: str = "plain",
    change: Callable[[nn.Module, dict[str, Any]], Any] | None = None,
    attention: str = "ring",
    **options: Any,
) -> Any:
    """Call a model in the block of a batch, with what `change` makes of model and inputs."""
    register()
    group = ring_of(2) if dist.is_initialized() else None
    model, batch = model_of(name, attention), shard_batch(batch_of(kind), group=group)
    with ring_forward(batch, loss_group=group, **options) as inputs:
        given = dict(inputs)
        if change is not None:
            change(model, given)
        return model(**given).loss


def forgotten_positions() -> Any:
    return forward(change=lambda _, given: given.pop("position_ids"))


def positions_of_the_shard() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        given["position_ids"] = torch.arange(given["input_ids"].shape[1])[None]

    return forward(change=change)


def labels_of_the_shard() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        given["labels"] = given["input_ids"].flip(1)
        del given["shift_labels"]

    return forward(change=change)


def attention_without_its_mask() -> Any:
    register()
    AttentionInterface.register("half", AttentionInterface()["ring"])
    return forward(attention="half", kind="padded left")


def mask_of_the_whole() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        given["attention_mask"] = batch_of("padded left")["attention_mask"]

    return forward(change=change)


def mask_in_four_dimensions() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        n = given["input_ids"].shape[1]
        given["attention_mask"] = torch.zeros(2, 1, n, n)

    return forward(change=change)


def another_mask() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        given["attention_mask"] = ~given["attention_mask"]

    return forward(change=change)


def documents_that_the_batch_does_not_know() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        given["position_ids"] = given["position_ids"] % 10

    return forward(change=change)


def another_layout() -> Any:
    return forward(layout="contiguous")


def another_window() -> Any:
    def change(model: nn.Module, _: Any) -> None:
        model.model.layers[1].self_attn.sliding_window = 3
        model.config.sliding_window = 8

    return forward("windows by layer", change=change)


def no_block() -> Any:
    register()
    return model_of("Llama", "ring")(input_ids=batch_of("plain")["input_ids"])


def other_attention() -> Any:
    return forward(attention="eager", change=lambda _, given: given.pop("labels"))


def keys_of_earlier_tokens() -> Any:
    def change(model: nn.Module, given: dict[str, Any]) -> None:
        cache = transformers.DynamicCache()
        cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
        names = inspect.signature(model.forward).parameters
        given["cache" if "cache" in names else "past_key_values"] = cache

    return forward(change=change)


def frequencies_of_length() -> Any:
    def change(model: nn.Module, _: Any) -> None:
        model.config.rope_parameters = dict(
            rope_type="dynamic", factor=2.0, rope_theta=10000.0, original_max_position_embeddings=16
        )

    return forward(change=change)


def linear_layers() -> Any:
    def change(model: nn.Module, _: Any) -> None:
        model.config.layer_types = ["linear_attention", "full_attention"]

    return forward(change=change)


def probabilities() -> Any:
    return forward(change=lambda _, given: given.update(output_attentions=True))


def documents_of_flash_attention() -> Any:
    return forward(change=lambda _, given: given.update(cu_seq_lens_q=torch.tensor([0, 5, 20])))


def another_length() -> Any:
    def change(_: nn.Module, given: dict[str, Any]) -> None:
        for name in ("input_ids", "position_ids", "attention_mask"):
            given[name] = given[name][:, :-1]

    return forward(change=change)


TRAPS: dict[Callable[[], Any], str] = {
    forgotten_positions: "position_ids are not the batch's",
    positions_of_the_shard: "position_ids are not the batch's",
    labels_of_the_shard: "labels are not the batch's",
    attention_without_its_mask: "the model makes a mask of its own",
    mask_of_the_whole: "is not the batch's",
    mask_in_four_dimensions: "the model makes a mask of its own",
    another_mask: "is not the batch's",
    documents_that_the_batch_does_not_know: "position_ids are not the batch's",
    another_layout: "got an unexpected keyword argument 'layout'",
    another_window: "sliding_window=3, but its mask's is 10",
    no_block: "call it in the block `with ring_forward",
    other_attention: 'attn_implementation="ring"',
    keys_of_earlier_tokens: "without a cache",
    frequencies_of_length: "rotary embeddings of type dynamic",
    linear_layers: "layers of linear_attention",
    probabilities: "output_attentions",
    documents_of_flash_attention: "cu_seq_lens_q, which ring attention does not have",
    another_length: "are not the batch's",
}


def all_traps() -> dict[str, str]:
    with hf.losses_as_they_were():
        return {trap.__name__: raised(trap) for trap in TRAPS}


def test_what_is_forgotten_raises_on_all_ranks_alike(pools):
    told = pools(4).run(all_traps)
    for trap, text in TRAPS.items():
        for found in told[:2]:
            assert text in found[trap.__name__], (trap.__name__, found[trap.__name__])
        assert told[0][trap.__name__] == told[1][trap.__name__]


def a_wrong_type_on_one_rank() -> str:
    batch = shard_batch(batch_of("plain"), group=ring_of(3))
    wrong: dict[str, Any] = {"ulysses": "2"} if dist.get_rank() == 1 else {}
    return raised(lambda: ring_forward(batch, **wrong))


def test_a_wrong_type_on_one_rank_is_told_to_all(pools):
    first, *others = pools(3).run(a_wrong_type_on_one_rank)
    assert first.startswith("ring_forward: ring_forward() parameter ulysses='2'"), first
    assert first.endswith("(on rank 1)")
    assert {*others} == {first}


def wrong_on_one_rank() -> str:
    """Only the second rank of each ring forgets something."""

    def change(_: nn.Module, given: dict[str, Any]) -> None:
        if ring_of(2).rank == 1:
            given["attention_mask"] = ~given["attention_mask"]

    return raised(lambda: forward(change=change))


def test_what_one_rank_does_wrong_raises_on_all(pools):
    told = pools(4).run(wrong_on_one_rank)
    assert all("is not the batch's" in text for text in told), told
    assert told[0] == told[1]


def test_a_name_of_transformers_own_is_not_taken():
    for name in ("sdpa", "eager", "my_flash", "flex_ring"):
        with pytest.raises(ValueError, match="transformers' own"):
            register(name)


def test_backward_of_checkpoints_knows_its_block_after_it_has_ended():
    register()
    want = hf.dense("Llama", "packed")
    model = model_of("Llama", "ring").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with hf.in_double():
        with ring_forward(shard_batch(batch_of("packed"))) as inputs:
            loss = model(**inputs).loss
        loss.backward()
    assert errors((loss.detach(), [p.grad for p in model.parameters()]), want) < EXACT


def test_dropout_is_the_same_when_it_is_recomputed():
    def step(checkpointed: bool) -> list[Tensor]:
        model = model_of("Llama", "ring").train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with ring_forward(shard_batch(batch_of("plain")), dropout_seed=4) as inputs:
            model(**inputs).loss.backward()
        return [p.grad for p in model.parameters()]

    kept, again = step(False), step(True)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(kept, again))
    whole = model_of("Llama", "ring").train()
    with ring_forward(shard_batch(batch_of("plain"))) as inputs:
        whole(**inputs).loss.backward()
    assert relative_error(kept[0], whole.model.embed_tokens.weight.grad) > 1e-3


def test_modules_may_be_replaced_and_a_model_is_gone_with_its_last_name():
    register()
    model, batch, losses = model_of("Llama", "ring"), shard_batch(batch_of("plain")), []
    for _ in range(2):
        with ring_forward(batch) as inputs:
            losses.append(model(**inputs).loss.detach())
        model.model.rotary_emb = deepcopy(model.model.rotary_emb)
    assert torch.equal(*losses)
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None


def sums_of_items() -> tuple[int, ...]:
    """For a pool of four: sums of two blocks of a batch, in rings of two and in one ring."""
    sums = []
    for size in (2, 4):
        group = ring_of(size)
        batch = shard_batch(batch_of("plain"), group=group)
        with mock.patch.object(Ring, "total", autospec=True, side_effect=Ring.total) as total:
            for _ in range(2):
                forward_of = ring_forward(batch)
                with forward_of as inputs:
                    items = inputs["num_items_in_batch"].item()
                    forward_of.call.attended = forward_of._attended = True
        assert items == batch.num_items.item() / size
        sums.append(total.call_count)
    return tuple(sums)


def test_rings_sum_items_once_a_batch_and_one_ring_never(pools):
    assert pools(4).run(sums_of_items) == [(1, 0)] * 4


def counted() -> tuple[int, int]:
    """For a pool: functions and files that a later forward with its loss meets."""
    met = walks_of_transformers(dist.get_rank())["Hugging Face, again"]
    return len(met.functions), met.files


def test_a_later_forward_gets_no_longer(pools):
    """A change that needs more says why, one that needs fewer lowers the numbers."""
    functions, files = pools(2).run(counted)[1]
    assert functions <= 228 + 3, "beside what other tests have left in the processes"
    assert files <= 49
