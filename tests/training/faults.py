"""Faults planted into `training/`, and into what batches tell attention."""

from tests.faults.mutant import Mutant

TRAINING = [
    Mutant(
        "all replicas take the first one's batches",
        "training/dataset.py:SequenceShardedDataset._take",
        "self._done + self.replica", "self._done",
    ),
    Mutant(
        "others' batches of a round come again",
        "training/dataset.py:SequenceShardedDataset._take",
        "self._done += self.replicas", "self._done += 1",
    ),
    Mutant(
        "each rank goes on elsewhere", "training/dataset.py:SequenceShardedDataset._state",
        "self._done * self.batch_size", "(self._done + self.place['rank']) * self.batch_size",
    ),
    Mutant(
        "what was taken is skipped again",
        "training/dataset.py:SequenceShardedDataset._batch",
        "number - self._at", "number",
    ),
    Mutant(
        "an iterator's documents are begun anew, without those that are gone",
        "training/dataset.py:SequenceShardedDataset._batch",
        "once and self._batches is not None and number < self._at", "False",
    ),
    Mutant(
        "behind a worker the state is that of the beginning",
        "training/dataset.py:SequenceShardedDataset.state_dict",
        "get_worker_info() is None and self._shared[1]", "False",
    ),
    Mutant(
        "behind a worker the data are repeated",
        "training/dataset.py:SequenceShardedDataset.__iter__",
        "if self._shared[1]:", "if False:",
    ),
    Mutant(
        "a worker that lives on goes on where it has read ahead",
        "training/dataset.py:SequenceShardedDataset.__iter__", "self._done = int(self._shared[0])",
        "pass",
    ),
    Mutant(
        "a batch that could not be made is gone",
        "training/dataset.py:SequenceShardedDataset._take",
        "batch = make() self._done += self.replicas", "self._done += self.replicas; batch = make()",
    ),
    Mutant(
        "documents of the corpus predict the next one",
        "training/dataset.py:SequenceShardedDataset._of_documents",
        "row[[start - 1 for start in starts[1:]]] = _IGNORE", "pass",
    ),
    Mutant(
        "a resumed epoch begins anew", "training/dataset.py:SequenceShardedDataset._order",
        "first % numbers if epoch == first // numbers else 0", "0",
    ),
    Mutant(
        "labels are shifted within the shard's documents only", "training/labels.py:next_of_whole",
        "moved.masked_fill(last_of_document(packing, positions), nothing)", "moved",
    ),
    Mutant(
        "documents of positions are one", "training/labels.py:documents_of_positions",
        "return back.cumsum(1) if bool(back.any()) else None", "return None",
    ),
    Mutant(
        "labels are not shifted", "training/batches.py:_Whole.read",
        "if shift:\n in_place, labels =", "if not shift:\n in_place, labels =",
    ),
    Mutant(
        "weights are not shifted with labels", "training/batches.py:_Whole.read",
        "next_of_whole(weights, packing, 0) if shift else weights", "weights",
    ),
    Mutant(
        "labels of padding count", "training/batches.py:_Whole.read",
        "labels = labels.masked_fill(~real, ignore_index)", "pass",
    ),
    Mutant(
        "positions count in the sequence", "training/batches.py:_positions",
        "if packing is None:", "if True:",
    ),
    Mutant(
        "positions are the shard's", "training/batches.py:_Whole.shard",
        "return t.index_select(dim, segment_positions(segments, t.device))",
        "return t.narrow(dim, 0, len(segment_positions(segments)))",
    ),
    Mutant(
        "masks stay whole", "training/batches.py:_Whole.shard",
        "None if t is None else mine(t)", "t",
    ),
    Mutant(
        "what is rolled passes documents", "training/batches.py:ShardedBatch.roll",
        "if self.packing is None or ahead == 0:", "if True:",
    ),
    Mutant(
        "a token ahead is the next one", "nn/loss.py:next_tokens",
        "torch.isin(mine + ahead, held)", "torch.isin(mine + 1, held)",
    ),
    Mutant(
        "the loss is the mean of this rank", "nn/loss.py:mean_over_ranks",
        "(_SumOverRanks.apply(t, ring) for t in (total, held))",
        "(_SumOverRanks.apply(t, ring) if t is total else t for t in (total, held))",
    ),
    Mutant(
        "weights are not counted", "training/losses.py:ring_cross_entropy",
        "held = found.real.sum() if found.weights is None else found.weights.sum()",
        "held = found.real.sum()",
    ),
    Mutant(
        "the mean's denominator has no gradient", "training/losses.py:ring_cross_entropy",
        "return mean_over_ranks(total, held, ring)",
        "return mean_over_ranks(total, held.detach(), ring)",
    ),
    Mutant(
        "the denominator's gradient is a rank's own", "nn/loss.py:mean_over_ranks",
        "(_SumOverRanks.apply(t, ring) for t in (total, held))",
        "(_SumOverRanks.apply(total, ring), held + _SumOverRanks.apply(held, ring).detach() "
        "- held.detach())",
    ),
    Mutant(
        "weights of ignored labels count", "training/loss_inputs.py:targets",
        "torch.where(real, weights.to(dtype), 0.0)", "weights.to(dtype)",
    ),
    Mutant(
        "a NaN weight of an ignored label passes, times 0", "training/loss_inputs.py:targets",
        "torch.where(real, weights.to(dtype), 0.0)", "weights.to(dtype) * real",
    ),
    Mutant(
        "the cap comes before the scale", "training/loss_inputs.py:Head.logits",
        "factor = (1.0 if self.scale is None else self.scale) / (self.softcap or 1.0)",
        "factor = 1 / (self.softcap or 1.0)",
    ),
    Mutant(
        "the cap has no slope of 1 at 0", "training/loss_inputs.py:Head.logits",
        "logits.tanh_() * self.softcap", "logits.tanh_()",
    ),
    Mutant(
        "a head's bias is left out", "training/loss_inputs.py:Head.logits",
        "F.linear(x, self.weight, self.bias)", "F.linear(x, self.weight)",
    ),
    Mutant(
        "16 bits are scaled before they are widened", "training/loss_inputs.py:Head.logits",
        "logits = logits.to(accumulation_dtype(logits.dtype))\n factor",
        "factor",
    ),
    Mutant(
        "labels beyond the classes pass", "training/loss_inputs.py:check_values",
        "(labels < 0) | (labels >= classes)", "(labels < 0)",
    ),
    Mutant(
        "negative labels pass", "training/loss_inputs.py:check_values",
        "(labels < 0) | (labels >= classes)", "(labels >= classes)",
    ),
    Mutant(
        "negative weights pass", "training/loss_inputs.py:_is_weight",
        "(weights >= 0) & (weights < math.inf)", "(weights < math.inf)",
    ),
    Mutant(
        "infinite weights pass", "training/loss_inputs.py:_is_weight",
        "(weights >= 0) & (weights < math.inf)", "(weights >= 0)",
    ),
    Mutant(
        "a head of any dtype passes", "training/loss_inputs.py:_check_alike",
        "or autocast_dtype(t) != autocast_dtype(x)", "",
    ),
    Mutant(
        "ranks do not compare the terms of a head", "training/losses.py:_same",
        '''"head": None if head.weight is None else head.weight.dtype,
        "bias of the head": head.bias is not None,
        "scale of logits": head.scale,
        "softcap of logits": head.softcap,''', "",
    ),
    Mutant(
        "weights are learned on some ranks", "training/losses.py:ring_cross_entropy",
        "((x, head, bias), (weights,))", "((x, head, bias),)",
    ),
    Mutant(
        "a wrong label that nobody waits for counts as another",
        "training/losses.py:ring_cross_entropy", "if found.wrong is not None:", "if False:",
    ),
    Mutant(
        "a wrong label that nobody waits for has a probability",
        "training/losses.py:ring_token_logprobs", "if wanted.wrong is not None:", "if False:",
    ),
    Mutant(
        "a wrong weight that nobody waits for is one", "training/loss_inputs.py:targets",
        "wrong_labels if weights is None else wrong_labels | ~_is_weight(weights.detach())",
        "wrong_labels",
    ),
    Mutant(
        "what was found wrong is told for ever", "training/loss_inputs.py:_Flags.check",
        "self._found.zero_()\n self._flags.zero_()", "pass",
    ),
    Mutant(
        "nobody is told of what was found", "training/loss_inputs.py:_Flags.raise_if",
        "self._flags.copy_(self._found, non_blocking=True)", "pass",
    ),
    Mutant(
        "gradients of log-probabilities are a rank's own", "training/losses.py:_Whole.backward",
        "* ctx.times", "",
    ),
    Mutant(
        "a rank without tokens takes no part", "training/losses.py:_by_chunks",
        "range(0, max(1, n), chunk or max(1, n))", "range(0, n, chunk or max(1, n))",
    ),
    Mutant(
        "chunks overlap", "training/losses.py:_by_chunks",
        "stop = start + (chunk or n)", "stop = start + (chunk or n) + 1",
    ),
    Mutant(
        "attention does not ask the batch for documents", "plan/placement.py:Placement.options",
        '"documents": self.packing,', "",
    ),
    Mutant(
        "attention does not ask the batch for its mask", "plan/placement.py:Placement.options",
        '"key_mask": self.key_mask', "",
    ),
    Mutant(
        "attention does not ask the batch for its layout", "plan/placement.py:Placement.options",
        '= {"layout": self.layout}', "= {}",
    ),
    Mutant(
        "whole sequences pass for shards", "plan/placement.py:Placement.check_call",
        "if n != held:", "if False:",
    ),
    Mutant(
        "what is recomputed outside of its block is of no batch", "plan/placement.py:placed",
        "placement is None and (_ended or _unseen) and in_backward()", "False",
    ),
    Mutant(
        "a reentrant checkpoint leaves no trace", "plan/placement.py:placed",
        "if _within_function():", "if False:",
    ),
    Mutant(
        "what is evaluated is taken for what may be recomputed",
        "plan/placement.py:_within_function", "or torch._C._is_fwd_grad_enabled()", "",
    ),
    Mutant(
        "backward is in any block", "plan/placement.py:check_began_here",
        "found and began not in found", "False",
    ),
    Mutant(
        "a plan is for any batch", "plan/placement.py:Placement.check_plan",
        "(plan.layout, plan.packing) == (self.layout, self.packing)", "True",
    ),
    Mutant(
        "a plan of any mask is the batch's", "plan/placement.py:Placement.check_plan",
        "and self.has_mask(plan.own_mask)", "",
    ),
    Mutant(
        "all masks of batches are one", "plan/placement.py:Placement.has_mask",
        "mask.whole == self.whole_mask", "True",
    ),
    Mutant(
        "ranks compare their own masks only", "plan/placement.py:Placement.has_mask",
        "None not in (mask.whole, self.whole_mask)", "False",
    ),
    Mutant(
        "all masks of no batch are one", "plan/placement.py:Placement.has_mask",
        "torch.equal(mask.values.to(self.key_mask.device), self.key_mask)", "True",
    ),
    Mutant(
        "a plan is of any ranks", "plan/placement.py:Placement.check_plan",
        "_ranks(plan.ring) != _ranks(self.ring)", "False",
    ),
    Mutant(
        "a plan's fit is known before it is looked at", "plan/ring_plan.py:RingPlan.check",
        "block.check_plan(self)", "self._blocks.add(block); block.check_plan(self)",
    ),
    Mutant(
        "losses are of any batches", "training/losses.py:_agree_in_block",
        "len(batches) > 1", "False",
    ),
    Mutant(
        "log-probabilities are of any batches", "training/losses.py:ring_token_logprobs",
        "_same(x, of, error, ignore_index) | {\"batch (its digest)\": batch.digest}",
        "_same(x, of, error, ignore_index)",
    ),
    Mutant(
        "files of one length are one", "training/dataset.py:TokenFile.sample",
        "found.append(digest(self.tokens[first:stop]))", "pass",
    ),
    Mutant(
        "files that begin alike are one", "training/dataset.py:TokenFile.sample",
        "found = [len(self)]", "found = []",
    ),
    Mutant(
        "averages over too few ranks pass", "nn/averaging.py:watch_averaging",
        "not ranks <= over", "False",
    ),
    Mutant(
        "split heads are taken for averages", "nn/averaging.py:watch_averaging",
        "and over != set(apart)", "",
    ),
    Mutant(
        "a checkpoint's k and v change places", "nn/projections.py:_take_either_form",
        "zip(parts, state.pop(fused).split(rows))",
        "zip([parts[0], parts[2], parts[1]], state.pop(fused).split(rows))",
    ),
    Mutant(
        "a checkpoint in three is not read as one", "nn/projections.py:_take_either_form",
        "torch.cat([state.pop(part) for part in parts])",
        "torch.cat([state.pop(part) for part in parts[::-1]])",
    ),
    Mutant(
        "key heads need not divide", "nn/projections.py:HeadProjections._check_split",
        "or self.key_heads % mesh.size()", "",
    ),
    Mutant(
        "heads that are not split pass", "nn/projections.py:HeadProjections.project",
        "if widths != rows:", "if False:",
    ),
    Mutant(
        "three projections of a context are of the tokens",
        "nn/projections.py:HeadProjections.project",
        "[self.to_q(queries), self.to_k(keys), self.to_v(keys)]",
        "[self.to_q(queries), self.to_k(queries), self.to_v(queries)]",
    ),
    Mutant(
        "who is told of a batch's arguments is this rank alone",
        "training/batches.py:report_to_ring_of_batch",
        "batch.ring if isinstance(batch, ShardedBatch) else None", "None",
    ),
]  # fmt: skip
