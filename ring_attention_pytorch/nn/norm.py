"""The normalisation layer before attention and feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch.arguments import checked, least_problem


class RMSNorm(nn.Module):
    """A layer that scales tokens to length sqrt(dim), times gamma (Zhang and Sennrich 2019)."""

    gamma: nn.Parameter

    @checked
    def __init__(self, dim: int):
        super().__init__()
        if (problem := least_problem(1, dim=dim)) is not None:
            raise ValueError(f"RMSNorm: {problem}")
        self.gamma = nn.Parameter(torch.ones(dim))

    @checked
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1] ** 0.5
        return F.normalize(x, dim=-1) * length * self.gamma
