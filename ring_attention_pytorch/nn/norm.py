"""The normalisation layer before attention and feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """A layer that scales tokens to length sqrt(dim), times gamma (Zhang and Sennrich 2019)."""

    gamma: nn.Parameter

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1] ** 0.5
        return F.normalize(x, dim=-1) * length * self.gamma
