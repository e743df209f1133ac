"""Faults planted into caches and attention to them, but for kernels, which need an interpreter."""

from tests.faults.mutant import Mutant

PAGES = "inference/page_table.py:Pages."
TABLE = "inference/page_table.py:PageTable."
CACHE = "inference/cache.py:RingCache."
STORAGE = "inference/storage.py:PagedStorage."
POOLS = "inference/pools.py:Pools."
ROLLING = "inference/rolling.py:"
LINEAGE = "inference/lineage.py:Lineage."
STATES = "inference/states.py:"

INFERENCE = [
    Mutant(
        "a chunk's plan takes the kernel of few tokens for the cache",
        "inference/prefill.py:plan_chunk", "kernel=cast(KernelOption, fastest.name)", "kernel=None",
    ),
    Mutant(
        "few heads leave a GPU idle", "inference/programs.py:splits_of",
        "each * heads >= _FULL * at_once", "True",
    ),
    Mutant(
        "small blocks of keys keep little under way", "inference/programs.py:Cut.of",
        "programs if block >= _BLOCK else 2 * programs", "programs",
    ),
    Mutant(
        "new tokens come between programs that run at once", "inference/programs.py:Cut.of",
        "programs * (_TURNS if new else 2)", "2 * programs",
    ),
    Mutant("a page too far", PAGES + "owner", "token // self.page", "(token + 1) // self.page"),
    Mutant(
        "a rank's last page counts as full", PAGES + "held",
        "min(max(rest - rank * self.page, 0), self.page)",
        "(self.page if rest > rank * self.page else 0)",
    ),
    Mutant(
        "pages that are not full are shared", TABLE + "rearrange",
        "[*shared, *rest] if source not in heirs else shared", "[*shared, *rest]",
    ),
    Mutant(
        "what a partial page holds is not copied", TABLE + "rearrange",
        "copies.append((there[full], held[full]))", "pass",
    ),
    Mutant(
        "shortening writes shared pages", TABLE + "shorten", "users[page := held[place]] > 1",
        "users[page := held[place]] > 9",
    ),
    Mutant(
        "a shared page is not copied", TABLE + "shorten", "if place == full and partial:",
        "if False:",
    ),
    Mutant(
        "a place of its own for whoever was alone", TABLE + "taken_to_rearrange",
        "(Counter(sources) - Counter(set(sources)))", "Counter(sources)",
    ),
    Mutant(
        "memory is made for pages that nobody shares", TABLE + "taken_to_shorten",
        "users[page] - 1", "users[page]",
    ),
    Mutant(
        "a page of another sequence is free", TABLE + "recount", "if not users", "if users < 2",
    ),
    Mutant(
        "tokens at the place of others", POOLS + "put",
        ".long(), tokens % page", ".long(), tokens * 0",
    ),
    Mutant(
        "tokens as if they were alone", POOLS + "held",
        "(index // page * self.pages.ranks + self.ring.rank)",
        "(index // page + self.ring.rank)",
    ),
    Mutant(
        "lengths stay behind", STORAGE + "advance", "self.pools.layer_lengths[layer] += n", "pass",
    ),
    Mutant(
        "what is forgotten stays on the device", STORAGE + "_apply", "self.lengths_of.copy_(",
        "self.lengths_of.clone().copy_(",
    ),
    Mutant(
        "left padding stays with its place", CACHE + "reorder",
        "[starts[i] for i in beams]", "starts",
    ),
    Mutant(
        "a freed sequence is still padded", CACHE + "free",
        "lengths[sequence] = starts[sequence] = 0",
        "lengths[sequence] = 0",
    ),
    Mutant(
        "queries see later drafts", "inference/partial.py:attend", "seen = cols <= rows",
        "seen = cols <= rows + 99",
    ),
    Mutant(
        "padding is seen", "inference/partial.py:attend_in_blocks", "max(start, unseen)",
        "max(0, unseen)",
    ),
    Mutant(
        "a window is one token wider", "inference/partial.py:attend",
        "cols >= rows - scores_of.window",
        "cols >= rows - scores_of.window - 1",
    ),
    Mutant(
        "keys at the edge of a window are out of reach",
        "inference/partial.py:attend_in_blocks", "first + at - scores_of.window",
        "first + at - scores_of.window + 1",
    ),
    Mutant(
        "all ranks weigh alike", "inference/partial.py:merged",
        "weight = (lse - total.", "weight = (0 * lse - total.",
    ),
    Mutant(
        "sinks weigh nothing", "inference/partial.py:merged",
        "total = torch.logaddexp(total, sinks.to(total))", "pass",
    ),
    Mutant(
        "a rank's own result is another's", "comm/exchange.py:all_gather_stacked",
        "found[ring.rank] = x",
        "found[ring.rank] = x * 0",
    ),
    Mutant(
        "a chunk in the order of ranks", "inference/prefill.py:_order", "torch.cat(each).argsort()",
        "torch.cat(each).sort().values",
    ),
    Mutant(
        "a chunk's cached part is left out", "inference/prefill.py:prefill",
        "result.add(all_rows, *found)", "pass",
    ),
    Mutant(
        "a call of another dtype is taken for one that was right",
        "inference/attention.py:_plan_for",
        "t.dtype,", "",
    ),
    Mutant(
        "a call of another shape is taken for one that was right",
        "inference/attention.py:_plan_for",
        "t.shape,", "",
    ),
    Mutant(
        "a call elsewhere is taken for one that was right",
        "inference/attention.py:_plan_for",
        "t.device", "0",
    ),
    Mutant(
        "any layer is one that there is", "inference/attention.py:_plan_for",
        "*kinds, options, ", "*kinds, options[1:], ",
    ),
    Mutant(
        "ranks attend to given keys in different ways", "decoding.py:_agreed_width",
        '"use_triton": use_triton,', "",
    ),
    Mutant(
        "a call is right once there is a plan", "inference/attention.py:_checked",
        "check_call(given, cache, layer)", "pass",
    ),
    Mutant(
        "others' queries are taken for own ones", "inference/prefill.py:_by_all",
        "queries[(me + places) % ring.size]", "queries[me]",
    ),
    Mutant(
        "heads of another page", POOLS + "local_of_all", "alpha=key_heads", "alpha=1",
    ),
    Mutant(
        "a chunk takes a plan that another rank has not",
        "inference/attention.py:_agreed_chunk", "plan if kept else None", "plan",
    ),
    Mutant(
        "each chunk makes a plan", "inference/attention.py:_sharded_chunk",
        "cache.plans.keep(_CHUNK, (_kind_of_chunk(given, layout, scores), plan))", "pass",
    ),
    Mutant(
        "a chunk is sent though there is no room", "inference/attention.py:_agreed_chunk",
        "cache.prepare(sum(counts), layer, in_graph=False)", "pass",
    ),
    Mutant(
        "a chunk sends more than is told", "inference/chunk_costs.py:ChunkSizes.sent",
        "(self.message + self.result)", "self.message",
    ),
    Mutant(
        "a chunk attends to what is not kept", "inference/prefill.py:prefill",
        "k, v = cache.rounded(k), cache.rounded(v)", "pass",
    ),
    Mutant(
        "pages are copied without their scales", STORAGE + "_apply",
        "map(self.pools.of, self._paged)",
        "((self.keys[i], self.values[i]) for i in self._paged)",
    ),
    Mutant(
        "a circle has no room for what comes", ROLLING + "Windows.turns", "2 * self.spare", "0",
    ),
    Mutant(
        "all sequences have one circle", ROLLING + "RollingTokens.extend", "* self.laid", "* 0",
    ),
    Mutant(
        "a circle forgets as it grows", ROLLING + "RollingTokens.grow",
        "pool.unflatten(0, (sequences, laid))", "0",
    ),
    Mutant(
        "a circle stays with its place", ROLLING + "RollingTokens.reorder", "each.copy_(", "(",
    ),
    Mutant(
        "what is overwritten can be rolled back", ROLLING + "RollingTokens.check_rollback",
        "> spare", "> 99",
    ),
    Mutant(
        "how long a sequence was stays with its place", ROLLING + "RollingTokens.reorder",
        "self.longest = [self.longest[i] for i in beams]", "pass",
    ),
    Mutant(
        "a window's tokens are found too early", POOLS + "before", "- gone",
        "- gone + 1",
    ),
    Mutant(
        "messages say nothing of the cache", "inference/attention.py:_decode_step",
        "cache.lineage.mark(layer) + layer", "layer",
    ),
    Mutant(
        "messages say nothing of the layer", "inference/attention.py:_decode_step",
        "cache.lineage.mark(layer) + layer", "cache.lineage.mark(layer)",
    ),
    Mutant(
        "plans are made of any cache", "inference/attention.py:_plan",
        "cache.state_note(layer)", "''",
    ),
    Mutant(
        "new tokens count once", LINEAGE + "advance", "n * self._all", "self._all",
    ),
    Mutant(
        "other sequences pass for these", LINEAGE + "reorder", "self._sum()", "pass",
    ),
    Mutant(
        "what was forked has one name", LINEAGE + "reorder", "if new else each",
        "if False else each",
    ),
    Mutant(
        "other padding passes for this", LINEAGE + "pad", "self._starts = [*starts]", "pass",
    ),
    Mutant(
        "all sequences count alike", LINEAGE + "__init__", "_number(sequence) | 1", "1",
    ),
    Mutant(
        "what is rolled back still counts", STORAGE + "_apply",
        "self.lineage.count(self._lengths)", "pass",
    ),
    Mutant(
        "queries are of tokens that are not there", STORAGE + "check_last", "0 < length < n",
        "False",
    ),
    Mutant(
        "endless scales", "inference/checks.py:check_options", "not isfinite(scores.scale)",
        "False",
    ),
    Mutant(
        "endless softclamps", "inference/checks.py:check_options", "scores.softclamp < inf",
        "scores.softclamp",
    ),
    Mutant(
        "a sequence of any length has room", CACHE + "_check_capacity", "tokens > most", "False",
    ),
    Mutant(
        "a sequence of less than nothing has room", CACHE + "_check_capacity", "tokens < least",
        "False",
    ),
    Mutant(
        "heads that no call has are explained", "inference/explain.py:_check",
        "heads % cache.key_heads", "False",
    ),
    Mutant(
        "no token is explained", "inference/explain.py:_check", "tokens < 1", "False",
    ),
    Mutant(
        "a state without what can be rolled back", CACHE + "state_dict",
        "else window.dropped[sequence]", "else None",
    ),
    Mutant(
        "a loaded cache has all that ever was", CACHE + "load_state_dict",
        "circle.take(", "(lambda *_: None)(",
    ),
    Mutant(
        "old padding stays", CACHE + "load_state_dict", "self._apply([], lengths, starts)",
        "self._apply([], lengths)",
    ),
    Mutant(
        "pages stay shared", STORAGE + "_begin_anew", "self._table.of = [[] for _ in before]",
        "pass",
    ),
    Mutant(
        "without memory pages are lost", STORAGE + "_begin_anew", "self._table.of = before",
        "pass",
    ),
    Mutant(
        "states of any heads", STATES + "_check_kind", "(tuple(t.shape), t.dtype) !=",
        "t.dtype != of and",
    ),
    Mutant(
        "states of any dtype", STATES + "_check_kind", "(tuple(t.shape), t.dtype) != (shape, of)",
        "tuple(t.shape) != shape",
    ),
    Mutant(
        "states of any layers", STATES + "_check_sizes", "!= {cache.layers}", "== set()",
    ),
    Mutant(
        "states beyond the capacity", STATES + "_check_sizes", "max(lengths) > cache.capacity",
        "False",
    ),
    Mutant(
        "states of several caches", STATES + "check_states",
        "state[name] != states[0][name]", "False",
    ),
    Mutant(
        "rows that do not fit 8 bits", "inference/scaled.py:stored", "> _THREE_QUARTERS",
        "> _MANTISSA",
    ),
]  # fmt: skip
