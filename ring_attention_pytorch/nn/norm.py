"""The normalisation layer before attention and feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attention_pytorch.arguments import check_least, checked, checks_of


class RMSNorm(nn.Module):
    """A layer that scales tokens to length sqrt(dim), times gamma (Zhang and Sennrich 2019).

    eps is added to the mean square. With 0 the gradient of a token of length r grows as 1 / r, so
    one near 0 has a large and inexact gradient.
    """

    @checked
    def __init__(self, dim: int, eps: float = 0.0):
        super().__init__()
        with checks_of("RMSNorm"):
            check_least(1, dim=dim)
            if not 0 <= eps < float("inf"):
                raise ValueError(f"eps must be from 0 and finite, got {eps}")
        self.eps: float = eps
        self.gamma: nn.Parameter = nn.Parameter(torch.ones(dim))

    @checked
    def forward(self, x: Tensor) -> Tensor:
        if self.eps:
            return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.gamma
        length = x.shape[-1] ** 0.5
        return F.normalize(x, dim=-1) * length * self.gamma
