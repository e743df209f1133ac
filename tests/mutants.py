"""Planted faults: each must make a small battery of cases fail, or the tests prove nothing.

A mutant is one change to the source of one file. `python -m tests.mutants` runs the battery
for the sources as they are and then for each mutant, in a process of its own over a changed
copy of the package, and prints one line of JSON: what was found, by name; null is nothing.
"""

import compileall
import itertools
import json
import multiprocessing as mp
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "ring_attention_pytorch"
SECONDS = 60


class Mutant(NamedTuple):
    name: str
    file: str  # of the package
    old: str  # occurs exactly once
    new: str


MUTANTS = [
    # layouts
    Mutant("causal off by one", "layouts.py", "right = gap // stride", "right = gap // stride - 1"),
    Mutant(
        "causal off by one in strides", "layouts.py", "right = gap // stride",
        "right = -(-gap // stride)",
    ),
    Mutant(
        "window off by one", "layouts.py", "left, right = (visible.window - gap) // stride,",
        "left, right = (visible.window + 1 - gap) // stride,",
    ),
    Mutant(
        "window forgotten in one direction", "layouts.py", "(visible.window + gap) // stride",
        "None",
    ),
    Mutant(
        "window forgotten under causal", "layouts.py",
        "if visible.window is not None:\n        left",
        "if visible.window is not None and not visible.causal:\n        left",
    ),
    Mutant("band off by one", "layouts.py", "seen &= offset <= right", "seen &= offset < right"),
    Mutant(
        "buckets forget how far down they are", "layouts.py",
        "None if right is None else right + above", "right",
    ),
    Mutant(
        "staircase joined whatever lies below", "layouts.py",
        "if not (full_below and beside and", "if not (beside and",
    ),
    Mutant(
        "a needed distance forgotten", "layouts.py", "for t in range(1, ring_size)\n",
        "for t in range(1, ring_size - 1)\n",
    ),
    Mutant(
        "zigzag without its mirror", "layouts.py", "[rank, 2 * ring_size - 1 - rank]",
        "[rank, ring_size + rank]",
    ),
    Mutant(
        "longer chunks counted twice", "layouts.py", "c * size + min(c, longer)",
        "c * size + longer",
    ),
    # documents
    Mutant(
        "documents see one another", "layouts.py", "for k in theirs.get(document, ())",
        "for k in sum(theirs.values(), [])",
    ),
    Mutant(
        "a document's last token left out", "segments.py", "-(-(stop - position) // stride)",
        "(stop - position) // stride",
    ),
    Mutant(
        "a document that goes on starts anew", "segments.py", "before = held.get(document, 0)",
        "before = 0",
    ),
    Mutant(
        "all samples have the first one's documents", "masks.py",
        "visible._replace(documents=documents)", "visible._replace(documents=packing[0])",
    ),
    Mutant(
        "samples that see alike are only the first", "masks.py",
        "stop = start + len(list(alike))", "stop = start + 1",
    ),
    Mutant(
        "what only a later sample needs is not sent", "transports/pieces.py",
        "self.apart or (self.visible,)", "self.apart[:1] or (self.visible,)",
    ),
    Mutant(
        "ids taken for another rank's", "documents.py", "in zip(segments, notes):",
        "in zip(reversed(segments), notes):",
    ),
    Mutant(
        "a prefix hides its later tokens", "layouts.py",
        "if visible.causal and not within:", "if visible.causal:",
    ),
    Mutant(
        "later tokens are seen from the prefix", "layouts.py",
        "max(q.start, k.start) < visible.prefix", "q.start < visible.prefix",
    ),
    Mutant(
        "positions of keys taken for queries'", "masks.py", "note[i]) for note in notes)",
        "note[0]) for note in notes)",
    ),
    Mutant(
        "a document's last token predicts the next one's", "documents.py",
        "torch.tensor([run.stop - 1", "torch.tensor([run.stop",
    ),
    Mutant(
        "the heaviest to who has most", "balance.py", "key=loads.__getitem__)",
        "key=loads.__getitem__, reverse=True)",
    ),
    Mutant(
        "work of the whole sequence, not of documents", "balance.py",
        "- offsets.repeat_interleave(lengths)", "- 0 * offsets.repeat_interleave(lengths)",
    ),
    Mutant(
        "a block forgets the tile that began before it", "kernels/triton.py",
        "bisect_right(stops, at)", "bisect_left(starts, at)",
    ),
    Mutant(
        "a block forgets its last tile", "kernels/triton.py",
        "bisect_left(starts, at + block)", "bisect_left(starts, at + block) - 1",
    ),
    # merging and precision
    Mutant(
        "every call of a kernel rounds as the last", "running.py",
        "return last if calls == 1 else running,", "return last if calls else running,",
    ),
    Mutant(
        "own keys kept for the end are forgotten", "transports/gather.py",
        "        if cut < length:\n            yield from _of",
        "        if False:\n            yield from _of",
    ),
    Mutant(
        "own keys kept for the end land first", "transports/gather.py",
        "part.move_to(total, at.start)", "part.move_to(total, 0)",
    ),
    Mutant(
        "a call of the kernel is not counted", "transports/gather.py",
        "        if cut < length:\n            yield stretch(own, slice(cut, length))\n", "",
    ),
    Mutant(
        "merge weights swapped", "rows.py", "torch.sigmoid(part_lse - lse)",
        "torch.sigmoid(lse - part_lse)",
    ),
    Mutant(
        "merge does not rescale", "rows.py",
        "merged.lerp_(part.to(wide), weight.transpose(1, 2).unsqueeze(-1))",
        "merged.add_(part * weight.transpose(1, 2).unsqueeze(-1))",
    ),
    Mutant(
        "merge of two -inf is NaN", "rows.py",
        ".masked_fill_(part_lse == -torch.inf, 0.0)", "",
    ),
    Mutant(
        "lse is that of the last block", "rows.py", "torch.logaddexp(lse, part_lse, out=lse)",
        "lse.copy_(part_lse)",
    ),
    Mutant(
        "running sums in half precision", "rows.py",
        "torch.promote_types(dtype, torch.float32)",
        "dtype if dtype == torch.float64 else torch.bfloat16",
    ),
    Mutant(
        "running sums in the inputs' precision", "rows.py",
        "torch.promote_types(dtype, torch.float32)", "dtype",
    ),
    Mutant(
        "sums do not wait for their parts", "running.py",
        'to be added to in place."""\n        self._join()',
        'to be added to in place."""',
    ),
    Mutant(
        "a result does not wait for its parts", "running.py",
        "lse in the accumulator's.\"\"\"\n        join(self._q.device)",
        "lse in the accumulator's.\"\"\"",
    ),
    # calls side by side
    Mutant(
        "a call waits for nothing", "lanes.py",
        "        self.stream.wait_event(lanes.begins)\n", "",
    ),
    Mutant(
        "memory is used again that a call writes", "lanes.py",
        "                t.record_stream(self.stream)", "                pass",
    ),
    Mutant(
        "what is sent last is not waited for", "lanes.py", "in range(len(_PRIORITIES))",
        "in range(len(_PRIORITIES) - 1)",
    ),
    Mutant(
        "what is sent does not wait for the last call", "lanes.py", "for lane in _OTHERS:",
        "for lane in _OTHERS[:1]:",
    ),
    Mutant(
        "the others' calls do not go first", "lanes.py", "(0, -1, -1, -1)", "(0, 0, 0, -1)",
    ),
    Mutant(
        "own keys' calls are taken for others'", "plan.py", ", own=True)", ")",
    ),
    Mutant(
        "half of own keys are others'", "transports/gather.py", "keys._replace(k=k,",
        "keys._replace(own=False, k=k,",
    ),
    Mutant(
        "calls side by side whose keys go away", "transports/gather.py",
        "return len(self.groups) == 1", "return True",
    ),
    Mutant(
        "own keys wait for the end of one group of several", "transports/symmetric.py",
        "overtaken and len(groups) == 1", "overtaken",
    ),
    Mutant(
        "keys are computed on before their stage has come", "transports/symmetric.py",
        "                shelf.join(end)\n                if part", "                if part",
    ),
    Mutant(
        "the next of several turns comes before all is read", "transports/symmetric.py",
        "parts if len(self.groups) == 1 else [*parts]", "parts",
    ),
    Mutant(
        "gradients of several turns are not read before the next", "transports/symmetric.py",
        "            if len(self.groups) > 1:\n                shelf.join(end)\n", "",
    ),
    Mutant(
        "dq waits for gradients that come home", "running.py",
        "if self._crowded and not self._waits:", "if self._crowded:",
    ),
    Mutant(
        "what is moved to another sum is read at once", "running.py",
        "        whole._waits += self._waits\n", "",
    ),
    Mutant(
        "what documents need is kept when they are gone", "transports/pieces.py",
        "(keeping if blocks.lasting else make)", "keeping",
    ),
    Mutant(
        "shelves stay that graphs of ours outgrew", "lanes.py",
        "return capturing(device) and not _captures.passing", "return capturing(device)",
    ),
    Mutant(
        "graphs of ours are taken for others'", "graphs.py", "with passing_capture(), torch",
        "with torch",
    ),
    Mutant(
        "nobody asks for stages", "transports/__init__.py",
        "late = keys_come_late(blocks, at_once, job)", "late = False",
    ),
    Mutant(
        "a graph's tables go away", "transports/swap.py",
        "            shelf.read_by_graphs.add(known[key].table)\n", "            pass\n",
    ),
    Mutant(
        "tables stay though no graph reads them", "transports/swap.py",
        "        if captured:\n            shelf", "        if True:\n            shelf",
    ),
    Mutant(
        "too little room for out and lse", "ulysses.py",
        "        (like(v, places * rows, heads), lse),\n", "",
    ),
    Mutant(
        "all ranks pull from the last one at a time", "transports/symmetric.py",
        "_in_rounds(found[::-1] if most_in_front(group) else found)", "_in_rounds(found)",
    ),
    Mutant(
        "all ranks pull from the first one at a time", "transports/symmetric.py",
        "_in_rounds(found[::-1] if most_in_front(group) else found)", "_in_rounds(found[::-1])",
    ),
    Mutant(
        "gradients wait for copy engines though nothing goes on", "transports/pieces.py",
        "(2 * brought + coming / 2)", "(coming / 2)",
    ),
    Mutant(
        "the first part is added to what was there", "rows.py",
        "elif not fresh and len(parts) == 1:", "elif len(parts) == 1:",
    ),
    Mutant(
        "a part in its place is lost", "running.py", "fresh=len(others) == len(parts))",
        "fresh=True)",
    ),
    Mutant(
        "two parts in one place", "running.py", "or apart or not _free(at, self._taken)",
        "or apart",
    ),
    Mutant(
        "two results in one place", "running.py",
        "self._place is None or not _free(rows, self._taken)", "self._place is None",
    ),
    Mutant(
        "parts that lie elsewhere are taken to be in their place", "running.py",
        "return found == [(at, first + at.start * step) for at in taken]", "return True",
    ),
    Mutant(
        "a place that is half full is taken to be full", "running.py",
        "if not taken or sum(at.stop - at.start for at in taken) < place.shape[1]:",
        "if not taken:",
    ),
    Mutant(
        "the place of a result stays when it was read", "running.py",
        "self._parts, self._place, self._taken = [], None, []",
        "self._parts, self._taken = [], []",
    ),
    Mutant(
        "the place of a sum stays when it was read", "running.py",
        "            self._place, self._taken = None, []\n        for",
        "            pass\n        for",
    ),
    Mutant(
        "a running sum does not come to its place", "running.py",
        "self._place.copy_(wide)", "self._place",
    ),
    Mutant(
        "gradients are added before they have come home", "transports/symmetric.py",
        "total.after(partial(shelf.join, end))", "pass",
    ),
    Mutant(
        "a sum is read before what it waits for", "running.py", "self._waits.pop()()",
        "self._waits.pop()",
    ),
    Mutant(
        "the second stage brings what the first did", "transports/pieces.py", "others[half:]",
        "others[:half]",
    ),
    Mutant(
        "keys come in stages where they are in time", "transports/pieces.py", "mine < others for",
        "mine > others for",
    ),
    Mutant(
        "keys come in stages where some have none of their own", "transports/pieces.py",
        "min(own) > 0 and ", "",
    ),
    # graphs
    Mutant(
        "a graph reads what it was captured with", "graphs.py",
        "torch._foreach_copy_(self._filled, [t for t in given if t is not None])", "pass",
    ),
    Mutant(
        "a layer's results become the next one's", "graphs.py",
        "None if t is None else t.clone()", "t",
    ),
    Mutant(
        "a replay does not wait for those before", "graphs.py",
        "current.wait_stream(self._last)", "pass",
    ),
    Mutant(
        "graphs of memory that is left", "graphs.py", "            self._kept.clear()\n", "",
    ),
    Mutant(
        "one graph whatever is given", "graphs.py",
        "            *(None if t is None else t.dtype for t in given),\n", "",
    ),
    Mutant(
        "what is made once is made in a graph", "graphs.py", "if not self._warm:", "if False:",
    ),
    Mutant(
        "the first call is of tensors that lie otherwise", "graphs.py",
        "found = function(*self._places)", "found = function(*given)",
    ),
    Mutant(
        "a plan that was replaced keeps graphs", "plan.py", "default=None, init=False, compare",
        "default=None, compare",
    ),
    Mutant(
        "a replay takes shelves as they were", "transports/symmetric.py",
        "        self.space.follow_stream()\n        return", "        return",
    ),
    Mutant(
        "graphs of one batch's mask are another's", "graphs.py",
        "(plan.key_mask, plan.packing, plan.terms.dropout)", "(None, plan.packing, None)",
    ),
    Mutant(
        "batches of other lengths share graphs", "graphs.py",
        "plan.signature, plan.blocks, swapped, plan.terms", "swapped, plan.terms",
    ),
    Mutant(
        "each batch is captured anew", "graphs.py", "self._plans.pop(kind, None) or (plan",
        "(plan",
    ),
    Mutant(
        "what comes once is captured", "graphs.py", "(plan.in_graphs() if known else None)",
        "plan.in_graphs()",
    ),
    Mutant(
        "neighbours of other lengths share graphs", "graphs.py",
        "plan.blocks, swapped,", "plan.blocks,",
    ),
    Mutant(
        "graphs go on with what a module was", "graphs.py", "plan.terms, plan.kernel", "plan.kernel"
    ),
    Mutant(
        "graphs of all batches stay", "graphs.py", "len(self._plans) > _KINDS", "False"
    ),
    Mutant(
        "layers that drop otherwise have graphs anew each time", "graphs.py",
        "if number not in self._layers:", "if True:",
    ),
    Mutant(
        "a ring's messages are captured", "transports/send_recv.py",
        "return self.distances == (0,)", "return True",
    ),
    Mutant(
        "a gather's messages are captured", "transports/gather.py",
        "return not self.groups\n", "return True\n",
    ),
    # the ring
    Mutant(
        "a gradient hop dropped", "transports/send_recv.py",
        "_add(grads, opened(received, forms[self._owner(here)]))", "pass",
    ),
    Mutant(
        "gradients not brought home", "transports/send_recv.py",
        "_add(own, opened(received, forms[self.ring.rank]))", "pass",
    ),
    Mutant(
        "gradients home to the wrong rank", "transports/send_recv.py",
        "ends = [*self.distances[2:], self.ring.size]",
        "ends = [*self.distances[2:], self.ring.size - 1]",
    ),
    Mutant(
        "keys of the wrong owner", "transports/send_recv.py",
        "return (self.ring.rank - distance) % self.ring.size",
        "return (self.ring.rank + distance) % self.ring.size",
    ),
    Mutant(
        "last hop dropped in both directions", "transports/send_recv.py",
        "return cls(ring, blocks.keys, blocks.distances)",
        "return cls(ring, blocks.keys, blocks.distances[: -1 or None] or (0,))",
    ),
    Mutant(
        "last hop dropped in backward", "transports/send_recv.py",
        "ends = [*self.distances[2:], self.ring.size]",
        "ends = [*self.distances[2:-1], self.ring.size]",
    ),
    Mutant(
        "stale key block", "transports/send_recv.py", "            held, spare = spare, held\n", ""
    ),
    Mutant(
        "stale key block in backward", "transports/send_recv.py",
        "            yield theirs, grads\n",
        "            fresh = theirs.k.shape == own_keys.k.shape\n"
        "            yield (theirs._replace(k=own_keys.k) if fresh else theirs), grads\n",
    ),
    Mutant(
        "stale key mask", "transports/send_recv.py", "mask[0] if mask else None",
        "(keys.key_mask if keys.key_mask.shape == mask[0].shape else mask[0]) if mask else None",
    ),
    Mutant(
        "transfer not awaited", "transports/send_recv.py", "            coming.wait()\n", ""
    ),
    Mutant(
        "gradients modified in flight", "transports/send_recv.py",
        "            computed, sent = sent, computed\n", "",
    ),
    Mutant(
        "one buffer received into twice", "transports/send_recv.py",
        "self._pass(held, spare, forms", "self._pass(held, held, forms",
    ),
    Mutant(
        "gradients of the hop before last", "running.py", "self._empty(self._dtype).zero_()",
        "self._empty(self._dtype)",
    ),
    Mutant(
        "dk and dv mixed", "transports/send_recv.py", "for total, part in zip(totals, parts):",
        "for total, part in zip(totals, reversed(parts)):",
    ),
    # gather
    Mutant(
        "pieces of the wrong owner", "transports/gather.py",
        "return [(self.ring.rank - t) % self.ring.size for t in distances]",
        "return [(self.ring.rank + t) % self.ring.size for t in distances]",
    ),
    Mutant(
        "the last partial is dropped", "transports/gather.py",
        "        if going is not None:\n            going()\n\n", "\n",
    ),
    Mutant(
        "partials of all groups but the last are dropped", "transports/gather.py",
        "                going()\n                going = None\n", "                pass\n",
    ),
    Mutant(
        "a partial overwrites what is there", "transports/gather.py",
        "total.add_all((piece.cols, part[:, at]) for piece, at in places(pieces, rank))",
        "[total.running()[:, p.cols].copy_(part[:, at]) for p, at in places(pieces, rank)]",
    ),
    Mutant(
        "a partial lands at the owner's first keys", "transports/gather.py",
        "((piece.cols, part[", "((slice(0, at.stop - at.start), part[",
    ),
    Mutant(
        "pieces in no order", "transports/pieces.py",
        "key=lambda piece: (piece.segment.start, piece.owner)", "key=lambda piece: 0",
    ),
    Mutant(
        "positions from the owner's first key on", "transports/pieces.py",
        "Segment(position + (first - start) * stride,", "Segment(position,",
    ),
    Mutant(
        "pieces with a gap joined", "transports/pieces.py",
        "b.start == a.start + a.stride * a.length", "b.start >= a.start + a.stride * a.length",
    ),
    Mutant(
        "a message's tensors overlap", "transports/messages.py", "-(-part.nbytes // _ALIGNED)",
        "(part.nbytes // _ALIGNED)",
    ),
    # shared memory
    Mutant(
        "keys pulled from the wrong rank", "transports/symmetric.py",
        "self.ranks[owner]", "self.ranks[self.ring.rank]",
    ),
    Mutant(
        "values for keys", "transports/symmetric.py", "cat((own.k, own.v)", "cat((own.v, own.k)"
    ),
    Mutant(
        "gradients of keys for those of values", "transports/symmetric.py",
        "k, v = apart(place, keys)", "v, k = apart(place, keys)",
    ),
    Mutant(
        "gradients of keys come home as those of values", "transports/symmetric.py",
        "(here, both[i]) for", "(here, both[0]) for",
    ),
    Mutant(
        "keys and values come by a copy each", "transports/symmetric.py",
        "for place, t in zip(whole, shelf.of(rank, form)):",
        "for place, t in ((a, b) for pair in zip(whole, shelf.of(rank, form)) "
        "for a, b in zip(*(x.split(own.k.shape[-1], -1) for x in pair))):",
    ),
    Mutant(
        "few tokens have as many calls as others", "transports/pieces.py",
        "seen * job.pair_flops <= _FEW", "seen * job.pair_flops < 0",
    ),
    Mutant(
        "few are counted whatever their keys weigh", "transports/pieces.py",
        "* job.token_bytes > _SOON_COPIED", "< 0",
    ),
    Mutant(
        "few are counted without their mask", "transports/pieces.py",
        "/ (1 + visible.causal)", "/ 1",
    ),
    Mutant(
        "few are counted without their window", "transports/pieces.py",
        "most = min(most, (2 - visible.causal) * visible.window + 1)", "pass",
    ),
    Mutant(
        "few are counted without their documents", "transports/pieces.py",
        "    if visible.documents is not None:\n        whole",
        "    if False:\n        whole",
    ),
    Mutant(
        "keys come together though not all at once", "transports/__init__.py",
        "gather.keeps and is_few", "is_few",
    ),
    Mutant(
        "graphs hold what spares the host", "graphs.py",
        "plan.overlapped or plan.transport", "plan.transport",
    ),
    Mutant(
        "calls overlap of what merges by itself", "graphs.py",
        "plan.transport if plan.kernel.merges else", "",
    ),
    Mutant(
        "another transport's calls are counted as this one's", "plan.py", ", _calls={})", ")",
    ),
    Mutant(
        "calls overlap as another transport's", "plan.py", "_tiles={}, _calls", "_calls",
    ),
    Mutant(
        "few tokens' graphs have calls that wait for one another", "plan.py",
        "made.overtaken or is_short", "(few or made).overtaken or is_short",
    ),
    Mutant(
        "keys that come together are read before all have come", "transports/together.py",
        "        shelf.publish()\n", "",
    ),
    Mutant(
        "keys that come together are written before all have read them", "transports/together.py",
        "begin(turns=1, back=False)", "begin(turns=2, back=False)",
    ),
    Mutant(
        "gradients are read before all have written them", "transports/together.py",
        "        self.space.grads.publish()\n", "",
    ),
    Mutant(
        "what nobody has seen has a gradient", "transports/together.py",
        "            both.zero_()", "            pass",
    ),
    Mutant(
        "gradients that come together are those of the last", "transports/together.py",
        "add_(both[:, here], *parts, fresh=True)", "add_(both[:, here], parts[-1], fresh=True)",
    ),
    Mutant(
        "gradients that come together are added in the inputs' dtype", "transports/together.py",
        "dtype=accumulator(dtype))", "dtype=dtype)",
    ),
    Mutant(
        "too little room for gradients that come together", "transports/together.py",
        "grads=widest * (job.token_bytes + job.batch)", "grads=1",
    ),
    Mutant(
        "gradients pulled from the wrong rank", "transports/symmetric.py",
        "self.ranks[user]", "self.ranks[self.ring.rank]",
    ),
    Mutant(
        "keys written while others read", "transports/shelves.py",
        "        if not back:\n            self.keys.meet()\n", "",
    ),
    Mutant(
        "heads written while others read", "transports/swap.py",
        "        shelf.meet()\n", "",
    ),
    Mutant(
        "all that is swapped comes from one place", "transports/swap.py",
        "sources[m.place][:, m.rows", "sources[0][:, m.rows",
    ),
    Mutant(
        "heads of another place", "ulysses.py",
        "Move(place, rows, which, at, here)", "Move(place, rows, here, at, here)",
    ),
    Mutant(
        "backward begins where forward ended", "transports/shelves.py",
        "half=0 if back else turns % 2", "half=turns % 2",
    ),
    Mutant(
        "everybody's gradients added by every owner", "transports/pieces.py",
        "if piece.owner == owner:", "if True:",
    ),
    # heads and sequence
    Mutant(
        "key heads of another place", "ulysses.py", "(p * mine + i) // group", "(p + i) // group"
    ),
    Mutant(
        "only one of the replicated heads has a gradient", "ulysses.py",
        "total[:, :, head] += t[:, :, i]", "total[:, :, head] = t[:, :, i]",
    ),
    Mutant(
        "sinks of other heads", "ring_flash_attention.py", "sinks[plan.ulysses.heads]",
        "sinks[: q.shape[2]]",
    ),
    Mutant(
        "slopes of other heads", "ulysses.py", "alibi[self.heads]",
        "alibi[: len(alibi[self.heads])]",
    ),
    Mutant(
        "a predicate counts heads from 0", "ulysses.py", "mask_mod(b, h + first,",
        "mask_mod(b, h,",
    ),
    Mutant(
        "shards land in the order of places", "ulysses.py",
        "held.sort(key=lambda each: (each[0].start, each[1]))", "pass",
    ),
    Mutant(
        "progressions taken in turn that are not", "ulysses.py", "if found == expected else None",
        "if expected else None",
    ),
    # autograd
    Mutant(
        "gradients divided by the ring", "derivatives.py",
        "return *(total.final() for", "return *(total.final() / plan.ring.size for",
    ),
    Mutant(
        "gradients are zero", "derivatives.py", "return *(total.final() for",
        "return *(total.final() * 0 for",
    ),
    Mutant(
        "dk and dv swapped", "derivatives.py", "for total in own), dsinks",
        "for total in (own[0], own[2], own[1])), dsinks",
    ),
    Mutant(
        "no delta", "contract.py", "return delta if self.dlse is None else delta - self.dlse",
        "return delta * 0 if self.dlse is None else delta * 0 - self.dlse",
    ),
    Mutant(
        "dlse forgotten", "contract.py",
        "return delta if self.dlse is None else delta - self.dlse", "return delta",
    ),
    Mutant(
        "dlse with the wrong sign", "contract.py", "else delta - self.dlse",
        "else delta + self.dlse",
    ),
    Mutant(
        "the sink's gradient without the lse's", "contract.py", "* saved.delta).sum(",
        "* (saved.delta + (0 if saved.dlse is None else saved.dlse))).sum(",
    ),
    Mutant(
        "a sink that only lse has", "running.py",
        "out.mul_(weight.transpose(1, 2).unsqueeze(-1))", "pass",
    ),
    Mutant(
        "ALiBi by the places held", "plan.py", "positions_seen(side, seen)",
        "torch.arange(sum(s.length for s in side))",
    ),
    Mutant(
        "ALiBi of the next head", "kernels/eager.py", '"(g r) -> g r 1 1"', '"(r g) -> g r 1 1"',
    ),
    Mutant(
        "ALiBi one way only", "kernels/eager.py", "- tiles.cols_at[part.cols]).abs()",
        "- tiles.cols_at[part.cols])",
    ),
    Mutant(
        "a predicate ignored", "kernels/eager.py", "if terms.mask_mod is not None:", "if False:"
    ),
    Mutant(
        "a predicate of the first samples only", "kernels/eager.py",
        "tiles.first, tiles.first + len(keys.k),", "0, len(keys.k),",
    ),
    Mutant(
        "dropout by the places held", "plan.py", " segment_positions(side).to(",
        " torch.arange(sum(s.length for s in side)).to(",
    ),
    Mutant(
        "each rank drops by its own seed", "plan.py", 'lengths[0]["seed"]',
        'lengths[ring.rank]["seed"]',
    ),
    Mutant(
        "heads that came by Ulysses drop as the first", "ulysses.py",
        "_replace(first_head=first)", "_replace(first_head=0)",
    ),
    Mutant(
        "samples drop alike", "kernels/eager.py", "rearrange(_samples(keys, tiles).int()",
        "rearrange(0 * _samples(keys, tiles).int()",
    ),
    Mutant(
        "dropout forgotten in backward", "kernels/eager.py",
        '_less(einsum(dout, v, "b i g r d, b j g d -> b g r i j"), left)',
        'einsum(dout, v, "b i g r d, b j g d -> b g r i j")',
    ),
    Mutant(
        "dropout forgotten in dv", "kernels/eager.py", "p = _less(p, left)", "pass",
    ),
    Mutant("what is kept is not raised", "dropout.py", "return 1 / (1 - self.rate)", "return 1.0"),
    Mutant(
        "draws with a sign", "dropout.py", "self.numbers[2] ^ -_SIGN", "self.numbers[2]",
    ),
    Mutant(
        "layers drop alike", "dropout.py", "self.seed ^ _mixed_seed(number)", "self.seed",
    ),
    Mutant(
        "keys of another sequence start anew on each rank", "checks.py", "(Segment(start, 1, n),)",
        "(Segment(0, 1, n),)",
    ),
    Mutant(
        "positions that repeat", "masks.py", "a.start + a.length > b.start", "a.start > b.start",
    ),
    Mutant(
        "a bias is scaled", "scores.py", "torch.float32)) / scale", "torch.float32))",
    ),
    Mutant(
        "a bias of another head", "scores.py", '"b m (g r) -> b m g r"', '"b m (r g) -> b m g r"',
    ),
    Mutant(
        "half the digits of a bias in 16 bits", "scores.py",
        "return 2 if dtype.itemsize == 2 else 1", "return 1",
    ),
    # kernels
    Mutant(
        "lse of the block in backward", "kernels/eager.py",
        ".sub_(finite(lse)).exp_()\n        dp",
        ".sub_(finite(torch.logsumexp(scores, -1, True))).exp_()\n        dp",
    ),
    Mutant(
        "no scale on dq", "kernels/eager.py", 'dq = einsum(ds, k, "b g r i j',
        'dq = einsum(ds / terms.scale, k, "b g r i j',
    ),
    Mutant(
        "heads tiled, not grouped", "kernels/eager.py", '"b i (g r) d -> b i g r d", g=h_kv',
        '"b i (r g) d -> b i g r d", g=h_kv',
    ),
    Mutant(
        "only one head of a group in dk", "kernels/eager.py",
        'einsum(ds, q, "b g r i j, b i g r d -> b j g d")',
        'einsum(ds[:, :, :1], q[:, :, :, :1], "b g r i j, b i g r d -> b j g d")',
    ),
    Mutant(
        "only one head of a group in dv", "kernels/eager.py",
        'einsum(p, dout, "b g r i j, b i g r d -> b j g d")',
        'einsum(p[:, :, :1], dout[:, :, :, :1], "b g r i j, b i g r d -> b j g d")',
    ),
    Mutant(
        "slope of the softclamp forgotten", "kernels/eager.py",
        "scores, slope = t * terms.softclamp, (1 - t.square()) * terms.scale",
        "scores = t * terms.softclamp",
    ),
    Mutant(
        "key mask ignored", "kernels/eager.py", "if keys.key_mask is not None:", "if False:"
    ),
    Mutant(
        "dk overwritten by each tile", "kernels/eager.py", "running[1][:, cols] += ",
        "running[1][:, cols] = ",
    ),
    Mutant(
        "an unseen row has a finite lse", "kernels/sdpa.py",
        "masked_fill(call.unseen.unsqueeze(1), -torch.inf)", "contiguous()",
    ),
    Mutant(
        "key mask ignored by the fast kernel", "kernels/sdpa.py",
        "if keys.key_mask is not None:", "if False:",
    ),
    Mutant(
        "dlse forgotten by the fast kernel", "kernels/sdpa.py", "if saved.dlse is not None:",
        "if False:",
    ),
    Mutant(
        "rows between documents keep what they held", "kernels/_packs.py",
        "return _filled(lse, 2, self.row_gaps, -torch.inf)", "return lse",
    ),
    Mutant(
        "gradients between documents keep what they held", "kernels/_packs.py",
        "1, self.col_gaps, 0.0)", "1, None, 0.0)",
    ),
    Mutant(
        "rows twice in a call", "kernels/_packs.py",
        "ascends = last.rows.stop <= tile.rows.start", "ascends = True",
    ),
    Mutant(
        "keys joined on the left move the diagonal", "kernels/_packs.py",
        "None if right is None else right + width", "right",
    ),
    Mutant(
        "keys of one sample for all", "kernels/_packs.py",
        "starts = [i * length + at.start", "starts = [at.start",
    ),
    Mutant(
        "sequences share keys whose gradients they need", "kernels/flash_attn_4.py",
        "disjoint_keys=True", "disjoint_keys=False",
    ),
    Mutant(
        "flash-attn 2's way with wide bounds forgotten", "kernels/_whole.py",
        "for part in _apart(tile):", "for part in (tile,):",
    ),
    Mutant(
        "dlse forgotten by kernels that don't know it", "kernels/_whole.py",
        "if saved.dlse is None or not", "if True or not",
    ),
    Mutant(
        "a rank without queries has a gradient of lse", "kernels/_whole.py",
        "if saved.dlse is None or not saved.dlse.numel():", "if saved.dlse is None:",
    ),
    Mutant(
        "a stretch ends a column early", "kernels/flex.py", "else row + right + 1",
        "else row + right",
    ),
    Mutant(
        "stretches joined over what lies between", "kernels/flex.py", "free | (stops == start)",
        "free | (stops <= start)",
    ),
    Mutant(
        "cells that hide something are full", "kernels/flex.py", "*_in_order(count == full)",
        "*_in_order(count > 0)",
    ),
    Mutant(
        "a predicate of local places", "kernels/flex.py", "h.long(), rows_at[i], cols_at[j])",
        "h.long(), i.long(), j.long())",
    ),
    Mutant(
        "a predicate's samples count anew", "kernels/flex.py", "tiles.first + torch.arange",
        "torch.arange",
    ),
    Mutant(
        "a part's delta is the whole's", "kernels/flex.py", "- weight * saved.delta",
        "- saved.delta",
    ),
    # agreement
    Mutant(
        "ranks may differ", "agreement.py", "if len(found) > 1:", "if False:"
    ),
    Mutant(
        "what one ring gets wrong is kept to itself", "agreement.py", "if ring.several:",
        "if False:",
    ),
    Mutant(
        "positions that one ring repeats are kept to itself", "plan.py",
        'raise_together(ring, "ring attention", repeats_problem(both) if counted else None)',
        "pass",
    ),
    Mutant(
        "a predicate's error is kept to itself", "masks.py", "except Exception as",
        "except OSError as",
    ),
    Mutant(
        "a rank's problem is kept to itself", "plan.py", "            problem=problem,\n",
        "            problem=None,\n",
    ),
    Mutant("lengths need not be the layout's", "checks.py", "if lengths == expected:", "if True:"),
    Mutant("any plan will do", "plan.py", "!= self.signature:", "is None:"),
]  # fmt: skip


