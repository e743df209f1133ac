"""Faults planted into attention, and a battery of cases that must find each of them.

`python -m tests.mutants` prints what was found, as JSON; how is told in `hunt`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests import hunt
from tests.faults import Mutant
from tests.hunt import Case

MUTANTS = [
    # layouts
    Mutant(
        "causal off by one", "geometry/tiles.py:_tile_of_pair",
        "right = gap // q.stride",
        "right = gap // q.stride - 1",
    ),
    Mutant(
        "causal off by one in strides", "geometry/tiles.py:_tile_of_pair",
        "right = gap // q.stride",
        "right = -(-gap // q.stride)",
    ),
    Mutant(
        "window off by one", "geometry/tiles.py:_tile_of_pair",
        "left = (mask.window - gap) // q.stride",
        "left = (mask.window + 1 - gap) // q.stride",
    ),
    Mutant(
        "window forgotten in one direction", "geometry/tiles.py:_tile_of_pair",
        "(mask.window + gap) // q.stride",
        "None",
    ),
    Mutant(
        "window forgotten under causal", "geometry/tiles.py:_tile_of_pair",
        "if mask.window is not None: left",
        "if mask.window is not None and not mask.causal: left",
    ),
    Mutant(
        "band off by one", "geometry/tiles.py:band",
        "visible &= offset <= right", "visible &= offset < right",
    ),
    Mutant(
        "buckets forget how far down they are", "geometry/tiles.py:buckets",
        "None if right is None else right + above", "right",
    ),
    Mutant(
        "staircase joined whatever lies below", "geometry/tiles.py:_is_staircase",
        "if not (below and beside and b[2:] == _FULL)", "if not beside",
    ),
    Mutant(
        "a needed distance forgotten", "geometry/tiles.py:needed_distances",
        "for t in ranks[1:]", "for t in ranks[1:-1]",
    ),
    Mutant(
        "zigzag without its mirror", "geometry/layouts.py:zigzag",
        "[rank, 2 * ring_size - 1 - rank]",
        "[rank, ring_size + rank]",
    ),
    Mutant(
        "longer chunks counted twice", "geometry/layouts.py:_chunks",
        "chunk * size + min(chunk, longer)",
        "chunk * size + longer",
    ),
    # documents
    Mutant(
        "documents see one another", "geometry/tiles.py:_visible_tiles",
        "of_keys.get(document, ())",
        "sum(of_keys.values(), [])",
    ),
    Mutant(
        "a document's last token left out", "geometry/segments.py:Documents._cut",
        "-(-(stop - position) // stride)", "(stop - position) // stride",
    ),
    Mutant(
        "a document that goes on starts anew", "geometry/segments.py:Documents.offsets",
        "before = lengths.get(document, 0)", "before = 0",
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
        "what only a later sample needs is not sent", "schedule/pieces.py:Workload.distances",
        "self.apart or (self.visible,)", "self.apart[:1] or (self.visible,)",
    ),
    Mutant(
        "ids taken for another rank's", "plan/packing.py:gather_ids", "in zip(segments, notes):",
        "in zip(reversed(segments), notes):",
    ),
    Mutant(
        "a prefix hides its later tokens", "geometry/tiles.py:_tile_of_pair",
        "if mask.causal and not in_prefix:",
        "if mask.causal:",
    ),
    Mutant(
        "later tokens are seen from the prefix", "geometry/tiles.py:_tile_of_pair",
        "max(q.start, k.start) < mask.prefix", "q.start < mask.prefix",
    ),
    Mutant(
        "positions of keys taken for queries'", "plan/masks.py:gather_positions",
        "for runs_of_ranks in zip(*notes)", "for runs_of_ranks in [[*zip(*notes)][0]] * len(own)",
    ),
    Mutant(
        "a document's last token predicts the next one's", "geometry/documents.py:last_of_document",
        "torch.tensor([run.stop - 1", "torch.tensor([run.stop",
    ),
    Mutant(
        "the heaviest to who has most", "geometry/balance.py:_dealt", "key=loads.__getitem__)",
        "key=loads.__getitem__, reverse=True)",
    ),
    Mutant(
        "work of the whole sequence, not of documents", "geometry/balance.py:visible_keys",
        "- offsets.repeat_interleave(lengths)", "- 0 * offsets.repeat_interleave(lengths)",
    ),
    Mutant(
        "a block forgets the tile that began before it", "kernels/_tile_table.py:_make_table",
        "bisect_right(stops, at)", "bisect_left(starts, at)",
    ),
    Mutant(
        "a block forgets its last tile", "kernels/_tile_table.py:_make_table",
        "bisect_left(starts, at + block)", "bisect_left(starts, at + block) - 1",
    ),
    # merging and precision
    Mutant(
        "every call of a kernel rounds as the last", "runtime/accumulate.py:_Accumulator._room",
        "self._end if self._calls == 1 else", "self._end if self._calls else",
    ),
    Mutant(
        "own keys kept for the end land first", "comm/gather.py:GatherCall.computed",
        "of_part.move_to(total, self._span(part).start)",
        "of_part.move_to(total, 0)",
    ),
    Mutant(
        "a call of the kernel is not counted", "schedule/steps.py:Schedule.positions",
        "for part in program.parts:", "for part in program.parts[:-1] or program.parts:",
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
    # calls side by side
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
        "own keys' calls are taken for others'", "plan/ring_plan.py:RingPlan.keys",
        ", own=True)", ")",
    ),
    Mutant(
        "half of own keys are others'", "comm/gather.py:some_of",
        "keys._replace(k=k,",
        "keys._replace(own=False, k=k,",
    ),
    Mutant(
        "calls side by side whose keys go away", "comm/gather.py:Gather.keeps",
        "return len(self.schedule.forward.blocks) == 2",
        "return True",
    ),
    Mutant(
        "own keys wait for the end of one group of several",
        "comm/gather_symmetric.py:SymmetricGather.over",
        "overtaken and len(rounds) == 1",
        "overtaken",
    ),
    Mutant(
        "keys are computed on before their stage has come",
        "comm/gather_symmetric.py:SymmetricCall._come",
        "self.space.keys.join(self.ends[transfer.stage])",
        "pass",
    ),
    Mutant(
        "gradients of several turns are not read before the next",
        "comm/gather_symmetric.py:SymmetricCall._send_home",
        "if not one_round: shelf.join(end)",
        "",
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
        "what documents need is kept when they are gone", "schedule/pieces.py:cached",
        "if workload.lasting:", "if True:",
    ),
    Mutant(
        "shelves stay that graphs of ours outgrew", "runtime/streams.py:captures_for_good",
        "return capturing(device) and not _captures.passing", "return capturing(device)",
    ),
    Mutant(
        "graphs of ours are taken for others'", "runtime/graphs.py:captured",
        "with passing_capture(), torch", "with torch",
    ),
    Mutant(
        "nobody asks for stages", "comm/transports.py:make_transport",
        "late = keys_come_late(blocks, at_once, job, machine)", "late = False",
    ),
    Mutant(
        "a graph's tables go away", "comm/all_to_all.py:SharedSwap._moves",
        "shelf.read_by_graphs.add(known[key].table)", "pass",
    ),
    Mutant(
        "tables stay though no graph reads them", "comm/all_to_all.py:SharedSwap._moves",
        "if captured: shelf", "if True: shelf",
    ),
    Mutant(
        "too little room for out and lse", "comm/ulysses.py:most_bytes",
        "(by_token, by_head, results)", "(by_token, by_head)",
    ),
    Mutant(
        "all ranks pull from the last one at a time",
        "comm/gather_symmetric.py:SymmetricGather._sources",
        "_in_rounds(sources[::-1] if most_in_front(made) else sources)",
        "_in_rounds(sources)",
    ),
    Mutant(
        "all ranks pull from the first one at a time",
        "comm/gather_symmetric.py:SymmetricGather._sources",
        "_in_rounds(sources[::-1] if most_in_front(made) else sources)",
        "_in_rounds(sources[::-1])",
    ),
    Mutant(
        "gradients wait for copy engines though nothing goes on",
        "schedule/policy.py:come_home_aside", "(2 * brought + coming / 2)", "(coming / 2)",
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
        "or apart or not _free(at, self._taken)",
        "or apart",
    ),
    Mutant(
        "parts that lie elsewhere are taken to be in their place", "runtime/accumulate.py:_fill",
        "return found == [(at, first + at.start * step) for at in taken]", "return True",
    ),
    Mutant(
        "a place that is half full is taken to be full", "runtime/accumulate.py:_fill",
        "if not taken or sum(at.stop - at.start for at in taken) < place.shape[1]:",
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
        "gradients are added before they have come home",
        "comm/gather_symmetric.py:SymmetricCall._send_home",
        "total.after(partial(shelf.join, end))",
        "pass",
    ),
    Mutant(
        "a sum is read before what it waits for", "runtime/accumulate.py:GradAccumulator._join",
        "self._waits.pop()()",
        "self._waits.pop()",
    ),
    Mutant(
        "the second stage brings what the first did", "schedule/pieces.py:in_two_stages",
        "one_by_one[half:]", "one_by_one[:half]",
    ),
    Mutant(
        "keys come in stages where they are in time", "schedule/policy.py:keys_come_late",
        "own < machine.beside_forward", "own > machine.beside_forward",
    ),
    Mutant(
        "keys come in stages where some have none of their own",
        "schedule/policy.py:keys_come_late", "own == 0", "own < 0",
    ),
    # graphs
    Mutant(
        "a graph reads what it was captured with", "runtime/graphs.py:_Graph.run",
        "torch._foreach_copy_(self._filled, [t for t in given if t is not None])", "pass",
    ),
    Mutant(
        "a layer's results become the next one's", "runtime/graphs.py:_Graph.run",
        "None if t is None else t.clone()", "t",
    ),
    Mutant(
        "a replay does not wait for those before", "runtime/graphs.py:Graphs._follow_streams",
        "current.wait_stream(self._last)", "pass",
    ),
    Mutant(
        "graphs of memory that is left", "runtime/graphs.py:Graphs._follow_streams",
        "self._kept.clear()",
        "",
    ),
    Mutant(
        "one graph whatever is given", "runtime/graphs.py:Graphs.run",
        ", *(None if t is None else t.dtype for t in given)", "",
    ),
    Mutant(
        "what is made once is made in a graph", "runtime/graphs.py:_Graph.run",
        "if not self._warm:",
        "if False:",
    ),
    Mutant(
        "the first call is of tensors that lie otherwise", "runtime/graphs.py:_Graph.run",
        "found = function(*self._places)", "found = function(*given)",
    ),
    Mutant(
        "a plan that was replaced keeps graphs", "runtime/graphs.py:with_graphs",
        "object.__setattr__(found, ", "type.__setattr__(type(found), ",
    ),
    Mutant(
        "a replay takes shelves as they were",
        "comm/gather_symmetric.py:SymmetricGather.follow_stream",
        "self.space.follow_stream() return", "return",
    ),
    Mutant(
        "graphs of one batch's mask are another's", "runtime/graphs.py:GraphCache.of",
        "(plan.key_mask, plan.packing, plan.terms.dropout)", "(None, plan.packing, None)",
    ),
    Mutant(
        "batches of other lengths share graphs", "runtime/graphs.py:GraphCache.of",
        "plan.signature, plan.blocks, swapped, plan.terms", "swapped, plan.terms",
    ),
    Mutant(
        "each batch is captured anew", "runtime/graphs.py:GraphCache.of",
        "self._plans.pop(kind, None) or (plan",
        "(plan",
    ),
    Mutant(
        "what comes once is captured", "runtime/graphs.py:GraphCache.of",
        "(plan.in_graphs() if known else None)",
        "plan.in_graphs()",
    ),
    Mutant(
        "neighbours of other lengths share graphs", "runtime/graphs.py:GraphCache.of",
        "plan.blocks, swapped,",
        "plan.blocks,",
    ),
    Mutant(
        "graphs go on with what a module was", "runtime/graphs.py:GraphCache.of",
        "plan.terms, plan.kernel",
        "plan.kernel",
    ),
    Mutant(
        "graphs of all batches stay", "runtime/graphs.py:GraphCache.of",
        "len(self._plans) > _KINDS", "False",
    ),
    Mutant(
        "layers that drop otherwise have graphs anew each time",
        "runtime/graphs.py:Graphs.of_layer",
        "if number not in self._layers:", "if True:",
    ),
    Mutant(
        "a ring's messages are captured", "comm/send_recv.py:SendRecv.capturable",
        "return not self.schedule.forward.transfers",
        "return True",
    ),
    Mutant(
        "a gather's messages are captured", "comm/gather.py:Gather.capturable",
        "return not self.schedule.forward.transfers",
        "return True",
    ),
    # the ring
    Mutant(
        "a gradient hop dropped", "comm/send_recv.py:_Call.wait",
        "total.add(slice(0, part.shape[1]), part)",
        "if not block: total.add(slice(0, part.shape[1]), part)",
    ),
    Mutant(
        "gradients not brought home", "comm/send_recv.py:_Call.wait",
        "total.add(slice(0, part.shape[1]), part)",
        "if block: total.add(slice(0, part.shape[1]), part)",
    ),
    Mutant(
        "keys of the wrong owner", "comm/send_recv.py:_Call._owner",
        "(self.ring.rank - distance) % self.ring.size",
        "(self.ring.rank + distance) % self.ring.size",
    ),
    Mutant(
        "stale key block", "comm/send_recv.py:_Call.keys",
        "self.held[part.block % 2]",
        "self.held[0]",
    ),
    Mutant(
        "stale key block in backward", "comm/send_recv.py:_Call.keys", "KVBlock(k, v,",
        "KVBlock((self.own.k if self.totals[0] and k.shape == self.own.k.shape else k), v,",
    ),
    Mutant(
        "stale key mask", "comm/send_recv.py:_Call.keys",
        "mask[0] if mask else None",
        "(self.own.key_mask if self.own.key_mask.shape == mask[0].shape else mask[0]) if "
        "mask else None",
    ),
    Mutant(
        "transfer not awaited", "comm/send_recv.py:_Call.wait",
        "self.under_way.pop(number).wait()",
        "self.under_way.pop(number)",
    ),
    Mutant(
        "gradients modified in flight", "comm/send_recv.py:_Call.start",
        "self.made, self.sent = self.sent, self.made",
        "pass",
    ),
    Mutant(
        "one buffer received into twice", "comm/send_recv.py:_Call.start",
        "self.held[source % 2], self.held[block % 2]",
        "self.held[source % 2], self.held[source % 2]",
    ),
    Mutant(
        "gradients of the hop before last", "runtime/accumulate.py:_Accumulator._update",
        "self._clear(self._wide)", "pass",
    ),
    Mutant(
        "dk and dv mixed", "comm/send_recv.py:_Call.wait",
        "zip(self.totals[block], parts)",
        "zip(self.totals[block], reversed(parts))",
    ),
    # gather
    Mutant(
        "pieces of the wrong owner", "comm/gather.py:GatherCall._behind",
        "return [(self.ring.rank - t) % self.ring.size for t in transfer.distances]",
        "return [(self.ring.rank + t) % self.ring.size for t in transfer.distances]",
    ),
    Mutant(
        "a partial overwrites what is there", "comm/gather.py:GatherCall._send_home",
        "total.add_all((piece.cols, part[:, at]) for piece, at in places(pieces, rank))",
        "[total.begin_update()[:, p.cols].copy_(part[:, at]) for p, at in places(pieces, rank)]",
    ),
    Mutant(
        "a partial lands at the owner's first keys", "comm/gather.py:GatherCall._send_home",
        "((piece.cols, part[",
        "((slice(0, at.stop - at.start), part[",
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
        "a message's tensors overlap", "comm/messages.py:Form.of_parts",
        "-(-end // _ALIGNED) * _ALIGNED", "0",
    ),
    # shared memory
    Mutant(
        "keys pulled from the wrong rank", "comm/gather_symmetric.py:SymmetricGather._sources",
        "self.ranks[owner]",
        "self.ranks[self.ring.rank]",
    ),
    Mutant(
        "values for keys", "comm/gather_symmetric.py:SymmetricCall._written",
        "cat((own.k, own.v)",
        "cat((own.v, own.k)",
    ),
    Mutant(
        "gradients of keys for those of values",
        "comm/gather_symmetric.py:SymmetricCall._grads_of",
        "dk, dv = apart(place, keys)",
        "dv, dk = apart(place, keys)",
    ),
    Mutant(
        "gradients of keys come home as those of values",
        "comm/gather_symmetric.py:SymmetricCall._send_home",
        "(here, both[i]) for",
        "(here, both[0]) for",
    ),
    Mutant(
        "keys and values come by a copy each",
        "comm/gather_symmetric.py:SymmetricCall._launch_copies",
        "for place, t in zip(self.rooms, shelf.of(rank, form)):",
        "for place, t in ((a, b) for pair in zip(self.rooms, shelf.of(rank, form)) for a, b "
        "in zip(*(x.split(self.own.k.shape[-1], -1) for x in pair))):",
    ),
    Mutant(
        "few tokens have as many calls as others", "schedule/policy.py:is_few",
        "pairs * shape.pair_flops * both <= machine.host", "pairs < 0",
    ),
    Mutant(
        "few are counted whatever their keys weigh", "schedule/policy.py:is_few",
        "* shape.token_bytes > _SOON_COPIED * machine.memory", "< 0",
    ),
    Mutant(
        "few are counted without their mask", "schedule/policy.py:is_few",
        "/ (1 + mask.causal)", "/ 1",
    ),
    Mutant(
        "few are counted without their window", "schedule/policy.py:is_few",
        "keys_seen = min(keys_seen, (2 - mask.causal) * mask.window + 1)", "pass",
    ),
    Mutant(
        "few are counted without their documents", "schedule/policy.py:is_few",
        "if mask.documents is not None: whole", "if False: whole",
    ),
    Mutant(
        "keys come together though not all at once", "comm/transports.py:make_together",
        "gather.keeps and is_few", "is_few",
    ),
    Mutant(
        "graphs hold what spares the host", "runtime/graphs.py:with_graphs",
        "plan.overlapped or plan.transport", "plan.transport",
    ),
    Mutant(
        "calls overlap of what merges by itself", "runtime/graphs.py:with_graphs",
        "plan.transport if plan.kernel.fuses_merge else", "",
    ),
    Mutant(
        "another transport's calls are counted as this one's", "plan/ring_plan.py:RingPlan.by",
        ", _calls={})", ")",
    ),
    Mutant(
        "calls overlap as another transport's", "plan/ring_plan.py:RingPlan.by",
        "_tiles={}, _calls",
        "_calls",
    ),
    Mutant(
        "few tokens' graphs have calls that wait for one another",
        "plan/prepare.py:settle_transport",
        "overlapping.overtaken or small", "(together or overlapping).overtaken or small",
    ),
    Mutant(
        "keys that come together are read before all have come",
        "comm/gather_first.py:_Call._publish",
        "self.space.keys.publish()",
        "",
    ),
    Mutant(
        "keys that come together are written before all have read them",
        "comm/gather_symmetric.py:SymmetricGather._begin",
        "self.space.begin(rounds, back=totals is not None)",
        "self.space.begin(2 * rounds, back=totals is not None)",
    ),
    Mutant(
        "gradients are read before all have written them",
        "comm/gather_first.py:_Call._send_home",
        "self.space.grads.publish()",
        "",
    ),
    Mutant(
        "what nobody has seen has a gradient", "comm/gather_first.py:_Call._brought",
        "both.zero_()",
        "pass",
    ),
    Mutant(
        "gradients that come together are those of the last",
        "comm/gather_first.py:_Call._brought",
        "add_(both[:, here], *parts, fresh=True)",
        "add_(both[:, here], parts[-1], fresh=True)",
    ),
    Mutant(
        "gradients that come together are added in the inputs' dtype",
        "comm/gather_first.py:_Call._brought",
        "dtype=accumulation_dtype(dtype))",
        "dtype=dtype)",
    ),
    Mutant(
        "too little room for gradients that come together", "comm/gather_first.py:GatherFirst.like",
        "grads=widest * job.grad_bytes", "grads=1",
    ),
    Mutant(
        "gradients pulled from the wrong rank",
        "comm/gather_symmetric.py:SymmetricGather.users_of_own",
        "self.ranks[user]",
        "self.ranks[self.ring.rank]",
    ),
    Mutant(
        "keys written while others read", "comm/symmetric_memory.py:SymmetricWorkspace.begin",
        "if not back: self.keys.meet()", "",
    ),
    Mutant(
        "heads written while others read", "comm/all_to_all.py:SharedSwap.swap", "shelf.meet()", "",
    ),
    Mutant(
        "all that is swapped comes from one place", "comm/all_to_all.py:SharedSwap.swap",
        "sources[m.place][:, m.rows", "sources[0][:, m.rows",
    ),
    Mutant(
        "heads of another place", "comm/ulysses.py:HeadPartition.to_heads",
        "Move(place, rows, which, at, here)", "Move(place, rows, here, at, here)",
    ),
    Mutant(
        "backward begins where forward ended", "comm/symmetric_memory.py:SymmetricWorkspace.begin",
        "half=0 if back else turns % 2", "half=turns % 2",
    ),
    Mutant(
        "everybody's gradients added by every owner", "schedule/pieces.py:places",
        "if chunk.owner == owner:", "if True:",
    ),
    # heads and sequence
    Mutant(
        "key heads of another place", "comm/ulysses.py:key_heads", "(p * mine + i) // group",
        "(p + i) // group",
    ),
    Mutant(
        "only one of the replicated heads has a gradient", "comm/ulysses.py:_summed",
        "total[:, :, head] += t[:, :, i]", "total[:, :, head] = t[:, :, i]",
    ),
    Mutant(
        "sinks of other heads", "functional.py:ring_attn", "sinks[plan.ulysses.heads]",
        "sinks[: q.shape[2]]",
    ),
    Mutant(
        "slopes of other heads", "comm/ulysses.py:Ulysses.of_heads", "alibi[self.heads]",
        "alibi[: len(alibi[self.heads])]",
    ),
    Mutant(
        "a predicate counts heads from 0", "comm/ulysses.py:Ulysses.of_heads",
        "mask_mod(b, h + first,",
        "mask_mod(b, h,",
    ),
    Mutant(
        "shards land in the order of places", "comm/ulysses.py:land",
        "held.sort(key=lambda each: (each[0].start, each[1]))", "pass",
    ),
    Mutant(
        "progressions taken in turn that are not", "comm/ulysses.py:_interleaved",
        "if found == expected else None", "if expected else None",
    ),
    # autograd
    Mutant(
        "gradients divided by the ring", "attention.py:backward", "return *(total.finalize() for",
        "return *(total.finalize() / plan.ring.size for",
    ),
    Mutant(
        "gradients are zero", "attention.py:backward", "return *(total.finalize() for",
        "return *(total.finalize() * 0 for",
    ),
    Mutant(
        "dk and dv swapped", "attention.py:backward", "for total in own), dsinks",
        "for total in (own[0], own[2], own[1])), dsinks",
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
        "a sink that only lse has", "runtime/accumulate.py:OutputAccumulator.add_sinks",
        "out.mul_(weight.transpose(1, 2).unsqueeze(-1))", "pass",
    ),
    Mutant(
        "ALiBi by the places held", "plan/ring_plan.py:RingPlan._of_block",
        "positions_seen(side, mask)",
        "torch.arange(sum(s.length for s in side))",
    ),
    Mutant(
        "ALiBi of the next head", "kernels/eager.py:visible_parts", '"(g r) -> g r 1 1"',
        '"(r g) -> g r 1 1"',
    ),
    Mutant(
        "ALiBi one way only", "kernels/eager.py:visible_parts", "- tiles.cols_at[part.cols]).abs()",
        "- tiles.cols_at[part.cols])",
    ),
    Mutant(
        "a predicate ignored", "kernels/eager.py:visible_parts", "if terms.mask_mod is not None:",
        "if False:",
    ),
    Mutant(
        "a predicate of the first samples only", "kernels/eager.py:_samples",
        "tiles.first, tiles.first + len(keys.k),", "0, len(keys.k),",
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
        "heads that came by Ulysses drop as the first", "comm/ulysses.py:Ulysses.of_heads",
        "_replace(first_head=first)", "_replace(first_head=0)",
    ),
    Mutant(
        "samples drop alike", "kernels/eager.py:_marks", "rearrange(_samples(keys, tiles).int()",
        "rearrange(0 * _samples(keys, tiles).int()",
    ),
    Mutant(
        "dropout forgotten in backward", "kernels/eager.py:backward",
        '_less(einsum(dout, v, "b i g r d, b j g d -> b g r i j"), left)',
        'einsum(dout, v, "b i g r d, b j g d -> b g r i j")',
    ),
    Mutant("dropout forgotten in dv", "kernels/eager.py:backward", "p = _less(p, left)", "pass"),
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
        "keys of another sequence start anew on each rank", "plan/checks.py:one_after_another",
        "(Segment(start, 1, n),)", "(Segment(0, 1, n),)",
    ),
    Mutant(
        "positions that repeat", "plan/masks.py:repeats_problem", "a.start + a.length > b.start",
        "a.start > b.start",
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
    # kernels
    Mutant(
        "lse of the block in backward", "kernels/eager.py:backward", ".sub_(finite(lse)).exp_() dp",
        ".sub_(finite(torch.logsumexp(scores, -1, True))).exp_() dp",
    ),
    Mutant(
        "no scale on dq", "kernels/eager.py:backward",
        'dq = einsum(ds, k, "b g r i j, b j g d -> b i g r d"',
        'dq = einsum(ds / terms.scale, k, "b g r i j, b j g d -> b i g r d"',
    ),
    Mutant(
        "heads tiled, not grouped", "kernels/eager.py:by_key_head",
        '"b i (g r) d -> b i g r d", g=h_kv', '"b i (r g) d -> b i g r d", g=h_kv',
    ),
    Mutant(
        "only one head of a group in dk", "kernels/eager.py:backward",
        'einsum(ds, q, "b g r i j, b i g r d -> b j g d")',
        'einsum(ds[:, :, :1], q[:, :, :, :1], "b g r i j, b i g r d -> b j g d")',
    ),
    Mutant(
        "only one head of a group in dv", "kernels/eager.py:backward",
        'einsum(p, dout, "b g r i j, b i g r d -> b j g d")',
        'einsum(p[:, :, :1], dout[:, :, :, :1], "b g r i j, b i g r d -> b j g d")',
    ),
    Mutant(
        "slope of the softclamp forgotten", "kernels/eager.py:scores_of",
        "scores, slope = t * terms.softclamp, (1 - t.square()) * terms.scale",
        "scores = t * terms.softclamp",
    ),
    Mutant(
        "key mask ignored", "kernels/eager.py:visible_parts", "if keys.key_mask is not None:",
        "if False:",
    ),
    Mutant(
        "dk overwritten by each tile", "kernels/eager.py:backward", "running[1][:, cols] +=",
        "running[1][:, cols] =",
    ),
    Mutant(
        "an unseen row has a finite lse", "kernels/sdpa.py:forward",
        "masked_fill(call.unseen.unsqueeze(1), -torch.inf)", "contiguous()",
    ),
    Mutant(
        "key mask ignored by the fast kernel", "kernels/sdpa.py:_calls",
        "if keys.key_mask is not None:", "if False:",
    ),
    Mutant(
        "dlse forgotten by the fast kernel", "kernels/sdpa.py:backward",
        "if saved.dlse is not None:", "if False:",
    ),
    Mutant(
        "rows between documents keep what they held", "kernels/_varlen.py:VarlenCall.of_lse",
        "return _filled(lse, 2, self.row_gaps, -torch.inf)", "return lse",
    ),
    Mutant(
        "gradients between documents keep what they held", "kernels/_varlen.py:VarlenCall.of_cols",
        "1, self.col_gaps, 0.0)", "1, None, 0.0)",
    ),
    Mutant(
        "rows twice in a call", "kernels/_varlen.py:_follows",
        "ascends = last.rows.stop <= tile.rows.start", "ascends = True",
    ),
    Mutant(
        "keys joined on the left move the diagonal", "kernels/_varlen.py:_joined",
        "None if right is None else right + width", "right",
    ),
    Mutant(
        "keys of one sample for all", "kernels/_varlen.py:_sequences",
        "starts = [i * length + at.start", "starts = [at.start",
    ),
    Mutant(
        "sequences share keys whose gradients they need", "kernels/flash_attn_4.py:backward",
        "disjoint_keys=True", "disjoint_keys=False",
    ),
    Mutant(
        "flash-attn 2's way with wide bounds forgotten", "kernels/_flash.py:windows",
        "for part in _apart(tile):", "for part in (tile,):",
    ),
    Mutant(
        "dlse forgotten by kernels that don't know it", "kernels/_flash.py:with_lse_gradient",
        "if saved.dlse is None or not", "if True or not",
    ),
    Mutant(
        "a rank without queries has a gradient of lse", "kernels/_flash.py:with_lse_gradient",
        "if saved.dlse is None or not saved.dlse.numel():", "if saved.dlse is None:",
    ),
    Mutant(
        "a stretch ends a column early", "kernels/flex.py:_stretches", "else row + right + 1",
        "else row + right",
    ),
    Mutant(
        "stretches joined over what lies between", "kernels/flex.py:_stretches",
        "free | (stops == start)", "free | (stops <= start)",
    ),
    Mutant(
        "cells that hide something are full", "kernels/flex.py:_mask", "*_in_order(count == full)",
        "*_in_order(count > 0)",
    ),
    Mutant(
        "a predicate of local places", "kernels/flex.py:_of_positions",
        "h.long(), rows_at[i], cols_at[j])", "h.long(), i.long(), j.long())",
    ),
    Mutant(
        "a predicate's samples count anew", "kernels/flex.py:_block", "tiles.first + torch.arange",
        "torch.arange",
    ),
    Mutant(
        "a part's delta is the whole's", "kernels/flex.py:backward", "- weight * saved.delta",
        "- saved.delta",
    ),
    # agreement
    Mutant(
        "ranks may differ", "comm/agreement.py:_check_same", "if len({*texts}) > 1:", "if False:",
    ),
    Mutant(
        "what one ring gets wrong is kept to itself", "comm/agreement.py:raise_together",
        "if ring.several:", "if False:",
    ),
    Mutant(
        "positions that one ring repeats are kept to itself", "plan/prepare.py:place_tokens",
        "repeats_problem(both) if dropped else None", "None",
    ),
    Mutant(
        "a predicate's error is kept to itself", "plan/masks.py:mask_mod_problem",
        "except Exception as",
        "except OSError as",
    ),
    Mutant(
        "a rank's problem is kept to itself", "comm/agreement.py:agree",
        '_shortened(problem or ring.problem or "") or None', "None",
    ),
    Mutant(
        "lengths need not be the layout's", "plan/checks.py:shards_problem",
        "if lengths == expected:",
        "if True:",
    ),
    Mutant(
        "any plan will do", "plan/ring_plan.py:RingPlan.check",
        "!= self.signature:", "is None:",
    ),
]  # fmt: skip


# --- the battery: what runs over a mutant ---


def battery() -> Iterator[Case]:
    """Cases that fail where something is wrong."""
    from tests import threads
    from tests.cases import Attention, check_in_threads, check_symmetric

    torch.set_num_threads(1)
    threads.PATIENCE = 10.0
    cases = [
        (Attention(12, "zigzag", causal=True, kernel="eager"), 3),
        (Attention(12, kernel="sdpa"), 4),
        (Attention(13, "striped", causal=True, window=3, kernel="eager"), 3),
        (Attention(31, "zigzag", causal=True, window=4, masked=True, kernel="eager"), 4),
        (Attention(31, "contiguous", window=9, masked=True, kernel="sdpa"), 3),
        (Attention(24, "zigzag", causal=True, window=1, softclamp=1.0), 3),
        (Attention(16, "zigzag", causal=True, masked=True, kernel="sdpa", heads=6), 2),
        (Attention(16, masked=True, heads=3, key_heads=1, kernel="eager"), 4),
        (Attention(24, "striped", window=3, kernel="sdpa", dtype=torch.float32), 3),
        (Attention(7, "zigzag", causal=True, masked=True), 8),
        (Attention(11, key_lengths=(3, 0, 8)), 3),
        (Attention(13, batch=1, heads=1, key_heads=1, d=3, d_v=5, dtype=torch.float32), 3),
        (Attention(29, "zigzag", causal=True, d_v=5, transport="gather", kernel="eager"), 4),
        (Attention(31, "contiguous", window=7, masked=True, transport="gather", memory=0), 3),
        (Attention(23, "striped", causal=True, masked=True, transport="gather", batch=1), 4),
        (Attention(23, "zigzag", causal=True, ulysses=2, heads=4, key_heads=1, masked=True), 4),
        (Attention(23, "striped", causal=True, ulysses=3, heads=6, key_heads=2), 3),
        (Attention(23, "striped", causal=True, ulysses=2, transport="gather"), 4),
        (Attention(12, "striped", causal=True, window=2, ids=((0,) * 3 + (1,) * 9,)), 3),
        (Attention(12, ids=((0,) * 12, (3, 3, 0, 0) * 3), kernel="eager"), 4),
        (Attention(12, "zigzag", ids=((0,) * 6 + (2,) * 6, (0,) * 5 + (2,) * 7), borders=True), 2),
        (Attention(12, causal=True, window=2, batch=3, ids=(*[(1, 1, 0) * 4] * 2, (0,) * 12)), 2),
        (Attention(8, ids=((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 0, 1, 1, 1))), 4),
    ]
    for case, size in cases:
        yield lambda case=case, size=size: check_in_threads(case, size)
    shared = Attention(29, "zigzag", causal=True, masked=True, d_v=5, kernel="eager")
    yield lambda: check_symmetric(shared, 4, 2)
    yield lambda: check_symmetric(replace(shared, ulysses=4), 4, 2)
    yield lambda: check_symmetric(shared, 4, 9, late=True)
    yield lambda: check_symmetric(shared, 4, 9, together=True)
    yield zigzag_is_balanced
    yield gathered_keys_are_few_large_tiles
    yield the_same_is_dropped_everywhere
    yield a_bias_keeps_its_digits
    yield dealt_layouts_are_even
    yield a_document_ends_where_another_begins
    yield blocks_know_their_tiles
    yield calls_are_counted
    yield from no_ring_is_left_alone()
    yield from streams_wait_for_one_another()
    yield from calls_go_side_by_side_where_they_may()
    yield from graphs_are_replayed_with_what_is_given()
    yield mismatches_are_errors
    yield plans_are_checked
    yield from keys_come_in_stages_where_they_are_late()
    yield from keys_come_together_where_they_are_few()
    yield from prefixes_and_positions_hold()
    yield from predicates_are_fused()
    yield from other_kernels_calls_cover_the_tiles()
    yield sums_of_16_bits_are_kept_in_32
    yield from shared_memory_is_read_before_it_is_written()


def patched(check: Callable[..., None], *given: Any, **named: Any) -> Case:
    """A case that is given a MonkeyPatch last of all."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(*given, patch, **named)

    return run


