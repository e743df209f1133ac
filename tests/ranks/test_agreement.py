"""Comparing notes: all ranks go on, or all of them say the same."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attention_pytorch import (
    RingAttention,
    RingPlan,
    RingTransformer,
    apply_rotary_pos_emb,
    ring_attn,
    ring_flash_attn,
    tree_attn_decode,
    ulysses_attn,
)
from ring_attention_pytorch.arguments import check_least
from ring_attention_pytorch.nn.sharding import unshard_sequence
from ring_attention_pytorch.ranks import notes
from ring_attention_pytorch.ranks.agreement import (
    MustMatch,
    agree,
    error_of,
    report_to_group,
    typed,
)
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.routing import ConditionalRoutedFeedForward, soft_topk
from ring_attention_pytorch.routing.plan import RoutingPlan
from tests.support import threads

values = (
    st.none() | st.booleans() | st.integers(0, 3) | st.text(max_size=3) | st.lists(st.booleans())
)


def said(size: int, call) -> list[str | None]:
    """What each rank was told, None if nothing."""

    def main(ring: Ring) -> str | None:
        try:
            call(ring)
        except ValueError as error:
            return str(error)
        return None

    return threads.run(size, main)[0]


def test_numbers_of_all_ranks_come_back_in_order():
    got, _ = threads.run(4, lambda r: agree(r, "here", {"x": 1}, {"n": 10 + r.rank}))
    assert got == [[{"n": 10}, {"n": 11}, {"n": 12}, {"n": 13}]] * 4


@settings(deadline=None, max_examples=60)
@given(st.lists(values, min_size=1, max_size=5))
def test_ranks_go_on_if_and_only_if_they_have_the_same(found):
    texts = said(len(found), lambda ring: agree(ring, "here", {"x": found[ring.rank]}))
    assert len(set(texts)) == 1
    # True is not 1 and None is not absent: compare as what is written
    assert (texts[0] is None) == (len({repr(v) for v in found}) == 1)


def test_the_error_names_the_argument_the_ranks_and_the_values():
    texts = said(4, lambda ring: agree(ring, "here", {"a": 0, "window": 8 - (ring.rank == 2)}))
    got = "got 8 on ranks 0, 1, 3, 7 on rank 2"
    told = f"here: window must be the same on every rank, {got}; pass the same on all"
    assert texts == [told] * 4


def test_a_thing_that_only_some_ranks_have_differs():
    texts = said(3, lambda ring: agree(ring, "here", {"extra": 1} if ring.rank == 2 else {}))
    assert len(set(texts)) == 1
    assert "extra must be the same" in texts[0]
    assert "null on ranks 0, 1, 1 on rank 2" in texts[0]


def test_a_problem_of_one_rank_is_raised_on_all_and_names_it():
    def call(ring: Ring) -> None:
        agree(ring, "here", {}, check=ValueError("a bad thing") if ring.rank == 1 else None)

    assert said(3, call) == ["here: a bad thing (on rank 1)"] * 3


def test_problems_that_all_ranks_have_are_told_once_and_others_with_their_ranks():
    bad = ValueError("bad")
    assert said(3, lambda ring: agree(ring, "here", {}, check=bad)) == ["here: bad"] * 3
    texts = said(3, lambda r: agree(r, "here", {}, check=ValueError(f"bad {r.rank > 0}")))
    assert texts == ["here: bad False (on rank 0); bad True (on ranks 1, 2)"] * 3


def test_a_problem_comes_before_a_difference():
    def call(ring: Ring) -> None:
        agree(ring, "here", {"x": ring.rank}, check=ValueError("bad") if ring.rank == 1 else None)

    assert said(2, call) == ["here: bad (on rank 1)"] * 2


@pytest.mark.parametrize("character", ["x", "é", "漢", "🦙", '"', "\\", "\0", "\ud800"])
def test_what_is_wrong_may_be_said_in_any_script_and_at_any_length(character):
    problem = character * 99_999

    def call(ring: Ring) -> None:
        wrong = ValueError(problem) if ring.rank else None
        agree(ring, "here", {"layout": problem}, check=wrong)

    (told,) = {*said(2, call)}
    assert 1000 < len(told) < 3000
    assert told.endswith("(on rank 1)")
    told.encode()


def test_notes_are_of_any_length():
    same = {f"dropout of layer {i}": i / 1000 for i in range(700)}
    got, _ = threads.run(3, lambda r: agree(r, "here", same, {"n": r.rank}))
    assert got == [[{"n": 0}, {"n": 1}, {"n": 2}]] * 3


def test_what_differs_late_differs():
    texts = said(2, lambda ring: agree(ring, "here", {"x": "a" * 5000 + str(ring.rank)}))
    assert "x must be the same on every rank" in texts[0]
    assert texts[0] == texts[1]


def test_things_that_json_does_not_know_are_compared_as_text():
    assert said(2, lambda ring: agree(ring, "here", {"dtype": torch.float32})) == [None] * 2
    texts = said(2, lambda r: agree(r, "here", {"dtype": (torch.half, torch.double)[r.rank]}))
    assert "torch.float16" in texts[0]
    assert "torch.float64" in texts[0]


def test_a_ring_of_one_agrees_with_itself():
    assert agree(Ring.alone(), "here", {"x": 1}, {"n": 3}) == [{"n": 3}]
    with pytest.raises(ValueError, match=r"^here: bad$"):
        agree(Ring.alone(), "here", {}, check=ValueError("bad"))


# --- several rings in one group ---


def wrong(kind: str, rank: int) -> dict[str, Any]:
    """A call of ranks 0 and 1, in which their ring is wrong, and of 2 and 3, which is not."""
    n = {"lengths": (3, 5), "lengths of documents": (3, 5)}.get(kind, (4, 4))[rank % 2]
    m = {"keys": (4, 6), "causal cross": (4, 6)}.get(kind, (n, n))[rank % 2]
    n, m = (n, m) if rank < 2 else (4, 4)
    at = torch.arange(n) + n * (rank % 2)
    how: dict[str, dict[str, Any]] = {
        "lengths": {},
        "lengths of documents": dict(documents=torch.zeros(1, n, dtype=torch.long)),
        "keys": dict(cross=False),
        "causal cross": dict(causal=True),
        "borders": dict(cu_seqlens=[0, 9 if rank < 2 else 8]),
        "positions": dict(
            query_positions=at, key_positions=at // (2 if rank < 2 else 1), dropout=0.1
        ),
    }
    q, k = torch.zeros(1, n, 2, 8), torch.zeros(1, m, 2, 8)
    return dict(q=q, k=k, v=k, **how[kind])


WRONG = {
    "lengths": r"puts \[4, 4\] of 8 tokens on the ranks, got \[3, 5\]",
    "lengths of documents": r"puts \[4, 4\] of 8 tokens on the ranks, got \[3, 5\]",
    "keys": "cross=False needs as many keys as queries",
    "causal cross": "causal and window need as many keys as queries",
    "borders": "must end with the length of the whole, 8, got 9",
    "positions": "dropout draws by positions",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_one_ring_gets_wrong_the_other_is_told(kind):
    def call(whole: threads.ThreadRing) -> None:
        RingPlan.make(**wrong(kind, whole.rank), group=threads.PartRing(whole, 2))

    (told,) = {*said(4, call)}
    assert told is not None
    assert told.endswith("(on ranks 0, 1)")
    assert re.search(WRONG[kind], told)


def test_rings_of_other_lengths_and_masks_go_on():
    def call(whole: threads.ThreadRing) -> list[int]:
        n = 4 if whole.rank < 2 else 3
        q = torch.zeros(1, n, 2, 8)
        ring = threads.PartRing(whole, 2)
        plan = RingPlan.make(q, q, q, causal=whole.rank < 2, group=ring)
        return plan.positions().tolist()

    assert threads.run(4, call)[0] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2], [3, 4, 5]]


def test_routing_tells_the_other_ring_too():
    def call(whole: threads.ThreadRing) -> None:
        x = torch.zeros(1, 6 if whole.rank == 1 else 4, 8)
        RoutingPlan.make(x, group=threads.PartRing(whole, 2))

    (told,) = {*said(4, call)}
    assert told is not None
    assert told.endswith("(on ranks 0, 1)")


def of_two_rings() -> str | None:
    """For a pool of four, in rings of two: what is said of a shard that is too long."""
    model = RingTransformer(
        num_tokens=8, dim=16, depth=1, dim_head=8, heads=2, causal=True, ring_attn=True,
        auto_shard_seq=False,
    )  # fmt: skip
    ids = torch.zeros(1, 6 if dist.get_rank() == 1 else 4, dtype=torch.long)
    try:
        model(ids, return_loss=True, ring_size=2)
    except ValueError as error:
        return str(error)
    return None


def test_a_model_tells_the_other_ring_too(pools):
    (told,) = {*pools(4).run(of_two_rings)}
    assert told is not None
    assert told.endswith("(on ranks 0, 1)")


def test_a_predicate_that_fails_on_one_rank_is_told_to_all():
    def call(ring: Ring) -> None:
        table = torch.zeros(4 * (ring.rank != 1), dtype=torch.long)
        q = torch.zeros(1, 4, 2, 8)
        RingPlan.make(q, q, q, group=ring, mask_mod=lambda b, h, i, j: table[i] == table[j])

    (told,) = {*said(3, call)}
    assert told is not None
    assert "mask_mod fails, asked of one pair: IndexError" in told
    assert told.endswith("(on rank 1)")


# --- other calls, other notes, other types ---


def test_ranks_in_different_calls_are_all_told_which():
    def call(ring: Ring) -> None:
        if ring.rank == 1:
            unshard_sequence(torch.zeros(1, 4), length=12, group=ring)
        else:
            q = torch.zeros(1, 4, 2, 8)
            ring_attn(q, q, q, group=ring)

    (told,) = {*said(3, call)}
    assert "ranks are in different calls" in told
    found = (
        r"ranks 0, 2: ring attention at test_agreement.py:\d+; rank 1: unshard_sequence at test_"
    )
    assert re.search(found, told)


FOREIGN = {
    "of another library": b"what else goes over a group" * 200,
    "too short": b"?",
    "no JSON": b"{",
    "too deep": b"[" * 200_000,
    "a list": b"[]",
    "no names": b"{}",
    "other kinds": b'{"everywhere": 1, "same": {}, "own": {}, "step": 0, "problem": null}',
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_notes_that_are_none_are_an_error_that_names_the_rank(kind):
    def call(ring: threads.ThreadRing) -> None:
        if ring.rank != 1:
            agree(ring, "here", {"x": 1})
        elif kind in ("of another library", "too short"):
            ring.gather_bytes(FOREIGN[kind], 4096)
            raise ValueError
        else:
            ring.gather_notes("here", FOREIGN[kind])
            raise ValueError

    first, _, third = said(3, call)
    assert first == third
    assert "rank 1" in first


MALFORMED = {
    "endless": (
        lambda _: notes._HEAD.pack(notes._MARK, 4, 1 << 60) + b"here",
        "has 1152921504606846976 bytes, more than",
    ),
    "of devices": (
        lambda _: notes._HEAD.pack(notes._MARK, 4, 3) + b"here" + b"old",
        "does not say how its devices are",
    ),
    "other numbers": (
        lambda ring: whole_note(ring, b'{"k": 1}'), "numbers: n on ranks 0, 2, k on rank 1"
    ),
    "no numbers": (lambda ring: whole_note(ring, b'{"n": "many"}'), "invalid literal for int"),
    "numbers without names": (lambda ring: whole_note(ring, b"[3]"), "has no attribute"),
}  # fmt: skip


def whole_note(ring: threads.ThreadRing, own: bytes) -> bytes:
    """The first message of a note like the others', but for the numbers of its rank."""
    step = ring.steps.notes - 1  # before these
    told = b"\0%d %d null\n%s\n%s" % (step, ring.size, MustMatch({"x": 1}).text, own)
    return notes._HEAD.pack(notes._MARK, 4, len(told)) + b"here" + told


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_note_is_refused_by_all_with_the_rank_that_sent_it(kind):
    message, text = MALFORMED[kind]

    def call(ring: threads.ThreadRing) -> None:
        if ring.rank != 1:
            agree(ring, "here", {"x": 1}, {"n": 5})
        ring.steps.compare("here")
        ring.gather_bytes(message(ring).ljust(notes.FIRST, b"\0"), notes.FIRST)
        raise ValueError

    first, _, third = said(3, call)
    assert first == third
    assert text in first
    assert "rank 1" in first
    assert "run the same version of this library" in first