# --- the battery: what runs over a mutant ---


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong. The package is imported here, and mutated."""
    from dataclasses import replace

    import torch

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
    yield no_ring_is_left_alone
    yield streams_wait_for_one_another
    yield calls_go_side_by_side_where_they_may
    yield graphs_are_replayed_with_what_is_given
    yield mismatches_are_errors
    yield plans_are_checked
    yield keys_come_in_stages_where_they_are_late  # the dearest come last
    yield prefixes_and_positions_hold
    yield predicates_are_fused
    yield other_kernels_calls_cover_the_tiles
    yield sums_of_16_bits_are_kept_in_32
    yield shared_memory_is_read_before_it_is_written


def shared_memory_is_read_before_it_is_written() -> None:
    """By a rank that is late."""
    from tests.test_transports import test_shared_memory_is_written_anew_when_all_have_read_it

    for at_once, ulysses, how in ((3, 1, {}), (1, 2, {}), (3, 1, dict(together=True))):
        test_shared_memory_is_written_anew_when_all_have_read_it(at_once, ulysses, how)


def keys_come_in_stages_where_they_are_late() -> None:
    """And calls wait for theirs, and what is shared for its readers."""
    from functools import partial

    import pytest
    import torch

    from tests import test_running, test_transports, test_ulysses

    for tokens, late, otherwise in test_transports.LATE:
        test_transports.test_few_tokens_of_many_ranks_come_late(tokens, late, otherwise)
    for check in (
        partial(test_transports.test_calls_wait_for_the_keys_of_their_own_stage, late=True),
        partial(test_transports.test_dq_waits_for_no_gradients_that_come_home, wide=True),
        test_transports.test_a_turn_of_several_says_that_the_last_one_was_read,
        test_transports.test_ranks_of_one_machine_gather_and_swap_out_of_shared_memory,
        test_transports.test_shelves_stay_whose_graphs_others_captured,
        test_ulysses.test_what_a_graph_reads_is_made_before_it_and_stays,
    ):
        with pytest.MonkeyPatch.context() as patch:
            check(patch)
    test_transports.test_what_comes_but_once_is_not_kept()
    for case in test_transports.ASIDE:
        test_transports.test_gradients_come_aside_where_that_is_hidden(*case)
    test_transports.unseen_keys_have_no_gradient()
    test_transports.plans_know_their_own_transport()
    test_transports.gradients_that_come_together_are_added_wide()
    with pytest.MonkeyPatch.context() as patch:
        test_transports.few_may_be_short(patch)
    for case in test_transports.FEW:
        with pytest.MonkeyPatch.context() as patch:
            test_transports.test_few_tokens_come_together(*case, patch)
    with pytest.MonkeyPatch.context() as patch:
        test_transports.test_keys_and_values_of_a_piece_come_by_one_copy(False, 18, patch)
    for layout in ("zigzag", "contiguous"):
        test_transports.test_no_two_ranks_pull_from_one_at_a_time(4, layout, causal=True)
    test_running.test_what_is_not_yet_to_be_read_is_not_read(wide=False, moved=True)
    for asks in (False, True):
        test_running.test_a_sum_is_made_where_it_has_to_be(asks)
    for dtype in (torch.float32, torch.bfloat16):
        test_running.test_parts_that_fill_their_place_are_the_result(dtype)
        test_running.test_parts_that_do_not_are_put_together(dtype)
    test_running.test_the_place_of_parts_goes_when_they_were_read()
    test_ulysses.test_a_shelf_has_room_for_all_that_is_swapped()


def no_ring_is_left_alone() -> None:
    """With what one of them gets wrong."""
    from tests import test_agreement

    for kind in ("lengths", "positions"):
        test_agreement.test_what_one_ring_gets_wrong_the_other_is_told(kind)
    test_agreement.test_a_predicate_that_fails_on_one_rank_is_told_to_all()


def streams_wait_for_one_another() -> None:
    """And whoever reads what is made on other streams waits for them."""
    import pytest
    import torch

    from tests import test_lanes, test_running

    for name in ("a_call_waits_for_what_was_before_and_nothing_waits_for_it_until_joined",
                 "calls_for_own_keys_give_way_to_the_others",
                 "what_is_behind_waits_for_all_others_whether_there_are_own_keys_or_not",
                 "what_is_behind_does_not_wait_for_own_keys",
                 "what_is_written_is_not_used_again_before_that",
                 "what_is_read_is_not_used_again_before_that"):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            getattr(test_lanes, f"test_{name}")(test_lanes.stood_in(patch))
    for dtype in (torch.float32, torch.bfloat16):
        test_running.test_a_part_that_is_all_there_is_is_the_result_itself(dtype)
        test_running.test_a_sum_of_parts_waits_for_them(dtype)


def graphs_are_replayed_with_what_is_given() -> None:
    """Those that can be."""
    import pytest

    from tests import test_graphs
    from tests.test_lanes import stood_in

    test_graphs.test_what_travels_in_messages_is_refused()
    test_graphs.test_what_a_graph_holds_overlaps()
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.test_what_graphs_of_ours_read_need_not_stay(patch)
    test_graphs.test_layers_that_drop_otherwise_have_graphs_of_their_own()
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.stand_in(patch)
        test_graphs.test_layers_that_share_graphs_get_what_is_theirs(None, overtaken=True)
        test_graphs.test_the_first_call_goes_as_ever_and_the_second_is_captured(None, patch)
        test_graphs.test_the_first_call_makes_what_is_made_for_the_graph(None)
        test_graphs.another_plan_has_no_graphs_of_this_one()
        test_graphs.test_a_gathers_graphs_are_of_the_shelves_at_hand()
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.batches_alike_share_graphs(patch)
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.what_is_changed_on_a_module_counts(patch)
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.others_lengths_make_another_kind(patch)
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.stand_in(patch)
        test_graphs.test_graphs_of_other_memory_or_other_kernels_are_not_replayed(
            None, patch, "memory"
        )
    with pytest.MonkeyPatch.context() as patch:
        test_graphs.replays_wait_for_those_before(stood_in(patch), patch)


def zigzag_is_balanced() -> None:
    """Causal work is equal on all ranks: what it is for, though any layout gives right results."""
    from ring_attention_pytorch.layouts import Visible, all_segments, tiles, visible_pairs

    everyone = all_segments("zigzag", 4, 32)
    work = {sum(visible_pairs(tiles(q, k, Visible(True))) for k in everyone) for q in everyone}
    assert len(work) == 1


def gathered_keys_are_few_large_tiles() -> None:
    """At most two calls for all other ranks' keys: what gathering is for."""
    from ring_attention_pytorch.layouts import LAYOUTS, Visible, all_segments, tiles
    from ring_attention_pytorch.transports.pieces import Blocks, joined, schedule
    from ring_attention_pytorch.ulysses import land

    for layout, visible in [
        ("zigzag", Visible(causal=True)),
        ("zigzag", Visible()),
        ("contiguous", Visible(causal=True, window=30)),
    ]:
        everyone = all_segments(layout, 5, 53)
        (group,) = schedule(Blocks(everyone, everyone, visible), at_once=4)
        for rank, mine in enumerate(everyone):
            assert len(tiles(mine, joined(group.pieces[rank]), visible)) <= 2
    assert all(len(land(all_segments(layout, 5, 53))[0]) == 1 for layout in LAYOUTS)


