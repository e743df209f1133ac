"""A DeviceMesh as the ranks of a ring: of one dimension, or of two, machines and their ranks."""

import re

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# the words of which names of a ring's two dimensions consist
_WORDS = {
    "machine", "machines", "node", "nodes", "host", "hosts", "rank", "ranks", "gpu", "gpus",
    "local", "inter", "intra", "inner", "outer", "cp", "sp", "ring", "context", "sequence", "seq",
}  # fmt: skip


def group_of(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group of a mesh.

    A ring over two dimensions takes the ranks row by row. Their names must say that they are a
    ring's, because a mesh of replicas by ranks would otherwise join different batches. The group is
    made on first use, by all ranks of the whole mesh together (`DeviceMesh._flatten`).

    Raises:
        ValueError: the mesh has more dimensions, or other names, or ranks that do not ascend.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 2 or not names or not all(map(_is_of_a_ring, names)):
        raise ValueError(
            'group must be a DeviceMesh of one dimension, as mesh["cp"], or of two that are '
            'named as machines and their ranks, such as ("machine", "rank") or ("node", "cp"); '
            f"got {mesh.ndim} with names {names or None}; pick some, or flatten the mesh"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"the ranks of a ring's mesh must ascend row by row, got {ranks}")
    return mesh._flatten().get_group()


def _is_of_a_ring(name: str) -> bool:
    """True if a dimension's name consists of words for a ring's ranks and their machines.

    >>> [_is_of_a_ring(name) for name in ("machine", "inner_cp", "dp", "dp_cp", "tp")]
    [True, True, False, False, False]
    """
    words = [word for word in re.split("[^a-z]+", name.lower()) if word]
    return bool(words) and _WORDS.issuperset(words)