def shared_memory_is_read_before_it_is_written() -> Iterator[Case]:
    """By a rank that is late."""
    from tests.test_transports import test_shared_memory_is_written_anew_when_all_have_read_it

    for at_once, ulysses, how in ((3, 1, {}), (1, 2, {}), (3, 1, dict(together=True))):
        yield partial(
            test_shared_memory_is_written_anew_when_all_have_read_it, at_once, ulysses, how
        )


def keys_come_in_stages_where_they_are_late() -> Iterator[Case]:
    """And calls wait for theirs, and what is shared for its readers."""
    from tests import test_running, test_transports, test_ulysses

    for tokens, late, otherwise in test_transports.LATE:
        yield partial(
            test_transports.test_few_tokens_of_many_ranks_come_late, tokens, late, otherwise
        )
    yield patched(test_transports.test_calls_wait_for_the_keys_of_their_own_stage, late=True)
    yield patched(test_transports.test_dq_waits_for_no_gradients_that_come_home, wide=True)
    yield patched(test_transports.test_a_turn_of_several_says_that_the_last_one_was_read)
    yield patched(test_transports.test_ranks_of_one_machine_gather_and_swap_out_of_shared_memory)
    yield patched(test_transports.test_shelves_stay_whose_graphs_others_captured)
    yield patched(test_ulysses.test_what_a_graph_reads_is_made_before_it_and_stays)
    yield test_transports.test_what_comes_but_once_is_not_kept
    for aside in test_transports.ASIDE:
        yield partial(test_transports.test_gradients_come_aside_where_that_is_hidden, *aside)
    yield partial(test_running.test_what_is_not_yet_to_be_read_is_not_read, wide=False, moved=True)
    for asks in (False, True):
        yield partial(test_running.test_a_sum_is_made_where_it_has_to_be, asks)
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(test_running.test_parts_that_fill_their_place_are_the_result, dtype)
        yield partial(test_running.test_parts_that_do_not_are_put_together, dtype)
    yield test_running.test_the_place_of_parts_goes_when_they_were_read
    yield test_ulysses.test_a_shelf_has_room_for_all_that_is_swapped