def prefixes_and_positions_hold() -> None:
    """The features whose masks are no arithmetic of a layout alone."""
    from tests.features import FEATURES, Problem, together

    for name in ("prefix", "positions", "sinks", "alibi", "bias of heads", "mask_mod"):
        errors = Problem(FEATURES[name] | FEATURES["gradient of lse"]).errors(3, "zigzag", "eager")
        assert max(errors.values()) < 1e-12, (name, errors)
    of_heads = Problem(together(("sinks", "alibi", "mask_mod"))).errors(4, "zigzag", ulysses=2)
    assert max(of_heads.values()) < 1e-12, of_heads
    apart = Problem(FEATURES["mask_mod"] | FEATURES["documents"]).errors(2, "striped", "eager")
    assert max(apart.values()) < 1e-12, apart


def predicates_are_fused() -> None:
    """FlexAttention's adapter, over a stand-in that goes by the cells of masks."""
    from tests.features import Problem, together
    from tests.flex_on_cpu import stood_in
    from tests.kernel_cases import CASES, faults

    with stood_in():
        for i in (2, 5):
            assert not (found := faults(CASES[i], "flex", "cpu")), found
        names = ("mask_mod", "documents", "gradient of lse")
        errors = Problem(together(names)).errors(2, "striped", "flex")
        assert max(errors.values()) < 1e-12, errors


