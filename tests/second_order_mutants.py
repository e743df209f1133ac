"""Faults planted into second derivatives and tangents, and a battery that must find each."""

from collections.abc import Callable, Iterable

from tests import hunt
from tests.faults import Mutant

MUTANTS = [
    Mutant(
        "probabilities move as if lse stood still", "kernels/eager_jvp.py:backward",
        "part.p * (part.ts - tlse)", "part.p * part.ts",
    ),
    Mutant(
        "the softclamp's slope stands still", "kernels/eager_jvp.py:backward",
        "tds * part.slope + ds * part.tslope", "tds * part.slope",
    ),
    Mutant(
        "keys stand still in the tangent of dq", "kernels/eager_jvp.py:backward",
        "_to_rows(tdqk, part.k) + _to_rows(dqk, part.tk)", "_to_rows(tdqk, part.k)",
    ),
    Mutant(
        "dout stands still in dv", "kernels/eager_jvp.py:backward",
        "_to_cols(tp, dout) + _to_cols(p, tdout)", "_to_cols(tp, dout)",
    ),
    Mutant(
        "values stand still", "kernels/eager_jvp.py:forward",
        "einsum(part.less(part.p), part.tv,", "0 * einsum(part.less(part.p), part.tv,",
    ),
    Mutant(
        "delta moves with dout only", "runtime/interfaces.py:tangent_of_delta",
        "+ sum_of_products(saved.dout, along.out)", "",
    ),
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
        "Ulysses keeps its gradients' gradients", "comm/ulysses.py:_ToHeads.backward",
        "*_ToSequence.apply(ctx.ulysses, ctx.spreads, *grads)",
        "*ctx.ulysses.unspread([g.detach() for g in grads], ctx.spreads)",
    ),
    Mutant(
        "tangents of other ranks' keys stay at home", "second_order.py:RingTangents.forward",
        "_beside((k, v), (tk, tv))", "_beside((k, v), (tk.zero_(), tv))",
    ),
    Mutant(
        "gathering keeps its gradients' gradients", "nn/sharding.py:_Gather.backward",
        "list(_AllToAll.apply(ctx.ring, [ctx.shape] * len(others), *others))",
        "_swap(ctx.ring, [ctx.shape] * len(others), others)",
    ),
    Mutant(
        "ranks may differ in tangents", "runtime/torch_func.py:tangents_note", "any(forward_ad",
        "all(forward_ad",
    ),
    Mutant(
        "any kernel's tangents are taken for eager's", "second_order.py:RingTangents.forward",
        'if {*plan.kernel.name.split("+")} != {"eager"}:', "if False:",
    ),
]  # fmt: skip


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong."""
    import torch

    from tests import test_second_order as cases
    from tests import threads

    torch.set_num_threads(1)
    threads.PATIENCE = 10.0
    yield bent_scores_hold
    yield heads_for_sequence_hold
    yield lambda: cases.test_ranks_that_differ_in_tangents_all_say_so(by_module=False)
    yield cases.test_a_penalty_on_what_whole_sequences_are_made_into
    yield cases.test_other_kernels_say_which_one_has_second_derivatives


def bent_scores_hold() -> None:
    """Tangents, and gradients of gradients, of what bends scores and of what moves lse."""
    from tests.features import together
    from tests.second_order import Second

    bent = Second(together(("causal", "softclamp", "sinks", "d_v != d")))
    errors = bent.errors(2, "zigzag")
    assert max(errors.values()) < 1e-12, errors


def heads_for_sequence_hold() -> None:
    from tests.features import FEATURES
    from tests.second_order import Second

    errors = Second(FEATURES["one key head"]).errors(2, "striped", ulysses=2)
    assert max(errors.values()) < 1e-12, errors


if __name__ == "__main__":
    hunt.main("tests.second_order_mutants")
