"""Memory in which what was never written shows."""

import torch


def poison() -> None:
    """Fill with NaN what PyTorch gives out next, small tensors and large ones."""
    held = [torch.full((1 << 18,), torch.nan, device="cuda") for _ in range(32)]
    held.append(torch.full((1 << 26,), torch.nan, device="cuda"))
    del held
