"""The memory of a GPU in training, by cause: arithmetic on the sizes of a model.

    moment              | loss    | last layer's backward | first layer's backward
    weights, moments    | all     | all                   | all
    gradients, alone    | the head's                      | all
    gradients, spread   | all, also of the step before: they have a stream of their own
    inputs of layers    | all     | all                   | one
    a layer             |         | computed again, with its gradients

The peak is the largest of these sums. A model is a Llama; FSDP2 shards weights and their states,
layers are checkpointed, and a loss has logits of some tokens at a time. Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", counts a layer of a GPT so.
"""

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from ring_attention_pytorch.comm.transports import owners_at_once
from ring_attention_pytorch.geometry.layouts import all_segments
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan.explain import held_by_gather
from ring_attention_pytorch.plan.proposal import MOST_MEMORY
from ring_attention_pytorch.schedule.hardware import H200
from ring_attention_pytorch.schedule.pieces import KVShape, Workload, rounds_of, tokens
from ring_attention_pytorch.schedule.policy import is_small

_STATES = ("weights", "gradients", "moments")  # one column of a table
CAUSES = (*_STATES, "FSDP", "inputs", "layer", "attention", "loss", "rest")
_KERNELS, _NCCL = 300 << 20, 1700 << 20  # bytes: measured, on H200s and by difference on H100s
_SIDE = 68  # results of calls that overlap, in tensors as large as q: measured, see docs
_ITEM = 2  # bytes of bfloat16, in which layers compute
Parts = dict[str, int]


class Sizes(NamedTuple):
    """Sizes of a Llama; the defaults are of Llama 3.1 8B."""

    dim: int = 4096
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    width: int = 128
    ffn: int = 14336
    classes: int = 128256

    @property
    def of_layer(self) -> int:
        """Weights of one layer."""
        attention = 2 * (self.heads + self.key_heads) * self.width
        return self.dim * (attention + 3 * self.ffn + 2)

    @property
    def of_head(self) -> int:
        """Weights of the head, and as many of the embedding."""
        return self.dim * self.classes

    @property
    def weights(self) -> int:
        """All weights.

        >>> Sizes().weights
        8030261248
        """
        return self.layers * self.of_layer + 2 * self.of_head + self.dim


