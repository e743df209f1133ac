"""Faults planted into files beside `attention.py`: a list for each battery that finds them."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "sinks of other heads", "functional.py:_attention", "sinks[plan.ulysses.heads]",
        "sinks[: q.shape[2]]",
    ),
    Mutant(
        "gradients divided by the ring", "attention.py:backward", "return *(total.finalize() for",
        "return *(total.finalize() / plan.ring.size for",
    ),
    Mutant(
        "gradients are zero", "attention.py:backward", "return *(total.finalize() for",
        "return *(total.finalize() * 0 for",
    ),
    Mutant(
        "dk and dv swapped", "attention.py:backward", "for total in own), dsinks",
        "for total in (own[0], own[2], own[1])), dsinks",
    ),
]  # fmt: skip

SECOND_ORDER = [
    Mutant(
        "sinks stand still", "second_order.py:RingTangents.forward",
        "tlse += sink_weights(sinks, lse)", "tlse += 0 * sink_weights(sinks, lse)",
    ),
    Mutant(
        "a sink's weight stands still", "second_order.py:_of_sinks",
        "moved = tp * saved.delta + p *", "moved = p *",
    ),
    Mutant(
        "dlse has no gradient", "attention.py:RingGradients.backward",
        "None if saved[5] is None else tlse, None, None", "None, None, None",
    ),
    Mutant(
        "cotangents stand still in forward over reverse", "attention.py:RingGradients.jvp",
        "ctx.saved_tensors, along[:4], *along[4:6])[0]", "ctx.saved_tensors, along[:4])[0]",
    ),
    Mutant(
        "tangents of other ranks' keys stay at home", "second_order.py:RingTangents.forward",
        "_beside((k, v), (tk, tv))", "_beside((k, v), (tk.zero_(), tv))",
    ),
    Mutant(
        "any kernel's tangents are taken for eager's", "second_order.py:RingTangents.forward",
        'if {*plan.kernel.name.split("+")} != {"eager"}:', "if False:",
    ),
]  # fmt: skip
