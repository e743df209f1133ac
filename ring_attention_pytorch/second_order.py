"""Second derivatives and forward mode: gather all keys, and differentiate plain attention.

    first derivatives    the loops of attention.py          keys of one block at a time
    all other ones       gather k and v; softmax(scores) v  all n x N scores of a rank's n queries

PyTorch differentiates the plain form any number of times, whatever kernel the plan has. Its memory
grows with n x N per head, for n queries here and N keys in all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from ring_attention_pytorch.comm.collectives import all_gather_along, fill_in
from ring_attention_pytorch.geometry.segments import count
from ring_attention_pytorch.kernels.eager import visible_parts
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.ring import Caller
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype

Some = Sequence[Tensor | Any]  # None: sinks or dlse that are not there, or no derivative
Results = tuple[Tensor | Any, ...]


def gathered_attention(
    plan: RingPlan,
    back_of: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *params: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the plan's (out, lse) in plain PyTorch, from keys gathered of all ranks.

    Shapes are as in `attention.forward`, and `back_of` is as for `Ring.call`. All ranks of the
    plan call this together.
    """
    name, wide = f"ring attention{plan.agreed.of_layer}, gathered", accumulation_dtype(q.dtype)
    caller = Caller(plan.transport.fabric.ring, name, plan.number, back_of)
    lengths = [count(segments) for segments in plan.blocks.keys]
    with torch.autocast(q.device.type, enabled=False):
        own, params = plan.keys(k, v), tuple(t.to(wide) for t in params)
        k, v = (all_gather_along(1, t.to(wide), lengths, caller) for t in own[:2])
        if plan.codec is not None:
            k, v = plan.codec.decode((k, v), params)
        hidden, bias, factor = _mask(plan, q.shape[2], k.shape[2], caller)
        terms, columns = plan.terms, k.shape[1]
        rows = rearrange(q.to(wide), "b i (g r) d -> b g r i d", g=k.shape[2])
        scores = einsum(rows, k, "b g r i d, b j g d -> b g r i j") * terms.scale
        if terms.softclamp is not None:
            scores = (scores / terms.softclamp).tanh() * terms.softclamp
        scores = scores if bias is None else scores + bias
        if sinks is not None:  # a key that every query sees, with value 0
            of_rows = rearrange(sinks.to(wide), "(g r) -> g r 1 1", g=k.shape[2])
            scores = torch.cat((scores, of_rows.expand(*scores.shape[:-1], 1)), -1)
            hidden = torch.nn.functional.pad(hidden, (0, 1), value=False)
        empty = hidden.all(-1, keepdim=True)  # rows that see no key: finite scores have no NaN
        scores = scores.masked_fill(hidden, -torch.inf).masked_fill(empty, 0.0)
        lse = scores.logsumexp(-1, keepdim=True)
        p = (scores - lse).exp().masked_fill(hidden, 0.0)[..., :columns]
        p = p if factor is None else p * factor
        out = rearrange(einsum(p, v, "b g r i j, b j g d -> b i g r d"), "b i g r d -> b i (g r) d")
        lse = lse.masked_fill(empty, -torch.inf)
        return out.to(q.dtype), rearrange(lse, "b g r i 1 -> b (g r) i")


def gathered_gradients(plan: RingPlan, back_of: int, *given: Tensor | None) -> Results:
    """Compute the gradients of (q, k, v, sinks, params) from these and (dout, dlse).

    They equal the results of `attention.backward`, and can be differentiated any number of times.
    """
    *inputs, dout, dlse = given
    return pulled_back(lambda *t: gathered_attention(plan, back_of, *t), inputs, (dout, dlse))


