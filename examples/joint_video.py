"""A training step of a joint text and video diffusion transformer, over any number of ranks.

    torchrun --nproc-per-node 3 examples/joint_video.py

Video tokens are spread over the ranks in shards of any lengths, text tokens are on all of them, and
all tokens see one another in one softmax: 40 heads over 3 ranks, which no all-to-all of heads can
deal. Padded text is masked. Text keys are `shared_keys`; the text's queries are dealt over the
ranks, beside the video's.

    this rank's queries     its video tokens, and its part of the text's
    keys in the ring        all video tokens
    shared keys             all text tokens

Gradients of shared keys are the whole's on every rank. The step sums all parameters' gradients over
ranks, so it takes a share of these: two lines, marked below. Else they would count P times.

Blocks as in Esser et al. 2024, https://arxiv.org/abs/2403.03206, without modulation by time.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attention_pytorch import ring_attn, shard_sequence, unshard_sequence
from ring_attention_pytorch.launch import torchrun_group
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring


class Stream(nn.Module):
    """Projections of one kind of tokens."""

    def __init__(self, heads: int, d: int) -> None:
        super().__init__()
        self.heads: int = heads
        self.norm = nn.LayerNorm(heads * d)
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(heads * d, heads * d, bias=False) for _ in range(4)
        )

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        k, v = (to(x).unflatten(-1, (self.heads, -1)) for to in (self.to_k, self.to_v))
        return k, v

    def queries(self, x: Tensor) -> Tensor:
        return self.to_q(self.norm(x)).unflatten(-1, (self.heads, -1))


class JointBlock(nn.Module):
    """Text and video tokens see one another; each kind has its own projections."""

    def __init__(self, heads: int = 40, d: int = 4) -> None:
        super().__init__()
        self.text, self.video = Stream(heads, d), Stream(heads, d)

    def forward(
        self, text: Tensor, video: Tensor, text_mask: Tensor, group: Group = None
    ) -> tuple[Tensor, Tensor]:
        """Return the new text tokens and video tokens of this rank.

        text is this rank's part of the text, as `shard_sequence` deals it; `text_mask` is whole.
        """
        ring = as_ring(group)
        whole = unshard_sequence(text, length=text_mask.shape[1], group=group)
        k, v = self.text.keys(whole)
        if ring.size > 1 and k.requires_grad:  # a share of the gradient, which all ranks have
            k.register_hook(lambda grad: grad / ring.size)
            v.register_hook(lambda grad: grad / ring.size)
        q = torch.cat((self.video.queries(video), self.text.queries(text)), 1)
        out = ring_attn(
            q, *self.video.keys(video), cross=True, group=group,
            shared_keys=(k, v), shared_key_mask=text_mask,
        )  # fmt: skip
        of_video, of_text = out.flatten(2).split((video.shape[1], text.shape[1]), 1)
        return text + self.text.to_out(of_text), video + self.video.to_out(of_video)


def step(
    blocks: list[JointBlock],
    text: Tensor,
    video: Tensor,
    text_mask: Tensor,
    target: Tensor,
    group: Group = None,
) -> Tensor:
    """Compute this rank's part of the loss, a sum of squares, and all gradients' parts.

    video and target are this rank's shards, of any length; text and its mask are whole.
    """
    own = shard_sequence(text, group=group)
    for block in blocks:
        own, video = block(own, video, text_mask, group)
    loss = (video - target).square().sum()
    loss.backward()
    return loss.detach()


def total(blocks: list[JointBlock], ring: Ring) -> None:
    """Sum all gradients over ranks."""
    for block in blocks:
        for p in block.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if ring.size > 1:
                dist.all_reduce(p.grad)


def main(tokens: int = 1000, words: int = 77) -> None:
    """Make a training step, and print the loss."""
    torch.manual_seed(0)
    ring = as_ring(None)
    blocks = [JointBlock() for _ in range(2)]
    text, video, target = (torch.randn(2, n, 160) for n in (words, tokens, tokens))
    mask = torch.arange(words) < torch.tensor([[words], [words // 3]])
    # later ranks hold more
    mine = slice(*(round(tokens * (r / ring.size) ** 2) for r in (ring.rank, ring.rank + 1)))
    loss = step(blocks, text, video[:, mine], mask, target[:, mine])
    total(blocks, ring)
    print(f"rank {ring.rank}: video tokens {mine.start} to {mine.stop}, loss {loss:.0f}")


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    with torchrun_group():
        main()