def other_kernels_calls_cover_the_tiles() -> None:
    """By stand-ins; and of a rank without queries, which has no tiles."""
    from dataclasses import replace

    import pytest
    import torch

    from ring_attention_pytorch.contract import Grads, Keys, Saved, Terms
    from ring_attention_pytorch.kernels import KERNELS
    from ring_attention_pytorch.running import Sum
    from tests.kernel_cases import faults
    from tests.test_adapters import ODD, STAND_INS, can

    none, keys = torch.zeros(1, 0, 2, 8), torch.zeros(1, 3, 2, 8)
    saved = Saved(none, none, torch.zeros(1, 2, 0), none, torch.zeros(1, 2, 0))
    with pytest.MonkeyPatch.context() as patch:
        for kernel, stand_in in STAND_INS.items():
            stand_in(patch)
            for case in ODD:
                if can(kernel, case):
                    assert not faults(replace(case, dtype=torch.float64), kernel, "cpu"), case
            grads = Grads(Sum(none), Sum(keys), Sum(keys))
            seen = Keys(keys, keys, None, ())
            KERNELS[kernel].backward(saved, seen, (), Terms(1.0, None, 8), grads)


def the_same_is_dropped_everywhere() -> None:
    """Over rings, heads swapped or not, by a seed that one rank drew; not in another layer."""
    from dataclasses import replace

    from ring_attention_pytorch.plan import RingPlan
    from ring_attention_pytorch.ring_flash_attention import ring_attn
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
    import torch

    from ring_attention_pytorch.scores import with_bias

    bias = torch.tensor([[100.5, -3.14159, 17.0]]).bfloat16()
    q, k = with_bias(*[torch.zeros(1, n, 1, 8).bfloat16() for n in (1, 3)], bias, 128**-0.5)
    got = 128**-0.5 * q[0, :, 0].float() @ k[0, :, 0].float().T
    assert (got / bias.float() - 1).abs().max() < 1e-4