def keys_come_together_where_they_are_few() -> Iterator[Case]:
    """And from no rank to two others at a time."""
    from tests import test_transports

    yield test_transports.unseen_keys_have_no_gradient
    yield test_transports.plans_know_their_own_transport
    yield test_transports.gradients_that_come_together_are_added_wide
    yield patched(test_transports.few_may_be_short)
    for few in test_transports.FEW:
        yield patched(test_transports.test_few_tokens_come_together, *few)
    yield patched(test_transports.test_keys_and_values_of_a_piece_come_by_one_copy, False, 18)
    for layout in ("zigzag", "contiguous"):
        yield partial(
            test_transports.test_no_two_ranks_pull_from_one_at_a_time, 4, layout, causal=True
        )


def no_ring_is_left_alone() -> Iterator[Case]:
    """With what one of them gets wrong."""
    from tests import test_agreement

    for kind in ("lengths", "positions"):
        yield partial(test_agreement.test_what_one_ring_gets_wrong_the_other_is_told, kind)
    yield test_agreement.test_a_predicate_that_fails_on_one_rank_is_told_to_all
    yield test_agreement.test_a_problem_of_one_rank_is_raised_on_all_and_names_it


def streams_wait_for_one_another() -> Iterator[Case]:
    """And whoever reads what is made on other streams waits for them."""
    from tests import test_running, test_streams

    for name in ("a_call_waits_for_what_was_before_and_nothing_waits_for_it_until_joined",
                 "calls_for_own_keys_give_way_to_the_others",
                 "what_is_behind_waits_for_all_others_whether_there_are_own_keys_or_not",
                 "what_is_behind_does_not_wait_for_own_keys",
                 "what_is_written_is_not_used_again_before_that",
                 "what_is_read_is_not_used_again_before_that"):  # fmt: skip
        check = getattr(test_streams, f"test_{name}")
        yield patched(lambda patch, check=check: check(test_streams.stood_in(patch)))
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(test_running.test_a_part_that_is_all_there_is_is_the_result_itself, dtype)
        yield partial(test_running.test_a_sum_of_parts_waits_for_them, dtype)


