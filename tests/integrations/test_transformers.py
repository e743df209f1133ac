"""Models of transformers over a spread batch are those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from tests.support import hf
from tests.support.hf import KINDS, MODELS, batch_of, model_of, ring_of
from tests.support.reference import relative_error

EXACT = 1e-10


def errors(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> float:
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def all_of(
    cases: list[tuple[str, str]], size: int, layout: str, options: dict[str, Any]
) -> dict[str, float]:
    """For a pool: the worst error of each model and kind of batch, in rings of a size."""
    found = {}
    with hf.losses_as_they_were():
        for name, kind in cases:
            got = hf.spread(name, kind, ring_of(size), layout, **options)
            found[f"{name}, {kind}"] = errors(got, hf.dense_once(name, kind))
    return found


@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        (2, "zigzag", dict(checkpointed=False)),
        (3, "auto", {}),
        (4, "auto", dict(ulysses=2, checkpointed=True)),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(size, layout, options, pools):
    """Each model with one kind of batch, another one in each ring."""
    cases = [(name, KINDS[(i + size) % 3]) for i, name in enumerate(MODELS)]
    for found in pools(4).run(all_of, cases, size, layout, options):
        assert max(found.values()) < EXACT, found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        (1, "zigzag", {}),
        (2, "zigzag", {}),
        (2, "balanced", dict(ulysses=2)),
        (3, "balanced", dict(checkpointed=False)),
        (3, "zigzag", dict(transport="gather")),
        (4, "zigzag", dict(ulysses=2)),
        (4, "balanced", dict(checkpointed=True)),
        (4, "contiguous", {}),
    ],
)
def test_every_model_with_every_kind_of_batch(size, layout, options, pools):
    cases = [(name, kind) for name in MODELS for kind in KINDS]
    for found in pools(4).run(all_of, cases, size, layout, options):
        assert max(found.values()) < EXACT, found


def hf_alone(name: str, kind: str, attention: str) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) by transformers itself, in one process."""
    model, batch = model_of(name, attention, torch.float32), batch_of(kind)
    labels = hf.whole_labels(kind)
    if kind == "padded left":
        labels[0, 8] = -100  # padding sees all padding there, and nothing here
    loss = model(**batch, shift_labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def documents_alone(name: str, kind: str, attention: str) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) by transformers, given each document by itself."""
    model, ids = model_of(name, attention, torch.float32), batch_of(kind)["input_ids"]
    documents, labels, losses = hf.documents_of(kind)[0], hf.whole_labels(kind), []
    for number in documents.unique():
        own = documents == number
        logits = model(input_ids=ids[:, own], use_cache=False).logits.flatten(0, 1)
        losses.append(F.cross_entropy(logits, labels[:, own].flatten(), reduction="sum"))
    loss = torch.stack(losses).sum() / (labels != -100).sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def as_hf_alone(
    cases: list[tuple[str, str]], size: int, attention: str, alone: Any = hf_alone
) -> dict[str, float]:
    """For a pool: the worst difference to transformers' own attention and loss, in float32."""
    found = {}
    for name, kind in cases:
        register()
        model, batch = model_of(name, "ring", torch.float32), batch_of(kind)
        if kind == "padded left":
            batch["labels"][0, 9] = -100
        spread = shard_batch(batch, group=ring_of(size))
        with ring_forward(spread, loss_group=ring_of(size)) as inputs:
            loss = model(**inputs).loss
            loss.backward()
        got = loss.detach(), hf.averaged(model, ring_of(size))
        found[f"{name}, {kind}"] = errors(got, alone(name, kind, attention))
    return found


def test_it_is_what_transformers_computes_where_that_is_right(pools):
    cases = [("Llama", "packed"), ("Qwen3", "plain"), ("Mistral", "plain"), ("Gemma2", "plain")]
    for found in pools(2).run(as_hf_alone, cases, 2, "eager"):
        assert max(found.values()) < 1e-5, found


@pytest.mark.thorough
def test_it_is_what_transformers_computes_with_padding_and_documents(pools):
    full = [("Llama", kind) for kind in KINDS] + [("Qwen3", kind) for kind in KINDS]
    windows = [
        ("Mistral", "packed"),
        ("Gemma2", "packed"),
        ("Gemma3", "packed"),
        ("GptOss", "plain"),
    ]
    for found in pools(4).run(as_hf_alone, full + windows, 4, "eager"):
        assert max(found.values()) < 1e-5, found


def test_documents_of_gpt_oss_do_not_see_one_another(pools):
    """transformers itself lets them, when they are packed: so each is compared by itself."""
    cases = [("GptOss", "packed")]
    for found in pools(2).run(as_hf_alone, cases, 2, "eager", documents_alone):
        assert max(found.values()) < 1e-5, found


def masked_words(size: int) -> float:
    """For a pool: an encoder that sees both ways, with windows, against transformers itself."""
    register()
    special = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}
    config = dict(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=hf.WORDS, local_attention=8, global_attn_every_n_layers=2, **special,
    )  # fmt: skip
    batch = batch_of("padded left")
    batch["labels"][:, ::3] = -100
    found = []
    for attention in ("ring", "sdpa"):
        torch.manual_seed(0)
        kind = transformers.ModernBertConfig(**config, attn_implementation=attention)
        model = transformers.ModernBertForMaskedLM(kind).eval()
        if attention == "ring":
            spread = shard_batch(batch, group=ring_of(size), shift_labels=False)
            more = dict(loss_group=ring_of(size), check_positions=False)
            with ring_forward(spread, **more) as inputs:
                loss = model(**inputs).loss
                loss.backward()
            grads = hf.averaged(model, ring_of(size))
        else:
            labels = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**{**batch, "labels": labels}).loss
            loss.backward()
            grads = [p.grad for p in model.parameters()]
        found.append((loss.detach(), grads))
    return errors(*found)


@pytest.mark.thorough
def test_an_encoder_sees_both_ways(pools):
    assert max(pools(2).run(masked_words, 2)) < 1e-5


def buckets_of_their_own() -> tuple[Tensor, list[Tensor]]:
    return hf.spread("Llama", "plain", ring_of(3), bucket_size=4 + dist.get_rank())


def test_ranks_may_hold_scores_of_as_many_queries_as_they_like(pools):
    want = hf.dense_once("Llama", "plain")
    assert all(errors(got, want) < EXACT for got in pools(3).run(buckets_of_their_own))


def test_one_process_without_a_group_needs_no_ranks():
    for kind in KINDS:
        assert errors(hf.spread("Gemma2", kind), hf.dense("Gemma2", kind)) < EXACT
