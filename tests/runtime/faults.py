"""Faults planted into `runtime/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "sinks count twice", "runtime/merging.py:_plain", "out, lse = merge(by_query)",
        "out, lse = merge(by_query + by_query[len(parts) // 2 :])",
    ),
    Mutant(
        "a part's out is read where it sees no key", "runtime/merging.py:_plain",
        "out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)", "out",
    ),
    Mutant(
        "gradients of shared keys are a rank's own", "comm/collectives.py:replicated",
        "linear(_same, sum_over_ranks, tensors", "linear(_same, lambda grads, _: grads, tensors",
    ),
    Mutant(
        "gradients of shared keys are summed twice", "comm/collectives.py:_sum",
        "sum_parts(parts.unbind()).to", "(sum_parts(parts.unbind()) * ring.size).to",
    ),
    Mutant(
        "shared tokens' gradients count on each rank", "nn/shared_tokens.py:shared_options",
        "grad / ranks", "grad",
    ),
    Mutant("what is left is in no sum", "attention.py:backward", "deferred.do()", ""),
    Mutant(
        "every call of a kernel rounds as the last",
        "runtime/accumulate.py:_Accumulator._update_memory",
        "last = self._calls == 1", "last = bool(self._calls)",
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
        "a call waits for nothing", "runtime/streams.py:_SideStream.__enter__",
        "self.stream.wait_event(side.begins)", "",
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
        "a part in its place is lost", "runtime/accumulate.py:GradAccumulator._written",
        "fresh=len(others) == len(parts))", "fresh=True)",
    ),
    Mutant(
        "a running sum does not come to its place",
        "runtime/accumulate.py:GradAccumulator.finalize",
        "self._place[0].copy_(wide)", "self._place[0]",
    ),
    Mutant(
        "a sum is read before what it waits for", "runtime/accumulate.py:_Accumulator._join",
        "self._waits.pop()()",
        "self._waits.pop()",
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
        "each plan has tables of its own", "comm/all_to_all.py:CopyPlan.key",
        "self.given, self.got, repr(self.moves)", "id(self)",
    ),
    Mutant(
        "no delta", "runtime/interfaces.py:Residuals.delta",
        "return delta if self.dlse is None else delta - self.dlse",
        "return delta * 0 if self.dlse is None else delta * 0 - self.dlse",
    ),
    Mutant(
        "the sink's gradient without the lse's", "runtime/interfaces.py:grad_of_sinks",
        "* saved.delta).sum(",
        "* (saved.delta + (0 if saved.dlse is None else saved.dlse))).sum(",
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
    Mutant(
        "a bias of another head", "runtime/scores.py:with_bias", '"b m (g r) -> b m g r"',
        '"b m (r g) -> b m g r"',
    ),
]  # fmt: skip

SUMMARIES = [
    Mutant(
        "no gradient through lse", "runtime/rowwise.py:merge",
        "torch.stack([lse for _, lse in parts])", "torch.stack([lse for _, lse in parts]).detach()",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "a bias over its scale is larger than its dtype holds", "runtime/scores.py:_undoing",
        "2.0 ** min(1023, 1 - math.frexp(scale)[1])", "1.0",
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
]  # fmt: skip

KEPT = [
    Mutant(
        "swaps are repeated in memory that was outgrown",
        "comm/fabric_shared.py:SharedMemory.follow_stream",
        "return self.space.keys, self.space.grads, self.space.swaps", "return None",
    ),
    Mutant(
        "deterministic algorithms take any tape", "runtime/tape.py:Tapes.run",
        "torch._C._get_deterministic_algorithms(),", "",
    ),
    Mutant(
        "tensors laid out otherwise take the same tape", "runtime/tape.py:Tape.key",
        "(t.stride(), t.data_ptr() & 15)", "True",
    ),
    Mutant(
        "a tensor given twice is two", "runtime/tape.py:Tape.key", "*map(ids.index, ids),", "",
    ),
    Mutant(
        "other operations make a tape of the same kind", "runtime/tape.py:_Recorder.kind",
        "*map(_role, self.constants)", "len(self.constants)",
    ),
    Mutant(
        "prepared launches take tensors by address",
        "runtime/launches.py:PreparedLaunch.__init__",
        "(id(t), number)",
        "(id(t), [getattr(u, 'data_ptr', int)() for u in given].index(t.data_ptr()))",
    ),
    Mutant(
        "constants are in the order of the call", "runtime/launches.py:PreparedLaunch.__init__",
        "for name in names", "for name in [*call.constants][:len(names)]",
    ),
]  # fmt: skip

COMPILED = [
    Mutant(
        "two objects have one number", "runtime/handles.py:new_handle", "next(_counter)", "_STRIDE",
    ),
    Mutant(
        "large layers meet another object", "runtime/handles.py:_STRIDE", "1 << 32", "1 << 20",
    ),
    Mutant(
        "an object is its own first layer", "runtime/handles.py:parted",
        "layer - 1 if layer else None", "max(0, layer - 1)",
    ),
    Mutant(
        "a plan goes before backward", "runtime/handles.py:object_of",
        "_kept_alive[handle] = thing", "_kept_alive[handle] = None",
    ),
]  # fmt: skip