def dealt_layouts_are_even() -> None:
    """As zigzag, but of documents: no rank has much more to do than another."""
    from ring_attention_pytorch.balance import balanced
    from ring_attention_pytorch.documents import of_borders
    from ring_attention_pytorch.layouts import Visible, tiles, visible_pairs

    borders = [0, 700, 720, 1500, 1600, 4096]
    everyone, visible = balanced(borders, 4).segments, Visible(True, None, of_borders(borders))
    work = [sum(visible_pairs(tiles(q, k, visible)) for k in everyone) for q in everyone]
    assert max(work) < 1.05 * sum(work) / 4
    assert max(map(len, balanced([0, 4096], 4).segments)) == 2  # two chunks each are enough


def a_document_ends_where_another_begins() -> None:
    """What its last token would have to predict is not its business."""
    import torch

    from ring_attention_pytorch.documents import last_of_document, of_borders

    found = last_of_document((of_borders([0, 2, 2, 5]),), torch.arange(5))
    assert found.tolist() == [[False, True, False, False, True]]


def blocks_know_their_tiles() -> None:
    """The Triton kernels' tables: every tile that a block meets is in its range."""
    import torch

    from ring_attention_pytorch.documents import of_borders
    from ring_attention_pytorch.kernels.triton import _table
    from ring_attention_pytorch.layouts import Visible, all_segments, tiles

    (whole,) = all_segments("contiguous", 1, 40)
    found = tiles(whole, whole, Visible(True, None, of_borders(range(0, 41, 5))))
    table = _table(found, "rows", 8, torch.empty(1, 40), every=True)
    for number, first, last in table.blocks.tolist():
        here = range(8 * number, 8 * number + 8)
        meets = [i for i, t in enumerate(found) if {*range(t.rows.start, t.rows.stop)} & {*here}]
        assert meets == list(range(first, last))


