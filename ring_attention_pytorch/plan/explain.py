"""A description of a plan, in words and figures, before it runs."""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from ring_attention_pytorch.arguments import checked
from ring_attention_pytorch.geometry.segments import Segments, count
from ring_attention_pytorch.geometry.tiles import tiles, visible_pairs
from ring_attention_pytorch.plan.over_machines import is_relayed, of_machines
from ring_attention_pytorch.plan.picture import picture as drawn
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.runtime.codec import groups_of_a_call
from ring_attention_pytorch.schedule.cost import (
    Cost,
    host_seconds,
    predict,
    swap_launch_seconds,
    swap_seconds,
)
from ring_attention_pytorch.schedule.pieces import KVShape, joined, tokens

_UNEVEN = 1.05  # pairs of a rank over the mean, from which on it is said


@checked
def explain_plan(plan: RingPlan, *, picture: str | PathLike[str] | None = None) -> str:
    """Describe which rank receives which keys and when, bytes, pairs, and the predicted time.

    Args:
        plan: from `RingPlan.make`. Nothing is sent; any rank can call this alone.
        picture: the path for a drawing of this rank's step as SVG: compute and transfers over time,
            as predicted, and as measured if calls were inside `observe()`.

    Returns:
        Some lines of text. Times are predicted by a model (docs/scaling.md) from the device's
        constants.

    >>> import torch
    >>> q = torch.randn(1, 6, 2, 4)
    >>> print(explain_plan(RingPlan.make(q, q, q, causal=True, kernel="eager")))
    rank 0 of 1: 6 of 6 tokens, contiguous, causal, kernel eager
    own keys: 6, 21 pairs in 1 tile
    """
    if picture is not None:
        Path(picture).write_text(drawn(plan), encoding="utf-8")
    head = _head(plan)
    if plan.ring.size == 1:
        return "\n".join(head)
    prediction = predicted(plan)
    steps = _of_gather(plan) if plan.chosen.name == "gather" else _of_ring(plan)
    received = (
        f"received: {_bytes(prediction.cost.received)} forward and backward; others' keys and "
        f"gradients take at most {_bytes(_held(plan))} here"
    )
    across = of_machines(plan, _bytes)
    last = _prediction(plan, prediction), *_of_host(plan, prediction)
    return "\n".join([*head, *_of_uneven(plan), *steps, received, *across, *last])


class Prediction(NamedTuple):
    """The predicted time of a call, forward and backward, in seconds."""

    cost: Cost  # of this rank's part in the transport
    swaps: float  # of the all-to-all
    host: float  # to launch it all

    @property
    def gpu(self) -> float:
        """Seconds that the GPU takes."""
        return self.cost.forward + self.cost.backward + self.swaps


def predicted(plan: RingPlan) -> Prediction:
    """Predict the time of a call as the plan launches it: one by one, or by tapes."""
    degree, shape, machine = plan.degree, plan.chosen.shape, plan.chosen.machine
    all_heads = shape._replace(heads=shape.heads * degree, key_heads=shape.key_heads * degree)
    own = count(plan.query_segments[plan.ring.rank])
    host = host_seconds(plan.schedule, plan.tapes is not None, machine)
    if (swap := plan.ulysses) is not None:
        host += swap_launch_seconds(swap.by.taped, machine)
    relays = plan.transport.fabric.ring.machines if is_relayed(plan) else ()
    return Prediction(
        predict(plan.schedule, plan.place, shape, machine.every(degree), relays),
        swap_seconds(own, all_heads, degree, machine),
        host,
    )


def _of_host(plan: RingPlan, prediction: Prediction) -> list[str]:
    """Return a line if the host takes longer than the GPU."""
    if plan.device.type != "cuda" or prediction.host <= prediction.gpu:
        return []
    line = f"launched one by one it takes the host longer, about {1e3 * prediction.host:.2g} ms"
    return [f"{line}; a CUDA graph of your step spares that"] if plan.capturable else [line]