WRONG_TYPES = {
    "ring_attn": dict(window="four"),
    "plan of a module": dict(documents=7),
    "ulysses_attn": dict(causal=1.5),
    "ring_flash_attn": dict(bucket_size="large"),
    "RingPlan": dict(memory="much"),
    "tree_attn_decode": dict(eps="small"),
    "unshard_sequence": dict(length="long"),
    "soft_topk": dict(eps="soft"),
    "RingAttention": dict(cu_seqlens=1),
    "RingTransformer": dict(return_loss="yes"),
    "ConditionalRoutedFeedForward": dict(num_heavy_tokens="few"),
}


def called_with(name: str, ring: Ring, wrong: dict[str, Any]) -> None:
    """That function, or module, over a ring, with what may be of a wrong type."""
    q, x = torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 16)
    attention = dict(dim=16, dim_head=8, heads=2, ring_attn=True, group=ring, auto_shard_seq=False)
    calls = {
        "ring_attn": lambda: ring_attn(q, q, q, group=ring, **wrong),
        "plan of a module": lambda: RingAttention(**attention).plan(x, **wrong),
        "ulysses_attn": lambda: ulysses_attn(q, q, q, group=ring, **wrong),
        "ring_flash_attn": lambda: ring_flash_attn(
            q, q, q, ring_reduce_col=True, group=ring, **wrong
        ),
        "RingPlan": lambda: RingPlan.make(q, q, q, group=ring, **wrong),
        "tree_attn_decode": lambda: tree_attn_decode(q, q, q, group=ring, **wrong),
        "unshard_sequence": lambda: unshard_sequence(x, group=ring, **{"length": 12} | wrong),
        "soft_topk": lambda: soft_topk(x, 2, group=ring, **wrong),
        "RingAttention": lambda: RingAttention(**attention)(x, **wrong),
        "RingTransformer": lambda: RingTransformer(num_tokens=9, depth=1, **attention)(
            x[..., 0].long(), **wrong
        ),
        "ConditionalRoutedFeedForward": lambda: ConditionalRoutedFeedForward(
            16, num_heavy_tokens=2, ring_attn=True, group=ring
        )(x, **wrong),
    }
    calls[name]()


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_all_ranks_hear_of_a_wrong_type(name):
    (told,) = {*said(3, lambda r: called_with(name, r, WRONG_TYPES[name] if r.rank == 1 else {}))}
    assert told is not None
    assert f"parameter {next(iter(WRONG_TYPES[name]))}=" in told
    assert "violates type hint" in told
    assert told.endswith("(on rank 1)")


