"""Decoding with a cache of latents over rings of threads, against attention to expanded keys."""

import pytest
import torch

from ring_attention_pytorch import RingCache, mla_attn_with_cache
from ring_attention_pytorch.geometry.layouts import positions
from tests.support import threads
from tests.support.latent_cases import D_ROPE, RANK, Case, expanded
from tests.support.reference import dense_attention, relative_error

CASE = Case(1, length=19)


def given() -> list[torch.Tensor]:
    found = CASE.tensors()
    return [found[name] for name in CASE.names]


def part(at: torch.Tensor | slice) -> list[torch.Tensor]:
    *sharded, w_up = given()
    return [*(t[:, at] for t in sharded), w_up]


def generated(ring, tied: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, int]:
    """A prompt that all ranks have, a chunk that they share, and then a token at a time."""
    kinds = dict(page=2, dtype=dtype, group=ring, tied=tied)
    cache = RingCache(2, 1, RANK + D_ROPE, value_dim=RANK, **kinds)
    found = [mla_attn_with_cache(*part(slice(0, 5)), cache)]
    at = 5 + positions("zigzag", rank=ring.rank, ring_size=ring.size, length=8)
    mine = mla_attn_with_cache(*part(at), cache, layout="zigzag")
    whole = torch.zeros(2, 8, *mine.shape[2:], dtype=torch.float64)
    whole[:, at - 5] = mine
    ring.total(whole)
    found.append(whole)
    for token in range(13, 19):
        found.append(mla_attn_with_cache(*part(slice(token, token + 1)), cache))
    return torch.cat(found, dim=1), cache.nbytes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_generation_equals_attention_to_expanded_keys(size, tied):
    named = dict(zip(CASE.names, given()))
    want, _ = dense_attention(*expanded(named), causal=True)
    ranks, _ = threads.run(size, lambda ring: generated(ring, tied))
    for out, _ in ranks:
        assert relative_error(out, want) < 1e-12


@pytest.mark.parametrize("size", [1, 2, 3])
def test_latents_in_8_bits_are_rounded_once_and_their_values_by_themselves(size):
    """Values have a scale of their own, so an untied cache holds each latent twice."""
    eight = RingCache(2, 1, RANK + D_ROPE, value_dim=RANK, dtype=torch.float8_e4m3fn)
    q_nope, q_rope, latent, k_rope, w_up = given()
    up_k, up_v = w_up.split((q_nope.shape[-1], w_up.shape[1] - q_nope.shape[-1]), dim=1)
    q = torch.cat((torch.einsum("bnhd,hdr->bnhr", q_nope, up_k), q_rope), dim=-1)
    k, v = (eight.rounded(t)[:, :, None] for t in (torch.cat((latent, k_rope), dim=-1), latent))
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5
    out, _ = dense_attention(q, k, v, causal=True, scale=scale)
    want = torch.einsum("bnhr,hvr->bnhv", out, up_v)
    exact, _ = dense_attention(*expanded(dict(zip(CASE.names, given()))), causal=True)
    assert 1e-3 < relative_error(want, exact) < 0.1
    ranks, _ = threads.run(size, lambda ring: generated(ring, False, torch.float8_e4m3fn))
    for found, _ in ranks:
        assert relative_error(found, want) < 1e-5


def test_under_autocast_no_product_is_in_fewer_bits_than_the_cache():
    """As `ring_attn_with_cache`, which is given tensors in the cache's dtype."""
    want, _ = dense_attention(*expanded(dict(zip(CASE.names, given()))), causal=True)
    cache = RingCache(2, 1, RANK + D_ROPE, value_dim=RANK, tied=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = mla_attn_with_cache(*(t.float() for t in given()), cache)
    assert relative_error(out, want) < 1e-5


def test_there_are_no_gradients_nor_a_part_of_them() -> None:
    """The up-projection of values is applied after attention, which has none."""
    cache = RingCache(2, 1, RANK + D_ROPE, value_dim=RANK, dtype=torch.float64, tied=True)
    assert not mla_attn_with_cache(*(t.requires_grad_() for t in given()), cache).requires_grad


def test_a_token_takes_its_latent_once_in_a_tied_cache():
    kinds = dict(value_dim=512, capacity=64, dtype=torch.bfloat16)
    assert RingCache(1, 1, 576, tied=True, **kinds).nbytes == 64 * 576 * 2
    assert RingCache(1, 1, 576, **kinds).nbytes == 64 * (576 + 512) * 2


def wrong(ring, change, before: int) -> str:
    """Return a rank's error where rank 1 has changed a call, the first with so many tokens."""
    cache = RingCache(2, 1, RANK + D_ROPE, value_dim=RANK, dtype=torch.float64, group=ring)
    for token in range(before):
        mla_attn_with_cache(*part(slice(token, token + 1)), cache)
    args = part(slice(before, before + 3))
    with pytest.raises(ValueError, match="mla_attn_with_cache") as error:
        mla_attn_with_cache(*(change(args) if ring.rank else args), cache)
    return str(error.value)


@pytest.mark.parametrize("before", [0, 2])
def test_all_ranks_raise_for_one(before):
    texts, _ = threads.run(2, lambda ring: wrong(ring, lambda a: [*a[:4], a[4][:2]], before))
    assert all("must agree, got" in text for text in texts)
    cache = RingCache(2, 1, RANK, value_dim=RANK, dtype=torch.float64)
    with pytest.raises(ValueError, match="the cache must be of latents"):
        mla_attn_with_cache(*part(slice(0, 3)), cache)


def test_ranks_must_expand_values_to_one_size():
    def main(ring) -> str:
        *tensors, w_up = part(slice(0, 5))
        cache = RingCache(
            2, 1, RANK + D_ROPE, value_dim=RANK, tied=True, dtype=torch.float64, group=ring
        )
        with pytest.raises(ValueError, match="w_up must be the same on every rank") as told:
            mla_attn_with_cache(*tensors, w_up[:, ring.rank :], cache)
        return str(told.value)

    assert len({*threads.run(2, main)[0]}) == 1


def test_with_a_plan_values_of_another_size_change_their_own_rank_alone():
    """All other sizes of w_up follow from the queries and the cache; its values are not sent."""
    whole, _ = dense_attention(*expanded(dict(zip(CASE.names, given()))), causal=True)

    def main(ring) -> list[torch.Tensor]:
        cache = RingCache(
            2, 1, RANK + D_ROPE, value_dim=RANK, tied=True, dtype=torch.float64, group=ring
        )
        found = []
        for token in range(4):
            *tensors, w_up = part(slice(token, token + 1))
            fewer = w_up.shape[1] - (1 if token == 2 and ring.rank else 0)
            found.append(mla_attn_with_cache(*tensors, w_up[:, :fewer], cache))
        return found

    for rank, found in enumerate(threads.run(2, main)[0]):
        for token, out in enumerate(found):
            want = whole[:, token : token + 1]
            want = want[..., :-1] if token == 2 and rank else want
            assert relative_error(out, want) < 1e-12
