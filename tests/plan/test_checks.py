"""Checks by themselves: what can be passes, and what can't be is refused with what came."""

from itertools import chain

import pytest
import torch

from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments, count
from ring_attention_pytorch.geometry.segments import segment_positions
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.plan import checks


def t(*shape: int, **kinds: object) -> torch.Tensor:
    return torch.zeros(shape, **kinds)


WRONG = {
    "three dimensions": ((t(2, 6, 8), t(2, 6, 8), t(2, 6, 8)), "must be .batch, tokens, heads"),
    "batch": ((t(2, 6, 4, 8), t(1, 6, 2, 8), t(1, 6, 2, 8)), "must agree in b, m, h_kv and d"),
    "keys and values": ((t(2, 6, 4, 8), t(2, 6, 2, 8), t(2, 5, 2, 8)), "must agree"),
    "head size": ((t(2, 6, 4, 8), t(2, 6, 2, 7), t(2, 6, 2, 8)), "must agree"),
    "heads": ((t(2, 6, 4, 8), t(2, 6, 3, 8), t(2, 6, 3, 8)), "a multiple of those of k"),
    "no heads": ((t(2, 6, 0, 8), t(2, 6, 1, 8), t(2, 6, 1, 8)), "there must be heads"),
    "no head size": ((t(2, 6, 4, 8), t(2, 6, 2, 8), t(2, 6, 2, 0)), "there must be heads"),
    "dtypes": ((t(2, 6, 4, 8), t(2, 6, 2, 8).half(), t(2, 6, 2, 8)), "one floating dtype"),
    "integers": (tuple(t(2, 6, 2, 8, dtype=torch.int32) for _ in range(3)), "one floating dtype"),
    "devices": ((t(2, 6, 4, 8), t(2, 6, 2, 8), t(2, 6, 2, 8, device="meta")), "on one device"),
    "no values": (tuple(t(2, 6, 2, 8, device="meta") for _ in range(3)), "have values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_go_together_are_refused(name):
    tensors, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        checks.check_qkv(*tensors)


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_tensors_that_do_are_not(dtype):
    checks.check_qkv(t(2, 6, 4, 8).to(dtype), t(2, 9, 2, 8).to(dtype), t(2, 9, 2, 5).to(dtype))
    checks.check_qkv(*(t(0, 0, 2, 8).to(dtype) for _ in range(3)))


def test_a_call_must_be_as_the_plan_was_made_for():
    q, k, v = t(2, 6, 4, 8), t(2, 9, 2, 8), t(2, 9, 2, 5)
    made = checks.Expected(checks.Signature.of(q, k, v), False, q.device)
    checks.check_tensors(made, (q, k, v), None)
    checks.check_tensors(made._replace(sinks=True), (q, k, v), t(4))
    for sinks, tensors, said in (
        (True, (q, k, v), "was made with sinks, got none"),
        (False, (q[:, :5], k, v), r"n=6, .*; got .*n=5"),
        (
            False,
            (q.half(), k.half(), v.half()),
            r"dtype=torch.float32.*; got .*dtype=torch.float16",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            checks.check_tensors(made._replace(sinks=sinks), tensors, None)
    with pytest.raises(ValueError, match="was made without sinks, got some"):
        checks.check_tensors(made, (q, k, v), t(4))


@pytest.mark.parametrize("mask", [t(2, 9), t(2, 8).bool(), t(9).bool()], ids=str)
def test_a_mask_is_bool_and_of_all_keys(mask):
    checks.check_key_mask(t(2, 9).bool(), t(2, 9, 2, 8))
    checks.check_key_mask(None, t(2, 9, 2, 8))
    with pytest.raises(ValueError, match=r"key_mask must be bool \[2, 9\]"):
        checks.check_key_mask(mask, t(2, 9, 2, 8))
    with pytest.raises(ValueError, match="on the keys' device"):
        checks.check_key_mask(t(2, 9, device="meta").bool(), t(2, 9, 2, 8))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_shards_have_the_lengths_of_their_layout(layout):
    right = [count(held) for held in all_segments(layout, 3, 20)]
    assert checks.check_shards(layout, tuple(right)) == all_segments(layout, 3, 20)
    wrong = [right[0] + 1, right[1], right[2] - 1]
    with pytest.raises(ValueError, match=r"of 20 tokens on the ranks, got .*\)$"):
        checks.check_shards(layout, wrong)


def test_lengths_of_one_and_of_two_sequences():
    same, other = ([4, 4], [4, 4]), ([4, 4], [3, 6])
    how = dict(packed=False, placed=False, counted=False)

    def check(lengths, mask=Mask(), cross=False, **more):  # noqa: B008 - it is never changed
        checks.check_lengths(lengths, "contiguous", mask, cross, **how | more)

    check(same, Mask(causal=True), packed=True)
    check(other, cross=True)
    check(other, Mask(causal=True), cross=True, placed=True)
    for wrong, said in (
        (lambda: check(other), "cross=False needs as many keys as queries"),
        (lambda: check(([5, 3], [5, 3])), "of 8 tokens on the ranks"),
        (lambda: check(other, cross=True, packed=True), "need keys of the same tokens"),
        (lambda: check(other, Mask(causal=True), cross=True), "cross attention has neither"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_positions_of_two_sequences(layout, counted):
    """Keys lie rank by rank; queries do so too, or by their layout where positions count."""
    queries, keys = checks.segments_of_two(layout, [4, 4, 4], [2, 0, 5], counted)
    assert [segment_positions(held).tolist() for held in keys] == [[0, 1], [], [2, 3, 4, 5, 6]]
    at = [segment_positions(held).tolist() for held in queries]
    assert sorted(chain(*at)) == [*range(12)]
    rank_by_rank = [[*range(4)], [*range(4, 8)], [*range(8, 12)]]
    assert (at == rank_by_rank) == (layout == "contiguous" or not counted)


def test_options_of_a_ring_need_one():
    for ring, more, said in (
        (False, dict(transport="gather"), "need ring_attn=True"),
        (False, dict(memory=1), "need ring_attn=True"),
        (True, dict(ulysses=3), "ulysses must divide heads=4, got 3"),
        (True, dict(ulysses=0), "ulysses must divide heads=4, got 0"),
    ):
        checks.check_over_ring(True, 4, transport="gather", ulysses=2, memory=None)
        checks.check_over_ring(False, 4, transport=None, ulysses=None, memory=None)
        with pytest.raises(ValueError, match=said):
            checks.check_over_ring(ring, 4, **dict(transport=None, ulysses=1, memory=None) | more)


def test_a_plan_does_what_its_module_asks():
    has = dict(transport="ring", ulysses=2, memory=7)
    for transport, memory in ((None, None), ("ring", None), ("ring", 7)):
        for ulysses in (2, None):
            checks.check_same_way(has, transport=transport, ulysses=ulysses, memory=memory)
    for wrong in (dict(transport="gather"), dict(ulysses=1), dict(memory=8)):
        with pytest.raises(ValueError, match="the plan has transport='ring', ulysses=2 and"):
            checks.check_same_way(has, **dict(transport=None, ulysses=2, memory=None) | wrong)


def test_autocast_decides_the_dtype_but_of_float64():
    assert checks.autocast_dtype(t(1)) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert checks.autocast_dtype(t(1)) == torch.bfloat16
        assert checks.autocast_dtype(t(1).double()) == torch.float64
        assert checks.autocast_dtype(t(1, device="meta")) == torch.float32
        like = checks.like_autocast(t(3, 2).requires_grad_())
        assert (like.shape, like.dtype, like.requires_grad) == ((3, 2), torch.bfloat16, True)
    one = t(2)
    assert checks.like_autocast(one) is one
