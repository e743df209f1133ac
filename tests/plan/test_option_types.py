"""The types of public options name all layouts, kernels, transports and options."""

from itertools import permutations
from pathlib import Path
from typing import Any, get_args

from ring_attention_pytorch.comm.transports import TRANSPORTS
from ring_attention_pytorch.functional import CallOptions
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.plan import option_types
from ring_attention_pytorch.plan.options import ROWS


def names() -> dict[str, Any]:
    """Return the names that type checkers know, by executing what only they do."""
    source = Path(option_types.__file__).read_text()
    known: dict[str, Any] = {}
    exec(source.replace("if TYPE_CHECKING:", "if True:"), known)
    return known


def test_types_name_all_kernels_and_options():
    known = names()
    kernels = {*get_args(known["KernelName"])}
    assert kernels == {*KERNELS, "flash-attn"}
    assert {*get_args(known["LayoutName"])} == {*LAYOUTS}
    assert {*get_args(known["TransportName"])} == {*TRANSPORTS}
    fast = ("flash-attn-4", "sdpa-cudnn", "triton", "flash-attn")
    pairs = {f"{a}+{b}" for a, b in permutations(fast, 2)}
    assert {*get_args(known["KernelPair"])} == pairs
    assert {*known["PlanOptions"].__annotations__} == {*ROWS}
    of_calls = {*CallOptions.__annotations__} - {*ROWS}
    assert of_calls == {"heads_first", "group", "plan"}
