"""Faults planted into files beside `attention.py`: a list for each battery that finds them."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "sinks of other heads", "attention.py:attention", "sinks[swap.heads]",
        "sinks[: q.shape[2]]",
    ),
    Mutant(
        "gradients divided by the ring", "attention.py:backward", "*(total.finalize() for",
        "*(total.finalize() / plan.ring.size for",
    ),
    Mutant(
        "gradients are zero", "attention.py:backward", "*(total.finalize() for",
        "*(total.finalize() * 0 for",
    ),
    Mutant(
        "dk and dv swapped", "attention.py:backward", "for total in own)",
        "for total in (own[0], own[2], own[1]))",
    ),
    Mutant(
        "the negative bit is of no matter", "runtime/torch_func.py:resolved",
        "return found.resolve_neg()", "return found",
    ),
    Mutant(
        "nobody waits for a collective", "runtime/torch_func.py:resolved",
        "found = found.trigger_wait()", "found = found.elem",
    ),
    Mutant(
        "a collective's result has no gradient", "runtime/torch_func.py:resolved",
        "return found.clone()", "pass",
    ),
    Mutant(
        "cotangents are read from memory", "attention.py:RingAttentionFunction.backward",
        "is None else resolved(dout), resolved(dlse)", "is None else dout, dlse",
    ),
    Mutant(
        "what is decoded is read from memory", "decoding.py:tree_attn_decode",
        "resolved(q), resolved(k), resolved(v), resolved(key_mask)", "q, k, v, key_mask",
    ),
    Mutant(
        "kernels read keys that are masked", "plan/ring_plan.py:RingPlan.keys",
        "keys.without_unseen(self.seen.reached)", "keys",
    ),
    Mutant(
        "decoding reads keys that are masked", "decoding.py:_by_message", ".without_unseen()", "",
    ),
    Mutant(
        "gates look at scores that are masked", "routing/soft_topk.py:_apply",
        "gates(shown, a, solution.eps)", "gates(scores.double(), a, solution.eps)",
    ),
    Mutant(
        "regular attention reads keys that are masked", "nn/reference.py:_attend",
        "k, v = (t.masked_fill(", "_ = (t.masked_fill(",
    ),
]  # fmt: skip

SECOND_ORDER = [
    Mutant(
        "hidden keys have tangents", "second_order.py:gathered_attention",
        "scores.masked_fill(hidden, -torch.inf)", "scores",
    ),
    Mutant(
        "scores are not clamped", "second_order.py:gathered_attention",
        ".tanh() * terms.softclamp", " * terms.softclamp",
    ),
    Mutant(
        "sinks count for nothing", "second_order.py:gathered_attention",
        "if sinks is not None:", "if False:",
    ),
    Mutant(
        "tangents of gradients lack the cotangents'", "attention.py:RingGradients.jvp",
        "(*along[:-4], *along[-2:])", "(*along[:-4], None, None)",
    ),
]  # fmt: skip

COMPILED = [
    Mutant(
        "an operator takes other heads' sinks", "operators.py:_swapped", "sinks[swap.heads]",
        "sinks.flip(0)[swap.heads]",
    ),
    Mutant(
        "results lie as they come", "operators.py:_forward",
        "return out.contiguous(), lse.contiguous()", "return out, lse",
    ),
    Mutant(
        "a graph forgets the cotangent of lse", "operators.py:_run_backward",
        "lse, dout, dlse, back_of", "lse, dout, None, back_of",
    ),
    Mutant(
        "the cotangent of lse stays where it is", "operators.py:_swapped",
        "swap.rows_to_heads(dout, dlse, back_of)", "swap.rows_to_heads(dout, None, back_of)",
    ),
    Mutant(
        "sinks of others' heads have a gradient", "operators.py:_swapped",
        "torch.zeros_like(sinks)", "torch.ones_like(sinks)",
    ),
    Mutant(
        "gradients come home to other tokens", "operators.py:_swapped",
        "swap.exchange(QKV_TO_SEQUENCE, *grads, back_of=back_of)",
        "[t.flip(1) for t in swap.exchange(QKV_TO_SEQUENCE, *grads, back_of=back_of)]",
    ),
    Mutant(
        "positions alike have no samples", "operators.py:_positions",
        "found.expand(x.shape[0], -1)", "found",
    ),
    Mutant(
        "a graph takes lse to be as narrow as q", "operators.py:_fake_forward",
        "accumulation_dtype(q.dtype)", "q.dtype",
    ),
    Mutant(
        "a graph takes out to be as wide as q", "operators.py:_fake_forward", "v.shape[3]",
        "q.shape[3]",
    ),
    Mutant(
        "a graph takes sinks to have no gradient", "operators.py:_fake_backward",
        "sinks.new_empty(sinks.shape)", "sinks.new_empty(0)",
    ),
    Mutant(
        "out has a cotangent where lse alone has one", "operators.py:_differentiate",
        "torch.zeros_like(out) if dout is None", "torch.ones_like(out) if dout is None",
    ),
    Mutant(
        "backward's messages go into CUDA graphs", "operators.py:_define",
        'overload or "default"), ctx, dout, dlse)',
        'overload and "default" or "default"), ctx, dout, dlse)',
    ),
]  # fmt: skip