def test_a_wrong_type_within_a_call_is_not_taken_for_one_of_its_own():
    told = []

    @beartype
    def inner(name: str) -> str:
        return name

    @typed(lambda given, error: told.append(error))
    def outer(x: int) -> object:
        return inner(x) if x else apply_rotary_pos_emb("angles", x)

    with pytest.raises(BeartypeCallHintParamViolation):
        outer(1)
    with pytest.raises(ValueError, match=r"^apply_rotary_pos_emb\(\) parameter pos='angles'"):
        outer(0)
    assert told == []


def test_whatever_breaks_in_a_check_is_told_with_its_kind():
    assert str(error_of(lambda: [][1])) == "IndexError: list index out of range"
    assert str(error_of(partial(check_least, 1, heads=0))) == "heads must be at least 1, got 0"
    assert error_of(lambda: None) is None


PREFIXES = [torch.tensor(1.5), torch.zeros(1), torch.zeros(1, 1), torch.ones(1, device="meta")]


@pytest.mark.parametrize("prefix", PREFIXES, ids=["0-d float", "float", "2-d", "meta"])
def test_all_ranks_hear_of_a_prefix_that_can_t_be(prefix):
    def call(ring: Ring) -> None:
        q = torch.zeros(1, 4, 2, 8)
        RingPlan.make(q, q, q, causal=True, group=ring, prefix=prefix if ring.rank == 1 else 1)

    (told,) = {*said(3, call)}
    assert told is not None
    assert told.endswith("(on rank 1)")


