"""Failures of a rank, for real, as the others see them: each event, phase and transport.

Four processes over gloo. Rank 1 is struck; the others tell what they saw and after how long, and
then form a group without it, in which results must be right.
"""

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import product
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.plan import plan_cache
from ring_attention_pytorch.ranks.failures import RingError, fail_together
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.ranks import Pool, unhurried
from tests.support.reference import dense_attention, relative_error

SIZE, STRUCK = 4, 1
OTHERS = tuple(rank for rank in range(SIZE) if rank != STRUCK)
TIMEOUT = 5.0  # seconds, of the groups; more on a busy machine
_AT_ONCE = 6  # sets of processes
SOON = 0.6  # of the timeout, what counts as at once

EVENTS = ("is killed", "stands still", "raises", "has no memory left")
PHASES = ("agreeing", "making a plan", "forward", "backward")
WAYS: dict[str, dict[str, object]] = {
    "ring": {"transport": "ring"},
    "gather": {"transport": "gather"},
    "Ulysses": {"transport": "ring", "ulysses": 2},
}


class Strike(NamedTuple):
    event: str
    phase: str
    way: str
    together: bool  # in a block of fail_together


class Seen(NamedTuple):
    """By one of the others."""

    error: str  # its type
    text: str
    seconds: float
    waited_for: tuple[int, ...]
    afterwards: float  # relative error in the new group
    timeout: float

    @property
    def when(self) -> str:
        return "at once" if self.seconds < SOON * self.timeout else "within the timeout"

    @property
    def is_late(self) -> bool:
        """True if it waited for longer than the timeout, and a second."""
        return self.seconds >= self.timeout + 1


# agreeing is the same however keys travel
STRIKES = [
    Strike(event, phase, way, together)
    for event, phase, way, together in product(EVENTS, PHASES, WAYS, (False, True))
    if phase != "agreeing" or way == "ring"
]


def blow(event: str) -> None:
    if event == "raises":
        raise ArithmeticError("struck")
    if event == "has no memory left":
        raise MemoryError("struck")
    os.kill(os.getpid(), signal.SIGKILL if event == "is killed" else signal.SIGSTOP)
    raise TimeoutError("stood still for long")


@contextmanager
def struck_in(strike: Strike) -> Iterator[Callable[[RingPlan], None]]:
    """A block in which this rank is struck; what it gives strikes a plan's kernel."""

    def fall(*given: object, **named: object) -> None:
        blow(strike.event)

    def into_kernel(plan: RingPlan) -> None:
        direction = {strike.phase: fall}
        if strike.phase in ("forward", "backward"):
            object.__setattr__(plan, "kernel", plan.kernel._replace(**direction))

    places = {
        "agreeing": "ring_attention_pytorch.plan.proposal.check_qkv",
        "making a plan": "ring_attention_pytorch.plan.prepare.make_transport",
    }
    with ExitStack() as stack:
        if strike.phase in places:
            stack.enter_context(mock.patch(places[strike.phase], fall))
        yield into_kernel


def layer(
    group: dist.ProcessGroup, into_kernel: Callable[[RingPlan], None], **way: object
) -> float:
    """Forward and backward over a group; the largest relative error."""
    ring = Ring(group)
    torch.manual_seed(0)
    whole = [torch.randn(1, 4 * ring.size, 4, 8, dtype=torch.float64) for _ in range(3)]
    mine = [t.chunk(ring.size, dim=1)[ring.rank].clone().requires_grad_() for t in whole]
    plan = RingPlan.make(*mine, causal=True, group=ring, **way)
    into_kernel(plan)
    out = ring_attn(*mine, plan=plan)
    grads = torch.autograd.grad(out.square().sum(), mine)
    whole = [t.requires_grad_() for t in whole]
    want, _ = dense_attention(*whole, causal=True)
    exact = [want, *torch.autograd.grad(want.square().sum(), whole)]
    pairs = zip([out, *grads], exact)
    return max(relative_error(t, e.chunk(ring.size, dim=1)[ring.rank]) for t, e in pairs)


def witness(strike: Strike, timeout: float) -> Seen | None:
    """For a pool: what this rank sees; None for the one that is struck."""
    rank, pids = dist.get_rank(), [None] * SIZE
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    dist.all_gather_object(pids, os.getpid(), group=group)
    assert layer(group, lambda plan: None, **WAYS[strike.way]) < 1e-12  # and all that is first
    plan_cache.forget()  # the plan is made anew
    started = time.monotonic()
    with ExitStack() as stack:
        if strike.together:
            stack.enter_context(fail_together())
        into_kernel = lambda plan: None  # noqa: E731 - the others'
        if rank == STRUCK:
            into_kernel = stack.enter_context(struck_in(strike))
        try:
            layer(group, into_kernel, **WAYS[strike.way])
            error: Exception = AssertionError("nothing")
        except Exception as raised:  # of any kind
            error = pickle.loads(pickle.dumps(raised))
    seconds = time.monotonic() - started
    if rank == STRUCK:
        return None
    if rank == OTHERS[0] and strike.event == "stands still":
        time.sleep(max(0.0, timeout + 1 - seconds))
        os.kill(pids[STRUCK], signal.SIGCONT)
    others = dist.new_group(list(OTHERS), use_local_synchronization=True)
    afterwards = layer(others, lambda plan: None)
    waited = error.ranks if isinstance(error, RingError) else ()
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return Seen(kind, str(error), seconds, waited, afterwards, timeout)


def outcomes(strikes: list[Strike]) -> dict[Strike, list[Seen]]:
    """Return what the others saw of each."""
    found: dict[Strike, list[Seen]] = {}

    def some(share: list[Strike]) -> None:
        pool = Pool(SIZE)
        try:
            for strike in share:
                answers = pool.answers(witness, strike, unhurried(TIMEOUT))
                assert all(answers[r][0] == "ok" for r in OTHERS), (strike, answers)
                found[strike] = [answers[r][1] for r in OTHERS]
                if strike.event == "is killed":
                    pool.stop()  # the next one starts anew
        finally:
            pool.stop()

    with ThreadPoolExecutor(_AT_ONCE) as workers:
        list(workers.map(some, (strikes[i::_AT_ONCE] for i in range(_AT_ONCE))))
    return {strike: found[strike] for strike in strikes}


def told(strike: Strike, seen: list[Seen]) -> str:
    """Say in words what the one saw who saw it last.

    Outside of `fail_together` it is a race who waits for the rank that failed, and who for one that
    lives on: only the timeout is sure.
    """
    (error,) = {each.error for each in seen}
    if error == "RingError" and not strike.together:
        return f"`{error}` within the timeout"
    return f"`{error}` {max(seen, key=lambda each: each.seconds).when}"
