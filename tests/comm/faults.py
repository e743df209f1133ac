"""Faults planted into `comm/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "gradients of others' keys are added to own ones, too",
        "comm/fabric_machines.py:MachineChannel._send_sums",
        "[] if held.relayed else sums", "sums",
    ),
    Mutant(
        "a relay writes a message where the one before begins",
        "comm/fabric_machines.py:HolderChannel._written",
        "room[:, at]", "room[:, : at.stop - at.start]",
    ),
    Mutant(
        "two parts leave something for the same queries",
        "comm/scheduled_transport.py:ScheduledTransport._run",
        "if deferred: deferred.do() keys =", "keys =",
    ),
    Mutant(
        "a gather of few tokens adds beside nothing", "comm/transports.py:make_one_stream",
        "apart, keys_first", "apart",
    ),
    Mutant(
        "nobody asks for stages", "comm/transports.py:make_transport",
        "late = keys_arrive_late(blocks, at_once, kv_shape, machine)", "late = False",
    ),
    Mutant(
        "too little room for out and lse", "comm/ulysses.py:most_bytes",
        "(by_token, by_head, [out, lse])", "(by_token, by_head)",
    ),
    Mutant(
        "a replay takes buffers as they were",
        "comm/fabric_shared.py:SharedMemory.follow_stream",
        "self.space.follow_stream() return", "return",
    ),
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
        "one buffer received into twice", "comm/send_recv.py:_Call.start",
        "self.held[source % 2], self.held[block % 2]",
        "self.held[source % 2], self.held[source % 2]",
    ),
    Mutant(
        "dk and dv mixed", "comm/send_recv.py:_Call.wait",
        "zip(self.totals[block], parts)",
        "zip(self.totals[block], reversed(parts))",
    ),
    Mutant(
        "a partial overwrites what is there", "comm/fabric_messages.py:MessageChannel.reduce",
        "total.add_all((here, part[:, at]) for here, at in places)",
        "[total.begin_update()[:, here].copy_(part[:, at]) for here, at in places]",
    ),
    Mutant(
        "a partial lands at the owner's first keys",
        "comm/fabric_messages.py:MessageChannel.reduce",
        "((here, part[",
        "((slice(0, at.stop - at.start), part[",
    ),
    Mutant(
        "a message's tensors overlap", "comm/messages.py:Form.of_parts",
        "-(-end // _ALIGNED) * _ALIGNED", "0",
    ),
    Mutant(
        "keys pulled from the wrong rank", "comm/fabric_copies.py:CopyEngines._sources",
        "self.ranks[owner]",
        "self.ranks[self.ring.rank]",
    ),
    Mutant(
        "gradients of keys for those of values",
        "comm/fabric_shared.py:SharedChannel.grad_accumulators",
        "dk, dv = apart(place, keys)",
        "dv, dk = apart(place, keys)",
    ),
    Mutant(
        "gradients of keys come home as those of values",
        "comm/fabric_copies.py:CopyChannel.reduce",
        "(here, both[i]) for",
        "(here, both[0]) for",
    ),
    Mutant(
        "keys and values come by a copy each",
        "comm/fabric_copies.py:CopyChannel._launch_copies",
        "for place, t in zip(self.received, buffer.peer_view(rank, form)):",
        "for place, t in ((a, b) for pair in zip(self.received, buffer.peer_view(rank, form)) "
        "for a, b in zip(*(x.split(self.own.k.shape[-1], -1) for x in pair))):",
    ),
    Mutant(
        "few tokens get the kernel that computes fastest", "plan/prepare.py:settle_transport",
        "kernel = light", "pass",
    ),
    Mutant(
        "short documents get the kernel of long ones", "plan/prepare.py:_of_documents",
        "return short", "return kernel",
    ),
    Mutant(
        "documents without a causal mask are half as long",
        "schedule/policy.py:documents_are_short", "(1 + workload.visible.causal)", "2",
    ),
    Mutant(
        "documents of a batch count as few", "schedule/policy.py:launches_decide",
        "masks = workload.visible, *workload.apart", "masks = (workload.visible,)",
    ),
    Mutant(
        "keys that come together are read before all have come",
        "comm/fabric_kernels.py:KernelChannel.take",
        "buffer.publish()",
        "",
    ),
    Mutant(
        "keys that come together are written before all have read them",
        "comm/fabric_shared.py:SharedChannel.__init__",
        "self._begin(len(program.blocks) - 1)",
        "self._begin(2 * len(program.blocks) - 2)",
    ),
    Mutant(
        "gradients are read before all have written them",
        "comm/fabric_kernels.py:KernelChannel._add_plainly",
        "self.space.grads.publish()",
        "",
    ),
    Mutant(
        "gradients that are read where they lie are those of the last",
        "comm/fabric_kernels.py:KernelChannel._add_plainly",
        "for both in parts:",
        "for both in parts[-1:]:",
    ),
    Mutant(
        "too little room for gradients that come together",
        "comm/transports.py:on_one_stream",
        "grads=held", "grads=0",
    ),
    Mutant(
        "too little room for keys that come together",
        "comm/transports.py:on_one_stream",
        "keys=most", "keys=0",
    ),
    Mutant(
        "own keys that only others see are written nowhere",
        "schedule/arrangement.py:Arrangement.of",
        "[(slice(end, mine.start), slice(behind, behind + unseen)), (mine, at)]", "[(mine, at)]",
    ),
    Mutant(
        "keys are taken from where their owner was given them",
        "schedule/arrangement.py:Arrangement.find", "shift = at.start - mine.start", "shift = 0",
    ),
    Mutant(
        "gradients pulled from the wrong rank",
        "comm/fabric_shared.py:SharedMemory.users_of_own",
        "self.ranks[user]",
        "self.ranks[self.ring.rank]",
    ),
    Mutant(
        "heads written while others read", "comm/fabric_shared.py:SharedMemory.swap",
        "buffer.wait_for_readers()", "",
    ),
    Mutant(
        "all that is swapped comes from one place", "comm/fabric_shared.py:SharedMemory.swap",
        "by_rank[m.place][:, m.rows", "by_rank[0][:, m.rows",
    ),
    Mutant(
        "heads of another place", "comm/ulysses.py:HeadPartition.to_heads",
        "Move(place, rows, which, at, here)", "Move(place, rows, here, at, here)",
    ),
    Mutant(
        "only one of the replicated heads has a gradient", "comm/ulysses.py:_summed",
        "total[:, :, head] += t[:, :, i]", "total[:, :, head] = t[:, :, i]",
    ),
    Mutant(
        "slopes of other heads", "comm/ulysses.py:Ulysses.of_heads", "alibi[self.heads]",
        "alibi[: len(alibi[self.heads])]",
    ),
    Mutant(
        "progressions taken in turn that are not", "comm/ulysses.py:_interleaved",
        "if found == expected else None", "if expected else None",
    ),
    Mutant(
        "heads that came by Ulysses drop as the first", "comm/ulysses.py:Ulysses.of_heads",
        "_replace(first_head=first)", "_replace(first_head=0)",
    ),
    Mutant(
        "a rank's problem is kept to itself", "ranks/agreement.py:agree",
        "ring.problem if error is None else _shortened(str(error))", "None",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "all are taken to have told what this rank has", "ranks/notes.py:exchange",
        "== len(firsts)", "> 0",
    ),
    Mutant(
        "own numbers are taken for the others'", "ranks/agreement.py:agree",
        "notes.count(mine) == len(notes)", "notes.count(mine) > 0",
    ),
    Mutant(
        "notes of any kind are read", "ranks/agreement.py:read_note",
        "(ValueError, TypeError, AttributeError, OverflowError, RecursionError)",
        "ZeroDivisionError",
    ),
    Mutant(
        "messages of any plan", "ranks/ring.py:Steps.tag",
        "(self._since, call, plan, operation, back_of)",
        "(self._since, call)",
    ),
    Mutant(
        "what differs late is taken for the same", "ranks/agreement.py:_plain",
        "if len(text) <= _LONGEST_TEXT: return text", "return text[:_LONGEST_TEXT]",
    ),
    Mutant(
        "a wrong type is kept to itself", "ranks/agreement.py:typed",
        "report(arguments.by_name(args, kwargs), ValueError(why))", "report",
    ),
    Mutant(
        "what breaks is kept to itself", "ranks/agreement.py:error_of",
        "except Exception as error:", "except OSError as error:",
    ),
]  # fmt: skip

FAILING = [
    Mutant(
        "what is under way is let go", "ranks/ring.py:Steps._break",
        "self._left, self.under_way = self.under_way, []", "self.under_way = []",
    ),
    Mutant(
        "what ranks disagree about breaks their ring", "ranks/ring.py:Steps.begin",
        "isinstance(error, Disagreement)", "isinstance(error, ZeroDivisionError)",
    ),
    Mutant(
        "one rank's device forgets alone", "ranks/ring.py:Ring.gather_notes",
        "if any(troubles)", 'if not message.startswith(b"\\0")',
    ),
    Mutant(
        "any call is the same", "ranks/agreement.py:check_same_call",
        'f"{ring.steps.now}\\n{call_site()}"', 'f"a call\\n{call_site()}"',
    ),
    Mutant(
        "a timeout is told in the transport's words", "ranks/failures.py:_why",
        'if waited := re.search(r"Timed out waiting (\\d+)ms", said):', "if waited := None:",
    ),
    Mutant(
        "errors name no rank", "ranks/failures.py:RingError.waiting",
        "ranks = sorted({*ranks})", "ranks = []",
    ),
    Mutant(
        "all are missing if one is", "ranks/notes.py:Links._receive",
        'raise Missing("Connection closed", [rank])', 'raise Missing("Connection closed", ())',
    ),
    Mutant(
        "notes are waited for without end", "ranks/notes.py:_wait",
        "min(max(0.0, 1000 * seconds), _MOST_MS)", "3000",
    ),
    Mutant(
        "all are named where one is missing", "ranks/ring.py:awaiting",
        "absent or ranks", "ranks",
    ),
    Mutant(
        "a plan is said to mend what has ended", "ranks/ring.py:Steps._check",
        "NEW_GROUP in text", "False",
    ),
    Mutant(
        "whoever has a number is let in", "ranks/notes.py:_accept",
        "(rank := _name(link)) in missing", "(rank := _name(link)) is not None",
    ),
]  # fmt: skip
