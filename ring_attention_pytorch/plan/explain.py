"""A description of what a plan would do, in words and figures, before it does anything."""

from beartype import beartype

from ring_attention_pytorch.comm.gather_first import GatherFirst
from ring_attention_pytorch.comm.gather_symmetric import SymmetricGather
from ring_attention_pytorch.geometry.layouts import count
from ring_attention_pytorch.geometry.tiles import tiles, visible_pairs
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.schedule.cost import (
    Cost,
    gather_steps,
    predict,
    ring_steps,
    swap_seconds,
)
from ring_attention_pytorch.schedule.pieces import joined, tokens


@beartype
def explain_plan(plan: RingPlan) -> str:
    """Describe who receives what and when, its bytes and pairs, and the predicted time.

    Args:
        plan: from `RingPlan.make`. Nothing is sent; any rank may ask, for itself.

    Returns:
        Some lines of text. Times are of a model (docs/scaling.md), by speeds that were measured
        here where the plan chose the transport on GPUs, and else by those of H200s.

    >>> import torch
    >>> q = torch.randn(1, 6, 2, 4)
    >>> print(explain_plan(RingPlan.make(q, q, q, causal=True, kernel="eager")))
    rank 0 of 1: 6 of 6 tokens, contiguous, causal, kernel eager
    own keys: 6, 21 pairs in 1 tile
    """
    head = _head(plan)
    if plan.ring.size == 1:
        return "\n".join(head)
    cost, swap = predicted(plan)
    steps = _of_gather(plan) if plan.transport_name == "gather" else _of_ring(plan)
    seconds = cost.forward + cost.backward + swap
    share = f"; {100 * cost.ideal / seconds:.0f} % of the kernel alone" if seconds else ""
    where = "by speeds measured here" if plan.machine.measured else "on H200s"
    tail = [
        f"received: {_bytes(cost.received)} forward and backward; others' keys and gradients take "
        f"at most {_bytes(_held(plan))} here",
        f"predicted {where}: forward {1e3 * cost.forward:.3g} ms, backward "
        f"{1e3 * cost.backward:.3g} ms" + (f", heads swapped {1e3 * swap:.3g} ms" if swap else "")
        + share,
    ]  # fmt: skip
    return "\n".join([*head, *steps, *tail])


def predicted(plan: RingPlan) -> tuple[Cost, float]:
    """Predict the cost of this rank's part in the transport, and seconds of the all-to-all."""
    degree, place, machine = plan.degree, plan.place, plan.machine
    domain = max(1, machine.domain // degree)
    if plan.transport_name == "ring":
        steps = ring_steps(plan.blocks, place, domain)
    else:
        steps = gather_steps(plan.blocks, place, domain, plan.at_once)
    own = count(plan.query_segments[plan.ring.rank])
    whole = plan.job._replace(heads=plan.job.heads * degree, key_heads=plan.job.key_heads * degree)
    cost = predict(plan.transport_name, steps, plan.job, machine._replace(domain=domain))
    return cost, swap_seconds(own, whole, degree, machine)


def _head(plan: RingPlan) -> list[str]:
    ring, blocks, place = plan.ring, plan.blocks, plan.place
    mask = " ".join(
        (["causal"] if plan.visible.causal else [])
        + ([f"window {plan.visible.window}"] if plan.visible.window is not None else [])
        + (["in documents"] if plan.packing else [])
        + ([f"dropout {plan.terms.dropout.rate}"] if plan.terms.dropout else [])
        + (["(samples differ: pairs at most)"] if blocks.apart else [])
    )
    length = sum(map(count, plan.query_segments))
    found = tiles(blocks.queries[place], blocks.keys[place], blocks.visible)
    lines = [
        f"rank {ring.rank} of {ring.size}: {count(plan.query_segments[ring.rank])} of {length} "
        f"tokens, {plan.layout}, {mask or 'no mask'}, kernel {plan.kernel.name}"
        + (", in CUDA graphs" if plan.graphs is not None else "")
    ]
    if plan.degree > 1:
        heads = _plural(plan.job.heads, "query head")
        key_heads = _plural(plan.job.key_heads, "key head")
        lines.append(
            f"swaps heads for sequence with {_plural(plan.degree - 1, 'neighbour')}: {heads} and "
            f"{key_heads} of {count(blocks.queries[place])} tokens"
            + (", out of shared memory" if plan.ulysses.shared is not None else "")
        )
    lines.append(
        f"own keys: {count(blocks.keys[place])}, {visible_pairs(found)} pairs in "
        f"{_plural(len(found), 'tile')}"
    )
    return lines


def _of_ring(plan: RingPlan) -> list[str]:
    blocks, place, size = plan.blocks, plan.place, len(plan.blocks.keys)
    lines = ["ring: one neighbour at a time"]
    for distance in blocks.distances[1:]:
        owner = (place - distance) % size
        found = tiles(blocks.queries[place], blocks.keys[owner], blocks.visible)
        weight = _bytes(count(blocks.keys[owner]) * plan.job.token_bytes)
        lines.append(
            f"hop {distance}: keys of place {owner}, {weight}, while the one before computes; "
            f"{visible_pairs(found)} pairs in {_plural(len(found), 'tile')}"
        )
    return lines


def _of_gather(plan: RingPlan) -> list[str]:
    place = plan.place
    if isinstance(plan.transport, GatherFirst):
        return [_of_all_together(plan, plan.transport)]
    pulled = isinstance(plan.transport, SymmetricGather)
    lines = [f"gather: {'pulled out of shared memory' if pulled else 'sent point to point'}"]
    home = "go home"
    if pulled:
        home += " by copy engine" if plan.transport.aside else ", added where they lie"
        home += ", while own keys are computed on" if plan.transport.overtaken else ""
    for number, group in enumerate(plan.transport.groups, 1):
        if not (mine := group.pieces[place]):
            lines.append(f"group {number}: nothing")
            continue
        owners = sorted({piece.owner for piece in mine})
        found = tiles(plan.blocks.queries[place], joined(mine), plan.blocks.visible)
        weight = _bytes(tokens(mine) * plan.job.token_bytes)
        lines.append(
            f"group {number}: {tokens(mine)} keys of places {owners}, {weight}, while the last "
            f"computes{', forward in two stages' if len(group.stages) > 1 else ''}; "
            f"{visible_pairs(found)} pairs in {_plural(len(found), 'tile')}, then their gradients "
            f"{home}"
        )
    return lines


def _of_all_together(plan: RingPlan, transport: GatherFirst) -> str:
    pieces = transport.groups[0].pieces[plan.place]
    found = tiles(plan.blocks.queries[plan.place], joined(pieces), plan.blocks.visible)
    return (
        f"gather: all {tokens(pieces)} keys out of shared memory before any call; "
        f"{visible_pairs(found)} pairs in {_plural(len(found), 'tile')}, then gradients are added "
        "where they lie"
    )


def _held(plan: RingPlan) -> int:
    """Return the most bytes of others' keys and gradients that are here at once."""
    job, longest = plan.job, max(map(count, plan.blocks.keys))
    if plan.transport_name == "ring":
        return longest * (2 * job.token_bytes + 3 * job.wide_bytes)
    return longest * (
        4 * job.token_bytes
        + plan.at_once * (3 * job.token_bytes + 2 * job.grad_bytes + 2 * job.wide_bytes)
    )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _bytes(number: float) -> str:
    """Write bytes in three figures.

    >>> _bytes(512), _bytes(33_554_432)
    ('512 B', '33.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError
