"""An agreement before any tensor is sent: all ranks agree, or all raise the same error.

A rank that disagrees about a shape makes gloo end the process, return wrong data, or hang. Ranks
therefore exchange notes first, in one small all-gather on the host. A note has three lines: the
number of agreements so far, the ring's size and the rank's error; the values that must match; the
rank's own numbers. The second line is long and rarely changes. It is encoded once, and parsed only
if ranks differ.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

from beartype.roar import BeartypeCallHintParamViolation
from torch.compiler import is_compiling

from ring_attention_pytorch.arguments import Arguments, Function, WrongArgument
from ring_attention_pytorch.ranks.failures import Disagreement, by_value, call_site, ranks_of
from ring_attention_pytorch.ranks.notes import exchange, unreadable
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.runtime.torch_func import run_apart

_LONGEST_TEXT = 2000  # characters of an error, or of one value

# raises the error of one rank's arguments; or is that error, if it is known already
Check: TypeAlias = Callable[[], object] | ValueError
# gets a call's arguments by name, and the error about them
Report: TypeAlias = Callable[[dict[str, Any], ValueError], object]


@dataclass(frozen=True)
class MustMatch:
    """Values by name that must be the `same` in a rank's ring, and `everywhere` in its group."""

    same: Mapping[str, Any] = field(default_factory=dict)
    everywhere: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> bytes:
        """The values as a line of a note, in JSON."""
        same = {name: _plain(value) for name, value in self.same.items()}
        return json.dumps([same, dict(self.everywhere)]).encode()


class Note(NamedTuple):
    """The note of one rank."""

    step: int  # the number of its agreements so far
    ring_size: int
    problem: str | None
    must_match: bytes
    own: dict[str, int]


def read_note(caller: str, rank: int, note: bytes) -> Note:
    """Parse a rank's note, which another version or another program may have sent.

    Raises:
        Disagreement: it can't be parsed.

    >>> read_note("a call", 0, b'3 2 null\\n[{"causal": true}, {}]\\n{"n": 4}').own
    {'n': 4}
    """
    try:
        head, must_match, own = note.split(b"\n")
        step, ring_size, problem = head.split(b" ", 2)
        numbers = {name: int(number) for name, number in _parsed(own).items()}
        return Note(int(step), int(ring_size), _parsed(problem), must_match, numbers)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise unreadable(caller, rank, error) from None


def read_must_match(caller: str, rank: int, note: Note) -> MustMatch:
    """Parse the values of a note that must match.

    Raises:
        Disagreement: they can't be parsed.
    """
    try:
        same, everywhere = json.loads(note.must_match)
        return MustMatch({**same}, {"ring size": note.ring_size, **everywhere})
    except (ValueError, TypeError, RecursionError) as error:
        raise unreadable(caller, rank, error) from None


@lru_cache(maxsize=64)
def _written(*own: tuple[str, int]) -> bytes:
    """Encode numbers as JSON."""
    return json.dumps(dict(own)).encode()


@lru_cache(maxsize=64)
def _parsed(text: bytes) -> Any:
    """Parse JSON. The result is cached: don't change it."""
    return json.loads(text)


def _shortened(text: str) -> str:
    """Cut an error text to its limit, and replace characters that can't be encoded."""
    return text[:_LONGEST_TEXT].encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types, with the same text on all ranks."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (bool, int, float, type(None))):
        return value
    text = str(value)
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:200]}... ({sha256(text.encode(errors='replace')).hexdigest()[:12]})"


def agree(
    ring: Ring,
    caller: str,
    same: Mapping[str, Any] | MustMatch,
    own: Mapping[str, int] | None = None,
    check: Check | None = None,
    everywhere: Mapping[str, Any] | None = None,
) -> list[dict[str, int]]:
    """Return the `own` numbers of each rank of the ring, once `same` is the same on all of them.

    `check` raises if this rank finds an error by itself. Then every rank of the group raises it,
    and none is left waiting; except in a batch's block whose ranks have agreed on this call before:
    there it is as with a plan. Error texts number ranks by the group. `everywhere` must be the same
    in all rings of the group, because it decides the next exchange. A `MustMatch` has both, and can
    be passed again.

    Raises:
        ValueError: ranks are in different calls, a check raises, or values differ; the same text on
            all ranks.
    """
    own, error = dict(own or {}), error_of(check)
    if error is not None and caller in ring.steps.passed_by:  # nobody else would come
        ring.report_failure(error)
        raise ValueError(f"{caller}: {error}")
    problem = ring.problem if error is None else _shortened(str(error))
    if ring.size == 1 and ring.group is None:
        ring.steps.compare(caller)
        ring.steps.broken = None
        _check_problems(caller, [problem])
        return [own]
    must_match = same if isinstance(same, MustMatch) else MustMatch(same, everywhere or {})
    if (unread := ring.steps.unread) is not None:
        ring.steps.unread, before = None, {"the batch before (its digest)": unread.for_note()}
        must_match = replace(must_match, same={**must_match.same, **before})
    wrong = b"null" if problem is None else json.dumps(problem).encode()
    head = b"%d %d %s" % (ring.steps.notes, ring.size, wrong)
    mine = b"\n".join((head, must_match.text, _written(*own.items())))
    notes = ring.gather_notes(caller, mine, problem)
    if problem is None and notes.count(mine) == len(notes):  # nothing to parse
        return [own] * ring.size
    read = [read_note(caller, *each) for each in enumerate(notes)]
    _check_problems(caller, [each.problem for each in read])
    _check_in_step(ring, caller, [each.step for each in read])
    if len({(each.ring_size, each.must_match) for each in read}) > 1:
        _check_must_match(ring, caller, read)
    _check_numbers(caller, [each.own for each in read])
    return [each.own for each in read[ring.first : ring.first + ring.size]]


def error_of(check: Check | None) -> ValueError | None:
    """Return the error of `check` as a ValueError; None if it raises nothing, or is None.

    A tensor without values, or an object whose attributes raise, can cause any exception. All ranks
    must get it: an exception of another type is named in the text.

    >>> error_of(lambda: [][1])
    ValueError('IndexError: list index out of range')
    """
    if check is None or isinstance(check, ValueError):
        return check
    try:
        check()
    except Exception as error:
        return with_type_name(error)
    return None


def with_type_name(error: Exception) -> ValueError:
    """Convert an error to a ValueError that names its type, unless it is a ValueError already."""
    kind = "" if type(error) is ValueError and str(error) else f"{type(error).__name__}: "
    return ValueError(f"{kind}{error}")


@contextmanager
def reporting(report: Callable[[ValueError], object]) -> Iterator[None]:
    """Report an error of this block to the ranks that wait for this one, then raise it.

    `report` is the ring's `report_failure`, or an agreement, which raises on all ranks.
    """
    try:
        yield
    except Exception as error:
        report(with_type_name(error))
        raise


def report_to_group(
    caller: str,
    agreed: tuple[str, Any] = ("plan", None),
    ring_of: Callable[[Group, int | None], Ring] = as_ring,
) -> Report:
    """Make the `report` of `typed`, for functions with a `group` that agree as `caller`.

    They agree only if the argument `agreed[0]` is `agreed[1]`: by default, only without a plan.
    Otherwise no rank waits in an agreement; a failure report is written for ranks that wait later.
    `ring_of` makes the ring of a group and a ring size.
    """

    def report(given: dict[str, Any], error: ValueError) -> None:
        if isinstance(options := given.get("options"), dict):
            given = {**given, **options}
        name, value = agreed
        if given.get(name) is value:
            group, size = given.get("group"), given.get("ring_size")
            group = group if isinstance(group, Group) else None
            ring = ring_of(group, size if type(size) is int else None)
            agree(ring, caller, {}, check=error)
        else:
            report_to_ring_of("plan", ring_of)(given, error)

    return report


def report_to_ring_of(name: str, ring_of: Callable[[Group, int | None], Ring] = as_ring) -> Report:
    """Make the `report` of `typed`, for functions whose argument `name` has a ring.

    Its ranks don't agree on the call. A failure report is written for those that will wait.
    """

    def report(given: dict[str, Any], error: ValueError) -> None:
        ring = getattr(given.get(name), "ring", None)
        if not isinstance(ring, Ring):  # none here, but ranks that have one wait
            group = given.get("group")
            ring = ring_of(group if isinstance(group, Group) else None, None)
        ring.report_failure(error)

    return report


def check_same_call(ring: Ring, queries: int | None = None) -> None:
    """Raise ValueError unless all ranks are in the same call, made by `Ring.call`.

    `queries` is a digest of this rank's queries, if other ranks should have others.

    Raises:
        ValueError: they are not, or all ranks have the same queries; the same text on all ranks,
            with each rank's call and its place in the source.
    """
    own = str(queries).encode()
    told = exchange(ring.gather_bytes, f"{ring.steps.now}\n{call_site()}", own)
    rings = [told[at : at + ring.size] for at in range(0, len(told), ring.size)]
    if ring.size > 1 and any({*each} != {b"None"} and len({*each}) == 1 for each in rings):
        raise Disagreement(
            f"{ring.steps.now}: all ranks of a ring have the same queries. Are they whole "
            "sequences, not sharded? Each rank passes its own tokens, such as shard_sequence "
            "returns"
        )


