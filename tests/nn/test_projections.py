"""Weights of q, k and v in one and in three."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ring_attention_pytorch import RingAttention


def mesh_of(ranks: list[int]) -> DeviceMesh:
    """A stand-in for a mesh, which needs no processes."""
    mesh = mock.Mock(spec=DeviceMesh)
    mesh.ndim, mesh.mesh = 1, torch.tensor(ranks)
    mesh.size.return_value = len(ranks)
    return mesh


def layer(heads: int = 4) -> RingAttention:
    return RingAttention(12, dim_head=4, heads=heads, num_grouped_query_heads=2, prenorm=False)


def test_weights_in_three_are_those_in_one_in_their_order():
    one, three, again = layer(), layer(), layer()
    three.split_projections(mesh_of([3]))
    three.load_state_dict(one.state_dict())
    q, k, v = one.to_qkv[1].weight.split([16, 8, 8])
    for weight, want in ((three.to_q, q), (three.to_k, k), (three.to_v, v)):
        assert torch.equal(weight.weight, want)
    again.load_state_dict(three.state_dict())
    assert torch.equal(again.to_qkv[1].weight, one.to_qkv[1].weight)
    x = torch.randn(2, 7, 12)
    assert torch.allclose(three(x), one(x), atol=1e-6)
    context = torch.randn(2, 3, 12)
    assert torch.allclose(three(x, context=context), one(x, context=context), atol=1e-6)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="3 key heads; take fewer ranks"):
        layer(heads=6).split_projections(mesh_of([0, 1]))


def test_projections_that_were_not_split_are_an_error():
    three = layer()
    three.split_projections(mesh_of([0, 1]))
    with pytest.raises(ValueError, match=r"must be \[8, 4, 4\] wide .* got \[16, 8, 8\]"):
        three(torch.randn(1, 5, 12))
