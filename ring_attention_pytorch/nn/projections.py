"""Projections to q, k and v: one weight, as in 0.5.20, or three, whose heads can be split.

Tensor parallelism gives each rank some of the heads. The fused weight has the rows of all q, then
of all k, then of all v, so a slice of it can be q alone. Slices of separate weights are whole
heads. Fused is the default: one matrix product, and state dicts and optimizer states fit 0.5.20.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attention_pytorch.arguments import checked, checks_of
from ring_attention_pytorch.nn.checks import dtype_refusal
from ring_attention_pytorch.nn.norm import RMSNorm

_NAMES = ("to_q", "to_k", "to_v")


class HeadProjections(nn.Module):
    """The q, k, v and output projections of an attention layer; subclasses add the attention."""

    heads: int
    key_heads: int
    dim_head: int
    qkv_head_breakdown: tuple[int, int, int]
    to_qkv: nn.Sequential
    to_out: nn.Linear

    to_q: nn.Module  # these three if heads are split
    to_k: nn.Module
    to_v: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.split_ranks: tuple[int, ...] = ()  # ranks that split the heads
        self.register_load_state_dict_pre_hook(_take_either_form)

    def make_projections(
        self, dim: int, dim_head: int, heads: int, key_heads: int, prenorm: bool
    ) -> None:
        """Make the weights for `heads` query heads and `key_heads` key heads."""
        self.heads, self.key_heads, self.dim_head = heads, key_heads, dim_head
        self.qkv_head_breakdown = (heads, key_heads, key_heads)
        self.to_qkv = nn.Sequential(
            RMSNorm(dim) if prenorm else nn.Identity(),
            nn.Linear(dim, dim_head * (heads + 2 * key_heads), bias=False),
        )
        self.to_out = nn.Linear(dim_head * heads, dim, bias=False)

    @checked
    def split_projections(self, mesh: DeviceMesh) -> None:
        """Split the fused weight of q, k and v, so that `parallelize_module` can split the heads.

        `to_qkv.1` becomes `to_q`, `to_k` and `to_v`; make these ColwiseParallel, and `to_out`
        RowwiseParallel. State dicts of either form load into the other. Call it before
        `fully_shard` and before you make an optimizer.

        Args:
            mesh: one dimension, the ranks that will split the heads; not the ring.

        Raises:
            ValueError: heads or key heads don't divide among its ranks, or the weight has been
                replaced already.
        """
        norm: nn.Module = self.to_qkv[0]
        linear: Any = self.to_qkv[-1]
        with checks_of("split_projections"):
            self._check_split(linear, mesh)
        for name, rows in zip(_NAMES, linear.weight.detach().split(self.all_rows())):
            layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
            layer.weight = nn.Parameter(rows.clone(), requires_grad=linear.weight.requires_grad)
            self.add_module(name, layer)
        self.to_qkv, self.split_ranks = nn.Sequential(norm), tuple(mesh.mesh.tolist())

    def _check_split(self, linear: nn.Module, mesh: DeviceMesh) -> None:
        if type(linear) is not nn.Linear or hasattr(linear.weight, "device_mesh"):
            raise ValueError(
                "the projection must be as it was made: call this once, before parallelize_module, "
                "fully_shard, and whatever else replaces layers"
            )
        if mesh.ndim != 1:
            raise ValueError(
                f'mesh must have one dimension, got {mesh.ndim}; pick one, as in mesh["tp"]'
            )
        if self.heads % mesh.size() or self.key_heads % mesh.size():
            raise ValueError(
                f"heads must divide among the {mesh.size()} ranks of the mesh, got {self.heads} "
                f"query heads and {self.key_heads} key heads; take fewer ranks, or more key heads"
            )

    def all_rows(self) -> list[int]:
        """Return the number of rows of the q, k and v weights, for all heads."""
        return [heads * self.dim_head for heads in self.qkv_head_breakdown]

    def heads_here(self) -> list[int]:
        """Return the numbers of q, k and v heads on this rank."""
        ranks = len(self.split_ranks) or 1
        return [heads // ranks for heads in self.qkv_head_breakdown]

    def project(self, x: Tensor, context: Tensor | None) -> list[Tensor]:
        """Return q of x, and k, v of the context or of x: `[b, n, h, d]`, with this rank's heads.

        Raises:
            ValueError: `split_projections` was called, but the heads have not been split; or x is
                of another dtype than the weights.
        """
        layers: Any = self.to_qkv
        norm, *fused = layers
        projection: Any = fused[0] if fused else self.to_q
        if why := dtype_refusal(x, projection):
            raise ValueError(why)
        rows = [heads * self.dim_head for heads in self.heads_here()]
        if fused and context is None:
            projected = list(self.to_qkv(x).split(rows, dim=-1))
        else:
            queries = norm(x)
            keys = queries if context is None else norm(context)
            if fused:
                weights = fused[0].weight.split(rows)
                projected = [F.linear(t, w) for t, w in zip((queries, keys, keys), weights)]
            else:
                projected = [self.to_q(queries), self.to_k(keys), self.to_v(keys)]
        widths = [t.shape[-1] for t in projected]
        if widths != rows:
            raise ValueError(
                f"q, k and v must be {rows} wide on each rank of the mesh that split_projections "
                f"was given, got {widths}; parallelize_module must take to_q, to_k and to_v over "
                "that mesh as ColwiseParallel()"
            )
        return [rearrange(t, "b n (h d) -> b n h d", d=self.dim_head) for t in projected]


def _take_either_form(
    module: HeadProjections, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Convert a state dict to the module's form: one fused weight of q, k and v, or three."""
    fused, parts = f"{prefix}to_qkv.1.weight", [f"{prefix}{name}.weight" for name in _NAMES]
    if not module.split_ranks and all(part in state for part in parts):
        state[fused] = torch.cat([state.pop(part) for part in parts])
    elif module.split_ranks and fused in state:
        rows = module.all_rows()
        if len(state[fused]) == sum(rows):  # if not, PyTorch reports an unexpected key
            state.update(zip(parts, state.pop(fused).split(rows)))
