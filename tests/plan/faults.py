"""Faults planted into `plan/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "few tokens' kernel has nothing to leave", "plan/prepare.py:settle_transport",
        "traits.square, traits.keys_first", "traits.square, False",
    ),
    Mutant(
        "all samples have the first one's documents", "plan/masks.py:by_sample",
        "visible._replace(documents=documents)", "visible._replace(documents=packing[0])",
    ),
    Mutant(
        "samples that see alike are only the first", "plan/masks.py:by_sample",
        "stop = start + len(list(samples))", "stop = start + 1",
    ),
    Mutant(
        "ids taken for another rank's", "plan/packing.py:gather_ids", "in zip(segments, notes):",
        "in zip(reversed(segments), notes):",
    ),
    Mutant(
        "positions of keys taken for queries'", "plan/masks.py:gather_positions",
        "for runs_of_ranks in zip(*notes)", "for runs_of_ranks in [[*zip(*notes)][0]] * len(own)",
    ),
    Mutant(
        "another transport's calls are counted as this one's", "plan/ring_plan.py:RingPlan.by",
        "Worked()", "Worked(calls=self._shared.calls)",
    ),
    Mutant(
        "calls overlap as another transport's", "plan/ring_plan.py:RingPlan.by",
        "Worked()", "Worked(tiles=self._shared.tiles)",
    ),
    Mutant(
        "few tokens' graphs have calls that wait for one another",
        "plan/prepare.py:settle_transport",
        "overlapping.schedule.own_low_priority or is_small",
        "(one_stream or overlapping).schedule.own_low_priority or is_small",
    ),
    Mutant(
        "dropout by the places held", "plan/ring_plan.py:RingPlan._tiles",
        "segment_positions(queries).to(",
        "torch.arange(sum(s.length for s in queries)).to(",
    ),
    Mutant(
        "keys of another sequence start anew on each rank", "plan/checks.py:one_after_another",
        "(Segment(start, 1, n),)", "(Segment(0, 1, n),)",
    ),
    Mutant(
        "a predicate's error is kept to itself", "plan/masks.py:check_mask_mod",
        "except Exception as",
        "except OSError as",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "whoever shares a ring shares a host", "plan/prepare.py:_machine_of",
        "share_one_host(machines)", "len(machines)",
    ),
    Mutant(
        "a device that nobody knows is as fast as any", "schedule/hardware.py:number_of",
        "else 0", "else -1",
    ),
    Mutant(
        "messages of any layer", "plan/ring_plan.py:RingPlan.run",
        'f"ring attention{of_layer}, {direction}"', 'f"ring attention, {direction}"',
    ),
    Mutant(
        "swaps of any layer", "plan/ring_plan.py:RingPlan._of_layer",
        "self.ulysses and replace(self.ulysses, of_layer=name)", "self.ulysses",
    ),
    Mutant(
        "predicates of one name are one", "runtime/digests.py:digest_of_function",
        "told = repr(_described(function, frozenset(), {}))", "told = ''",
    ),
    Mutant(
        "methods that a predicate calls are not told", "runtime/digests.py:_methods",
        "names = frozenset().union(*(_names(each.__code__) for each in new.values()))",
        "names = frozenset()",
    ),
    Mutant(
        "all attributes of a predicate are told", "runtime/digests.py:_of_object",
        "if name in reads", "",
    ),
]  # fmt: skip

KEPT = [
    Mutant(
        "what is compiled ahead is a plan's first call", "warm_up.py:_dry_run",
        "replaced(plan, shared=shared)", "plan",
    ),
    Mutant(
        "kernels are compiled one after another", "runtime/launches.py:compile_together",
        'hasattr(triton, "AsyncCompileMode")', "False",
    ),
    Mutant(
        "backward fails where something can't be compiled ahead",
        "runtime/launches.py:compile_ahead",
        "except Exception:", "except ZeroDivisionError:",
    ),
    Mutant(
        "kernels by which ranks meet are held back", "runtime/launches.py:operation",
        "launch(call(", "(launch and _launch_or_hold)(call(",
    ),
    Mutant(
        "all tensors of a call are kept while it is compiled",
        "runtime/launches.py:_launch_or_hold",
        "id(call.kernel), *call.constants.items()", "id(call), ",
    ),
    Mutant(
        "plans are found again whatever the settings", "plan/plan_cache.py:settings",
        "torch.is_grad_enabled(),", "",
    ),
]  # fmt: skip