def calls_are_counted() -> None:
    """Else a kernel would round before the end."""
    import torch

    from ring_attention_pytorch.running import Sum
    from tests.cases import Attention, miscounted

    total = Sum(torch.empty(1, 2, 1, dtype=torch.bfloat16), calls=2)
    assert [total.room()[1].dtype for _ in range(2)] == [torch.float32, torch.bfloat16]

    assert not miscounted(Attention(29, "zigzag", causal=True, transport="gather"), 3)


def calls_go_side_by_side_where_they_may() -> None:
    from tests.test_transports import test_calls_go_side_by_side_where_keys_stay

    for how, at_once, aside in ((dict(), 3, True), (dict(memory=0), 1, False)):
        test_calls_go_side_by_side_where_keys_stay(how, at_once, aside)


def sums_of_16_bits_are_kept_in_32() -> None:
    """One rounding at the end: 2 ** -9, however many blocks are summed."""
    import torch

    from tests import threads
    from tests.cases import Attention, errors, oracle, shard

    case = Attention(256, kernel="eager", dtype=torch.bfloat16, batch=1, d=16, d_v=16)
    got, _ = threads.run(8, lambda ring: shard(case, ring))
    for rank, mine in enumerate(got):
        assert mine[1].dtype == torch.float32
        assert max(errors(case, rank, 8, mine, oracle(case)).values()) < 2**-8