@pytest.mark.parametrize("name", ["key_mask", "documents", "query_positions", "cu_seqlens"])
def test_all_ranks_hear_of_tensors_without_values(name):
    def call(ring: Ring) -> None:
        device = "meta" if ring.rank == 1 else "cpu"
        q, at = torch.zeros(1, 4, 2, 8), torch.arange(4, device=device) + 4 * ring.rank
        given = {
            "key_mask": dict(key_mask=torch.ones(1, 4, dtype=torch.bool, device=device)),
            "documents": dict(documents=torch.zeros(1, 4, dtype=torch.long, device=device)),
            "query_positions": dict(query_positions=at, key_positions=at),
            "cu_seqlens": dict(cu_seqlens=torch.tensor([0, 5, 12], device=device)),
        }
        RingPlan.make(q, q, q, group=ring, **given[name])

    (told,) = {*said(3, call)}
    assert told is not None
    assert told.endswith("(on rank 1)")


def without_values(name: str, ring: Ring) -> None:
    """Call that function, or module, on one rank with tensors on meta."""
    device = "meta" if ring.rank == 1 else "cpu"
    q, x = torch.zeros(1, 4, 3, 8, device=device), torch.zeros(1, 4, 16, device=device)
    attention = dict(dim=16, dim_head=8, heads=2, ring_attn=True, group=ring, auto_shard_seq=False)
    angles = torch.zeros(4, 8, device=device)
    calls = {
        "ring_attn": lambda: ring_attn(q, q, q, group=ring),
        "keys": lambda: tree_attn_decode(
            torch.zeros(1, 4, 1, 8), q, q, shard_kv_seq=False, group=ring
        ),
        "tree_attn_decode": lambda: tree_attn_decode(q, q, q, group=ring),
        "unshard_sequence": lambda: unshard_sequence(x, length=12, group=ring),
        "scores": lambda: soft_topk(x, 2, group=ring),
        "k": lambda: soft_topk(torch.zeros(1, 4, 16), x[..., 0] + 1, group=ring),
        "RoutingPlan": lambda: RoutingPlan.make(x, group=ring),
        "no tensor": lambda: RoutingPlan.make(x if ring.rank != 1 else None, group=ring),
        "RingAttention": lambda: RingAttention(**attention)(x),
        "plan": lambda: RingAttention(**attention).plan(x),
        "rotary_emb": lambda: RingAttention(**attention)(torch.zeros(1, 4, 16), rotary_emb=angles),
        "RingTransformer": lambda: RingTransformer(num_tokens=9, depth=1, **attention)(
            x[..., 0].long()
        ),
    }
    calls[name]()