def _prediction(plan: RingPlan, prediction: Prediction) -> str:
    cost = prediction.cost
    forward, backward = f"{1e3 * cost.forward:.3g} ms", f"{1e3 * cost.backward:.3g} ms"
    line = f"predicted on {plan.chosen.machine.device}s: forward {forward}, backward {backward}"
    if prediction.swaps:
        line += f", heads swapped {1e3 * prediction.swaps:.3g} ms"
    if prediction.gpu:
        line += f"; {100 * cost.ideal / prediction.gpu:.0f} % of the kernel alone"
    return line


def _head(plan: RingPlan) -> list[str]:
    ring, blocks, place = plan.ring, plan.blocks, plan.place
    own = count(plan.query_segments[ring.rank])
    length = sum(map(count, plan.query_segments))
    line = (
        f"rank {ring.rank} of {ring.size}: {own} of {length} tokens, {plan.layout}, "
        f"{_mask(plan)}, kernel {plan.kernel.name}"
    )
    lines = [line]
    if by_kernel := plan.chosen.by_kernel:
        few, many = (f"{1e3 * taken:.3g} ms by {name}" for name, taken in by_kernel.items())
        lines.append(f"documents: predicted {few}, in few calls; {many}, a call for each")
    if plan.shared is not None:
        held = count(plan.shared.blocks.keys[0])
        lines.append(f"shared keys: {held} on every rank, kernel {plan.shared.kernel.name}")
    if plan.ulysses is not None and plan.degree > 1:
        neighbours = _plural(plan.degree - 1, "neighbour")
        heads = _plural(plan.chosen.shape.heads, "query head")
        key_heads = _plural(plan.chosen.shape.key_heads, "key head")
        tokens_here = count(blocks.queries[place])
        line = (
            f"swaps heads for sequence with {neighbours}: {heads} and {key_heads} of {tokens_here} "
            "tokens"
        )
        if plan.ulysses.by.name:
            line += f", out of {plan.ulysses.by.name}"
        lines.append(line)
    lines += _of_codec(plan)
    keys = blocks.keys[place]
    return [*lines, f"own keys: {count(keys)}, {_pairs(plan, keys)}"]


def _of_codec(plan: RingPlan) -> list[str]:
    """Describe a token's bytes on the wire, and the memory of decoded keys, if there are any."""
    codec, shape, program = plan.codec, plan.chosen.shape, plan.schedule.forward
    if codec is None:
        return []
    heads = shape.heads if codec.by_heads else shape.key_heads
    token = shape.batch * (shape.d + shape.d_v) * shape.itemsize
    longest = max(count(program.segments(part, plan.place)) for part in program.parts)
    groups = groups_of_a_call(codec, plan.terms, heads, longest * token)
    size = heads // groups
    return [
        f"keys travel as {codec}: {_bytes(shape.token_bytes)} a token instead of "
        f"{_bytes(heads * token)}; a block is decoded here for {_plural(size, 'head')} at once, "
        f"at most {_bytes(size * longest * token)}"
    ]


def _mask(plan: RingPlan) -> str:
    words = []
    if plan.visible.causal:
        words.append("causal")
    if plan.visible.window is not None:
        words.append(f"window {plan.visible.window}")
    if plan.packing:
        words.append("in documents")
    if plan.terms.dropout:
        words.append(f"dropout {plan.terms.dropout.rate}")
    if plan.blocks.apart:
        words.append("(samples differ: pairs at most)")
    return " ".join(words) or "no mask"


def _pairs(plan: RingPlan, keys: Segments) -> str:
    """Describe which of these keys this rank's queries see."""
    visible = tiles(plan.blocks.queries[plan.place], keys, plan.blocks.visible)
    return f"{visible_pairs(visible)} pairs in {_plural(len(visible), 'tile')}"


