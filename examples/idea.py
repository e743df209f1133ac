"""Ring attention in one file: the idea, without the machinery; `docs/idea.md` walks through it.

    torchrun --nproc-per-node 4 examples/idea.py

Four processes each hold a quarter of a sequence. Queries stay; keys and values travel around a
ring. After one round every query has met every key, and nobody ever held more than two quarters.

    step 0    rank 0 computes on k0   rank 1 on k1   rank 2 on k2   rank 3 on k3
    step 1    rank 0 computes on k3   rank 1 on k0   rank 2 on k1   rank 3 on k2
    step 2    rank 0 computes on k2   rank 1 on k3   rank 2 on k0   rank 3 on k1
    step 3    rank 0 computes on k1   rank 1 on k2   rank 2 on k3   rank 3 on k0
"""

import click
import torch
import torch.distributed as dist
from einops import einsum
from torch import Tensor, nn

# 1. Layout: which tokens a rank holds, as a list of runs.


def runs(layout: str, rank: int, size: int, n: int) -> list[range]:
    """Return the runs of tokens of one rank, of n tokens in all.

    >>> runs("zigzag", rank=0, size=2, n=8)  # an early and a late run: equal work under causality
    [range(0, 2), range(6, 8)]
    """
    if layout == "contiguous":
        return [range(rank * n // size, (rank + 1) * n // size)]
    if layout == "striped":
        return [range(rank, n, size)]
    part = n // (2 * size)
    return [range(i * part, (i + 1) * part) for i in (rank, 2 * size - 1 - rank)]


def positions(layout: str, rank: int, size: int, n: int) -> Tensor:
    return torch.cat([torch.tensor(run) for run in runs(layout, rank, size, n)])


# 2. One block: attention of this rank's queries to the keys that are here now.


def scores(q: Tensor, k: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
    """Return the causal scores `[b, h, i, j]` of q `[b, i, h, d]` and k `[b, j, h, d]`."""
    s = einsum(q, k, "b i h d, b j h d -> b h i j") * q.shape[-1] ** -0.5
    return s.masked_fill(q_at[:, None] < k_at, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, k_at: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to a block, and its lse: the log of the sum of exp(score) of each query."""
    s = scores(q, k, q_at, k_at)
    lse = s.logsumexp(-1)
    p = (s - lse.unsqueeze(-1)).exp().nan_to_num(0.0)  # a query that sees nothing has lse -inf
    return einsum(p, v, "b h i j, b j h d -> b i h d"), lse


# 3. Merge: two partial results are one result, weighted by their share of the softmax's sum.


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, more_lse)
    share = (more_lse - both).exp().nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)
    return torch.lerp(out, more, share), both


# 4. The ring: give tensors to the next rank, take those of the previous one.


def pass_on(*tensors: Tensor) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(t) for t in tensors]
    sends = [dist.P2POp(dist.isend, t.contiguous(), (rank + 1) % size) for t in tensors]
    takes = [dist.P2POp(dist.irecv, t, (rank - 1) % size) for t in received]
    for work in dist.batch_isend_irecv(sends + takes):
        work.wait()
    return received


# 5. Forward and backward: two loops over the same ring.


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, at: list[Tensor]) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf).transpose(1, 2)
        here_k, here_v = k, v
        for step in range(size):
            part = attend(q, here_k, here_v, at[rank], at[(rank - step) % size])
            out, lse = merge(out, lse, *part)
            if step < size - 1:
                here_k, here_v = pass_on(here_k, here_v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.at = at
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Go around once more. Gradients of keys travel with their keys, and come home last."""
        q, k, v, out, lse = ctx.saved_tensors
        rank, size, scale = dist.get_rank(), dist.get_world_size(), q.shape[-1] ** -0.5
        delta = einsum(dout, out, "b i h d, b i h d -> b h i").unsqueeze(-1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(size):
            # the whole softmax's probabilities, because lse is that of all keys
            s = scores(q, k, ctx.at[rank], ctx.at[(rank - step) % size])
            p = (s - lse.unsqueeze(-1)).exp()
            ds = p * (einsum(dout, v, "b i h d, b j h d -> b h i j") - delta) * scale
            dq += einsum(ds, k, "b h i j, b j h d -> b i h d")
            dk += einsum(ds, q, "b h i j, b i h d -> b j h d")
            dv += einsum(p, dout, "b h i j, b i h d -> b j h d")
            k, v, dk, dv = pass_on(k, v, dk, dv)
        return dq, dk, dv, None


# 6. The proof: the same numbers as attention over the whole sequence.


def errors(layout: str, n: int = 48) -> list[float]:
    """Compare this rank's output and gradients with dense attention in float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    at = [positions(layout, r, size, n) for r in range(size)]
    draw = torch.Generator().manual_seed(0)
    *qkv, dout = torch.randn(4, 2, n, 3, 8, generator=draw, dtype=torch.float64)
    dense = [t.clone().requires_grad_() for t in qkv]
    want = nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in dense), is_causal=True
    ).transpose(1, 2)
    want.backward(dout)
    mine = [t[:, at[rank]].requires_grad_() for t in qkv]
    out = RingAttention.apply(*mine, at)
    out.backward(dout[:, at[rank]])
    pairs = [(out, want), *((t.grad, whole.grad) for t, whole in zip(mine, dense))]
    return [(got - right[:, at[rank]]).abs().max().item() for got, right in pairs]


@click.command(help=__doc__)
def main() -> None:
    dist.init_process_group("gloo")
    for layout in ("contiguous", "striped", "zigzag"):
        worst = max(errors(layout))
        if dist.get_rank() == 0:
            print(f"{layout:12} output and gradients differ from dense attention by {worst:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