def graphs_are_replayed_with_what_is_given() -> Iterator[Case]:
    """Those that can be."""
    from tests import test_graphs
    from tests.test_streams import stood_in

    def on_cpu(check: Callable[[pytest.MonkeyPatch], None]) -> Case:
        return patched(lambda patch: (test_graphs.stand_in(patch), check(patch)))

    shared = test_graphs.test_layers_that_share_graphs_get_what_is_theirs
    second = test_graphs.test_the_first_call_goes_as_ever_and_the_second_is_captured
    other = test_graphs.test_graphs_of_other_memory_or_other_kernels_are_not_replayed
    yield test_graphs.test_what_travels_in_messages_is_refused
    yield test_graphs.test_what_a_graph_holds_overlaps
    yield patched(test_graphs.test_what_graphs_of_ours_read_need_not_stay)
    yield test_graphs.test_layers_that_drop_otherwise_have_graphs_of_their_own
    yield on_cpu(lambda _: shared(None, overtaken=True))
    yield on_cpu(lambda patch: second(None, patch))
    yield on_cpu(test_graphs.test_the_first_call_makes_what_is_made_for_the_graph)
    yield on_cpu(lambda _: test_graphs.another_plan_has_no_graphs_of_this_one())
    yield test_graphs.test_a_gathers_graphs_are_of_the_shelves_at_hand
    yield patched(test_graphs.batches_alike_share_graphs)
    yield patched(test_graphs.what_is_changed_on_a_module_counts)
    yield patched(test_graphs.others_lengths_make_another_kind)
    yield on_cpu(lambda patch: other(None, patch, "memory"))
    yield patched(lambda patch: test_graphs.replays_wait_for_those_before(stood_in(patch), patch))


