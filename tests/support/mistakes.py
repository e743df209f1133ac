"""Calls of which one rank's differs."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ring_attention_pytorch.functional import ring_attn
from ring_attention_pytorch.ranks.ring import Ring

SIZE, ALTERED = 4, 2  # how many ranks, and which of them is different
OTHERS = "ranks 0, 1, 3"

Call = dict[str, Any]


def good() -> Call:
    """Make the call of all ranks but one, each with six tokens."""
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    return {"q": q, "k": k, "v": v, "layout": "zigzag", "causal": True, "window": 9}


def resized(**sizes: int) -> Callable[[Call], None]:
    """Tensors of other sizes, by the names of the dimensions."""

    def change(call: Call) -> None:
        s = {"b": 2, "n": 6, "m": 6, "h": 4, "g": 2, "d": 8, "d_v": 8, **sizes}
        call["q"] = torch.randn(s["b"], s["n"], s["h"], s["d"])
        call["k"] = torch.randn(s["b"], s["m"], s["g"], s["d"])
        call["v"] = torch.randn(s["b"], s["m"], s["g"], s["d_v"])

    return change


def each(change: Callable[[torch.Tensor], Any]) -> Callable[[Call], None]:
    return lambda call: call.update({name: change(call[name]) for name in "qkv"})


def given(**options: Any) -> Callable[[Call], None]:
    return lambda call: call.update(options)


def first(change: Callable[[torch.Tensor], Any]) -> Callable[[Call], None]:
    return lambda call: call.update(q=change(call["q"]))


# what is altered, how, and what must be said
ALTERATIONS: dict[str, tuple[Callable[[Call], None], list[str]]] = {
    "batch": (resized(b=3), ["batch size", f"2 on {OTHERS}", "3 on rank 2"]),
    "heads": (resized(h=6), ["heads of q", f"4 on {OTHERS}", "6 on rank 2"]),
    "no heads": (resized(h=0), ["there must be heads", "[2, 6, 0, 8]", "(on rank 2)"]),
    "key heads": (resized(g=4), ["heads of k", f"2 on {OTHERS}", "4 on rank 2"]),
    "d": (resized(d=4), ["head size of q and k", f"8 on {OTHERS}", "4 on rank 2"]),
    "d_v": (resized(d_v=4), ["head size of v", f"8 on {OTHERS}", "4 on rank 2"]),
    "dtype": (
        each(torch.Tensor.double),
        ["dtype", f'"torch.float32" on {OTHERS}', '"torch.float64" on rank 2'],
    ),
    "causal": (given(causal=False), ["causal", f"true on {OTHERS}", "false on rank 2"]),
    "window": (given(window=8), ["window", f"9 on {OTHERS}", "8 on rank 2"]),
    "no window": (given(window=None), ["window", f"9 on {OTHERS}", "null on rank 2"]),
    "scale": (given(scale=0.5), ["scale", f"null on {OTHERS}", "0.5 on rank 2"]),
    "softclamp": (given(softclamp=5.0), ["softclamp", f"null on {OTHERS}", "5.0 on rank 2"]),
    "layout": (
        given(layout="striped"),
        ["layout", f'"zigzag" on {OTHERS}', '"striped" on rank 2'],
    ),
    "kernel": (given(kernel="eager"), ["kernel", f"null on {OTHERS}", '"eager" on rank 2']),
    "key mask": (
        given(key_mask=torch.ones(2, 6, dtype=torch.bool)),
        ["key_mask", f"null on {OTHERS}", '"given" on rank 2'],
    ),
    "cross": (given(cross=False), ["cross", f"null on {OTHERS}", "false on rank 2"]),
    "grad mode": (given(no_grad=True), ["grad mode", f"true on {OTHERS}", "false on rank 2"]),
    "requires_grad": (
        first(torch.Tensor.requires_grad_),
        ["requires_grad of q, k, v", "[true, false, false] on rank 2"],
    ),
    "one token less": (
        resized(n=5, m=5),
        ["layout='zigzag' puts [5, 6, 6, 6] of 23 tokens", "got [6, 6, 5, 6]", "shard_sequence"],
    ),
    "one query less": (
        resized(n=5),
        ["query lengths [6, 6, 5, 6]", "key lengths [6, 6, 6, 6]", "causal and window"],
    ),
    "dimensions": (first(lambda q: q[0]), ["got q [6, 4, 8]", "on rank 2", "[batch, tokens"]),
    "heads that do not divide": (resized(h=3), ["multiple", "q [2, 6, 3, 8]", "on rank 2"]),
    "k unlike v": (
        lambda call: call.update(v=call["v"][:, :4]),
        ["v [2, 4, 2, 8]", "must agree", "on rank 2"],
    ),
    "mixed dtypes": (
        first(torch.Tensor.double),
        ["one floating dtype", "torch.float64, torch.float32", "on rank 2"],
    ),
    "integers": (each(torch.Tensor.int), ["floating dtype", "torch.int32", "on rank 2"]),
    "mask dtype": (
        given(key_mask=torch.ones(2, 6)),
        ["key_mask must be bool [2, 6]", "got torch.float32 [2, 6]", "on rank 2"],
    ),
    "mask shape": (
        given(key_mask=torch.ones(2, 24, dtype=torch.bool)),
        ["key_mask must be bool [2, 6]", "got torch.bool [2, 24]", "on rank 2"],
    ),
    "unknown layout": (given(layout="spiral"), ["balanced(), got 'spiral'", "on rank 2"]),
    "long unknown layout": (given(layout="🦙" * 3000), ["layout must be one of", "on rank 2"]),
    "unknown kernel": (given(kernel="fast"), ["'eager', got 'fast'", "on rank 2"]),
    "kernel that can't": (
        given(kernel="sdpa", softclamp=2.0),
        ["kernel='sdpa' has no softclamp", "on rank 2"],
    ),
    "negative window": (given(window=-1), ["window", "got -1", "on rank 2"]),
    "infinite scale": (given(scale=float("inf")), ["scale must be finite, got inf", "on rank 2"]),
    "NaN scale": (given(scale=float("nan")), ["scale must be finite, got nan", "on rank 2"]),
    "softclamp of zero": (given(softclamp=0.0), ["softclamp", "got 0.0", "on rank 2"]),
    "bucket size": (given(bucket_size=0), ["bucket_size", "got 0", "on rank 2"]),
    "masked cross attention": (
        given(cross=True),
        ["cross attention has no causal", "on rank 2"],
    ),
}


def told(ring: Ring, name: str | None) -> tuple[str | None, float]:
    """Return one rank's error, and after how many seconds."""
    torch.manual_seed(0)
    call = good()
    if ring.rank == ALTERED and name is not None:
        ALTERATIONS[name][0](call)
    mode = torch.no_grad() if call.pop("no_grad", False) else nullcontext()
    start = time.monotonic()
    try:
        with mode:
            ring_attn(call.pop("q"), call.pop("k"), call.pop("v"), group=ring, **call)
        text = None
    except ValueError as error:
        text = str(error)
    return text, time.monotonic() - start
