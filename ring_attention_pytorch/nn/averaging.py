"""A warning where ranks of a ring do not share the gradients of their parameters.

Each has gradients of its own tokens. FSDP2 over other ranks leaves them so, and nothing fails.
Inside forward its parameters look like any others: this looks at the end of the first backward.
"""

import warnings
from collections.abc import Collection

from torch import Tensor, nn
from torch.autograd.variable import Variable

from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.torch_func import forward_mode


def watch_averaging(module: nn.Module, result: Tensor, ring: Ring, apart: Collection[int]) -> bool:
    """Warn after backward through `result` if parameters are sharded over too few ranks.

    Args:
        module: whose parameters.
        result: a tensor that the module has computed, of parameters.
        ring: the ranks that share a sequence.
        apart: ranks among which heads are split: what is sharded over them alone is no average.

    Returns:
        Whether there will be a look after backward: one is enough.
    """
    if ring.size == 1 or not result.requires_grad or forward_mode():
        return False
    ranks = set(ring.ranks)

    def look() -> None:
        for p in module.parameters():
            mesh = getattr(p, "device_mesh", None)  # only sharded parameters have one
            if mesh is None:
                continue
            over = set(mesh.mesh.flatten().tolist())
            if not ranks <= over and over != set(apart):
                warnings.warn(_text(sorted(over), sorted(ranks)), stacklevel=2)
                return

    def after_backward(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(look)

    result.register_hook(after_backward)
    return True


def _text(over: list[int], ranks: list[int]) -> str:
    return (
        f"gradients are averaged over ranks {over} and not over the ring's ranks {ranks}, of "
        "which each has gradients of its own tokens only: shard parameters over a mesh that has "
        'all of them, such as fully_shard(model, mesh=mesh["dp", "cp"])'
    )
