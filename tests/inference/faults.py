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
        "shortening writes shared pages", TABLE + "shorten", "users[page := held[place]] > 1",
        "users[page := held[place]] > 9",
    ),
    Mutant(
        "a page of another sequence is free", TABLE + "recount", "if not users", "if users < 2",
    ),
    Mutant(
        "tokens at the place of others", POOLS + "put",
        ".long(), tokens % page", ".long(), tokens * 0",
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
        "a rank's own result is another's", "comm/exchange.py:all_gather_stacked",
        "found[ring.rank] = x",
        "found[ring.rank] = x * 0",
    ),
    Mutant(
        "a chunk in the order of ranks", "inference/prefill.py:_order", "torch.cat(each).argsort()",
        "torch.cat(each).sort().values",
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
        "others' queries are taken for own ones", "inference/prefill.py:_by_all",
        "queries[(me + places) % ring.size]", "queries[me]",
    ),
    Mutant(
        "heads of another page", POOLS + "local_of_all", "alpha=key_heads", "alpha=1",
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
        "what is overwritten can be rolled back", ROLLING + "RollingTokens.check_rollback",
        "> spare", "> 99",
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
        "plans are made of any cache", "inference/attention.py:_plan",
        "cache.state_note(layer)", "''",
    ),
    Mutant(
        "new tokens count once", LINEAGE + "advance", "n * self._all", "self._all",
    ),
    Mutant(
        "queries are of tokens that are not there", STORAGE + "check_last", "0 < length < n",
        "False",
    ),
    Mutant(
        "endless softclamps", "inference/checks.py:check_options", "scores.softclamp < inf",
        "scores.softclamp",
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
        "states of several caches", STATES + "check_states",
        "state[name] != states[0][name]", "False",
    ),
    Mutant(
        "rows that do not fit 8 bits", "inference/scaled.py:stored", "> _THREE_QUARTERS",
        "> _MANTISSA",
    ),
]  # fmt: skip
