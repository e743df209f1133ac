"""A call of a model, watched: its parts as they are now, and hooks that go when it ends."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations import watched
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.integrations.watched import Parts, Watched, parts_of
from tests.support import hf


def block(positions: torch.Tensor | None = None) -> SimpleNamespace:
    told: list[str] = []

    def tell(check) -> None:
        try:
            check()
        except ValueError as error:
            told.append(str(error))
            raise

    return SimpleNamespace(
        inputs={"position_ids": positions}, wholes=[], same=[positions], check_positions=True,
        agree_in_block=tell, ensure=tell, num_items=None, said=told,
    )  # fmt: skip


def test_parts_are_looked_for_anew() -> None:
    model = hf.model_of("Qwen3", "sdpa")
    found = parts_of(nn.Sequential(model))
    assert [type(m).__name__ for m in found.models] == ["Qwen3ForCausalLM", "Qwen3Model"]
    assert [*found.places] == [model.model.rotary_emb]
    assert found.head is None
    assert not found.routed
    other = hf.model_of("Qwen3", "sdpa")
    model.model.rotary_emb = other.model.rotary_emb
    assert [*parts_of(model).places] == [other.model.rotary_emb]
    assert parts_of(nn.Linear(1, 1)) == Parts([], {}, None, [], [], False)


def test_no_hook_stays_when_a_call_ends() -> None:
    model = hf.model_of("Qwen3", "sdpa")
    call = Watched(block(), model)
    assert len(model.model.rotary_emb._forward_pre_hooks) == 1
    call.hooks.close()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_layer_s_positions_are_compared_once_and_others_told() -> None:
    mine = torch.tensor([[0, 3, 4]])
    here, layer = block(mine), SimpleNamespace(forward=lambda hidden: hidden)
    call = Watched(here)
    same = mine.clone()
    assert not call.are_placed(layer, None)  # nobody has said where tokens are
    assert not call.are_placed(layer, same)
    assert any(each is same for each in here.same)  # and is not compared again
    with_them = SimpleNamespace(forward=lambda hidden, position_ids: hidden)
    assert call.are_placed(with_them, same)
    with pytest.raises(ValueError, match="position_ids are not the batch's"):
        call.are_placed(layer, mine + 1)
    assert len(here.said) == 1


def test_what_was_made_of_whole_sequences_makes_a_module_know_of_ranks() -> None:
    here = block()
    here.wholes.append("before")
    call = Watched(here)
    assert not call.knows
    with call._unnoticed():
        here.wholes.append("ours")
    assert not call.knows
    here.wholes.append("its own")
    assert call.knows


def test_losses_of_several_batches_have_none_of_routers() -> None:
    here = block()
    here.num_items = torch.tensor(3)

    def tell(error: ValueError) -> None:
        raise error

    here.agree_in_block = tell
    with pytest.raises(ValueError, match="the routers' loss is of a batch"):
        Watched(here).router_loss((torch.zeros(2, 3),), 1, None)
    assert Watched(here).router_loss(None, 1, None) == 0


def batch():
    return shard_batch({"input_ids": torch.tensor([[1, 2, 3]])})


def test_the_block_is_the_innermost_one_that_is_open() -> None:
    assert watched.opened() is None
    with batch():
        assert watched.opened() is None  # a batch's block alone is none of a model
        placement = watched.begun("outer")
        assert watched.needed() == "outer"
        with batch():
            assert watched.opened() is None
            assert watched.begun("inner") is not placement
            assert watched.needed() == "inner"
        assert watched.needed() == "outer"
    assert watched.opened() is None


def test_another_thread_is_in_no_block() -> None:
    found = []
    with batch():
        watched.begun("this")
        other = threading.Thread(target=lambda: found.append(watched.opened()))
        other.start()
        other.join()
    assert found == [None]


def test_where_a_block_is_needed_its_absence_is_told() -> None:
    with pytest.raises(ValueError, match="this model has ring attention, which needs its batch"):
        watched.needed()


WRAPPERS = {
    "FSDP2": lambda model, mesh: fully_shard(model, mesh=mesh),
    "DDP": lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group()),
}


def averaged_over(name: str) -> list[int]:
    """For a pool of four: how often two steps warn, where dp or all ranks average gradients."""
    register()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    found = []
    for over in (mesh["dp"], init_device_mesh("cpu", (4,))):
        model = WRAPPERS[name](hf.model_of("Llama", "ring"), over)
        batch = shard_batch(hf.batch_of("plain"), group=mesh["cp"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with ring_forward(batch) as inputs:
                    model(**inputs).loss.backward()
        found.append(sum("and not over the ring's ranks" in str(w.message) for w in caught))
    return found


@pytest.mark.parametrize("name", WRAPPERS)
def test_averaging_without_the_ring_s_ranks_is_told_once(name: str, pools) -> None:
    assert pools(4).run(averaged_over, name) == [[1, 0]] * 4
