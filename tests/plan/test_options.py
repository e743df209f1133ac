"""The table of options, and what must say the same of each: signature, docs, kernels, notes."""

import inspect
import re
from typing import get_type_hints

import pytest
import torch

from ring_attention_pytorch import RingPlan, ring_attn, ulysses_attn
from ring_attention_pytorch.plan.options import ROWS, Options, check_only_plan
from ring_attention_pytorch.runtime.interfaces import FEATURES
from tests.support import threads

OF_CALLS = {
    "q",
    "k",
    "v",
    "group",
    "plan",
    "heads_first",
    "return_lse",
}  # parameters that are no options


def test_every_row_is_a_parameter_of_the_same_type_and_default():
    parameters = inspect.signature(ring_attn).parameters
    assert {*parameters} == {*ROWS} | OF_CALLS
    hints, of_rows = get_type_hints(inspect.unwrap(ring_attn)), get_type_hints(Options)
    for name in ROWS:
        assert parameters[name].default == getattr(Options, name), name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if name != "documents":  # plans of layers share what was made of them
            assert hints[name] == of_rows[name], name


def test_rows_and_parameters_stand_in_the_same_blocks():
    titles = ("# which keys a query sees", "# what a score is", "# how it is computed")
    signature, table = inspect.getsource(ring_attn), inspect.getsource(Options)
    places = [[text.index(title) for title in titles] for text in (signature, table)]
    for name in ROWS:
        row, parameter = (re.search(rf"^    {name}: ", t, re.MULTILINE) for t in (table, signature))
        assert [row.start() > place for place in places[1]] == [
            parameter.start() > place for place in places[0]
        ], name
    parameters = inspect.signature(ring_attn).parameters
    assert [name for name in parameters if name not in OF_CALLS] == [*ROWS]


@pytest.mark.parametrize("name", [*ROWS])
def test_every_row_is_documented(name):
    named = rf"^ +(\w+, )*{name}(, \w+)*: "
    assert re.search(named, inspect.getdoc(ring_attn), re.MULTILINE)


def test_what_kernels_may_lack_is_marked():
    of_rows = {name for name, row in ROWS.items() if row.feature}
    others = {"unusual_scale", "deterministic"}  # of the scale, and of PyTorch's settings
    assert of_rows == (FEATURES - others - {"alibi"}) | {"alibi_slopes", "scale"}


def test_options_that_are_not_given_are_no_options():
    mask = torch.ones(1)
    defaults = {name: getattr(Options, name) for name in ROWS}
    given = dict(causal=False, window=None, scale=1.0, key_mask=mask, layout="contiguous")
    with pytest.raises(ValueError, match="decides key_mask, scale; pass"):
        check_only_plan(defaults | given, None)
    with pytest.raises(ValueError, match="decides scale, group; pass"):
        check_only_plan(defaults | {"scale": 1.0}, "a group")
    check_only_plan({**defaults}, None)


def with_another_name(call, ring, wrong):
    q = torch.randn(1, 4, 4, 8)
    name = "windw" if ring.rank == wrong else "window"
    with pytest.raises(ValueError, match="windw") as told:
        call(q, q, q, group=ring, causal=True, **{name: 3})
    return str(told.value)


@pytest.mark.parametrize("call", [ring_attn, ulysses_attn, RingPlan.make])
def test_all_ranks_hear_of_a_name_that_is_no_option(call):
    texts, _ = threads.run(2, lambda ring: with_another_name(call, ring, wrong=1))
    assert len({*texts}) == 1
    assert texts[0].endswith("(on rank 1)")


def test_what_was_meant_is_named():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"no option windw \(did you mean window\?\), tansport"):
        RingPlan.make(q, q, q, windw=3, tansport="ring")
