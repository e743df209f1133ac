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
        "if shift:\n labels =", "if not shift:\n labels =",
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
        "return t.index_select(1, segment_positions(segments, t.device))",
        "return t[:, : len(segment_positions(segments))]",
    ),
    Mutant(
        "masks stay whole", "training/batches.py:_Whole.shard",
        "None if self.real is None else mine(self.real)", "None",
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
        "total = _SumOverRanks.apply(total, ring)\n ring.total(held)",
        "total = _SumOverRanks.apply(total, ring)",
    ),
    Mutant(
        "weights are not counted", "training/losses.py:ring_cross_entropy",
        "held = (weights * real).sum()", "pass",
    ),
    Mutant(
        "gradients of log-probabilities are a rank's own", "training/losses.py:_Whole.backward",
        "* ctx.times", "",
    ),
    Mutant(
        "a rank without tokens takes no part", "training/losses.py:_chunks",
        "range(0, max(1, n), chunk or max(1, n))", "range(0, n, chunk or max(1, n))",
    ),
    Mutant(
        "chunks overlap", "training/losses.py:_chunks",
        "stop = start + (chunk or n)", "stop = start + (chunk or n) + 1",
    ),
    Mutant(
        "attention does not ask the batch for documents", "comm/placement.py:Placement.options",
        '"documents": self.packing,', "",
    ),
    Mutant(
        "attention does not ask the batch for its mask", "comm/placement.py:Placement.options",
        '"key_mask": self.key_mask', "",
    ),
    Mutant(
        "attention does not ask the batch for its layout", "comm/placement.py:Placement.options",
        '= {"layout": self.layout}', "= {}",
    ),
    Mutant(
        "whole sequences pass for shards", "comm/placement.py:Placement.problem",
        "if n != held:", "if False:",
    ),
    Mutant(
        "what is recomputed outside of its block is of no batch", "comm/placement.py:placed",
        "placement is None and (_ended or _unseen) and in_backward()", "False",
    ),
    Mutant(
        "a reentrant checkpoint leaves no trace", "comm/placement.py:placed",
        "if _within_function():", "if False:",
    ),
    Mutant(
        "what is evaluated is taken for what may be recomputed",
        "comm/placement.py:_within_function", "or torch._C._is_fwd_grad_enabled()", "",
    ),
    Mutant(
        "backward is in any block", "comm/placement.py:check_began_here",
        "found and began not in found", "False",
    ),
    Mutant(
        "a plan is for any batch", "comm/placement.py:check_plan",
        "(layout, packing, key_mask is None) != mine", "False",
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
        "key heads need not divide", "nn/projections.py:HeadProjections._split_problem",
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
        "training/losses.py:_told_by_batch",
        "batch.ring if isinstance(batch, ShardedBatch) else None", "None",
    ),
]  # fmt: skip
