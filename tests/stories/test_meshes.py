"""Recipes of meshes: gradients are those of one process, and the guide quotes the code."""

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from examples import meshes
from ring_attention_pytorch import (
    RingAttention,
    RingTransformer,
    Summaries,
    shard_sequence,
    unshard_sequence,
)
from tests.support.reference import relative_error

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "meshes.md"


def over_replicas_alone(model: nn.Module) -> meshes.Wrapped:
    """Average parameters over dp, and not over the ring: the guide warns of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    fully_shard(model, mesh=mesh["dp"])
    return meshes.Wrapped(model, mesh["cp"], mesh["dp"].get_local_rank())


def outcome(recipe: Callable[[nn.Module], meshes.Wrapped]) -> tuple[float, list[str]]:
    """For a pool of 4 or 8: a recipe's worst error, and what attention warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, error = meshes.compare(recipe)
    return error, [str(w.message) for w in caught if "averaged" in str(w.message)]


@pytest.mark.parametrize("name", meshes.RECIPES)
def test_gradients_over_a_mesh_are_those_of_one_process(name, pools):
    for error, told in pools(4).run(outcome, meshes.RECIPES[name]):
        assert error < 1e-10
        assert not told


@pytest.mark.thorough
def test_replicas_of_rings_may_split_heads(pools):
    for error, told in pools(8).run(outcome, meshes.tensor_parallel):
        assert error < 1e-10
        assert not told


def test_averaging_over_too_few_is_wrong_and_is_told(pools):
    for rank, (error, told) in enumerate(pools(4).run(outcome, over_replicas_alone)):
        assert error > 0.1
        dp, cp = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert len(told) == 2  # one for each layer, of which Python shows the first
        assert told[0].startswith(f"gradients are averaged over ranks {dp} and not over")
        assert f"the ring's ranks {cp}" in told[0]
        assert 'mesh["dp", "cp"]' in told[0]


def heads_without_averages(model: nn.Module) -> meshes.Wrapped:
    """Heads are split; nothing averages gradients, as a loop of one's own may do it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    heads = {f"to_{name}": ColwiseParallel() for name in "qkv"} | {"to_out": RowwiseParallel()}
    for block in model.blocks:
        block.attention.split_projections(mesh["tp"])
        parallelize_module(block.attention, mesh["tp"], heads)
    return meshes.Wrapped(model, mesh["cp"], 0)


def test_split_heads_are_not_taken_for_averages(pools):
    assert all(not told for _, told in pools(4).run(outcome, heads_without_averages))


def transformers_heads() -> float:
    """For a pool of 4: loss and gradients of our own model over cp x tp, and one process'."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    sizes = dict(num_tokens=20, dim=16, depth=2, dim_head=4, heads=4, num_grouped_query_heads=2)
    torch.manual_seed(0)
    one = RingTransformer(**sizes, causal=True).double()
    spread = RingTransformer(**sizes, causal=True, ring_attn=True, group=mesh["cp"]).double()
    spread.load_state_dict(one.state_dict())
    heads = {f"to_{name}": ColwiseParallel() for name in "qkv"} | {"to_out": RowwiseParallel()}
    for attention, _ in spread.layers:
        attention.split_projections(mesh["tp"])
        parallelize_module(attention, mesh["tp"], heads)
    ids = torch.randint(20, (1, 23))
    want, got = one(ids, return_loss=True), spread(ids, return_loss=True)
    want.backward()
    got.backward()
    grads = {}
    for name, p in spread.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        grads[name] = grad / 2
    found = RingTransformer(**sizes).double()
    found.load_state_dict(grads | dict(found.named_buffers()))
    errors = [(got - want).abs() / want]
    for p, exact in zip(found.parameters(), one.parameters()):
        errors.append((p - exact.grad).norm() / exact.grad.norm())
    return float(max(errors).detach())


def test_heads_of_our_own_model_may_be_split(pools):
    assert max(pools(4).run(transformers_heads)) < 1e-10