def raise_together(ring: Ring, caller: str, check: Check | None) -> None:
    """Run a check of gathered values, which raises on all ranks of this ring or on none.

    Other rings of the group raise, too. Without that they would wait for these ranks in the next
    exchange of the whole group. All ranks of the group call this, with a check or without.

    Raises:
        ValueError: the check of a ring raises; the same text on all ranks of the group.
    """
    if ring.several:
        agree(ring, caller, {}, check=check)
    elif (error := error_of(check)) is not None:
        raise Disagreement(f"{caller}: {error}")


def typed(report: Report, apart: bool = False) -> Callable[[Function], Function]:
    """Decorate a function: check the types and names of its arguments, on all ranks together.

    `report` gets the arguments by name, and the error about them. It raises that error on all ranks
    that will wait for this one, as the `check` of an agreement, or returns if there are none.
    torch.compile traces the function, or, with `apart`, breaks the graph around it; it checks types
    only if `apart`.

    Raises:
        ValueError: an argument has another type, or is no parameter; on all ranks alike. It is a
            `WrongArgument` if no other rank has to raise it.

    >>> @typed(lambda given, error: None)
    ... def twice(x: int) -> int:
    ...     return 2 * x
    >>> twice("two")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ring_attention_pytorch.arguments.WrongArgument: twice() parameter x='two' violates type hint ...
    """

    def decorate(function: Function) -> Any:
        arguments = Arguments(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return run_apart(call, *args, **kwargs) if apart else function(*args, **kwargs)
            try:
                return arguments.call(*args, **kwargs)
            except (BeartypeCallHintParamViolation, TypeError) as error:
                if (why := arguments.refusal(error, args, kwargs)) is None:
                    raise
            report(arguments.by_name(args, kwargs), ValueError(why))
            raise WrongArgument(why)

        return call

    return decorate


def _check_problems(caller: str, problems: list[str | None]) -> None:
    """Raise the errors that ranks found by themselves: each once, with the ranks that have it."""
    if not any(problems):
        return
    texts = []
    for problem, ranks in by_value(problems).items():
        if problem is not None:
            where = "" if len(ranks) == len(problems) else f" (on {ranks_of(ranks)})"
            texts.append(f"{problem}{where}")
    if texts:
        raise Disagreement(f"{caller}: {'; '.join(texts)}")


def _check_in_step(ring: Ring, caller: str, steps: list[int]) -> None:
    """Raise if ranks have made different numbers of agreements; afterwards all count alike."""
    if len({*steps}) > 1:
        ring.steps.notes = max(steps) + 1
        raise Disagreement(
            f"{caller}: ranks are out of step, some have skipped a call: notes were compared "
            f"before this {_each(steps)}; all ranks must make the same calls in the same order"
        )


def _check_numbers(caller: str, own: list[dict[str, int]]) -> None:
    """Raise if ranks have sent numbers of other names, as other versions of this library do."""
    if len({tuple(numbers) for numbers in own}) > 1:
        raise Disagreement(
            f"{caller}: ranks tell other numbers: {_each([', '.join(n) or 'none' for n in own])}; "
            "run the same version of this library on all ranks"
        )


def _check_must_match(ring: Ring, caller: str, notes: list[Note]) -> None:
    """Raise if values that must match differ: first in the whole group, then in each ring."""
    must_matches = [read_must_match(caller, *each) for each in enumerate(notes)]
    _check_same(caller, [each.everywhere for each in must_matches], first=0)
    for first in range(0, len(must_matches), ring.size):  # all rings: every rank raises
        of_ring = must_matches[first : first + ring.size]
        _check_same(caller, [each.same for each in of_ring], first)


def _check_same(caller: str, members: list[Mapping[str, Any]], first: int) -> None:
    """Raise if ranks have sent different values of any name; ranks count from `first`."""
    if len(members) == 1 or len({json.dumps(member) for member in members}) == 1:
        return
    for name in dict.fromkeys(name for member in members for name in member):
        texts = [json.dumps(member.get(name), ensure_ascii=False) for member in members]
        if len({*texts}) > 1:
            got = _each(texts, first)
            raise Disagreement(
                f"{caller}: {name} must be the same on every rank, got {got}; pass the same on all"
            )


def _each(values: Sequence[object], first: int = 0) -> str:
    """Name each value and its ranks, counted from `first`.

    >>> _each([3, 4, 3], first=4)
    '3 on ranks 4, 6, 4 on rank 5'
    """
    texts = []
    for value, ranks in by_value(values).items():
        texts.append(f"{value} on {ranks_of([first + rank for rank in ranks])}")
    return ", ".join(texts)
