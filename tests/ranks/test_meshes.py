"""Meshes of machines and their ranks are rings, and meshes of anything else are refused."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.ranks.ring import Ring
from tests.support.cases import Attention, errors, oracle, shard
from tests.support.reference import dense_attention


def found_by_rank() -> tuple[float, float, list[str]]:
    """For a pool of 4: errors over a mesh of two dimensions, over a part of one, and refusals."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "rank"))
    ring, case = Ring(mesh), Attention(causal=True, layout="zigzag", length=37)
    assert (ring.rank, ring.size, ring.ranks) == (dist.get_rank(), 4, [0, 1, 2, 3])
    assert Ring(mesh).group is ring.group, "a group is made anew"
    worst = max(errors(case, ring.rank, 4, shard(case, ring), oracle(case)).values())
    replicas = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "node", "cp"))
    part = replicas["node", "cp"]
    draw = torch.Generator().manual_seed(dist.get_rank() // 2)  # a batch of each pair
    q = torch.randn(1, 10, 2, 4, generator=draw).double()
    mine = q.chunk(2, dim=1)[dist.get_rank() % 2]
    out = ring_attn(mine, mine, mine, causal=True, group=part)
    want = dense_attention(q, q, q, causal=True)[0].chunk(2, dim=1)[dist.get_rank() % 2]
    wrong = [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")),
        init_device_mesh("cpu", (2, 2)),
        replicas,
        DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("machine", "rank")),
    ]
    said = []
    for each in wrong:
        try:
            ring_attn(mine, mine, mine, group=each)
        except ValueError as error:
            said.append(str(error))
    return worst, (out - want).abs().max().item(), said


def test_a_mesh_of_machines_and_ranks_is_a_ring_and_one_of_replicas_is_refused(pools):
    for worst, of_part, said in pools(4).run(found_by_rank):
        assert max(worst, of_part) < 1e-12
        assert "got 2 with names ('dp', 'cp')" in said[0]
        assert "got 2 with names None" in said[1]
        assert "got 3 with names ('dp', 'node', 'cp')" in said[2]
        assert "must ascend row by row, got [1, 0, 3, 2]" in said[3]