def mismatches_are_errors() -> None:
    """A rank that differs, errs or holds another's tokens: ValueError on all ranks."""
    import torch

    from ring_attention_pytorch.ring_flash_attention import ring_attn
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
    import torch

    from ring_attention_pytorch.plan import RingPlan
    from ring_attention_pytorch.ring_flash_attention import ring_attn

    q = torch.randn(1, 5, 2, 4)
    try:
        ring_attn(q[:, :3], q, q, plan=RingPlan.make(q, q, q))
    except ValueError:
        return
    raise AssertionError("a plan for other tensors was used")


# --- running it ---


# what finds most faults in a file, to be asked before all others
_SOONEST: dict[str | None, tuple[Callable[[], None], ...]] = {
    "balance.py": (dealt_layouts_are_even,),
    "dropout.py": (the_same_is_dropped_everywhere,),
    "plan.py": (prefixes_and_positions_hold,),
    "scores.py": (prefixes_and_positions_hold, a_bias_keeps_its_digits),
    "kernels/flex.py": (predicates_are_fused,),
    "kernels/triton.py": (blocks_know_their_tiles,),
    **dict.fromkeys(
        ("kernels/_packs.py", "kernels/_whole.py", "kernels/flash_attn_4.py"),
        (other_kernels_calls_cover_the_tiles,),
    ),
}


