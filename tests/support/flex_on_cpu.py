"""FlexAttention on the CPU, where PyTorch's own has no gradients.

The stand-in is dense attention with its signature. It goes by the cells of a mask as the kernels
do, which PyTorch's own dense version does not look at.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from einops import repeat
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ring_attention_pytorch.kernels import flex

ANYWHERE = flex.CAN._replace(devices=None, dtypes=None, package=None)


@contextmanager
def stood_in() -> Iterator[None]:
    """The adapter over dense attention, uncompiled, and for all that a CPU can do."""
    plain = dict(flex_attention=dense_flex, _run=lambda function, *given: function(*given))
    with patch.multiple(flex, CAN=ANYWHERE, **plain):
        yield


def dense_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask: BlockMask,
    scale: float,
    *,
    enable_gqa: bool,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]:
    assert enable_gqa
    assert return_aux == AuxRequest(lse=True)
    for t in (q, k, v):
        assert t.shape[2] % 128 == 0 < t.shape[2]
        assert t.shape[3] in (16, 32, 64, 128, 256)
        assert t.transpose(1, 2).is_contiguous()
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).to(wide) for t in (k, v))
    places = index(*q.shape[:3], k.shape[2])
    scores = q.to(wide) @ k.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, *places)
    scores = scores.masked_fill(~shown(mask, places), -torch.inf)
    lse = scores.detach().logsumexp(-1, keepdim=True)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    total = (scores - finite).exp().sum(-1)
    p = (scores - finite).exp() / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return (p @ v).to(q.dtype), AuxOutput(lse=total.log() + finite[..., 0])


def index(*sizes: int) -> list[Tensor]:
    """int32 as in the kernels, each along its own dimension."""
    return [
        torch.arange(size, dtype=torch.int32).view([-1 if i == at else 1 for i in range(4)])
        for at, size in enumerate(sizes)
    ]


def shown(mask: BlockMask, places: list[Tensor]) -> Tensor:
    """By the keys of each row of cells, and by the rows of each column of cells."""
    keys = cells(mask.kv_num_blocks, mask.kv_indices)
    whole = cells(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(keys, cells(mask.q_num_blocks, mask.q_indices).mT)
    assert torch.equal(whole, cells(mask.full_q_num_blocks, mask.full_q_indices).mT)
    assert not (keys & whole).any()
    keys, whole = (
        repeat(t, "b h n m -> b h (n r) (m c)", r=mask.BLOCK_SIZE[0], c=mask.BLOCK_SIZE[1])
        for t in (keys, whole)
    )
    return (keys & mask.mask_mod(*places)) | whole


def cells(count: Tensor, which: Tensor) -> Tensor:
    """bool `[b, h, rows, columns]`, from how many of each row are chosen and which come first."""
    first = torch.arange(which.shape[-1]) < count.unsqueeze(-1)
    return torch.zeros_like(first).scatter(-1, which.long(), first)


@contextmanager
def in_dense_mathematics() -> Iterator[Any]:
    """FlexAttention itself, traced as for a GPU, then run without making code.

    Yields the counter of what was compiled.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # which takes its time

    counter = CompileCounterWithBackend("aot_eager")
    flex._compiled.cache_clear()
    with (
        patch.object(flex, "CAN", ANYWHERE),
        patch.object(torch, "compile", partial(torch.compile, backend=counter)),
        patch.object(flex_attention, "_validate_device", lambda *given: None),
    ):
        yield counter
    flex._compiled.cache_clear()
