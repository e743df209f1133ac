"""Kernels with which ranks wait at a barrier in shared memory, and check each other's purpose.

A rank's board is memory that all ranks write: `[2, ranks]` words, one per rank for each of the last
two barriers. A word is the barrier's number and, below it, its purpose:

    | 63 .. 32: number | 30 .. 24: call | 23 .. 0: kind and plan |

A purpose is all below the number. Its call is the one that a backward differentiates; 0 if that is
unknown, as in compiled code, which then matches any.

A rank that has given up writes `FAILED` on all boards instead, and waits for no rank any more.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

FAILED = tl.constexpr(-1)
CALL = tl.constexpr(127 << 24)  # the bits of a word that are its call
# the words of a guard's state: whether anything is wrong, the number of barriers so far, how many
# programs of a kernel have left its barrier, the addresses of the report and of the boards
WRONG, MET, LEFT, REPORT, BOARDS = (tl.constexpr(i) for i in range(5))


@triton.jit
def _board(state, rank):
    return tl.load(state + BOARDS + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _boards(state, lane, peer):
    return tl.load(state + BOARDS + lane, mask=peer, other=0).to(tl.pointer_type(tl.int64))


@triton.jit
def report_first(state, peer, expected, seen):
    """Write the report of a failure, unless an earlier one was written.

    A state begins with WRONG; its word REPORT is the address of the report.
    """
    if tl.load(state + WRONG) == 0:
        report = tl.load(state + REPORT).to(tl.pointer_type(tl.int64))
        tl.store(report + 1, peer)
        tl.store(report + 2, expected)
        tl.store(report + 3, seen)
        tl.store(report, 1)
        tl.store(state + WRONG, 1)


@triton.jit
def _give_up(boards, peer, rank, RANKS: tl.constexpr):
    """Mark this rank as failed on all boards, its own included, so that no rank waits for it."""
    for half in tl.static_range(2):
        tl.atomic_xchg(boards + half * RANKS + rank, FAILED, mask=peer, sem="release", scope="sys")


@triton.jit
def wait_at_barrier(
    state, number, purpose, rank, patience, RANKS: tl.constexpr, LANES: tl.constexpr
):
    """Wait until all ranks have arrived at barrier `number`; return whether this rank gave up.

    Every program of a kernel waits, see `barrier_kernel`; the first one marks this rank's arrival.

    All threads agree, because `seen` is read once for all of them. WRONG may change while they read
    it, so it decides only whether to mark the arrival. The thread that sets it has seen FAILED on
    this rank's board, or writes it there.
    """
    lane = tl.arange(0, LANES)
    peer = lane < RANKS
    word = (number << 32) | purpose
    mark = number << 32 >> 32  # the number as read from a word, which is signed
    half = (number % 2) * RANKS
    own = _board(state, rank) + half + lane
    theirs = _boards(state, lane, peer)
    if (tl.program_id(0) == 0) & (tl.load(state + WRONG) == 0):
        tl.atomic_xchg(theirs + half + rank, word, mask=peer, sem="release", scope="sys")
    begin = globaltimer()
    waiting = number > 0  # always
    while waiting:
        so_far = tl.load(own, mask=peer, other=0, volatile=True)
        absent = tl.sum((peer & (so_far >> 32 != mark)).to(tl.int32))
        failed = tl.sum((peer & (so_far == FAILED)).to(tl.int32))
        waiting = (absent > 0) & (failed == 0) & (globaltimer() - begin < patience)
    seen = tl.atomic_add(own, 0, mask=peer, sem="acquire", scope="sys")
    compared = tl.where(((seen & CALL) == 0) | ((word & CALL) == 0), ~CALL, -1)
    wrong = peer & (((seen ^ word) & compared) != 0)
    gives_up = tl.sum(wrong.to(tl.int32)) > 0
    if gives_up:
        gave_up = peer & (seen == FAILED)  # the ranks that make others absent
        blamed = gave_up | (wrong & (tl.sum(gave_up.to(tl.int32)) == 0))
        first = tl.min(tl.where(blamed, lane, LANES))
        report_first(state, first, word, tl.sum(tl.where(lane == first, seen, 0)))
        _give_up(theirs, peer, rank, RANKS)
    return gives_up


@triton.jit(do_not_specialize=["purpose", "rank", "patience"])
def barrier_kernel(
    state,
    purpose: tl.int32,
    rank: tl.int32,
    patience: tl.int64,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Wait until all ranks arrive for this `purpose`, for at most `patience` nanoseconds."""
    number = tl.load(state + MET) + 1
    tl.store(state + MET, number)
    wait_at_barrier(state, number, purpose, rank, patience, RANKS, LANES)


@triton.jit
def leave(state, number):
    """End a kernel whose programs have all passed this barrier: the last one stores its `number`.

    Until then all programs must see the same number.
    """
    before = tl.atomic_add(state + LEFT, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(state + LEFT, 0)
        tl.store(state + MET, number)


@triton.jit
def out_of_step(state, rank, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Return whether any rank has failed by now, this one included.

    If none has, all earlier reads were valid. A program of several warps has a barrier between its
    reads and this.
    """
    lane = tl.arange(0, 2 * LANES)  # the words of both slots, in one atomic
    word = lane < 2 * RANKS
    own = _board(state, rank) + lane
    seen = tl.atomic_add(own, 0, mask=word, sem="acq_rel", scope="sys")
    failed = word & (seen == FAILED)
    any_failed = tl.sum(failed.to(tl.int32)) > 0
    if any_failed:
        gone = tl.full((), FAILED, tl.int64)
        report_first(state, tl.min(tl.where(failed, lane % RANKS, LANES)), gone, gone)
    return any_failed


@triton.jit(do_not_specialize=["rank"])
def fail_kernel(state, rank: tl.int32, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Mark this rank as failed on all boards."""
    lane = tl.arange(0, LANES)
    peer = lane < RANKS
    tl.store(state + WRONG, 1)
    _give_up(_boards(state, lane, peer), peer, rank, RANKS)


@triton.jit
def _fill(address, nbytes, BLOCK: tl.constexpr):
    """Set all bits, which is NaN in every floating dtype."""
    place = address.to(tl.pointer_type(tl.int8))
    for first in range(tl.program_id(0) * BLOCK, nbytes, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(place + at, tl.full((BLOCK,), -1, tl.int8), mask=at < nbytes)


@triton.jit(do_not_specialize=["rank", "address", "nbytes"])
def fill_nan_kernel(
    state,
    rank: tl.int32,
    address: tl.int64,
    nbytes: tl.int64,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill data read from peers' memory with NaN, if anything is wrong or a rank gave up."""
    if out_of_step(state, rank, RANKS, LANES):
        _fill(address, nbytes, BLOCK)


@triton.jit(do_not_specialize=["number", "stamp", "peer", "expected", "address", "nbytes"])
def compare_kernel(
    state, number: tl.int64, stamp: tl.int64, peer: tl.int32, expected: tl.int32, address: tl.int64,
    nbytes: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill a peer's message with NaN if its stamp is another, or anything was wrong before.

    The number of this exchange is reported to the host, unless it is 0.
    """
    if (tl.program_id(0) == 0) & (number > 0):
        report = tl.load(state + REPORT).to(tl.pointer_type(tl.int64))
        tl.store(report + 4, number)
    came = tl.load(stamp.to(tl.pointer_type(tl.int32)))
    wrong = came != expected
    if wrong:
        report_first(state, peer, expected, came)
    if wrong | (tl.load(state + WRONG) != 0):  # not all threads see at once a store by one
        _fill(address, nbytes, BLOCK)
