"""Call kernels by themselves, without this library, for ratios in the same run."""

from collections.abc import Callable

import torch
from torch import Tensor

from ring_attention_pytorch.geometry.tiles import Tile

Runs = dict[str, Callable[[], object]]
Block = tuple[Tensor, Tensor, Tensor, Tensor, Tile]  # q, k, v, dout and the one tile


def _window(tile: Tile) -> tuple[int, int]:
    return (-1 if tile.left is None else tile.left), (-1 if tile.right is None else tile.right)


def cudnn(block: Block) -> Runs:
    """Call cuDNN through PyTorch; it has no window."""
    *tensors, tile = block
    if tile.left is not None:
        raise NotImplementedError
    aten, causal = torch.ops.aten, tile.right is not None
    q, k, v, dout = (t.transpose(1, 2) for t in tensors)

    def forward() -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)

    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()

    def backward() -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal
        )

    return {"forward": forward, "backward": backward}


def torch_flash(block: Block) -> Runs:
    """Call flash attention 2 as it is inside PyTorch."""
    q, k, v, dout, tile = block
    aten, n, (left, right) = torch.ops.aten, q.shape[1], _window(tile)
    bounds = dict(window_size_left=left, window_size_right=right)

    def forward() -> tuple[Tensor, ...]:
        return aten._flash_attention_forward(q, k, v, None, None, n, n, 0.0, False, False, **bounds)

    out, lse, state, unused, _ = forward()

    def backward() -> tuple[Tensor, ...]:
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, n, n, 0.0, False, state, unused, **bounds
        )

    return {"forward": forward, "backward": backward}


def flash_attn_2(block: Block) -> Runs:
    """Call the package flash-attn 2."""
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v, dout, tile = block
    rest = (0.0, q.shape[-1] ** -0.5, False, *_window(tile), 0.0, None)

    def forward() -> tuple[Tensor, ...]:
        return _flash_attn_forward(q, k, v, *rest, False)

    out, lse, *_ = forward()

    def backward() -> Tensor:
        grads = (torch.empty_like(t) for t in (q, k, v))
        return _flash_attn_backward(dout, q, k, v, out, lse, *grads, *rest, False)

    return {"forward": forward, "backward": backward}


def flash_attn_4(block: Block) -> Runs:
    """Call the package flash-attn-4."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    q, k, v, dout, tile = block
    options = dict(causal=tile.left is None and tile.right == 0)
    if tile.left is not None:
        options = dict(window_size_left=tile.left, window_size_right=tile.right)

    def forward() -> tuple[Tensor, ...]:
        return _flash_attn_fwd(q, k, v, return_lse=True, **options)

    out, lse = forward()[:2]
    return {
        "forward": forward,
        "backward": lambda: _flash_attn_bwd(q, k, v, out, dout, lse, **options),
    }


# by the name of the kernel that is the same code
DIRECT: dict[str, Callable[[Block], Runs]] = {
    "flash-attn-4": flash_attn_4,
    "sdpa-cudnn": cudnn,
    "flash-attn-2": flash_attn_2,
    "sdpa-flash": torch_flash,
}
