"""Faults planted into `schedule/`: a list for each battery."""

from tests.faults.mutant import Mutant

STEPS = "schedule/steps.py:"

ATTENTION = [
    Mutant(
        "a relay does not use what it holds", "schedule/held_keys.py:distances_inside",
        "range(ranks)", "range(1, ranks)",
    ),
    Mutant(
        "a chunk is where its message has it, not its slot", "schedule/held_keys.py:Held.of",
        "at.start + leg.find(span).start", "leg.find(span).start",
    ),
    Mutant(
        "all of a call hides its gradients", "schedule/policy.py:reduce_by_copy_engine",
        "machine.deferred_share * visible_pairs(others)", "1e9 * visible_pairs(others)",
    ),
    Mutant(
        "what only a later sample needs is not sent", "schedule/pieces.py:Workload.distances",
        "self.apart or (self.visible,)", "self.apart[:1] or (self.visible,)",
    ),
    Mutant(
        "a call of the kernel is not counted", "schedule/steps.py:Schedule.positions",
        "for part in program.parts:", "for part in program.parts[:-1] or program.parts:",
    ),
    Mutant(
        "gradients wait for copy engines though nothing goes on",
        "schedule/policy.py:reduce_by_copy_engine", "(2 * fetched + returning / 2)",
        "(returning / 2)",
    ),
    Mutant(
        "the second stage brings what the first did", "schedule/pieces.py:in_two_stages",
        "one_by_one[half:]", "one_by_one[:half]",
    ),
    Mutant(
        "keys come in stages where they are in time", "schedule/policy.py:keys_arrive_late",
        "own < machine.forward_flops_per_byte", "own > machine.forward_flops_per_byte",
    ),
    Mutant(
        "keys come in stages where some have none of their own",
        "schedule/policy.py:keys_arrive_late", "own == 0", "own < 0",
    ),
    Mutant(
        "pieces in no order", "schedule/pieces.py:needed",
        "key=lambda chunk: (chunk.segment.start, chunk.owner)", "key=lambda chunk: 0",
    ),
    Mutant(
        "pieces with a gap joined", "schedule/pieces.py:joined",
        "start == end", "start >= end",
    ),
]  # fmt: skip

SCHEDULES = [
    Mutant("a hop is left out", STEPS + "ring", "pairwise(distances)", "pairwise(distances[:-1])"),
    Mutant(
        "own keys are handed on at each hop", STEPS + "ring",
        "Transfer(KEYS, number, number + 1,", "Transfer(KEYS, 0, number + 1,",
    ),
    Mutant(
        "gradients stay with the last rank", STEPS + "ring",
        "[*distances[1:], len(workload.keys)]", "distances[1:]",
    ),
    Mutant(
        "the second stage is not waited for", STEPS + "_gathered",
        "enumerate(waits)", "enumerate(waits[:1] * len(waits))",
    ),
    Mutant(
        "a round is never started", STEPS + "_gathered", "following = [*starts, ()]",
        "following = [*starts[:1], *[() for _ in starts]]",
    ),
    Mutant(
        "gradients go to owners in front", STEPS + "_from_users",
        "-distance % len(workload.keys)", "distance",
    ),
    Mutant(
        "gradients go home before they are computed", STEPS + "gather",
        "backward += [step, Step(in_flight, start)]",
        "backward += [Step(in_flight, start), step]",
    ),
    Mutant(
        "own keys' gradients stay", STEPS + "gather_first",
        "home = Transfer(GRADS, 1, 0, _from_users(workload, workload.distances))",
        "home = Transfer(GRADS, 1, 0, _from_users(workload, workload.distances[1:]))",
    ),
    Mutant(
        "keys go where they lie at their owner", STEPS + "Program.copies",
        "copies.append(Copy(peer, chunk.first, at.start, chunk.segment.length))",
        "copies.append(Copy(peer, chunk.first, chunk.first, chunk.segment.length))",
    ),
    Mutant(
        "the first stage is as long as both", STEPS + "Program.spans", "start = stop", "pass",
    ),
]  # fmt: skip