def split_by_hand() -> list[str]:
    """For a pool of 4: checkpoints of both forms, and what is refused on this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    sizes = dict(dim=12, dim_head=4, heads=4, num_grouped_query_heads=2)
    one, again, parted = (RingAttention(**sizes) for _ in range(3))
    parted.split_projections(mesh["tp"])
    names = ["to_k.weight", "to_out.weight", "to_q.weight", "to_qkv.0.gamma", "to_v.weight"]
    assert sorted(parted.state_dict()) == names
    parted.load_state_dict(one.state_dict())
    again.load_state_dict(parted.state_dict())
    for name, weight in one.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    with pytest.raises(RuntimeError, match=r"to_qkv\.1\.weight"):
        parted.load_state_dict(RingAttention(12, dim_head=4, heads=8).state_dict())
    frozen = RingAttention(**sizes).bfloat16().requires_grad_(False)
    frozen.split_projections(mesh["tp"])
    assert not frozen.to_v.weight.requires_grad
    assert frozen.to_v.weight.dtype == torch.bfloat16
    few = RingAttention(12, dim_head=4, heads=6, num_grouped_query_heads=2)
    spread = RingAttention(**sizes, ring_attn=True)
    spread.split_projections(mesh["tp"])
    x = torch.randn(1, 5, 12)
    told = []
    for wrong in (
        lambda: few.split_projections(mesh["tp"]),
        lambda: RingAttention(**sizes).split_projections(mesh),
        lambda: parted.split_projections(mesh["tp"]),
        lambda: spread(x),
        lambda: spread(x, plan=spread.plan(x)),
    ):
        with pytest.raises(ValueError, match="must") as error:
            wrong()
        told.append(str(error.value))
    return told


def test_weights_go_from_one_form_into_the_other_and_what_does_not_fit_raises(pools):
    texts = ["got 6 query heads and 3 key heads", 'as in mesh["tp"]', "call this once"]
    texts += ["must be [8, 4, 4] wide on each rank"] * 2
    for told in pools(4).run(split_by_hand):
        for text, found in zip(texts, told, strict=True):
            assert text in found


MIXED = {
    "attention": {},
    "delta net": {"layers": "ra"},
    "mamba": {"layers": "ma"},
    "summaries": {"attn_summaries": Summaries(8, stride=4)},
    "no kernels": {"force_regular_attn": True},
}  # fmt: skip


def mixed_errors(kind: str) -> dict[str, float]:
    """For a pool of 2: blocks by FSDP2 in bfloat16, against one process's model in bfloat16.

    In 16 bits rotary angles of so many tokens would collide.
    """
    torch.manual_seed(0)
    how: dict[str, Any] = dict(num_tokens=9, dim=16, depth=2, dim_head=8, heads=2, causal=True)
    how |= MIXED[kind]
    alone = "force_regular_attn" in how  # each rank attends to the whole sequence
    whole = RingTransformer(**how)
    for name, p in whole.named_parameters():
        p.data *= 4 if "to_qkv.1" in name else 1  # otherwise all tokens are seen alike
    model = RingTransformer(**how, ring_attn=True, auto_shard_seq=False)
    model.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    ids = torch.randint(0, 9, (1, 600))
    mine = ids if alone else shard_sequence(ids)
    logits, want = model(mine), whole.bfloat16()(ids)
    logits = logits if alone else unshard_sequence(logits, length=600)
    model(mine, return_loss=True).backward()
    whole(ids, return_loss=True).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    errors = {name: relative_error(grads[name], p.grad) for name, p in whole.named_parameters()}
    return errors | {"logits": relative_error(logits, want)}


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_precision_of_blocks_keeps_plans_and_angles(kind, pools):
    for errors in pools(2).run(mixed_errors, kind):
        assert errors.pop("logits") < 0.02
        assert max(errors.values()) < 0.1, errors


def test_angles_in_16_bits_are_refused():
    layer = RingAttention(16, dim_head=8, heads=2)
    with pytest.raises(ValueError, match=r"rotary_emb must be float32 or float64, got torch\.bf"):
        layer(torch.randn(1, 4, 16), rotary_emb=torch.zeros(4, 8, dtype=torch.bfloat16))


def over_all(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def saved(folder: Path) -> list[Tensor]:
    """For a pool of 4: what is saved after a step, whole."""
    torch.manual_seed(0)
    wrapped = meshes.hsdp(meshes.Model().double())
    optimizer = torch.optim.AdamW(wrapped.model.parameters())
    meshes.step(wrapped, meshes.batches()[wrapped.replica])
    optimizer.step()
    dcp.save(get_state_dict(wrapped.model, optimizer)[0], checkpoint_id=folder / "model")
    dcp.save(get_state_dict(wrapped.model, optimizer)[1], checkpoint_id=folder / "optimizer")
    return everything(wrapped.model, optimizer)


def loaded(folder: Path) -> tuple[list[Tensor], float]:
    """For a pool of 2: what is loaded, whole, and the worst error of a step from there."""
    torch.manual_seed(1)
    model = over_all(meshes.Model().double())
    optimizer = torch.optim.AdamW(model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    dcp.load(weights, checkpoint_id=folder / "model")
    dcp.load(moments, checkpoint_id=folder / "optimizer")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = everything(model, optimizer)
    whole, _ = get_state_dict(model, [], options=StateDictOptions(full_state_dict=True))
    wrapped = meshes.Wrapped(model, init_device_mesh("cpu", (2,)), 0)
    loss = meshes.step(wrapped, meshes.batches()[0])
    return found, meshes.worst_error(wrapped, loss, meshes.one_process(whole, 1))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    found = [*weights.values()]
    return found + [t for t in moments.values() if isinstance(t, Tensor)]


def test_what_four_ranks_save_two_go_on_with(pools, tmp_path):
    want = pools(4).run(saved, tmp_path)[0]
    assert len(want) > 30
    for found, error in pools(2).run(loaded, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert error < 1e-10


def test_the_guide_quotes_the_recipes():
    quoted = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    functions = [meshes.step, *meshes.RECIPES.values()]
    assert quoted == [inspect.getsource(function) for function in functions]
