"""Attention of TransformerEngine over a group, where it imports: each of its modes is a peer.

Its 2.20.2 gives flash-attn 4 a window where it means none, so that causal attention over a group is
0. Here that is mended.

A rank holds a causal sequence as by our "zigzag". Of packed documents it holds two chunks of each,
as by "zigzag" again (`each_in_zigzag`); so all lengths are multiples of twice the ranks.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch.geometry.layouts import AssignedLayout, all_segments
from ring_attention_pytorch.geometry.segments import Segment

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")  # the last one needs four ranks
VERSIONS = {"flash-attn 3": ("flash_attn_3", "V3"), "flash-attn 4": ("flash_attn.cute", "V4")}
last: list[str] = []  # the kernel that it was told last, alone


class Asked(NamedTuple):
    """A mask, as this package's module and its calls take it."""

    causal: bool
    window: int | None = None  # keys before a query that it sees
    borders: Sequence[int] | None = None  # of packed documents

    @property
    def kind(self) -> str:
        """Return the name of the mask there.

        >>> Asked(True).kind, Asked(False).kind, Asked(True, borders=[0, 8]).kind
        ('causal', 'no_mask', 'padding_causal')
        """
        if self.borders is None:
            return "causal" if self.causal else "no_mask"
        return "padding_causal" if self.causal else "padding"

    @property
    def module(self) -> dict[str, Any]:
        """Return what the module is made with.

        >>> Asked(True, window=16).module
        {'qkv_format': 'bshd', 'attn_mask_type': 'causal', 'window_size': (16, 0)}
        """
        form = "bshd" if self.borders is None else "thd"
        found: dict[str, Any] = dict(qkv_format=form, attn_mask_type=self.kind)
        if self.window is not None:
            found["window_size"] = (self.window, 0 if self.causal else self.window)
        return found

    def call(self, device: torch.device) -> dict[str, Any]:
        """Return what each call is given: borders of the whole, and the longest document."""
        if self.borders is None:
            return {}
        cut = torch.tensor(self.borders, dtype=torch.int32, device=device)
        longest = max(stop - start for start, stop in pairwise(self.borders))
        names = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
        # the same tensor four times: nothing lies between documents
        return dict.fromkeys(names, cut) | dict(max_seqlen_q=longest, max_seqlen_kv=longest)


def each_in_zigzag(borders: Sequence[int], ranks: int) -> AssignedLayout:
    """Give each rank its two chunks of every document.

    Raises:
        ValueError: a length that twice the ranks does not divide.

    >>> each_in_zigzag([0, 8, 12], 2).segments[0]
    (Segment(start=0, stride=1, length=2), Segment(start=6, stride=1, length=2), \
Segment(start=8, stride=1, length=1), Segment(start=11, stride=1, length=1))
    """
    by_rank: list[list[Segment]] = [[] for _ in range(ranks)]
    for start, stop in pairwise(borders):
        if (stop - start) % (2 * ranks):
            raise ValueError(f"a document's length must be a multiple of {2 * ranks}: {borders}")
        for held, segments in zip(by_rank, all_segments("zigzag", ranks, stop - start)):
            held += [each._replace(start=start + each.start) for each in segments]
    return AssignedLayout(tuple(map(tuple, by_rank)))


def settings(kernel: str) -> dict[str, str]:
    """Return the environment by which it takes this kernel alone.

    >>> settings("cuDNN")["NVTE_FLASH_ATTN"], settings("flash-attn 4")["NVTE_FUSED_ATTN"]
    ('0', '0')
    """
    fused = kernel == "cuDNN"
    found = {"NVTE_FUSED_ATTN": str(int(fused)), "NVTE_FLASH_ATTN": str(int(not fused))}
    chosen = "" if fused else VERSIONS[kernel][1]
    return found | {f"NVTE_FLASH_ATTN_{v}": str(int(v == chosen)) for v in ("V2", "V3", "V4")}


def kernels() -> list[str]:
    """Return the kernels that it can have here."""
    return ["cuDNN", *(name for name, (package, _) in VERSIONS.items() if has(package))]


def has(package: str) -> bool:
    """Tell whether a module is there to import."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not
        return False


def engine(
    asked: Asked, only: Sequence[str] | None = None, modes: Sequence[str] = MODES
) -> dict[str, Attend]:
    """Return attention by each mode and kernel, by name; none where the package is missing.

    Each takes this rank's q, k, v `[1, n, h, d]` and gives out, and must run on all ranks.
    """
    if not has("transformer_engine"):
        return {}
    import_module("transformer_engine.pytorch")  # it can't load cuDNN after PyTorch has done so
    able = MODES if dist.get_world_size() >= 4 else MODES[:-1]
    return {
        f"TransformerEngine {mode}, {kernel}": attention(asked, mode, kernel)
        for kernel, mode in product(only or kernels(), modes)
        if mode in able
    }


def attention(asked: Asked, mode: str, kernel: str) -> Attend:
    """Return attention by one mode and kernel; its module is made at the first call."""
    made: list[Callable[..., Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        choose(kernel)
        if not made:
            made.append(partial(module(asked, mode, q, k), **asked.call(q.device)))
        shards = (q, k, v) if asked.borders is None else (q[0], k[0], v[0])
        return made[0](*shards).view(q.shape)

    return attend


def module(asked: Asked, mode: str, q: Tensor, k: Tensor) -> Callable[..., Tensor]:
    """Make its module for such heads, over all ranks."""
    from transformer_engine.pytorch import DotProductAttention

    options = dict(num_gqa_groups=k.shape[2], attention_dropout=0.0, **asked.module)
    found = DotProductAttention(q.shape[2], q.shape[3], **options).to(q.device)
    everyone = list(range(dist.get_world_size()))
    every_other = stream() if q.is_cuda else None
    found.set_context_parallel_group(groups(mode), everyone, every_other, mode)
    return found


def choose(kernel: str) -> None:
    """Have it take this kernel; it looks at the environment if it is asked to."""
    if last == [kernel]:
        return
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    if kernel == "flash-attn 4":
        mend_windows()
    os.environ.update(settings(kernel))
    _attention_backends["backend_selection_requires_update"] = True
    last[:] = [kernel]


@cache
def mend_windows() -> None:
    """Have it give flash-attn 4 no window where it means none."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    for name in ("_flash_attn_fwd_v4", "_flash_attn_bwd_v4"):
        setattr(backends, name, without_ends(getattr(backends, name)))


def without_ends(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass on no window instead of -1, which flash-attn 4 takes as one if the other side is not.

    >>> without_ends(dict)(window_size_left=-1, window_size_right=0, causal=True)
    {'window_size_left': None, 'window_size_right': 0, 'causal': True}
    """

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for side in ("window_size_left", "window_size_right"):
            if (options.get(side) or 0) < 0:
                options[side] = None
        return function(*args, **options)

    return call


def groups(mode: str) -> Any:
    """Return the group of a mode; of two modes, the groups that swap heads and pass keys on."""
    return pairs() if mode == "a2a+p2p" else dist.group.WORLD


@cache
def pairs() -> list[dist.ProcessGroup]:
    """Make groups of neighbours, and of every other rank; return this rank's two."""
    rank, size = dist.get_rank(), dist.get_world_size()
    near = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
    far = [dist.new_group(list(range(i, size, 2))) for i in range(2)]
    return [near[rank // 2], far[rank % 2]]


@cache
def stream() -> torch.cuda.Stream:
    """Return the stream on which it runs every other step."""
    return torch.cuda.Stream()
