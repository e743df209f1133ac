"""Faults planted into `schedule/`: a list for each battery."""

from tests.faults.mutant import Mutant

STEPS = "schedule/steps.py:"

ATTENTION = [
    Mutant(
        "dq hides no gradients", "schedule/policy.py:reduce_by_copy_engine",
        "if machine.keys_first:", "if False:",
    ),
    Mutant(
        "all of a call hides its gradients", "schedule/policy.py:reduce_by_copy_engine",
        "machine.deferred_share * visible_pairs(others)", "1e9 * visible_pairs(others)",
    ),
    Mutant(
        "gradients are predicted to wait for dq", "schedule/hardware.py:Hardware.deferred_share",
        "_OF_QUERIES if self.keys_first else", "",
    ),
    Mutant(
        "dq is predicted to be left though something is waited for", "schedule/cost.py:walked",
        "0.0 if wait else", "",
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
        "what documents need is kept when they are gone", "schedule/pieces.py:cached",
        "if workload.visible.cacheable and not workload.apart:", "if True:",
    ),
    Mutant(
        "gradients wait for copy engines though nothing goes on",
        "schedule/policy.py:reduce_by_copy_engine", "(2 * brought + coming / 2)", "(coming / 2)",
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
        "positions from the owner's first key on", "schedule/pieces.py:needed",
        "Segment(position + (first - start) * stride,", "Segment(position,",
    ),
    Mutant(
        "pieces with a gap joined", "schedule/pieces.py:joined",
        "start == end", "start >= end",
    ),
    Mutant(
        "few tokens have as many calls as others", "schedule/policy.py:is_few",
        "_seconds(workload, shape, machine) <= machine.host", "False",
    ),
    Mutant(
        "few are counted whatever their keys weigh", "schedule/policy.py:is_few",
        "return copied and", "return",
    ),
    Mutant(
        "few are counted without their mask", "schedule/policy.py:_seconds",
        "/ (1 + mask.causal)", "/ 1",
    ),
    Mutant(
        "few are counted without their window", "schedule/policy.py:_seconds",
        "keys_seen = min(keys_seen, (2 - mask.causal) * mask.window + 1)", "pass",
    ),
    Mutant(
        "few are counted without their documents", "schedule/policy.py:_seconds",
        "if mask.documents is not None: whole", "if False: whole",
    ),
    Mutant(
        "everybody's gradients added by every owner", "schedule/pieces.py:places",
        "if chunk.owner == owner:", "if True:",
    ),
]  # fmt: skip

SCHEDULES = [
    Mutant("a hop is left out", STEPS + "ring", "pairwise(distances)", "pairwise(distances[:-1])"),
    Mutant(
        "keys come from the other neighbour", STEPS + "Program.copies",
        "peers = [(rank - distance) % size", "peers = [(rank + distance) % size",
    ),
    Mutant(
        "keys are handed on before they came", STEPS + "ring",
        "wait = (number - 1,) if number else ()", "wait = ()",
    ),
    Mutant(
        "own keys are handed on at each hop", STEPS + "ring",
        "Transfer(KEYS, number, number + 1,", "Transfer(KEYS, 0, number + 1,",
    ),
    Mutant(
        "gradients are sent on before others' came", STEPS + "ring",
        "before = (last + number - 2,) if number > 1 else ()", "before = ()",
    ),
    Mutant(
        "gradients stay with the last rank", STEPS + "ring",
        "[*distances[1:], len(workload.keys)]", "distances[1:]",
    ),
    Mutant(
        "gradients that come home are not waited for", STEPS + "ring",
        "backward.append(Step((2 * last - 1,)))", "pass",
    ),
    Mutant(
        "gradients are added to the next owner's", STEPS + "ring",
        "into = number + 1 if", "into = number if",
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
        "back += [step, Step(going, (len(transfers) - 1,))]",
        "back += [Step(going, (len(transfers) - 1,)), step]",
    ),
    Mutant(
        "the last gradients are not waited for", STEPS + "gather",
        "back.append(Step(going))", "pass",
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