NO_VALUES = [
    "ring_attn", "keys", "tree_attn_decode", "unshard_sequence", "scores", "k", "RoutingPlan",
    "no tensor", "RingAttention", "plan", "rotary_emb", "RingTransformer",
]  # fmt: skip


@pytest.mark.parametrize("name", NO_VALUES)
def test_all_ranks_hear_of_calls_without_values(name):
    (told,) = {*said(3, lambda ring: without_values(name, ring))}
    assert told is not None
    assert "rank 1" in told


def test_a_group_that_is_none_is_named():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="parameter group='everyone' violates type hint"):
        ring_attn(q, q, q, group="everyone")


def test_numbers_of_each_sample_are_the_same_on_all_ranks():
    texts = said(2, lambda r: soft_topk(torch.rand(1, 4), torch.tensor([1.0 + r.rank]), group=r))
    assert texts[0] == texts[1]
    assert "k must be the same on every rank" in texts[0]


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (lambda: None, None),
        (lambda: "all is well", None),
        (lambda: [][1], "IndexError: list index out of range (on rank 1)"),
        (ValueError("caught before"), "caught before (on rank 1)"),
        (lambda: next(iter(())), "StopIteration:  (on rank 1)"),
    ],
)
def test_what_the_check_of_a_rank_raises_is_raised_on_all(check, told):
    texts = said(2, lambda ring: agree(ring, "here", {}, check=check if ring.rank else None))
    assert texts == [told and f"here: {told}"] * 2


def test_a_problem_without_words_is_one():
    def nothing() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^here: ValueError: $"):
        agree(Ring.alone(), "here", {}, check=nothing)


def test_without_a_plan_others_are_told_where_they_agree():
    """With one nobody agrees: a wrong type is left for those who will wait."""

    def call(ring: Ring) -> None:
        tell = report_to_group("here", ring_of=lambda *_: ring)
        if ring.rank:
            tell({"options": {"plan": None}}, ValueError("of a wrong type"))
        else:
            agree(ring, "here", {})

    assert said(2, call) == ["here: of a wrong type (on rank 1)"] * 2
    ring = Ring.alone()
    report_to_group("here", ring_of=lambda *_: ring)({"plan": "a plan"}, ValueError("bad"))