def mutate(mutant: Mutant | None, package: Path, folder: Path) -> None:
    """A copy of a package in the folder, with the fault planted."""
    copy = folder / PACKAGE.name
    shutil.copytree(package, copy)  # what is compiled too, but for the file that changes
    if mutant is not None:
        file = copy / mutant.file
        source = file.read_text()
        assert source.count(mutant.old) == 1, f"{mutant.name}: not once in {mutant.file}"
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        file.write_text(source.replace(mutant.old, mutant.new))


def _battery_over(folder: str, file: str | None, answer: Connection) -> None:
    """In a process of its own: the first thing found wrong, or None."""
    import torch

    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    found = None
    try:
        for number, case in enumerate(itertools.chain(_SOONEST.get(file, ()), battery())):
            found = f"case {number}"
            torch.manual_seed(0)  # else a fault may show in some runs only
            case()
        found = None
        assert sys.modules[PACKAGE.name].__file__.startswith(folder), "not the copy"
    except BaseException as error:
        found = f"{found}: {type(error).__name__}: {error}"[:300]
    answer.send(found)


def verdict(mutant: Mutant | None, package: Path) -> str | None:
    """What the battery found wrong with the mutant (None: with the package as it is)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mutate(mutant, package, Path(folder))
        except AssertionError:
            return None
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        file = None if mutant is None else mutant.file
        process = context.Process(target=_battery_over, args=(folder, file, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(SECONDS) else "no end"
        except EOFError:
            return "the process died"
        finally:
            process.kill()
            process.join()


def tell(planted: Sequence[Mutant]) -> None:
    """Print the verdicts on the package as it is, "", and on each mutant."""
    import beartype  # noqa: F401 - imported before forking, so only once
    import einops  # noqa: F401
    import torch.distributed.device_mesh
    import torch.fx.experimental.symbolic_shapes  # noqa: F401 - which the first Function imports

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as two:
        compiled = Path(folder) / PACKAGE.name  # once for all
        shutil.copytree(PACKAGE, compiled)
        compileall.compile_dir(compiled, quiet=2)
        found = two.map(partial(verdict, package=compiled), itertools.chain([None], planted))
        print(json.dumps(dict(zip(["", *(m.name for m in planted)], found))))


def main() -> None:
    assert PACKAGE.name not in sys.modules, "must be imported from the copy"
    tell(MUTANTS)


if __name__ == "__main__":
    main()
