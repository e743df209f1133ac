"""The module of ring-attention-pytorch 0.5.20 of that name; see `original`."""

from ring_attention_pytorch.original.tensor_types import Bool, Float, Int, TorchTyping

__all__ = ["Bool", "Float", "Int", "TorchTyping"]
