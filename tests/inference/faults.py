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
        "values of a tied cache are moved twice", "inference/pools.py:Pools.all",
        "values = () if self.tied else (self.values,)",
        "values = ([k[..., : self.sizes.value_dim] for k in self.keys],) if self.tied else "
        "(self.values,)",
    ),
    Mutant(
        "a chunk's plan takes the kernel of few tokens for the cache",
        "inference/prefill.py:plan_chunk", "kernel=cast(KernelOption, fastest.name)", "kernel=None",
    ),
    Mutant(
        "the oldest keys that are kept are a window's", "inference/prefill.py:_windows",
        "k[len(k) - n :]", "k[:n]",
    ),
    Mutant(
        "padding in a window is seen", "inference/attention.py:_sees_all", "- window)",
        "- window + 1)",
    ),
    Mutant("a page too far", PAGES + "owner", "token // self.page", "(token + 1) // self.page"),
    Mutant(
        "what is forgotten stays on the device", STORAGE + "_apply", "self.lengths_of.copy_(",
        "self.lengths_of.clone().copy_(",
    ),
    Mutant(
        "left padding stays with its place", CACHE + "reorder",
        "[starts[i] for i in beams]", "starts",
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
        "all ranks weigh alike", "inference/partial.py:merged",
        "weight = (lse - total.", "weight = (0 * lse - total.",
    ),
    Mutant(
        "a rank's own result is another's", "comm/collectives.py:_stacked",
        "found[ranks.index(mine)] = x",
        "found[ranks.index(mine)] = x * 0",
    ),
    Mutant(
        "a chunk's own results without sinks", "inference/decode_plan.py:DecodePlan.run_chunk",
        "lses.transpose(2, 3), sinks)", "lses.transpose(2, 3))",
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
        "heads of another page", POOLS + "local_of_all", "alpha=key_heads", "alpha=1",
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
        "plans are made of any cache", "inference/attention.py:_plan",
        "cache.state_note(layer)", "''",
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
        "rows that do not fit 8 bits", "runtime/scaled.py:stored", "> _THREE_QUARTERS",
        "> _MANTISSA",
    ),
]  # fmt: skip
