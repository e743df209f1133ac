"""The normalisation layer before attention and feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch.arguments import check_least, checked, checks_of


class RMSNorm(nn.Module):
    """A layer that scales tokens to length sqrt(dim), times gamma (Zhang and Sennrich 2019)."""

    @checked
    def __init__(self, dim: int):
        super().__init__()
        with checks_of("RMSNorm"):
            check_least(1, dim=dim)
        self.gamma: nn.Parameter = nn.Parameter(torch.ones(dim))

    @checked
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1] ** 0.5
        return F.normalize(x, dim=-1) * length * self.gamma