def _of_uneven(plan: RingPlan) -> list[str]:
    """Return a line if a rank has far more visible pairs than the mean: the others wait for it."""
    blocks = plan.blocks
    every = tuple(segment for keys in blocks.keys for segment in keys)
    pairs = [visible_pairs(tiles(queries, every, blocks.visible)) for queries in blocks.queries]
    most, mean = max(pairs), sum(pairs) / len(pairs)
    if blocks.apart or most <= _UNEVEN * mean:
        return []
    line = f"uneven: place {pairs.index(most)} has {most / mean:.2f} times the mean of pairs"
    if plan.packing and isinstance(plan.layout, str):
        line += "; a layout from balanced() deals documents evenly"
    elif plan.visible.causal and plan.layout == "contiguous":
        line += '; layout="zigzag" is even'
    return [line]


def _of_ring(plan: RingPlan) -> list[str]:
    lines, program, place = ["ring: one neighbour at a time"], plan.schedule.forward, plan.place
    for part in program.parts[1:]:
        (distance,) = program.blocks[part.block].distances
        owner = (place - distance) % len(plan.blocks.keys)
        keys = program.segments(part, place)
        weight = _bytes(count(keys) * plan.chosen.shape.token_bytes)
        lines.append(
            f"hop {distance}: keys of place {owner}, {weight}, while the one before computes; "
            f"{_pairs(plan, keys)}"
        )
    return lines


def _of_gather(plan: RingPlan) -> list[str]:
    program, place = plan.schedule.forward, plan.place
    if program.parts[0].block != 0:
        return [_of_all_together(plan)]
    shared = plan.transport.fabric.name
    way = "by way of a relay on each machine" if is_relayed(plan) else "sent point to point"
    lines = [f"gather: {f'pulled out of {shared}' if shared else way}"]
    for number, block in enumerate(program.blocks[1:], 1):
        chunks = program.chunks(number, place)
        if not chunks:
            lines.append(f"group {number}: nothing")
            continue
        owners = sorted({chunk.owner for chunk in chunks})
        weight = _bytes(tokens(chunks) * plan.chosen.shape.token_bytes)
        stages = ", forward in two stages" if len(block.stages) > 1 else ""
        lines.append(
            f"group {number}: {tokens(chunks)} keys of places {owners}, {weight}, while the last "
            f"computes{stages}; {_pairs(plan, joined(chunks))}, then their gradients {_home(plan)}"
        )
    return lines


def _home(plan: RingPlan) -> str:
    """Describe how gradients are sent home, and the compute that overlaps this."""
    words = f"go home{plan.transport.fabric.return_path}"
    if plan.schedule.own_low_priority:
        words += ", while own keys are computed on"
    else:
        words += _meanwhile(plan)
    return words


def _meanwhile(plan: RingPlan) -> str:
    """Describe the work that a kernel defers until gradients are sent, if all are sent at once."""
    leaves = plan.kernel.traits.keys_first and len(plan.schedule.backward.blocks) == 2
    return ", while those of queries are computed" if leaves else ""


def _of_all_together(plan: RingPlan) -> str:
    chunks = plan.schedule.forward.chunks(1, plan.place)
    return (
        f"gather: all {tokens(chunks)} keys in shared memory, before any call; "
        f"{_pairs(plan, joined(chunks))}, then gradients are added where they lie"
        f"{_meanwhile(plan)}"
    )


def _held(plan: RingPlan) -> int:
    """Return the peak bytes of peers' keys and gradients on this rank."""
    shape, program = plan.chosen.shape, plan.schedule.forward
    longest = max(map(count, plan.blocks.keys))
    if plan.chosen.name == "ring":
        return longest * (2 * shape.token_bytes + 3 * shape.wide_bytes)
    if program.parts[0].block != 0:  # all keys and their gradients, twice, then sums
        fetched = tokens(program.chunks(1, plan.place))
        return 2 * fetched * (shape.token_bytes + shape.grad_bytes) + longest * shape.wide_bytes
    return held_by_gather(longest, plan.chosen.at_once, shape)


def held_by_gather(longest: int, at_once: int, shape: KVShape) -> int:
    """Return the peak bytes of peers' keys and gradients, of so many owners at once."""
    of_owner = 3 * shape.token_bytes + 2 * shape.grad_bytes + 2 * shape.wide_bytes
    return longest * (4 * shape.token_bytes + at_once * of_owner)


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
