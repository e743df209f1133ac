"""One thread at a time in any kernel, where threads stand for ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from threading import Lock
from typing import Any
from unittest import mock

from ring_attention_pytorch.kernels import KERNELS


@contextmanager
def in_turn() -> Iterator[None]:
    """Have every kernel called by one thread at a time: flash-attn 4 can't be compiled by two."""
    turn = Lock()

    def one(call: Callable[..., None], *given: Any) -> None:
        with turn:
            call(*given)

    with ExitStack() as patches:
        for kernel, name in product(KERNELS.values(), ("forward", "backward")):
            call = partial(one, getattr(kernel, name))
            patches.enter_context(mock.patch.object(kernel, name, call))
        yield
