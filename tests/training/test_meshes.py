"""Recipes of meshes: gradients are those of one process, and the guide quotes the code."""

import copy
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples import meshes

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "meshes.md"


def error_of(name: str) -> float:
    """For a pool of 4: the worst relative error of a recipe."""
    recipe = meshes.RECIPES.get(name, over_replicas_alone)
    torch.manual_seed(0)
    model = meshes.Model().double()
    replicas = 1 if recipe is meshes.cp_and_tp else 2
    want = meshes.one_process(copy.deepcopy(model), replicas)
    wrapped = recipe(model)
    loss = meshes.step(wrapped, meshes.batches()[wrapped.replica])
    return meshes.worst_error(wrapped, loss, want)


def over_replicas_alone(model: nn.Module) -> meshes.Wrapped:
    """What the guide warns of: parameters are averaged over dp, and not over the ring."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    fully_shard(model, mesh=mesh["dp"])
    return meshes.Wrapped(model, mesh["cp"], mesh["dp"].get_local_rank())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", meshes.RECIPES)
def test_gradients_over_a_mesh_are_those_of_one_process(name, pools):
    assert max(pools(4).run(error_of, name)) < 1e-10


def test_the_comparison_sees_what_is_averaged_over_too_few(pools):
    assert max(pools(4).run(error_of, "too few")) > 0.1


def test_the_guide_quotes_the_recipes():
    quoted = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    functions = [meshes.step, *meshes.RECIPES.values()]
    assert quoted == [inspect.getsource(function) for function in functions]
