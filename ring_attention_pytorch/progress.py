"""Progress of long work, in lines of the logger "ring_attention_pytorch.progress".

    training: 1 of 500 steps, 14 s
    prompt: 262144 of 1048576 tokens, 21 s

They are of level INFO, so a program that did not ask for that level stays silent. Commands of this
project call `show`.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

logger = logging.getLogger("ring_attention_pytorch.progress")
_FIRST, _EVERY = 1.0, 5.0  # seconds before a line of the same work
_T = TypeVar("_T")


class _Stderr(logging.Handler):
    """A handler that prints lines to the current `sys.stderr`, which programs may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def show() -> None:
    """Print progress to stderr, unless this is another process of torchrun than the first."""
    if os.environ.get("RANK", "0") != "0" or logger.handlers:
        return
    logger.addHandler(_Stderr())
    logger.setLevel(logging.INFO)


def say(text: str, *values: object) -> None:
    """Log the name of a long piece of work that begins now; `values` are formatted by `logging`."""
    logger.info(text, *values)


def counted(
    items: Iterable[_T], work: str, total: int, unit: str, size: Callable[[_T], int] | None = None
) -> Iterator[_T]:
    """Yield items, and log how many are done: after a second, then every five.

    Args:
        items: steps, tokens or chunks, whose use by the caller takes long.
        work: the name of the work.
        total: the number of units in all items.
        unit: the unit that is counted, such as "tokens".
        size: the number of units of an item; one each if None.

    >>> [*counted("ab", "letters", 2, "letters")]
    ['a', 'b']
    """
    if not logger.isEnabledFor(logging.INFO):
        yield from items
        return
    begin, done = time.perf_counter(), 0
    due = begin + _FIRST
    for item in items:
        yield item
        done += 1 if size is None else size(item)
        if (now := time.perf_counter()) >= due:
            so_far = min(done, total)  # the last item may be smaller
            logger.info("%s: %d of %d %s, %.0f s", work, so_far, total, unit, now - begin)
            due = now + _EVERY
