"""Faults planted into `plan/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "few tokens' kernel has nothing to leave", "plan/prepare.py:settle_transport",
        "few.square, few.keys_first", "few.square, False",
    ),
    Mutant(
        "all samples have the first one's documents", "plan/masks.py:by_sample",
        "visible._replace(documents=documents)", "visible._replace(documents=packing[0])",
    ),
    Mutant(
        "samples that see alike are only the first", "plan/masks.py:by_sample",
        "stop = start + len(list(alike))", "stop = start + 1",
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
        "overlapping.schedule.own_low_priority or small",
        "(together or overlapping).schedule.own_low_priority or small",
    ),
    Mutant(
        "ALiBi by the places held", "plan/ring_plan.py:RingPlan._of_block",
        "positions_seen(side, mask)",
        "torch.arange(sum(s.length for s in side))",
    ),
    Mutant(
        "dropout by the places held", "plan/ring_plan.py:RingPlan._of_block",
        "segment_positions(side).to(",
        "torch.arange(sum(s.length for s in side)).to(",
    ),
    Mutant(
        "each rank drops by its own seed", "plan/ring_plan.py:RingPlan._agreed",
        'lengths[0]["seed"]',
        'lengths[ring.rank]["seed"]',
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
    Mutant(
        "any plan will do", "plan/checks.py:check_tensors",
        "!= wanted.signature:", "is None:",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "plans go by the fastest device of several", "plan/prepare.py:_machine_of",
        'min(rank["device"]', 'max(rank["device"]',
    ),
    Mutant(
        "whoever shares a ring shares a host", "plan/prepare.py:_machine_of",
        "for rank in ranks), domain)", "for rank in ranks))",
    ),
    Mutant(
        "a device that nobody knows is as fast as any", "schedule/hardware.py:number_of",
        "else 0", "else -1",
    ),
    Mutant(
        "a plan of one rank is asked to measure in vain", "plan/options.py:_check_calibrate",
        "not call.q.is_cuda or call.ring_size == 1", "not call.q.is_cuda and call.ring_size > 1",
    ),
    Mutant(
        "sums go by what was measured under deterministic algorithms",
        "plan/options.py:_check_calibrate",
        "if torch.are_deterministic_algorithms_enabled():", "if False:",
    ),
    Mutant(
        "messages of any layer", "plan/ring_plan.py:RingPlan.call",
        'f"ring attention{of_layer}, {direction}"', 'f"ring attention, {direction}"',
    ),
    Mutant(
        "swaps of any layer", "plan/ring_plan.py:RingPlan._of_layer",
        "None if swap is None else replace(swap, of_layer=of_layer)", "swap",
    ),
    Mutant(
        "sinks beside any plan", "plan/checks.py:check_tensors",
        "wanted.sinks != (sinks is not None)", "False",
    ),
    Mutant(
        "predicates of one name are one", "runtime/digests.py:digest_of_function",
        "told = repr(_described(function, frozenset(), {}))", "told = ''",
    ),
    Mutant(
        "what a predicate closes over is not told", "runtime/digests.py:_of_function",
        "cells.append(_described(cell.cell_contents, names, seen))", "pass",
    ),
    Mutant(
        "constants of a predicate are not told", "runtime/digests.py:_described",
        "return thing.co_code, constants, thing.co_names", "return thing.co_code, thing.co_names",
    ),
    Mutant(
        "defaults of a predicate are not told", "runtime/digests.py:_of_function",
        "defaults = function.__defaults__, function.__kwdefaults__", "defaults = ()",
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
    Mutant(
        "a table is the one it was", "runtime/digests.py:_of_tensor",
        "known[0] != t._version", "False",
    ),
    Mutant(
        "cells of another owner's mask", "plan/ring_plan.py:RingPlan.tiles",
        "if self.seen.repeats or keys not in own:", "if keys not in own:",
    ),
    Mutant(
        "queries of two sequences in the order of ranks", "plan/prepare.py:place_tokens",
        "dropped or options.alibi_slopes is not None or options.mask_mod is not None", "dropped",
    ),
    Mutant(
        "a rank without work divides by it", "plan/explain.py:_prediction", "if found.gpu:",
        "if True:",
    ),
]  # fmt: skip

KEPT = [
    Mutant(
        "a plan that is warmed up still records", "warm_up.py:warm_up",
        "range(_CALLS)", "range(2)",
    ),
    Mutant(
        "what is compiled ahead is a plan's first call", "warm_up.py:_dry_run",
        "_call(replace(plan), ", "_call(plan, ",
    ),
    Mutant(
        "all ranks compile the same", "warm_up.py:_compile",
        "machines.index(machines[plan.ring.rank]) == plan.ring.rank", "True",
    ),
    Mutant(
        "one rank compiles for all hosts", "warm_up.py:_compile",
        "machines.index(machines[plan.ring.rank]) == plan.ring.rank", "plan.ring.rank == 0",
    ),
    Mutant(
        "kernels are compiled one after another", "runtime/launches.py:compile_together",
        'hasattr(triton, "AsyncCompileMode")', "False",
    ),
    Mutant(
        "a failed compilation goes on in its thread", "runtime/launches.py:compile_together",
        "contextvars.Context().run(_compile, calls, mode)", "_compile(calls, mode)",
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
        "options of other types are found again", "plan/plan_cache.py:cache_key",
        "tuple(options), values, types, tuple", "tuple(options), values, tuple",
    ),
    Mutant(
        "seeds that are drawn are found again", "plan/plan_cache.py:cache_key",
        'options.get("dropout") or options.get("mask_mod") is not None', "False",
    ),
    Mutant(
        "options that are tensors are found again by their identity",
        "plan/plan_cache.py:_has_tensors",
        "any(issubclass(each, Tensor) for each in types)", "False",
    ),
    Mutant(
        "plans are found again whatever the settings", "plan/plan_cache.py:settings",
        "torch.is_grad_enabled(),", "",
    ),
    Mutant(
        "all layers of a plan are remembered", "plan/ring_plan.py:RingPlan.for_layer",
        "of_layer, _LAYERS)", "of_layer)",
    ),
    Mutant(
        "a layer's plan is made in each call", "plan/ring_plan.py:RingPlan.for_layer",
        "self._own.layers.of(number, of_layer, _LAYERS)", "of_layer()",
    ),
]  # fmt: skip