def zigzag_is_balanced() -> None:
    """Causal work is equal on all ranks: what it is for, though any layout gives right results."""
    from ring_attention_pytorch.geometry.layouts import all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

    everyone = all_segments("zigzag", 4, 32)
    work = {sum(visible_pairs(tiles(q, k, Mask(True))) for k in everyone) for q in everyone}
    assert len(work) == 1


def gathered_keys_are_few_large_tiles() -> None:
    """At most two calls for all other ranks' keys: what gathering is for."""
    from ring_attention_pytorch.comm.ulysses import land
    from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles
    from ring_attention_pytorch.schedule.pieces import Workload, joined, schedule

    for layout, visible in [
        ("zigzag", Mask(causal=True)),
        ("zigzag", Mask()),
        ("contiguous", Mask(causal=True, window=30)),
    ]:
        everyone = all_segments(layout, 5, 53)
        (group,) = schedule(Workload(everyone, everyone, visible), at_once=4)
        for rank, mine in enumerate(everyone):
            assert len(tiles(mine, joined(group.pieces[rank]), visible)) <= 2
    assert all(len(land(all_segments(layout, 5, 53))[0]) == 1 for layout in LAYOUTS)


def prefixes_and_positions_hold() -> Iterator[Case]:
    """The features whose masks are no arithmetic of a layout alone."""
    from tests.features import FEATURES, Problem, together

    def holds(feature: Any, *how: Any, **named: Any) -> None:
        errors = Problem(feature).errors(*how, **named)
        assert max(errors.values()) < 1e-12, errors

    for name in ("prefix", "positions", "sinks", "alibi", "bias of heads", "mask_mod"):
        wanted = FEATURES[name] | FEATURES["gradient of lse"]
        yield partial(holds, wanted, 3, "zigzag", "eager")
    yield partial(holds, together(("sinks", "alibi", "mask_mod")), 4, "zigzag", ulysses=2)
    yield partial(holds, FEATURES["mask_mod"] | FEATURES["documents"], 2, "striped", "eager")


