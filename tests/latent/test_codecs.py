"""Codecs by themselves: what they decode, and the pulled back gradients against autograd."""

import pytest
import torch

from ring_attention_pytorch.latent.codecs import LatentKeys, TiedKeys
from ring_attention_pytorch.runtime.codec import Codec


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


CASES = [
    (LatentKeys(rank=5, d_nope=6, d_rope=4, d_v=3), 1, [(4, 9, 5)], (4, 10, 3)),
    (TiedKeys(d_v=7), 2, [], (2, 7, 7)),
]


@pytest.mark.parametrize(("codec", "g", "params", "sizes"), CASES)
def test_gradients_are_those_of_decode(codec: Codec, g, params, sizes):
    h, d, d_v = sizes
    encoded = tuple(drawn(2, 5, g, width) for width in codec.widths)
    params = tuple(drawn(*shape) for shape in params)
    k, v = codec.decode(encoded, params)
    assert k.shape == (2, 5, h, d)
    assert v.shape == (2, 5, h, d_v)
    grads = torch.randn_like(k), torch.randn_like(v)
    of_encoded, of_params = codec.pull_back(encoded, params, grads)
    want = torch.autograd.grad((k, v), (*encoded, *params), grads)
    for got, right in zip((*of_encoded, *of_params), want, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_latents_decode_to_what_the_projection_makes():
    codec = LatentKeys(rank=5, d_nope=6, d_rope=4, d_v=3)
    latent, rotated, up = drawn(1, 2, 1, 5), drawn(1, 2, 1, 4), drawn(4, 9, 5)
    k, v = codec.decode((latent, rotated), (up,))
    row = up[2] @ latent[0, 1, 0]
    torch.testing.assert_close(k[0, 1, 2], torch.cat((row[:6], rotated[0, 1, 0])))
    torch.testing.assert_close(v[0, 1, 2], row[6:])
