"""A warning if the ranks of a ring do not average their parameters' gradients.

Each rank has gradients of its own tokens only. If FSDP2 or DDP averages over other ranks, nothing
fails. The check runs at the end of the first backward: in forward, FSDP2's parameters look
unsharded.
"""

import warnings
from collections.abc import Collection, Iterator

from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch.ranks.ring import Ring, as_ring
from ring_attention_pytorch.runtime.torch_func import forward_mode


def watch_averaging(module: nn.Module, result: Tensor, ring: Ring, apart: Collection[int]) -> bool:
    """Warn after backward through `result` if gradients are averaged over too few ranks.

    Args:
        module: the module whose parameters are checked.
        result: a tensor that the module computed from its parameters.
        ring: the ranks that share a sequence.
        apart: ranks that split the heads. Sharding over exactly these averages nothing.

    Returns:
        True if the check will run after backward, so that the caller need not ask again.
    """
    if ring.size == 1 or not result.requires_grad or forward_mode():
        return False
    ranks = set(ring.ranks)

    def look() -> None:
        for over in _averaged_over(module):
            if not ranks <= over and over != set(apart):
                warnings.warn(_text(sorted(over), sorted(ranks)), stacklevel=2)
                return

    def after_backward(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(look)

    result.register_hook(after_backward)
    return True


def _averaged_over(module: nn.Module) -> Iterator[set[int]]:
    """Yield the ranks of each DDP in a module, and of each sharded parameter."""
    for m in module.modules():
        if isinstance(m, DistributedDataParallel):
            yield {*as_ring(m.process_group).ranks}
    for p in module.parameters():
        mesh = getattr(p, "device_mesh", None)  # only sharded parameters have one
        if mesh is not None:
            yield {*mesh.mesh.flatten().tolist()}


def _text(over: list[int], ranks: list[int]) -> str:
    return (
        f"gradients are averaged over ranks {over} and not over the ring's ranks {ranks}, of "
        "which each has gradients of its own tokens only: DDP or FSDP2 must be over all of them, "
        'as in fully_shard(model, mesh=mesh["dp", "cp"])'
    )
