"""Measure attention on the CPU, each in processes of its own: ours, PyTorch's, and peers."""

import math
import multiprocessing as mp
import resource
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, HEADS, D = 1, 8, 64
NAMES = ("out", "dq", "dk", "dv")
ONE = "one process, SDPA"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Work(NamedTuple):
    """Say what a process is to do; `peers` is the folder that comes first on its path."""

    subject: str
    rank: int
    size: int
    length: int
    peers: str | None = None
    dtype: torch.dtype = torch.float32


# ---- what is measured: attention of this rank's shards [b, n, h, d], and their positions


def subject(work: Work) -> tuple[Attend, Tensor]:
    """Return a causal attention function, and the positions of the tokens that it gets."""
    if work.subject == ONE:
        return _sdpa, torch.arange(work.length)
    if work.subject.startswith("ring-attention-pytorch"):
        return _original(work)
    if work.subject.startswith("axolotl-ringmaster"):
        return _ringmaster(work)
    return _ours(work)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _ours(work: Work) -> tuple[Attend, Tensor]:
    from ring_attention_pytorch.functional import ring_attn
    from ring_attention_pytorch.geometry.layouts import positions
    from ring_attention_pytorch.ranks.ring import Exchange, Ring

    class Mirror(Ring):
        """Hands back what it is given to send: a ring's work without any transport."""

        def exchange(self, sends: Any, receives: Any) -> Exchange:
            for (_, t), (_, given) in zip(receives, sends):
                t.copy_(given)
            return Exchange(self, sends, receives, [])

    layout, _, alone = work.subject.partition(", ")
    ring = Mirror() if alone else Ring()
    held = positions(layout, rank=work.rank, ring_size=work.size, length=work.length)
    return lambda q, k, v: ring_attn(q, k, v, causal=True, layout=layout, group=ring), held


def _original(work: Work) -> tuple[Attend, Tensor]:
    import ring_attention_pytorch as original
    from ring_attention_pytorch import ring_flash_attn

    if not Path(original.__file__ or "").is_relative_to(Path(work.peers).resolve()):
        raise ModuleNotFoundError("the folder of peers has no ring_attention_pytorch")
    striped, n = work.subject.endswith("striped"), work.length // work.size
    options = dict(causal=True, bucket_size=min(n, 512), ring_reduce_col=True, ring_size=work.size)
    start, step = (work.rank, work.size) if striped else (work.rank * n, 1)
    held = start + step * torch.arange(n)
    return lambda q, k, v: ring_flash_attn(q, k, v, striped_ring_attn=striped, **options), held


def _ringmaster(work: Work) -> tuple[Attend, Tensor]:
    from ringmaster.ring.distflash import distflash_attention
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    n, options = work.length // work.size, dict(group=dist.group.WORLD, scaling=D**-0.5)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if work.subject.endswith("distflash"):
            return distflash_attention(q, k, v, **options)
        return ring_p2p_attention(q, k, v, causal=True, **options)

    return attend, work.rank * n + torch.arange(n)


# ---- what a process answers


def draw(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw whole q, k, v and the cotangent of out, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, length, HEADS, D, generator=generator, dtype=dtype) for _ in "qkvo"]


def step(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """Run one forward and backward; return out, dq, dk, dv."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def cpu_time(work: Work) -> Callable[[], tuple[float, float]]:
    """Prepare to tell CPU seconds of one step, and the system's part of them."""
    attend, held = subject(work)
    tensors = [t[:, held].contiguous() for t in draw(work.length, work.dtype)]
    step(attend, tensors)

    def measure() -> tuple[float, float]:
        if dist.is_initialized():
            dist.barrier()
        begin, system = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
        step(attend, tensors)
        end = time.process_time()
        return end - begin, resource.getrusage(resource.RUSAGE_SELF).ru_stime - system

    return measure


def sent_and_live(work: Work) -> Callable[[], tuple[int, int]]:
    """Prepare to tell bytes sent in a step, and the most bytes of tensors alive at once."""
    attend, held = subject(work)
    tensors = [t[:, held].contiguous() for t in draw(work.length, work.dtype)]
    sent, real = [0], dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        sent[0] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    def measure() -> tuple[int, int]:
        sent[0], dist.batch_isend_irecv = 0, counting
        with LiveBytes(tensors) as live:
            step(attend, tensors)
        dist.batch_isend_irecv = real
        return sent[0], live.peak

    return measure


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages alive, and the most there were, from `tensors` on."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, weakref.WeakSet()
        for t in tensors:
            self._add(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._add(t)
        return result

    def _add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage not in self.seen:
            self.seen.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, nbytes: int) -> None:
        self.now -= nbytes


def errors(work: Work) -> Callable[[], list[float]]:
    """Prepare to tell relative errors of out, dq, dk and dv, against dense attention in float64."""
    attend, held = subject(work)
    whole = [t.to(work.dtype) for t in draw(work.length, torch.float64)]

    def measure() -> list[float]:
        got = step(attend, [t[:, held].contiguous() for t in whole])
        want = [t[:, held] for t in step(_dense, [t.double() for t in whole])]
        return [((g - w).norm() / w.norm()).item() for g, w in zip(got, want)]

    return measure


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


# ---- processes

# one imports torch, and all others are forked from it; not ours, whose name a peer has too
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed"])


class Failed(RuntimeError):
    """Say why a process can't."""


class Ranks:
    """Start and warm up the processes of one subject; `ask` gives every rank's answer."""

    def __init__(self, prepare: Callable, name: str, size: int, length: int, **options: Any):
        self.folder, self.members = tempfile.TemporaryDirectory(), []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            work = Work(name, rank, size, length, **options)
            process = _context.Process(
                target=_serve, args=(theirs, prepare, work, self.folder.name), daemon=True
            )
            process.start()
            theirs.close()
            self.members.append((ours, process))
        try:
            self._answers()
        except Failed:
            self.stop()
            raise

    def ask(self) -> list[Any]:
        """Return every rank's answer."""
        for pipe, _ in self.members:
            pipe.send("again")
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for pipe, _ in self.members:
            try:
                answers.append(pipe.recv() if pipe.poll(600) else "no answer in 600 s")
            except EOFError:
                answers.append("the process died")
        problem = next((a for a in answers if isinstance(a, str)), None)
        if problem is not None:
            raise Failed(problem)
        return answers

    def stop(self) -> None:
        """End the processes."""
        for pipe, process in self.members:
            process.kill()
            process.join()
            pipe.close()
        self.folder.cleanup()


def _serve(pipe: Connection, prepare: Callable, work: Work, folder: str) -> None:
    torch.set_num_threads(1)
    if work.peers is not None:
        sys.path.insert(0, str(Path(work.peers).resolve()))
    try:
        if work.subject != ONE:
            dist.init_process_group(
                "gloo", rank=work.rank, world_size=work.size, init_method=f"file://{folder}/store"
            )
        measure = prepare(work)
        pipe.send(())
        while pipe.recv():
            pipe.send(measure())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def once(prepare: Callable, name: str, size: int, length: int, **options: Any) -> list[Any]:
    """Return every rank's answer from processes of their own."""
    ranks = Ranks(prepare, name, size, length, **options)
    try:
        return ranks.ask()
    finally:
        ranks.stop()
