"""Faults planted into `training/`, and into what batches tell attention."""

from tests.faults.mutant import Mutant

TRAINING = [
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
        "a batch that could not be made is gone",
        "training/dataset.py:SequenceShardedDataset._take",
        "batch = make() self._done += self.replicas", "self._done += self.replicas; batch = make()",
    ),
    Mutant(
        "positions are the shard's", "training/batches.py:_Whole.shard",
        "return t.index_select(dim, segment_positions(segments, t.device))",
        "return t.narrow(dim, 0, len(segment_positions(segments)))",
    ),
    Mutant(
        "a batch that no block used is never compared", "training/batches.py:shard_batch",
        "ring.steps.unread = mine if isinstance(mine, UnreadDigest) else None", "pass",
    ),
    Mutant(
        "a loss over other ranks compares a batch", "training/losses.py:_agree_in_block",
        "block.digest.compared |= {*block.ring.ranks} <= {*ring.ranks}", "pass",
    ),
    Mutant(
        "masks stay whole", "training/batches.py:_Whole.shard",
        "mine(self.real)", "self.real",
    ),
    Mutant(
        "a token ahead is the next one", "nn/loss.py:next_tokens",
        "torch.isin(mine + ahead, held)", "torch.isin(mine + 1, held)",
    ),
    Mutant(
        "the mean's denominator has no gradient", "training/losses.py:ring_cross_entropy",
        "return mean_over_ranks(total, held, ring)",
        "return mean_over_ranks(total, held.detach(), ring)",
    ),
    Mutant(
        "the denominator's gradient is a rank's own", "nn/loss.py:mean_over_ranks",
        "counts.view_as(held)", "counts.detach().view_as(held) + held - held.detach()",
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
        "ranks do not compare the terms of a head", "training/losses.py:_same",
        '''"head": None if head.weight is None else head.weight.dtype,
        "bias of the head": head.bias is not None,
        "scale of logits": head.scale,
        "softcap of logits": head.softcap,''', "",
    ),
    Mutant(
        "weights are learned on some ranks", "training/losses.py:_sums",
        "((x, of.weight, of.bias), (weights,))", "((x, of.weight, of.bias),)",
    ),
    Mutant(
        "what was found wrong is told for ever", "training/loss_inputs.py:_Flags.check",
        "self._found.zero_()\n self._flags.zero_()", "pass",
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
        "all masks of no batch are one", "plan/placement.py:Placement.has_mask",
        "torch.equal(mask.values.to(self.key_mask.device), self.key_mask)", "True",
    ),
    Mutant(
        "a plan's fit is known before it is looked at", "plan/ring_plan.py:RingPlan.check",
        "block.check_plan(self)", "self._blocks.add(block); block.check_plan(self)",
    ),
    Mutant(
        "files that begin alike are one", "training/dataset.py:TokenFile.sample",
        "found = [len(self)]", "found = []",
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
        "three projections of a context are of the tokens",
        "nn/projections.py:HeadProjections.project",
        "[self.to_q(queries), self.to_k(keys), self.to_v(keys)]",
        "[self.to_q(queries), self.to_k(queries), self.to_v(queries)]",
    ),
]  # fmt: skip