def pulled_back(function: Callable[..., Results], inputs: Some, cotangents: Some) -> Results:
    """Return the gradients of inputs for these cotangents; None counts as 0, of an input as none.

    >>> x = torch.tensor(3.0)
    >>> pulled_back(lambda x, _: (x * x, None), (x, None), (torch.tensor(1.0), None))
    (tensor(6.), None)
    """
    there: list[bool] = []

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        following = iter(tensors)
        results = function(*(None if t is None else next(following) for t in inputs))
        there[:] = [t is not None for t in results]
        return tuple(t for t in results if t is not None)

    vjp: Any = torch.func.vjp  # typed as if it always returned `aux`
    results, pull = vjp(of_tensors, *(t for t in inputs if t is not None))
    along = [t for t, is_there in zip(cotangents, there) if is_there]
    along = [torch.zeros_like(r) if t is None else t for r, t in zip(results, along)]
    grads = iter(pull(tuple(along)))
    return tuple(None if t is None else next(grads) for t in inputs)


def pushed_forward(function: Callable[..., Results], inputs: Some, tangents: Some) -> Results:
    """Return the tangents of results for these of inputs; None counts as 0.

    Pulling back is linear in cotangents, and its own pullback is this: no forward mode within
    forward mode.

    Raises:
        NotImplementedError: forward mode over forward mode, in which PyTorch's Functions lose the
            outer tangents.

    >>> x = torch.tensor(3.0)
    >>> pushed_forward(lambda x, _: (x * x, None), (x, None), (torch.tensor(1.0), None))
    (tensor(6.), None)
    """
    levels = [each.key() for each in retrieve_all_functorch_interpreters()]
    if levels.count(TransformType.Jvp) > 1:
        raise NotImplementedError(
            "ring attention has no forward mode over forward mode; take torch.func.jvp of "
            "torch.func.grad, or the reverse"
        )
    primals = [None if t is None else forward_ad.unpack_dual(t).primal for t in inputs]
    with torch.no_grad():
        zeros = [None if t is None else torch.zeros_like(t) for t in function(*primals)]
    return pulled_back(lambda *along: pulled_back(function, primals, along), zeros, tangents)


def _mask(
    plan: RingPlan, heads: int, key_heads: int, caller: Caller
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return which scores are hidden, their bias, and dropout's factor of probabilities.

    Each is `[b, g, r, n, N]`, with g key heads of r query heads; None if there is none.
    """
    with torch._C._DisableFuncTorch():  # within a transform new tensors would be wrapped
        terms, device = plan.terms, plan.device
        batch, lengths = plan.signature[0], [count(segments) for segments in plan.blocks.keys]
        rows = count(plan.blocks.queries[plan.place])
        shape = batch, key_heads, heads // key_heads, rows, sum(lengths)
        hidden = torch.ones(shape, dtype=torch.bool, device=device)
        wide = accumulation_dtype(getattr(torch, plan.signature[7].removeprefix("torch.")))
        bias = None if terms.alibi is None else torch.zeros(shape, dtype=wide, device=device)
        factor = None if terms.dropout is None else torch.zeros(shape, dtype=wide, device=device)
        seen = None
        if plan.key_mask is not None:
            seen = torch.zeros(sum(lengths), batch, dtype=torch.uint8, device=device)
            seen.split(lengths)[plan.place].copy_(plan.key_mask.T)
            fill_in(seen, lengths, caller)
        start = 0
        for owner, segments in enumerate(plan.blocks.keys):
            cols = slice(start, start + lengths[owner])
            like = torch.empty((), dtype=wide, device=device)
            like = like.expand(batch, lengths[owner], key_heads, 1)
            block = KVBlock(like, like, None if seen is None else seen[cols].T.bool(), segments)
            for samples, tiles in plan.tiles(segments):
                parts = visible_parts(block.samples(samples), tiles, terms, heads)
                for at, where, *given in parts:
                    where = slice(start + where.start, start + where.stop)
                    for total, part in zip((hidden, bias, factor), given):
                        if total is not None and part is not None:
                            total[samples, :, :, at, where] = part
            start = cols.stop
        return hidden, bias, factor
