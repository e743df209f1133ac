"""One thread at a time in any kernel, where threads stand for ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from itertools import product
from threading import RLock
from typing import Any
from unittest import mock

from ring_attention_pytorch.kernels import KERNELS


@contextmanager
def in_turn() -> Iterator[None]:
    """Have each kernel called by one thread at a time.

    flash-attn 4 can't be compiled by two, and Triton's autotuner keeps the arguments of one call.
    """
    turn = RLock()

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def one(*given: Any, **named: Any) -> Any:
            with turn:
                return call(*given, **named)

        return one

    called: list[tuple[Any, str]] = [*product(KERNELS.values(), ("forward", "backward"))]
    if find_spec("triton"):
        from triton.runtime.autotuner import Autotuner

        called.append((Autotuner, "run"))
    with ExitStack() as patches:
        for holder, name in called:
            patches.enter_context(mock.patch.object(holder, name, locked(getattr(holder, name))))
        yield
