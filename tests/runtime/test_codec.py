"""Decoding a block: by groups of heads, and what of a call hinders that."""

import torch

from ring_attention_pytorch.latent.codecs import LatentKeys, TiedKeys
from ring_attention_pytorch.runtime import codec
from ring_attention_pytorch.runtime.codec import groups_of_a_call, groups_of_heads, values_like
from ring_attention_pytorch.runtime.interfaces import ScoreMods

LATENT = LatentKeys(5, 6, 4, 3)
PLAIN = ScoreMods(1.0, None, 1024)


def test_groups_are_equal_and_as_few_as_fit():
    for heads in range(1, 40):
        for most in (1, 5, 17, 100):
            number = groups_of_heads(heads, 3, most)
            assert heads % number == 0
            size = 3 * heads // number
            assert size <= most or number == heads
            fewer = [n for n in range(1, number) if heads % n == 0]
            assert all(3 * heads // n > most for n in fewer)


def test_terms_that_count_heads_get_all_of_them_at_once():
    big = codec.MOST_DECODED
    assert groups_of_a_call(LATENT, PLAIN, 4, big) == 4
    assert groups_of_a_call(LATENT, PLAIN._replace(alibi=torch.ones(4)), 4, big) == 1
    assert groups_of_a_call(LATENT, PLAIN._replace(mask_mod=lambda b, h, i, j: i), 4, big) == 1
    assert groups_of_a_call(TiedKeys(8), PLAIN, 4, big) == 1


def test_values_have_the_size_that_kernels_get_and_no_memory():
    like = values_like(LATENT, torch.empty(2, 7, 1, 4, dtype=torch.float16))
    assert (like.shape, like.dtype) == ((2, 7, 1, 3), torch.float16)
    assert like.untyped_storage().nbytes() == 2