def predicates_are_fused() -> Iterator[Case]:
    """FlexAttention's adapter, over a stand-in that goes by the cells of masks."""
    from tests.features import Problem, together
    from tests.flex_on_cpu import stood_in
    from tests.kernel_cases import CASES, faults

    def alone(number: int) -> None:
        with stood_in():
            assert not (found := faults(CASES[number], "flex", "cpu")), found

    def on_a_ring() -> None:
        names = ("mask_mod", "documents", "gradient of lse")
        with stood_in():
            errors = Problem(together(names)).errors(2, "striped", "flex")
        assert max(errors.values()) < 1e-12, errors

    yield from (partial(alone, number) for number in (2, 5))
    yield on_a_ring


def other_kernels_calls_cover_the_tiles() -> Iterator[Case]:
    """By stand-ins; and of a rank without queries, which has no tiles."""
    from tests.kernel_cases import KernelCase, faults
    from tests.test_adapters import ODD, STAND_INS, can

    def covers(kernel: str, case: KernelCase, patch: pytest.MonkeyPatch) -> None:
        STAND_INS[kernel](patch)
        assert not faults(replace(case, dtype=torch.float64), kernel, "cpu"), case

    for kernel in STAND_INS:
        for case in ODD:
            if can(kernel, case):
                yield patched(covers, kernel, case)
        yield patched(nothing_has_no_gradients, kernel)


