# ruff: noqa: C901, RET505, SIM102 - a kernel takes every size by itself, forks early
"""Attention of few queries to one rank's cached keys, split over keys: bound by memory bandwidth.

A program reads some keys of one key head, for all queries that use them, and thus each key is read
once. The query heads of a group are rows of one matrix. The result is partial: out and lse in
float32. `_triton_merge` merges the results of all splits and ranks.

The last split is the new tokens: it attends to those that this rank owns, and writes them to the
cache. No other program reads them before the next call, because all use the old length.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ring_attention_pytorch.inference._triton_append import (
    exponent,
    kept,
    power_of_rows,
    power_of_two,
    store_rows,
)
from ring_attention_pytorch.ranks._triton_guard import MET

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _held(length, PAGE: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr):
    """Return how many of the first `length` tokens this rank holds: `Pages.held`."""
    rest = length % (PAGE * RANKS) - RANK * PAGE
    return length // (PAGE * RANKS) * PAGE + tl.minimum(tl.maximum(rest, 0), PAGE)


@triton.jit
def _tanh(x):
    """Return tanh, exact near zero and without overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _scores(q, k, factor, clamp, slope, distance, PRECISION: tl.constexpr, CLAMP, ALIBI):
    """Return scores in base 2. `factor` is the scale, times log2(e) unless CLAMP follows."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor
    if CLAMP:
        scores = clamp * _tanh(scores)
    if ALIBI:
        scores = scores - slope[:, None] * distance
    return scores


@triton.jit
def _add(running, scores, v, v_scale, PRECISION: tl.constexpr, SCALED: tl.constexpr):
    """Add keys with these scores, -inf if hidden, to (acc, top, total).

    `total` has a number for each row and column of scores, summed once at the end: warps share
    rows. A value's scale is part of its weight. Weights up to 2 ** 15 use float16's full range.
    """
    acc, top, total = running
    spare = 0.0
    if SCALED:
        power = exponent(v_scale).to(tl.float32)
        scores = scores + power[None, :]
        spare = 15.0
    new_top = tl.maximum(top, tl.max(scores, 1) - spare)
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    if SCALED:
        p = p * tl.exp2(-power)[None, :]
    return acc, new_top, total * fade[:, None] + p


@triton.jit
def _for_8_bits(q):
    """Return queries in the dtype to multiply by keys of 8 bits, and their scales.

    bfloat16 is scaled into float16, without loss: 8 bits convert to it in a third of the
    instructions, and those are the bottleneck: 438 us instead of 463 at 512k keys.
    """
    if q.dtype == tl.bfloat16:
        power = tl.maximum(power_of_rows(q), -126)
        q = (q.to(tl.float32) * power_of_two(-power)[:, None]).to(tl.float16)
        return q, power_of_two(power)
    else:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def _pages(table, j, end, PAGE: tl.constexpr, COLS: tl.constexpr):
    """Return the page of each key from j to `end`; a scalar if they share one page."""
    index = j if PAGE % COLS == 0 else j + tl.arange(0, COLS)
    return tl.load(table + index // PAGE, mask=index < end, other=0).to(tl.int64)


@triton.jit(
    do_not_specialize=["width", "page_rows", "head_rows", "given", "factor", "clamp", "window"]
)
def attend_kernel(
    q, k_new, v_new, slopes, key_mask,
    # the cache
    keys, values, key_scales, value_scales, tables, lengths, width: tl.int32, page_rows: tl.int64,
    head_rows: tl.int64, given: tl.int64,
    # the same in all calls of a plan
    starts, capacities, acc_of, lse_of, next_lengths, state, factor: tl.float32, clamp: tl.float32,
    window: tl.int32,
    # sizes
    N: tl.constexpr, ROWS_IN_ALL: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, ROW_V: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    NEW_COLS: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, RANKS: tl.constexpr,
    RANK: tl.constexpr,
    # forks
    NEW: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, STARTS: tl.constexpr, CLAMP: tl.constexpr, ALIBI: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the cached keys, of one key head and sequence.

    Without CAUSAL each sequence is one page of `given` keys. With MASKED, queries see the keys
    for which `key_mask` `[b, given]` is not 0.
    Strides in rows of keys or values: `page_rows`, `head_rows`, and STEP between tokens. ROW_V
    numbers are between values: D if they are the first D_V numbers of keys.
    """
    if PDL:  # launched before the previous kernel ends, as `merge_kernel` is before this one ends
        gdc_launch_dependents()
        gdc_wait()
    # the split of new tokens is last: it is short, and the others fill all multiprocessors evenly
    others = tl.num_programs(0) // SPLITS
    split, of = tl.program_id(0) // others, tl.program_id(0) % others
    block, of = of % BLOCKS, of // BLOCKS
    kv, sample = of % KV, of // KV
    length = tl.load(lengths + sample) if CAUSAL else given.to(tl.int32)
    # without new tokens a sequence must have at least the queries' tokens, or none
    fits = length + N <= tl.load(capacities + sample) if NEW else (length >= N) | (length == 0)
    if not CAUSAL:
        fits = length >= 0
    if (split == 0) & (block == 0) & (kv == 0):
        tl.store(next_lengths + sample, tl.where(fits, length + N if NEW else length, -1))
        if SHARED:
            if sample == 0:  # the number of this call, which `merge_kernel` reads
                tl.store(state + MET, tl.load(state + MET) + 1)

    first_query = length if NEW else length - N
    row = block * ROWS + tl.arange(0, ROWS)
    query, member = row // GROUP, row % GROUP
    held = row < N * GROUP
    place = (sample * N + query) * (KV * GROUP) + kv * GROUP + member  # among all rows of q
    col, col_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    q_at = q + place.to(tl.int64)[:, None] * D + col[None, :]
    q_rows = tl.load(q_at, mask=held[:, None] & (col < D)[None, :], other=0.0)
    if SCALED:
        q_rows, q_scale = _for_8_bits(q_rows)
    token = first_query + query
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + kv * GROUP + member, mask=held, other=0.0).to(tl.float32) * _LOG2_E

    start = 0
    if STARTS:
        start = tl.load(starts + sample)
    unseen = start
    if WINDOW:
        unseen = tl.maximum(start, first_query + block * ROWS // GROUP - window)
    count = _held(length, PAGE, RANKS, RANK)
    first = tl.minimum(_held(unseen, PAGE, RANKS, RANK), count) // COLS * COLS
    # in whole blocks of keys; numbers of blocks differ by at most one between splits
    in_all = tl.cdiv(count - first, COLS)
    begin = first + in_all * split // (SPLITS - NEW) * COLS
    end = first + in_all * (split + 1) // (SPLITS - NEW) * COLS
    end = tl.minimum(end, count)  # not behind begin, for the split of new tokens
    acc = tl.zeros([ROWS, WIDTH_V], tl.float32)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    totals = tl.zeros([ROWS, COLS], tl.float32)
    table = tables + sample.to(tl.int64) * width

    # read one step ahead: a load that depends on another of the same step halves those in flight
    page = _pages(table, begin, end, PAGE, COLS)
    for j in range(begin, end, COLS):
        index = j + tl.arange(0, COLS)
        there = index < end
        at = page * page_rows + kv * head_rows + index % PAGE * STEP
        if PAGE % COLS == 0:
            at = page * page_rows + kv * head_rows + (j % PAGE + tl.arange(0, COLS)) * STEP
        page = _pages(table, j + COLS, end, PAGE, COLS)
        key_token = (index // PAGE * RANKS + RANK) * PAGE + index % PAGE
        shown = there  # hidden values can be NaN, and NaN * 0 is NaN
        if MASKED:
            shown = tl.load(key_mask + sample * given + index, mask=there, other=0) != 0
        if STARTS or WINDOW:
            shown = shown & (key_token >= unseen)
        k_mask = there[:, None] if D == WIDTH else there[:, None] & (col < D)[None, :]
        v_mask = shown[:, None] if D_V == WIDTH_V else shown[:, None] & (col_v < D_V)[None, :]
        k = tl.load(keys + at[:, None] * D + col[None, :], mask=k_mask, other=0.0)
        v = tl.load(values + at[:, None] * ROW_V + col_v[None, :], mask=v_mask, other=0.0)
        distance = (token[:, None] - key_token[None, :]).to(tl.float32)
        factors, v_scale = factor, 1.0
        if SCALED:
            k_scale = tl.load(key_scales + at, mask=there, other=1.0)
            v_scale = tl.load(value_scales + at, mask=shown, other=1.0)
            factors = factor * q_scale[:, None] * k_scale[None, :]
        scores = _scores(q_rows, k, factors, clamp, slope, distance, PRECISION, CLAMP, ALIBI)
        seen = shown[None, :]
        if CAUSAL and (not NEW) and N > 1:
            seen = seen & (key_token[None, :] <= token[:, None])
        if WINDOW:
            seen = seen & (key_token[None, :] >= token[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        running = _add((acc, top, totals), scores, v.to(q_rows.dtype), v_scale, PRECISION, SCALED)
        acc, top, totals = running
    total = tl.sum(totals, 1)

    if NEW:
        if split == SPLITS - 1:
            new_totals = tl.zeros([ROWS, NEW_COLS], tl.float32)
            for j in range(0, N, NEW_COLS):
                new = j + tl.arange(0, NEW_COLS)
                new_token = length + new
                mine = (new < N) & (new_token // PAGE % RANKS == RANK)
                at = ((sample * N + new) * KV + kv).to(tl.int64)
                k_mask = mine[:, None] & (col < D)[None, :]
                v_mask = mine[:, None] & (col_v < D_V)[None, :]
                k = tl.load(k_new + at[:, None] * D + col[None, :], mask=k_mask, other=0.0)
                v = tl.load(v_new + at[:, None] * ROW_V + col_v[None, :], mask=v_mask, other=0.0)
                k, k_scale = kept(k, SCALED)
                v, v_scale = kept(v, SCALED)
                if block == 0:
                    write = mine & fits
                    store_rows(
                        keys, key_scales, table, k, k_scale, new_token, write, kv,
                        PAGE, RANKS, KV, D, D, WIDTH, SCALED,
                    )  # fmt: skip
                    store_rows(
                        values, value_scales, table, v, v_scale, new_token, write, kv,
                        PAGE, RANKS, KV, D_V, ROW_V, WIDTH_V, SCALED,
                    )  # fmt: skip
                factors = factor
                if SCALED:
                    factors = factor * q_scale[:, None] * k_scale[None, :]
                distance = (token[:, None] - new_token[None, :]).to(tl.float32)
                scores = _scores(
                    q_rows, k, factors, clamp, slope, distance, PRECISION, CLAMP, ALIBI
                )
                seen = mine[None, :] & (new_token[None, :] <= token[:, None])
                if STARTS:
                    seen = seen & (new_token >= start)[None, :]
                    v = tl.where((new_token >= start)[:, None], v, 0.0)
                    v_scale = tl.where(new_token >= start, v_scale, 1.0)
                if WINDOW:
                    seen = seen & (new_token[None, :] >= token[:, None] - window)
                scores = tl.where(seen, scores, -float("inf"))
                v = v.to(q_rows.dtype)
                running = _add((acc, top, new_totals), scores, v, v_scale, PRECISION, SCALED)
                acc, top, new_totals = running
            total = tl.sum(new_totals, 1)  # this split has no others

    place = place.to(tl.int64) + split * ROWS_IN_ALL
    some = tl.where(total == 0.0, 1.0, total)
    within = held[:, None] & (col_v < D_V)[None, :]
    tl.store(acc_of + place[:, None] * D_V + col_v[None, :], acc / some[:, None], mask=within)
    lse = tl.where(total == 0.0, -float("inf"), (top + tl.log2(some)) / _LOG2_E)
    tl.store(lse_of + place, lse, mask=held)
