"""Faults planted into `runtime/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant("what is left is in no sum", "attention.py:backward", "deferred.do()", ""),
    Mutant(
        "a sum that is asked for again is twice as much",
        "runtime/accumulate.py:GradAccumulator.finalize", "self._wide = None", "pass",
    ),
    Mutant(
        "what is left of samples is done at once", "runtime/accumulate.py:GradAccumulator.samples",
        ", deferred=self.deferred)", ")",
    ),
    Mutant(
        "parts have times without what they left", "runtime/observe.py:_RecordedCall.computed",
        "if self._deferred: self._deferred.do()", "",
    ),
    Mutant(
        "a sum forgets what it runs in", "runtime/accumulate.py:GradAccumulator.finalize",
        "self._parts.insert(0, (self._whole, self._wide))", "pass",
    ),
    Mutant(
        "every call of a kernel rounds as the last",
        "runtime/accumulate.py:_Accumulator._update_memory",
        "self._end if self._calls == 1 else", "self._end if self._calls else",
    ),
    Mutant(
        "merge weights swapped", "runtime/rowwise.py:merge_", "torch.sigmoid(part_lse - lse)",
        "torch.sigmoid(lse - part_lse)",
    ),
    Mutant(
        "merge does not rescale", "runtime/rowwise.py:merge_",
        "merged.lerp_(part.to(wide), weight.transpose(1, 2).unsqueeze(-1))",
        "merged.add_(part * weight.transpose(1, 2).unsqueeze(-1))",
    ),
    Mutant(
        "merge of two -inf is NaN", "runtime/rowwise.py:merge_",
        ".masked_fill_(part_lse == -torch.inf, 0.0)",
        "",
    ),
    Mutant(
        "lse is that of the last block", "runtime/rowwise.py:merge_",
        "torch.logaddexp(lse, part_lse, out=lse)", "lse.copy_(part_lse)",
    ),
    Mutant(
        "running sums in half precision", "runtime/rowwise.py:accumulation_dtype",
        "torch.promote_types(dtype, torch.float32)",
        "dtype if dtype == torch.float64 else torch.bfloat16",
    ),
    Mutant(
        "running sums in the inputs' precision", "runtime/rowwise.py:accumulation_dtype",
        "torch.promote_types(dtype, torch.float32)", "dtype",
    ),
    Mutant(
        "sums do not wait for their parts", "runtime/accumulate.py:_Accumulator._update",
        "self._join() if self._wide is None:", "if self._wide is None:",
    ),
    Mutant(
        "a result does not wait for its parts", "runtime/accumulate.py:OutputAccumulator.finalize",
        "self._join()", "pass",
    ),
    Mutant(
        "a call waits for nothing", "runtime/streams.py:_SideStream.__enter__",
        "self.stream.wait_event(side.begins)", "",
    ),
    Mutant(
        "memory is used again that a call writes", "runtime/streams.py:_SideStream.__enter__",
        "t.record_stream(self.stream)", "pass",
    ),
    Mutant(
        "what is sent last is not waited for", "runtime/streams.py:_returning",
        "in range(len(_PRIORITIES))",
        "in range(len(_PRIORITIES) - 1)",
    ),
    Mutant(
        "what is sent does not wait for the last call",
        "runtime/streams.py:_SideStreamAfterOthers.__enter__",
        "for lane in _OTHERS:", "for lane in _OTHERS[:1]:",
    ),
    Mutant(
        "the others' calls do not go first", "runtime/streams.py:_PRIORITIES", "(0, -1, -1, -1)",
        "(0, 0, 0, -1)",
    ),
    Mutant(
        "dq waits for gradients that come home", "runtime/accumulate.py:GradAccumulator.add_all",
        "if self._crowded and not self._waits:", "if self._crowded:",
    ),
    Mutant(
        "what is moved to another sum is read at once",
        "runtime/accumulate.py:GradAccumulator.move_to",
        "whole._waits += self._waits", "",
    ),
    Mutant(
        "shelves stay that graphs of ours outgrew", "runtime/streams.py:captures_for_good",
        "return capturing(device) and not _captures.passing", "return capturing(device)",
    ),
    Mutant(
        "graphs of ours are taken for others'", "runtime/graphs.py:_capture",
        "with passing_capture(), torch", "with torch",
    ),
    Mutant(
        "the first part is added to what was there", "runtime/rowwise.py:add_",
        "elif not fresh and len(parts) == 1:", "elif len(parts) == 1:",
    ),
    Mutant(
        "a part in its place is lost", "runtime/accumulate.py:GradAccumulator._written",
        "fresh=len(others) == len(parts))", "fresh=True)",
    ),
    Mutant(
        "two parts in one place", "runtime/accumulate.py:_Accumulator._alloc",
        "or apart or not is_free(at, self._taken)",
        "or apart",
    ),
    Mutant(
        "parts that lie elsewhere are taken to be in their place", "runtime/accumulate.py:_fill",
        "return there == [(at, [t.data_ptr() for t in part]) for at, part in parts[:len(taken)]]",
        "return True",
    ),
    Mutant(
        "a place that is half full is taken to be full", "runtime/accumulate.py:_fill",
        "if not taken or sum(at.stop - at.start for at in taken) < place[0].shape[dims[0]]:",
        "if not taken:",
    ),
    Mutant(
        "the place of parts stays when they were read", "runtime/accumulate.py:_Accumulator._fold",
        "self._place, self._taken = None, [] for", "pass for",
    ),
    Mutant(
        "a running sum does not come to its place",
        "runtime/accumulate.py:GradAccumulator.finalize",
        "self._place[0].copy_(wide)", "self._place[0]",
    ),
    Mutant(
        "a sum is read before what it waits for", "runtime/accumulate.py:GradAccumulator._join",
        "self._waits.pop()()",
        "self._waits.pop()",
    ),
    Mutant(
        "a graph reads what it was captured with", "runtime/graphs.py:captured",
        "addresses.set(tensors)", "pass",
    ),
    Mutant(
        "what is captured is made for tensors of before", "runtime/graphs.py:_capture",
        "into=results)", "into=None)",
    ),
    Mutant(
        "a layer's results become the next one's", "runtime/graphs.py:Graph.run",
        "_like(self._results)", "self.__dict__.setdefault('made', _like(self._results))",
    ),
    Mutant(
        "tensors are read as they lie", "runtime/graphs.py:_readable", "t.contiguous()", "t",
    ),
    Mutant(
        "tensors are read as if they were aligned", "runtime/graphs.py:_readable",
        "t.data_ptr() % _ALIGNMENT == 0", "True",
    ),
    Mutant(
        "drivers need tell nothing", "runtime/graphs.py:graphs_refusal",
        "if can_be_set():", "if True:",
    ),
    Mutant(
        "numbers that look like an address are one", "runtime/graph_nodes.py:_Node.__init__",
        "and other == word + span.apart", "",
    ),
    Mutant(
        "all addresses are where a tensor begins", "runtime/graph_nodes.py:_Node.set",
        "now[number] + beyond", "now[number]",
    ),
    Mutant(
        "nodes are told of what stays", "runtime/graph_nodes.py:Addresses.set",
        "if not moved.isdisjoint(node.numbers):", "if True:",
    ),
    Mutant(
        "nodes that were told before one refused are not told again",
        "runtime/graph_nodes.py:Addresses.set", "self._now = [-1] * len(now)", "pass",
    ),
    Mutant(
        "a result that no node writes", "runtime/graph_nodes.py:Addresses.__init__",
        "and span.number not in found", "and False",
    ),
    Mutant(
        "two captures may do anything", "runtime/graph_nodes.py:_Node.__init__",
        "if given.what != twin.what:", "if False:",
    ),
    Mutant(
        "a graph is of whatever device is current", "runtime/graphs.py:captured",
        "with torch.cuda.device(device):", "if True:",
    ),
    Mutant(
        "a settled sum's place is free", "runtime/accumulate.py:GradAccumulator.flush",
        "self._taken = [self._whole]", "pass",
    ),
    Mutant(
        "nobody listens to the driver", "runtime/graph_nodes.py:_call",
        'raise _error(f"{name}: CUDA error {code}")', "pass",
    ),
    Mutant(
        "nodes of unknown kinds have no memory", "runtime/graph_nodes.py:_given",
        "if kind.value in _NO_TENSORS:", "if kind.value not in _READ:",
    ),
    Mutant(
        "kernels that hide what they are given have no memory",
        "runtime/graph_nodes.py:_there",
        "raise _error(f\"kernel {_name(params)} hides what it is given\")", "return 0",
    ),
    Mutant(
        "parameters end where the driver fails", "runtime/graph_nodes.py:_sizes",
        "if code != _INVALID_VALUE:", "if False:",
    ),
    Mutant(
        "two captures need not be the same", "runtime/graph_nodes.py:_alike",
        "if len(these) != len(those):", "if False:",
    ),
    Mutant(
        "a sum ends elsewhere than it has to", "runtime/accumulate.py:GradAccumulator.finalize",
        "self._place or self._anew(self._whole, self._end)",
        "self._anew(self._whole, self._end)",
    ),
    Mutant(
        "a result is left where it was made", "runtime/accumulate.py:OutputAccumulator.finalize",
        "there.copy_(t)", "pass",
    ),
    Mutant(
        "out is not where a graph has it", "attention.py:forward",
        "else None, into)", "else None)",
    ),
    Mutant(
        "dq is not where a graph has it", "attention.py:backward", "place=dq, deferred", "deferred",
    ),
    Mutant(
        "dk and dv are not where a graph has them", "attention.py:backward",
        "else None, place=place)", "else None)",
    ),
    Mutant(
        "the sink's gradient is not where a graph has it", "runtime/interfaces.py:grad_of_sinks",
        ", out=into)", ")",
    ),
    Mutant(
        "a replay does not wait for those before", "runtime/replay.py:Recordings._follow_last",
        "current.wait_stream(self._last)", "pass",
    ),
    Mutant(
        "graphs of memory that is left", "runtime/replay.py:Recordings.run",
        "if memory != self._memory:", "if False:",
    ),
    Mutant(
        "one graph whatever is given", "runtime/graphs.py:Graph.key",
        "tuple([None if t is None else t.dtype for t in given])", "()",
    ),
    Mutant(
        "what is made once is made in a graph", "runtime/graphs.py:Graph.run",
        "found = function(owner, *given)", "found = _like(given)",
    ),
    Mutant(
        "one table for whatever is swapped", "comm/fabric_shared.py:SharedMemory.swap",
        "key = me, self.ranks, tuple(way.key for way in ways), forms[me]", "key = 0",
    ),
    Mutant(
        "what is swapped is taken when others have read", "comm/fabric_shared.py:SharedMemory.swap",
        "buffer.read_barrier()", "buffer.write_barrier()",
    ),
    Mutant(
        "swaps don't wait for other streams", "comm/fabric_shared.py:SharedMemory.follow_stream",
        "self.space.follow_stream()", "pass",
    ),
    Mutant(
        "each plan has tables of its own", "comm/all_to_all.py:CopyPlan.key",
        "self.given, self.got, *moves", "id(self),",
    ),
    Mutant(
        "graphs leave out what swaps heads", "runtime/graphs.py:with_graphs",
        "_recorded(replace(swap), swap.by.replay)", "swap",
    ),
    Mutant(
        "a graph holds messages between neighbours", "runtime/graphs.py:with_graphs",
        "swap.by.replay.graph and", "",
    ),
    Mutant(
        "a graph sums gradients of repeated heads elsewhere", "comm/ulysses.py:_summed",
        "if into is None else into.copy_(total)", "",
    ),
    Mutant(
        "a graph brings heads elsewhere", "comm/ulysses.py:AllToAll.__call__",
        "if place is None or sums else place", "",
    ),
    Mutant(
        "a plan that was replaced keeps graphs", "runtime/graphs.py:_recorded",
        "Recordings(Graph, replay.follow)",
        "vars(owner.ring).setdefault('kept', Recordings(Graph, replay.follow))",
    ),
    Mutant(
        "graphs of one batch's mask are another's", "plan/plan_cache.py:GraphCache.in_place_of",
        "(plan.key_mask, plan.packing, plan.terms.dropout)", "(None, plan.packing, None)",
    ),
    Mutant(
        "batches of other lengths share graphs", "plan/plan_cache.py:GraphCache.in_place_of",
        "plan.signature, plan.blocks, swapped, plan.terms", "swapped, plan.terms",
    ),
    Mutant(
        "each batch is captured anew", "plan/plan_cache.py:GraphCache.in_place_of",
        "self.of(key, plan.in_graphs)", "plan.in_graphs()",
    ),
    Mutant(
        "what comes once is captured", "plan/plan_cache.py:GraphCache.in_place_of",
        "if key not in self:", "if False:",
    ),
    Mutant(
        "neighbours of other lengths share graphs", "plan/plan_cache.py:GraphCache.in_place_of",
        "plan.blocks, swapped,",
        "plan.blocks,",
    ),
    Mutant(
        "graphs go on with what a module was", "plan/plan_cache.py:GraphCache.in_place_of",
        "plan.terms, plan.kernel",
        "plan.kernel",
    ),
    Mutant(
        "graphs of all batches stay", "plan/plan_cache.py:GraphCache.in_place_of",
        "self.keep(key, None, _WITH_GRAPHS)", "self.keep(key, None)",
    ),
    Mutant(
        "layers that drop otherwise have graphs anew each time",
        "plan/ring_plan.py:RingPlan.for_layer",
        "self._own.layers.of(number, of_layer, _LAYERS)", "of_layer()",
    ),
    Mutant(
        "gradients of the hop before last", "runtime/accumulate.py:_Accumulator._update",
        "self._clear(self._wide)", "pass",
    ),
    Mutant(
        "graphs hold what spares the host", "runtime/graphs.py:with_graphs",
        "plan.chosen.overlapping_transport or plan.transport", "plan.transport",
    ),
    Mutant(
        "calls overlap of what merges by itself", "runtime/graphs.py:with_graphs",
        "plan.transport if merges else", "",
    ),
    Mutant(
        "no delta", "runtime/interfaces.py:Residuals.delta",
        "return delta if self.dlse is None else delta - self.dlse",
        "return delta * 0 if self.dlse is None else delta * 0 - self.dlse",
    ),
    Mutant(
        "dlse forgotten", "runtime/interfaces.py:Residuals.delta",
        "return delta if self.dlse is None else delta - self.dlse", "return delta",
    ),
    Mutant(
        "dlse with the wrong sign", "runtime/interfaces.py:Residuals.delta",
        "else delta - self.dlse",
        "else delta + self.dlse",
    ),
    Mutant(
        "the sink's gradient without the lse's", "runtime/interfaces.py:grad_of_sinks",
        "* saved.delta).sum(",
        "* (saved.delta + (0 if saved.dlse is None else saved.dlse))).sum(",
    ),
    Mutant(
        "a sink that only lse has", "runtime/rowwise.py:merge_sinks_",
        "out.mul_(weight.transpose(1, 2).unsqueeze(-1))", "pass",
    ),
    Mutant(
        "what is kept is not raised", "runtime/dropout.py:Dropout.inverse",
        "return 1 / (1 - self.rate)",
        "return 1.0",
    ),
    Mutant(
        "draws with a sign", "runtime/dropout.py:Dropout.kept", "self.numbers[2] ^ -_SIGN",
        "self.numbers[2]",
    ),
    Mutant(
        "layers drop alike", "runtime/dropout.py:Dropout.for_layer",
        "self.seed ^ _mixed_seed(number)",
        "self.seed",
    ),
    Mutant("a bias is scaled", "runtime/scores.py:with_bias", "/ (scale * pick)", "/ pick"),
    Mutant(
        "a bias of another head", "runtime/scores.py:with_bias", '"b m (g r) -> b m g r"',
        '"b m (r g) -> b m g r"',
    ),
    Mutant(
        "half the digits of a bias in 16 bits", "runtime/scores.py:_parts",
        "return 2 if dtype.itemsize == 2 else 1", "return 1",
    ),
]  # fmt: skip

SUMMARIES = [
    Mutant(
        "no gradient through lse", "runtime/rowwise.py:merge",
        "torch.stack([lse for _, lse in parts])", "torch.stack([lse for _, lse in parts]).detach()",
    ),
    Mutant(
        "lse of parts in half precision", "runtime/rowwise.py:merge",
        "lses.to(accumulation_dtype(lses.dtype))", "lses",
    ),
    Mutant(
        "parts of nothing are NaN", "runtime/rowwise.py:softmax_weights",
        "top.masked_fill(top.isinf(), 0.0)", "top",
    ),
    Mutant(
        "no key at all is NaN", "runtime/rowwise.py:softmax_weights",
        "total.masked_fill(empty, 1.0)", "total",
    ),
    Mutant(
        "lse of nothing is 0", "runtime/rowwise.py:softmax_weights",
        ".masked_fill(empty, -torch.inf)", "",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "a scale that float32 takes for 0", "runtime/interfaces.py:KernelRequest.of",
        "scale < torch.finfo(torch.float32).tiny", "0 >= scale",
    ),
    Mutant(
        "a bias over its scale is larger than its dtype holds", "runtime/scores.py:_undoing",
        "2.0 ** min(1023, 1 - math.frexp(scale)[1])", "1.0",
    ),
    Mutant(
        "scales that float16 can't undo", "runtime/scores.py:check_bias",
        "if not held.tiny <= _undoing(scale) <= held.max:", "if False:",
    ),
    Mutant(
        "parts of float16 travel as they are", "runtime/rowwise.py:wire_dtype",
        "torch.float32 if dtype == torch.float16 else dtype", "dtype",
    ),
    Mutant(
        "a part is taken for the sum in another dtype",
        "runtime/accumulate.py:GradAccumulator.finalize",
        "self._parts[0][1][0].dtype == self._end", "True",
    ),
    Mutant(
        "kernels get memory of the sum's dtype", "runtime/accumulate.py:_Accumulator._alloc",
        "if self._end != self._like.dtype:", "if False:",
    ),
    Mutant(
        "another mask's cells", "runtime/interfaces.py:Tiles.of_another_mask",
        "found.masked = {}", "pass",
    ),
    Mutant(
        "another layout's graphs", "plan/plan_cache.py:GraphCache.in_place_of",
        "(repr(swap.queries), repr(swap.keys))",
        "(swap.queries.lengths, swap.keys.lengths)",
    ),
]  # fmt: skip

SECOND_ORDER = [
    Mutant(
        "delta moves with dout only", "runtime/interfaces.py:tangent_of_delta",
        "+ sum_of_products(saved.dout, along.out)", "",
    ),
    Mutant(
        "ranks may differ in tangents", "runtime/torch_func.py:tangents_note", "any(forward_ad",
        "all(forward_ad",
    ),
]  # fmt: skip

KEPT = [
    Mutant(
        "any kernel is taped", "plan/ring_plan.py:RingPlan.__post_init__",
        "self.kernel.traits.taped and", "",
    ),
    Mutant(
        "tapes read memory that was outgrown", "runtime/replay.py:Recordings.run",
        "if memory != self._memory:", "if False:",
    ),
    Mutant(
        "swaps are repeated in memory that was outgrown",
        "comm/fabric_shared.py:SharedMemory.follow_stream",
        "return self.space.keys, self.space.grads, self.space.swaps", "return None",
    ),
    Mutant(
        "a tape of what differs each time", "runtime/tape.py:Tape._recorded",
        "or not (first is None or recorder.agrees(first))", "",
    ),
    Mutant(
        "deterministic algorithms take any tape", "runtime/replay.py:Recordings.run",
        "torch._C._get_deterministic_algorithms(),", "",
    ),
    Mutant(
        "constants of a tape come and go", "runtime/tape.py:_Recorder.agrees",
        "number in self.views or _same(a, b)", "True",
    ),
    Mutant(
        "tensors laid out otherwise take the same tape", "runtime/tape.py:Tape.key",
        "(t.stride(), t.data_ptr() & 15)", "True",
    ),
    Mutant(
        "what flash-attn 4 launches first is not seen", "kernels/flash_attn_4.py:_seen_by_tapes",
        'hasattr(each, "compile_cache")', 'each is interface._flash_attn_fwd',
    ),
    Mutant(
        "caches of flash-attn 4 stay wrapped", "kernels/flash_attn_4.py:_seen_by_tapes",
        "owner.compile_cache = cache\n", "pass\n",
    ),
    Mutant(
        "a tensor given twice is two", "runtime/tape.py:Tape.key", "*map(ids.index, ids),", "",
    ),
    Mutant(
        "prepared launches take tensors by address", "runtime/launches.py:_slot",
        "numbers[id(arg.base)]",
        "{t.data_ptr(): i for i, t in reversed([*enumerate(given)])}[arg.base.data_ptr()]",
    ),
    Mutant(
        "prepared launches keep what the first call was given",
        "runtime/launches.py:PreparedLaunch._look", "args[at] = slot.tensor(given)", "pass",
    ),
    Mutant(
        "constants are in the order of the call", "runtime/launches.py:PreparedLaunch.__init__",
        "for name in names", "for name in [*call.constants][:len(names)]",
    ),
    Mutant(
        "what reads values is taped", "runtime/tape.py:_Recorder.__torch_function__",
        "self.refused = True", "pass",
    ),
    Mutant(
        "a tape runs under autocast", "runtime/tape.py:Tape.run",
        "if not (elsewhere or torch._C._is_any_autocast_enabled()):", "if True:",
    ),
    Mutant(
        "views of what is given are made once", "runtime/tape.py:_Recorder._is_constant_view",
        'if not self._names[id(t)].startswith("c"):', "if False:",
    ),
    Mutant(
        "a view laid out otherwise is the tensor itself", "runtime/tape.py:_is_as_given",
        "and out.stride() == t.stride()", "",
    ),
    Mutant(
        "an operation is taped, and what it does, too", "runtime/tape.py:opaque",
        "with torch._C.DisableTorchFunction():", "if True:",
    ),
]  # fmt: skip

COMPILED = [
    Mutant(
        "two objects have one number", "runtime/handles.py:new_handle", "next(_counter)", "_STRIDE",
    ),
    Mutant(
        "the first layer is no layer", "runtime/handles.py:handle_of_layer", "handle + 1 + layer",
        "handle + layer",
    ),
    Mutant(
        "any number is that of a layer", "runtime/handles.py:check_layer",
        "not 0 <= number < LAYERS", "False",
    ),
    Mutant(
        "large layers meet another object", "runtime/handles.py:_STRIDE", "1 << 32", "1 << 20",
    ),
    Mutant(
        "an object is its own first layer", "runtime/handles.py:parted",
        "layer - 1 if layer else None", "max(0, layer - 1)",
    ),
    Mutant(
        "who is gone is None", "runtime/handles.py:object_of", "if thing is None:", "if False:",
    ),
    Mutant(
        "a plan goes before backward", "runtime/handles.py:object_of",
        "_kept_alive[handle] = thing",
        "_kept_alive[handle] = None",
    ),
    Mutant(
        "those used first go, however often", "runtime/handles.py:object_of",
        "_kept_alive.move_to_end(handle)", "",
    ),
    Mutant(
        "those used last go", "runtime/handles.py:object_of", "_kept_alive.popitem(last=False)",
        "_kept_alive.popitem()",
    ),
    Mutant(
        "all plans stay", "runtime/handles.py:object_of",
        "if len(_kept_alive) > _MOST_KEPT:", "if False:",
    ),
]  # fmt: skip