def nothing_has_no_gradients(kernel: str, patch: pytest.MonkeyPatch) -> None:
    from ring_attention_pytorch.kernels import KERNELS
    from ring_attention_pytorch.runtime.accumulate import GradAccumulator
    from ring_attention_pytorch.runtime.interfaces import Grads, KVBlock, Residuals, ScoreMods
    from tests.test_adapters import STAND_INS

    STAND_INS[kernel](patch)
    none, keys = torch.zeros(1, 0, 2, 8), torch.zeros(1, 3, 2, 8)
    saved = Residuals(none, none, torch.zeros(1, 2, 0), none, torch.zeros(1, 2, 0))
    grads = Grads(GradAccumulator(none), GradAccumulator(keys), GradAccumulator(keys))
    KERNELS[kernel].backward(
        saved, KVBlock(keys, keys, None, ()), (), ScoreMods(1.0, None, 8), grads
    )


def the_same_is_dropped_everywhere() -> None:
    """Over rings, heads swapped or not, by a seed that one rank drew; not in another layer."""
    from ring_attention_pytorch.functional import ring_attn
    from ring_attention_pytorch.plan.ring_plan import RingPlan
    from tests import threads
    from tests.features import FEATURES, Problem, drawn, refusal
    from tests.reference import relative_error

    problem = Problem(FEATURES["dropout"] | FEATURES["causal"])
    for size, way in ((3, {}), (2, dict(ulysses=2))):
        problem.feature = replace(problem.feature, ring=FEATURES["dropout"].ring | way)
        errors = problem.errors(size, "zigzag", "eager")
        assert max(errors.values()) < 1e-12, errors
    q, k = drawn(1, 4, 2, 4, seed=1), drawn(1, 12, 2, 4, seed=2)
    whole = ring_attn(q, k, k, dropout=0.5, dropout_seed=1)

    def main(ring: threads.ThreadRing) -> tuple[float, int]:
        here, theirs = (t.tensor_split(2, dim=1)[ring.rank] for t in (q, k))
        got = ring_attn(here, theirs, theirs, dropout=0.5, dropout_seed=1, group=ring)
        plan = RingPlan.make(here, theirs, theirs, dropout=0.5, group=ring)
        return (
            relative_error(got, whole.tensor_split(2, dim=1)[ring.rank]),
            plan.terms.dropout.seed,
        )

    (error, seed), (other_error, other_seed) = threads.run(2, main)[0]
    assert max(error, other_error) < 1e-12
    assert seed == other_seed
    plan = RingPlan.make(q, q, q, dropout=0.5)
    assert len({plan.for_layer(i).terms.dropout.seed for i in range(3)}) == 3
    again = dict.fromkeys(("query_positions", "key_positions"), q[0, :, 0, 0].long() * 0)
    assert refusal(lambda: ring_attn(q, q, q, dropout=0.5, **again)) is not None


