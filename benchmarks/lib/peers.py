"""Find other packages' attention over shards of a GPU group, where they import, by name.

Each takes this rank's q, k, v `[1, n, h, d]` and gives out; all split a causal sequence as our
"zigzag" does, and a full one in order, but for the ring of `ring_flash_attn` named striped. A
function comes out of a context, in which both its forward and its backward have to run.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.transformer_engine import Asked, engine

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Peers = dict[str, AbstractContextManager[Attend]]


def peers(causal: bool, tokens: int, key_heads: int) -> Peers:
    """Find all that can be had here; tell of those that fail to be made, and leave them out."""
    found: Peers = {}
    for make in (_torch, _ringmaster, _yunchang, _zhuzilin, _transformer_engine):
        try:
            found |= make(causal, tokens, key_heads)
        except Exception as error:  # another package's, whatever it is
            if dist.get_rank() == 0:
                print(f"{make.__name__[1:]} is left out: {type(error).__name__}: {error}"[:200])
    return found


def installed(name: str) -> bool:
    """Tell whether a package is there to import."""
    return importlib.util.find_spec(name) is not None


def _torch(causal: bool, tokens: int, key_heads: int) -> Peers:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as settings
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = dist.get_world_size()
    mesh = init_device_mesh("cuda", (size,))
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    @contextmanager
    def attend(kernel: str, rotate: str, repeated: bool) -> Iterator[Attend]:
        settings._cp_options.enable_load_balance = causal
        settings.set_rotate_method(rotate)
        unused = torch.zeros(1, 2 * size, device="cuda")

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if repeated:
                group = q.shape[2] // k.shape[2]
                k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
            return out.transpose(1, 2)

        with (
            context_parallel(mesh, buffers=[unused], buffer_seq_dims=[1]),
            sdpa_kernel([backends[kernel]]),
        ):
            yield run

    return {
        f"torch context_parallel, {kernel}, {rotate}{how}": attend(kernel, rotate, bool(how))
        for kernel in backends
        for rotate in ("allgather", "alltoall")
        for how in ("", ", repeated")
    }


def _ringmaster(causal: bool, tokens: int, key_heads: int) -> Peers:
    if not installed("ringmaster") or not causal:
        return {}
    import ringmaster.ring.p2p_attn as p2p
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    from ringmaster.ring import zigzag

    p2p._flash_ops = zigzag._flash_ops = lambda *_: (_flash_attn_forward, _flash_attn_backward)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = zigzag.ZigzagRingAttention.apply(q, k, v, dist.group.WORLD, None, None)
        out = out[0] if isinstance(out, tuple) else out
        return out if out.shape[1] == tokens else out.transpose(1, 2)

    return {"axolotl-ringmaster, zigzag": nullcontext(run)}


def _yunchang(causal: bool, tokens: int, key_heads: int) -> Peers:
    if not installed("yunchang"):
        return {}
    from yunchang import LongContextAttention, set_seq_parallel_pg

    size, found = dist.get_world_size(), {}

    def attend(degree: int) -> Attend:
        set_seq_parallel_pg(degree, size // degree, dist.get_rank(), size)
        kind = "zigzag" if causal and degree < size else "basic"
        return LongContextAttention(ring_impl_type=kind)

    for degree in (d for d in (size, size // 2) if d >= 1 and key_heads % d == 0):
        module = attend(degree)
        name = f"yunchang, Ulysses {degree} x ring {size // degree}"
        found[name] = nullcontext(_causal(module, causal))
    return found


def _zhuzilin(causal: bool, tokens: int, key_heads: int) -> Peers:
    if not installed("ring_flash_attn"):
        return {}
    import ring_flash_attn as package

    names = ("zigzag_ring_flash_attn_func", "stripe_flash_attn_func") if causal else ()
    return {
        f"ring-flash-attn, {name.split('_')[0]}": nullcontext(
            _causal(getattr(package, name), causal)
        )
        for name in (*names, "ring_flash_attn_func")
    }


def _transformer_engine(causal: bool, tokens: int, key_heads: int) -> Peers:
    return {name: nullcontext(attend) for name, attend in engine(Asked(causal)).items()}


def _causal(function: Callable[..., Tensor], causal: bool) -> Attend:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return run


def one_gpu(name: str, causal: bool) -> Attend | None:
    """Return a kernel of PyTorch by itself, by the name that it has among ours, if it is one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    }

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel([backends[name]]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    return run if name in backends else None