class Training(NamedTuple):
    """How a model is trained: the tokens of one sequence over the ranks, and limits of memory."""

    tokens: int
    ranks: int
    checkpoint: bool = True  # layers keep their inputs only
    offload: bool = False  # these are on the host
    chunk: int | None = None  # `chunk_tokens` of feed-forwards
    logits: int | None = 2048  # tokens of the loss at once; None is all
    float32: bool = False  # weights, gradients and moments; layers compute in bfloat16 anyway

    @property
    def here(self) -> int:
        """Tokens of one rank."""
        return -(-self.tokens // self.ranks)


def peak(sizes: Sizes, how: Training) -> tuple[str, Parts]:
    """Return the moment at which a GPU holds most, and the bytes of each cause then.

    >>> moment, parts = peak(Sizes(), Training(tokens=1 << 17, ranks=4))
    >>> moment, f"{parts['inputs'] / 2**30:.1f} GiB"
    ('backward of the last layer', '8.2 GiB')
    """
    every = moments(sizes, how)
    return max(every.items(), key=lambda moment: sum(moment[1].values()))


def allocated(sizes: Sizes, how: Training) -> int:
    """Return the most that PyTorch's allocator holds, if attention is to own tokens alone.

    NCCL's memory, loaded kernels and memory that ranks share are not in it, unlike in the peak.
    """
    others = _KERNELS + (how.ranks > 1) * _NCCL
    return max(
        sum(parts.values()) - parts["attention"] - others for parts in moments(sizes, how).values()
    )


def described(sizes: Sizes, how: Training) -> str:
    """Describe the peak in lines: a cause and its bytes each, and the sum."""
    moment, parts = peak(sizes, how)
    rows = [*((cause, parts.get(cause, 0)) for cause in CAUSES), ("peak", sum(parts.values()))]
    gpus = f"{how.ranks} GPU{'s' * (how.ranks > 1)}, {how.here} tokens each"
    head = f"{sizes.weights / 1e9:.2f} billion weights, {how.tokens} tokens on {gpus}: {moment}"
    return "\n".join([head, *(f"  {cause:10} {_gib(of):>6} GiB" for cause, of in rows)])


def table(sizes: Sizes, every: Iterable[Training]) -> str:
    """Make a Markdown table: a row for each way to train, a column for each cause, in GiB."""
    columns = ("tokens", "GPUs", "states", *CAUSES[len(_STATES) :], "peak")
    lines = [columns, ["---"] * len(columns)]
    for how in every:
        parts = peak(sizes, how)[1]
        figures = [parts.get(cause, 0) for cause in CAUSES]
        states = sum(figures[: len(_STATES)])
        figures = [states, *figures[len(_STATES) :], sum(parts.values())]
        lines.append([length_of(how.tokens), str(how.ranks), *map(_gib, figures)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def length_of(tokens: int) -> str:
    """Write a length as benchmarks do.

    >>> length_of(1 << 17), length_of(1 << 20)
    ('128k', '1M')
    """
    return f"{tokens / 2**20:g}M" if tokens >= 1 << 20 else f"{tokens / 2**10:g}k"


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f}"


def moments(sizes: Sizes, how: Training) -> dict[str, Parts]:
    """Return the bytes of each cause at the moments that can be the peak.

    FSDP2 gathers weights on one stream and sums gradients on another, and attention may compute on
    more of them. PyTorch's allocator keeps memory for the stream that had it. So what these streams
    ever hold, all gradients of the step before included, is no one else's.
    """
    shard = (4 if how.float32 else _ITEM) * -(-sizes.weights // how.ranks)
    token = _ITEM * sizes.dim * how.here
    kept, work = _layer(sizes, how)
    inputs = 2 * token if how.offload else sizes.layers * token
    saved = inputs if how.checkpoint else inputs + sizes.layers * kept
    last = work if how.checkpoint else work - kept
    layer, head, spread = _ITEM * sizes.of_layer, _ITEM * sizes.of_head, how.ranks > 1
    streams = spread * (head + layer + 4 * sizes.of_head // how.ranks)
    always = {
        "weights": shard, "gradients": spread * shard, "moments": 2 * shard,
        "attention": _of_attention(sizes, how), "rest": _rest(sizes, how),
    }  # fmt: skip
    return {
        "loss": always | {
            "FSDP": streams + spread * head, "inputs": saved + 2 * token,
            "loss": _logits(sizes, how) + token + 2 * head,
        },
        "backward of the last layer": always | {
            "gradients": shard if spread else head, "inputs": saved + token, "layer": last,
            "FSDP": streams + spread * (layer + 4 * sizes.of_head),
        },
        "backward of the first layer": always | {
            "gradients": shard if spread else shard - head, "inputs": token, "layer": last,
            "FSDP": streams + spread * (layer + 4 * sizes.of_layer),
        },
        "step of the optimizer": always | {"gradients": shard, "FSDP": streams},
    }  # fmt: skip


def _rest(sizes: Sizes, how: Training) -> int:
    """Return the bytes of NCCL and of loaded kernels, and those that the allocator can't use.

    A large tensor needs a hole as large: one of the feed-forward's width stays empty, and where
    gradients are on the same stream, too, one of the head's weights.
    """
    if how.ranks == 1:
        return _KERNELS + _widest(sizes, how) + _ITEM * sizes.of_head
    return _KERNELS + _NCCL + _widest(sizes, how)


def _widest(sizes: Sizes, how: Training) -> int:
    """Return the bytes of the largest tensor of a layer."""
    chunk = how.here if how.chunk is None else min(how.chunk, how.here)
    return _ITEM * max(chunk * sizes.ffn, how.here * sizes.heads * sizes.width)


def _layer(sizes: Sizes, how: Training) -> tuple[int, int]:
    """Return the bytes that a layer keeps for backward, and the most that backward then holds.

    It keeps the results of its norms, q, k, v and out, the sum after attention, and four tensors of
    the feed-forward's width. Most are alive when the product inside the feed-forward has its
    gradient and its factors' gradients, or in backward of attention with many peers' keys.
    """
    heads, key_heads = sizes.heads * sizes.width, sizes.key_heads * sizes.width
    attention = 3 * sizes.dim + 2 * heads + 2 * key_heads  # norms' results, the sum; q, out; k, v
    chunk = how.here if how.chunk is None else min(how.chunk, how.here)
    kept = how.here * attention + (4 * how.here * sizes.ffn if how.chunk is None else 0)
    gradients = sizes.dim if how.chunk is None else 2 * sizes.dim  # of the result, and of chunks
    feed_forward = how.here * (attention + gradients) + 6 * chunk * sizes.ffn
    if chunk < how.here:
        # gradients of three weights, of earlier chunks and of this one, beside fewer of its tensors
        weight, wide = sizes.dim * sizes.ffn, chunk * sizes.ffn
        of_weights = max(2 * weight, 4 * weight - wide, 6 * weight - 6 * wide)
        feed_forward += of_weights - chunk * sizes.dim
    of_attention = how.here * (2 * sizes.dim + 5 * heads + 4 * key_heads)  # a wide one of q, out's
    of_attention += _of_peers(sizes, how) // _ITEM
    return _ITEM * kept, _ITEM * max(feed_forward, of_attention)


def _logits(sizes: Sizes, how: Training) -> int:
    """Return the bytes of the logits of some tokens: float32, their logarithms and gradient."""
    chunk = how.here if how.logits is None else min(how.logits, how.here)
    return 12 * chunk * sizes.classes


def _shape(sizes: Sizes) -> KVShape:
    return KVShape(1, sizes.heads, sizes.key_heads, sizes.width, sizes.width, _ITEM)


def _of_attention(sizes: Sizes, how: Training) -> int:
    """Return the bytes that other ranks read, and of side streams where calls overlap.

    Two slots are read by others: own keys, and gradients of theirs. With few tokens calls overlap
    on four streams, whose memory is not given to others before all have waited for it.
    """
    if how.ranks == 1:
        return 0
    work, at_once, shape = _exchange(sizes, how)
    pieces = chain.from_iterable(each.pieces for each in rounds_of(work, at_once))
    longest, widest = max(map(count, work.keys)), max(map(tokens, pieces))
    q = _ITEM * how.here * sizes.heads * sizes.width
    overlapping = _SIDE * q if is_small(work, shape, H200) else 0
    return 2 * (longest * shape.token_bytes + widest * shape.grad_bytes) + overlapping


def _of_peers(sizes: Sizes, how: Training) -> int:
    """Return the bytes of peers' keys and gradients while backward of attention runs."""
    if how.ranks == 1:
        return 0
    work, at_once, shape = _exchange(sizes, how)
    return held_by_gather(max(map(count, work.keys)), at_once, shape)


def _exchange(sizes: Sizes, how: Training) -> tuple[Workload, int, KVShape]:
    """Return the bytes that ranks exchange, and from how many owners at once."""
    shape, every = _shape(sizes), all_segments("zigzag", how.ranks, how.tokens)
    work = Workload(every, every, Mask(causal=True))
    return work, owners_at_once(MOST_MEMORY, work, shape), shape