def a_bias_keeps_its_digits() -> None:
    """Large ones in 16 bits, too."""
    from ring_attention_pytorch.runtime.scores import with_bias

    bias = torch.tensor([[100.5, -3.14159, 17.0]]).bfloat16()
    q, k = with_bias(*[torch.zeros(1, n, 1, 8).bfloat16() for n in (1, 3)], bias, 128**-0.5)
    got = 128**-0.5 * q[0, :, 0].float() @ k[0, :, 0].float().T
    assert (got / bias.float() - 1).abs().max() < 1e-4


def dealt_layouts_are_even() -> None:
    """As zigzag, but of documents: no rank has much more to do than another."""
    from ring_attention_pytorch.geometry.balance import balanced
    from ring_attention_pytorch.geometry.documents import of_borders
    from ring_attention_pytorch.geometry.tiles import Mask, tiles, visible_pairs

    borders = [0, 700, 720, 1500, 1600, 4096]
    everyone, visible = balanced(borders, 4).segments, Mask(True, None, of_borders(borders))
    work = [sum(visible_pairs(tiles(q, k, visible)) for k in everyone) for q in everyone]
    assert max(work) < 1.05 * sum(work) / 4
    assert max(map(len, balanced([0, 4096], 4).segments)) == 2  # two chunks each are enough


def a_document_ends_where_another_begins() -> None:
    """What its last token would have to predict is not its business."""
    from ring_attention_pytorch.geometry.documents import last_of_document, of_borders

    found = last_of_document((of_borders([0, 2, 2, 5]),), torch.arange(5))
    assert found.tolist() == [[False, True, False, False, True]]


def blocks_know_their_tiles() -> None:
    """The Triton kernels' tables: every tile that a block meets is in its range."""
    from ring_attention_pytorch.geometry.documents import of_borders
    from ring_attention_pytorch.geometry.layouts import all_segments
    from ring_attention_pytorch.geometry.tiles import Mask, tiles
    from ring_attention_pytorch.kernels._tile_table import tile_table

    (whole,) = all_segments("contiguous", 1, 40)
    found = tiles(whole, whole, Mask(True, None, of_borders(range(0, 41, 5))))
    table = tile_table(found, "rows", 8, torch.empty(1, 40), every=True)
    for number, first, last in table.blocks.tolist():
        here = range(8 * number, 8 * number + 8)
        meets = [i for i, t in enumerate(found) if {*range(t.rows.start, t.rows.stop)} & {*here}]
        assert meets == list(range(first, last))


def calls_are_counted() -> None:
    """Else a kernel would round before the end."""
    from ring_attention_pytorch.runtime.accumulate import GradAccumulator
    from tests.cases import Attention, miscounted

    total = GradAccumulator(torch.empty(1, 2, 1, dtype=torch.bfloat16), calls=2)
    assert [total.room()[1].dtype for _ in range(2)] == [torch.float32, torch.bfloat16]

    assert not miscounted(Attention(29, "zigzag", causal=True, transport="gather"), 3)


def calls_go_side_by_side_where_they_may() -> Iterator[Case]:
    from tests.test_transports import test_calls_go_side_by_side_where_keys_stay

    for how, at_once, aside in ((dict(), 3, True), (dict(memory=0), 1, False)):
        yield partial(test_calls_go_side_by_side_where_keys_stay, how, at_once, aside)


def sums_of_16_bits_are_kept_in_32() -> None:
    """One rounding at the end: 2 ** -9, however many blocks are summed."""
    from tests import threads
    from tests.cases import Attention, errors, oracle, shard

    case = Attention(256, kernel="eager", dtype=torch.bfloat16, batch=1, d=16, d_v=16)
    got, _ = threads.run(8, lambda ring: shard(case, ring))
    for rank, mine in enumerate(got):
        assert mine[1].dtype == torch.float32
        assert max(errors(case, rank, 8, mine, oracle(case)).values()) < 2**-8


def mismatches_are_errors() -> None:
    """A rank that differs, errs or holds another's tokens: ValueError on all ranks."""
    from ring_attention_pytorch.functional import ring_attn
    from tests import threads

    def said(n: Callable[[int], int], causal: Callable[[int], bool], window: int | None) -> list:
        def main(ring: threads.ThreadRing) -> bool:
            q = torch.randn(1, n(ring.rank), 2, 4)
            try:
                ring_attn(q, q, q, causal=causal(ring.rank), window=window, group=ring)
            except ValueError:
                return True
            return False

        return threads.run(3, main)[0]

    assert said(lambda r: 4, lambda r: r == 1, None) == [True] * 3
    assert said(lambda r: 4, lambda r: True, -1) == [True] * 3
    assert said(lambda r: 4 + r, lambda r: True, None) == [True] * 3


def plans_are_checked() -> None:
    """A plan is for tensors of one shape."""
    from ring_attention_pytorch.functional import ring_attn
    from ring_attention_pytorch.plan.ring_plan import RingPlan

    q = torch.randn(1, 5, 2, 4)
    try:
        ring_attn(q[:, :3], q, q, plan=RingPlan.make(q, q, q))
    except ValueError:
        return
    raise AssertionError("a plan for other tensors was used")


if __name__ == "__main__":
    hunt.main("tests.mutants")
