"""A joint training step beside diffusers' ring: the same numbers where that is right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from examples.joint_video import JointBlock, step
from ring_attention_pytorch import shard_sequence
from tests.support.reference import relative_error

theirs = pytest.importorskip("diffusers.models.attention_dispatch")
WORDS, TOKENS, UNEVEN = 6, 18, (0, 3, 4, 18)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_on_cpu(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **how: Any) -> Any:
    """Return out and lse, which diffusers' ring asks of a backend and none has on CPUs."""
    if how["_save_ctx"]:
        ctx.save_for_backward(query, key, value)
    heads_first = (t.transpose(1, 2) for t in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first)
    return [t.transpose(1, 2) for t in found]


def differentiate_on_cpu(_: Any, grad_out: Tensor, **given: Tensor) -> list[Tensor]:
    names = ("query", "key", "value", "out", "lse")
    heads_first = (t.transpose(1, 2) for t in (grad_out, *(given[name] for name in names)))
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return [t.transpose(1, 2) for t in back(*heads_first, 0.0, False)]


def their_ring(anything: bool) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    size = dist.get_world_size()
    of_ring = ContextParallelConfig(ring_degree=size, ring_anything=anything, convert_to_fp32=False)
    config = ParallelConfig(context_parallel_config=of_ring)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), size, torch.device("cpu"), mesh=mesh)
    return config


def by_their_ring(anything: bool = False) -> Attend:
    config = their_ring(anything)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops = dict(forward_op=attend_on_cpu, backward_op=differentiate_on_cpu)
        return theirs._templated_context_parallel_attention(q, k, v, _parallel_config=config, **ops)

    return attend


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def joined_step(
    blocks: list[JointBlock], text: Tensor, video: Tensor, target: Tensor, attend: Attend
) -> Tensor:
    """With text and video in one sequence, both of which are spread alike; no text is padded."""
    for block in blocks:
        both = (block.video, video), (block.text, text)
        q = torch.cat([stream.queries(x) for stream, x in both], 1)
        k, v = (torch.cat(t, 1) for t in zip(*(stream.keys(x) for stream, x in both)))
        of_video, of_text = attend(q, k, v).flatten(2).split((video.shape[1], text.shape[1]), 1)
        text, video = text + block.text.to_out(of_text), video + block.video.to_out(of_video)
    return (video - target).square().sum()


def drawn() -> tuple[list[JointBlock], list[Tensor]]:
    """40 heads, which 3 ranks can't swap."""
    torch.manual_seed(0)
    blocks = [JointBlock(heads=40, d=2).double() for _ in range(2)]
    return blocks, [torch.randn(2, n, 80).double() for n in (WORDS, TOKENS, TOKENS)]


def gradients(blocks: list[JointBlock]) -> list[Tensor]:
    own = [p for block in blocks for p in block.parameters()]
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in own]


def both_steps() -> list[list[Tensor]]:
    """Return this rank's part of the loss and of all gradients, by each library."""
    blocks, (text, video, target) = drawn()
    own, also = [shard_sequence(t) for t in (text, video, target)], copy.deepcopy(blocks)
    ours = step(blocks, text, own[1], torch.ones(2, WORDS) > 0, own[2])
    loss = joined_step(also, *own, by_their_ring())
    loss.backward()
    return [[ours, *gradients(blocks)], [loss.detach(), *gradients(also)]]


@pytest.mark.parametrize("size", [2, 3])
def test_an_even_step_is_the_same_by_both_on_two_ranks(pools, size):
    blocks, given = drawn()
    loss = joined_step(blocks, *given, dense)
    loss.backward()
    want, worst = [loss.detach(), *gradients(blocks)], []
    for of_each in zip(*pools(size).run(both_steps)):
        found = [sum(parts, torch.zeros(())) for parts in zip(*of_each)]
        assert relative_error(found[0], want[0]) < 1e-12
        worst.append(max(relative_error(*each) for each in zip(found, want) if each[1].any()))
    assert worst[0] < 1e-12
    # of three ranks they send gradients on in the order in which they don't take keys
    assert worst[1] < 1e-12 if size == 2 else worst[1] > 0.5


def uneven_step() -> tuple[Tensor, str, list[str]]:
    """This rank's part of their loss, what stops its backward, and what their backends refuse."""
    blocks, (text, *videos) = drawn()
    mine = slice(*UNEVEN[dist.get_rank() : dist.get_rank() + 2])
    own = shard_sequence(text), *(t[:, mine] for t in videos)
    loss = joined_step(blocks, *own, by_their_ring(anything=True))
    with pytest.raises(NotImplementedError) as backward:
        loss.backward()
    refused, q = [], torch.randn(1, 4, 2, 8).bfloat16()
    for options in (dict(backend="native"), dict(backend="_native_flash", attn_mask=q > 0)):
        with pytest.raises((ValueError, NotImplementedError)) as found:
            theirs.dispatch_attention_fn(q, q, q, parallel_config=their_ring(False), **options)
        refused.append(str(found.value))
    return loss.detach(), str(backward.value), refused


def test_uneven_lengths_train_here_only(pools):
    blocks, given = drawn()
    want = joined_step(blocks, *given, dense)
    losses, backward, refused = zip(*pools(3).run(uneven_step))
    assert relative_error(sum(losses), want) < 1e-12
    assert "Backward pass for Ring Anything Attention" in backward[0]
    assert "return_lse" in refused[0][0]  # no lse, so no ring, on CPUs
    assert "attn_mask" in refused[0][1]  # no padded text
