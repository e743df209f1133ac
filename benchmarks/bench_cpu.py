"""CPU time of causal ring attention, forward and backward, against one process' SDPA.

    python -m benchmarks.bench_cpu --save
    python -m benchmarks.bench_cpu --length 2048 --repeats 3

Every process computes with one thread. CPU time is user and system time of whole processes,
gloo's threads included, summed over the ranks. In every round all subjects take their turn,
and a subject's ratio is to the SDPA of the same round, so that a machine which slows down
slows both. Bytes are counted where `torch.distributed` is called; live bytes are those of all
tensors that Python could see, inputs and gradients included, without what a kernel allocates
inside of itself. Errors are the worst rank's, relative to dense attention in float64.

Peers are looked for in the folder `--peers`, which comes first on their processes' path:

    pip install --no-deps --target DIR ring-attention-pytorch==0.5.20 jaxtyping wadler-lindig \\
        axolotl-ringmaster==0.2.7
"""

import datetime
import math
import multiprocessing as mp
import platform
import resource
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, HEADS, D = 1, 8, 64
NAMES = ("out", "dq", "dk", "dv")
TARGETS = {"zigzag": 1.25, "striped": 1.50}
ONE = "one process, SDPA"
PEERS = (
    "ring-attention-pytorch 0.5.20, contiguous",
    "ring-attention-pytorch 0.5.20, striped",
    "axolotl-ringmaster 0.2.7, p2p",
    "axolotl-ringmaster 0.2.7, distflash",
)
PEERS_NOTE = (
    " The peers run what they have for the CPU: ring-attention-pytorch its einsum in buckets of "
    "512, axolotl-ringmaster its fallback of explicit softmax (its own kernels need CUDA)."
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Work(NamedTuple):
    """What a process is to do; `peers` is the folder that comes first on its path."""

    subject: str
    rank: int
    size: int
    length: int
    peers: str | None = None
    dtype: torch.dtype = torch.float32


# ---- what is measured: attention of this rank's shards [b, n, h, d], and their positions


def subject(work: Work) -> tuple[Attend, Tensor]:
    """A causal attention function, and the positions of the tokens that it gets."""
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
    from ring_attention_pytorch.layouts import positions
    from ring_attention_pytorch.ring import Ring, Transfer
    from ring_attention_pytorch.ring_flash_attention import ring_attn

    class Mirror(Ring):
        """Hands back what it is given to send: a ring's work without any transport."""

        def exchange(self, sends: Any, receives: Any) -> Transfer:
            for (_, t), (_, given) in zip(receives, sends):
                t.copy_(given)
            return Transfer([], [t for _, t in receives], [])

    layout, _, alone = work.subject.partition(", ")
    ring = Mirror() if alone else Ring()
    held = positions(layout, rank=work.rank, ring_size=work.size, length=work.length)
    return lambda q, k, v: ring_attn(q, k, v, causal=True, layout=layout, group=ring), held


def _original(work: Work) -> tuple[Attend, Tensor]:
    from ring_attention_pytorch import ring_flash_attention
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    if not Path(ring_flash_attention.__file__).is_relative_to(Path(work.peers).resolve()):
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
    """Whole q, k, v and the cotangent of out, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, length, HEADS, D, generator=generator, dtype=dtype) for _ in "qkvo"]


def step(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    """One forward and backward: out, dq, dk, dv."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def cpu_time(work: Work) -> Callable[[], tuple[float, float]]:
    """Prepares; the answer is CPU seconds of one step, and the system's part of them."""
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
    """Bytes sent in a step, and the most bytes of tensors alive at once."""
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
    """The bytes of all storages alive, and the most there were, from `tensors` on."""

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
    """Relative errors of out, dq, dk and dv against dense attention in float64."""
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


class Failed(RuntimeError):
    """A process said why it can't."""


class Ranks:
    """The processes of one subject, started and warmed up; `ask` gives every rank's answer."""

    def __init__(self, prepare: Callable, name: str, size: int, length: int, **options: Any):
        context = mp.get_context("spawn")
        self.folder, self.members = tempfile.TemporaryDirectory(), []
        for rank in range(size):
            ours, theirs = context.Pipe()
            work = Work(name, rank, size, length, **options)
            process = context.Process(
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
    """Every rank's answer from processes of their own."""
    ranks = Ranks(prepare, name, size, length, **options)
    try:
        return ranks.ask()
    finally:
        ranks.stop()


# ---- the report


def time_all(names: dict[str, dict], ranks: int, length: int, repeats: int) -> dict[str, Any]:
    """Of each subject [(CPU seconds, system's part) of every rank] per round, or why not."""
    pools, rounds = {}, {}
    for name, options in names.items():
        say(f"starting {name}")
        try:
            pools[name] = Ranks(cpu_time, name, 1 if name == ONE else ranks, length, **options)
            rounds[name] = []
        except Failed as error:
            rounds[name] = str(error)
    for i in range(repeats):
        for name in list(pools):
            say(f"round {i + 1} of {repeats}: {name}")
            try:
                rounds[name].append(pools[name].ask())
            except Failed as error:
                rounds[name] = str(error)
                pools.pop(name).stop()
    for pool in pools.values():
        pool.stop()
    return rounds


def time_rows(rounds: dict[str, Any], found: dict[str, str]) -> tuple[list[list[str]], dict]:
    """The rows of the table of times, and each subject's median ratio."""
    totals = {
        name: [sum(seconds for seconds, _ in answers) for answers in result]
        for name, result in rounds.items()
        if not isinstance(result, str)
    }
    rows, ratios = [], {}
    for name, result in rounds.items():
        if name not in totals:
            rows.append([name, f"failed: {result}", *[""] * 4, found.get(name, "")])
            continue
        all_ratios = [own / one for own, one in zip(totals[name], totals[ONE])]
        ratios[name] = statistics.median(all_ratios)
        system = statistics.median(sum(part for _, part in answers) for answers in result)
        uneven = statistics.median(
            max(a)[0] * len(a) / sum(seconds for seconds, _ in a) for a in result
        )
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else ""
        rows.append([
            name, f"{statistics.median(totals[name]):.2f}", f"{system:.2f}",
            f"**{ratios[name]:.2f}** ({min(all_ratios):.2f}-{max(all_ratios):.2f})",
            target, f"{uneven:.2f}", found.get(name, ""),
        ])  # fmt: skip
    return rows, ratios


def work_rows(ranks: int, length: int) -> list[list[str]]:
    """Visible pairs of every rank, and their balance."""
    from ring_attention_pytorch.layouts import Visible, all_segments, tiles, visible_pairs

    rows = []
    for layout in ("contiguous", "striped", "zigzag"):
        held = all_segments(layout, ranks, length)
        pairs = [sum(visible_pairs(tiles(q, k, Visible(causal=True))) for k in held) for q in held]
        assert sum(pairs) == length * (length + 1) // 2
        shown = ", ".join(f"{p / 1e6:.2f}" for p in pairs)
        rows.append([layout, shown, f"{max(pairs) * ranks / sum(pairs):.4f}"])
    return rows


def memory_rows(ranks: int, length: int) -> list[list[str]]:
    """Bytes sent by a rank, and live at its peak, for rings that share one length."""
    rows, first = [], None
    for size in sorted({1, 2, ranks, 2 * ranks}):
        say(f"bytes of {size} ranks")
        sent, live = zip(*once(sent_and_live, "zigzag", size, length))
        # size - 1 messages of keys forward, of keys backward and of gradients, all in float32
        shard = BATCH * (length // size) * HEADS * D * 4
        formula = 2 * shard * (3 * (size - 1))
        first = first or max(live)
        rows.append([
            str(size), f"{formula:,}", f"{max(sent):,}", f"{max(live) / 2**20:.1f}",
            f"{max(live) / shard:.1f}", f"{max(live) * size / first:.2f}",
        ])  # fmt: skip
    return rows


def all_errors(names: dict[str, dict], ranks: int) -> dict[str, str]:
    """The worst rank's errors of every subject, in float32."""
    found = {}
    for name, options in names.items():
        say(f"errors of {name}")
        try:
            found[name] = _worst(once(errors, name, 1 if name == ONE else ranks, 256, **options))
        except Failed as error:
            found[name] = str(error)
    return found


def _worst(answers: list[list[float]]) -> str:
    return ", ".join(f"{name} {max(e):.0e}" for name, e in zip(NAMES, zip(*answers)))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |".replace("\n", " ") for row in lines)


def say(what: str) -> None:
    click.echo(f"\r\x1b[K{what}", nl=False, err=True)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()}, {mp.cpu_count()} cores"


def plot(ratios: dict[str, float], path: Path) -> None:
    """A bar for each subject; without matplotlib there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        click.echo("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 0.45 * len(ratios) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(ratios), list(ratios.values()), color="#4878a8")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("CPU time of causal forward and backward, one process' SDPA = 1")
    figure.savefig(path, dpi=120)


@click.command()
@click.option("--length", default=8192, show_default=True, help="tokens of the whole sequence")
@click.option("--ranks", default=4, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--peers", type=click.Path(exists=True, file_okay=False), help="folder of peers")
@click.option("--save", is_flag=True, help="write benchmarks/results/DATE-cpu.md and .png")
def main(length: int, ranks: int, repeats: int, peers: str | None, save: bool) -> None:
    """Measure, print, and with --save keep."""
    if length % (2 * ranks):
        raise click.UsageError("--length must be a multiple of twice --ranks")
    layouts = ("zigzag", "striped", "contiguous")
    alone = [f"{layout}, compute alone" for layout in layouts]
    checked = {name: {} for name in (ONE, *layouts)}
    if peers is not None:
        checked |= {name: {"peers": peers} for name in PEERS}
    exact = {name: _worst(once(errors, name, ranks, 256, dtype=torch.float64)) for name in layouts}
    found = all_errors(checked, ranks)
    names = {name: checked.get(name, {}) for name in (ONE, *layouts, *alone, *checked)}
    rows, ratios = time_rows(time_all(names, ranks, length, repeats), found)
    report = "\n\n".join([
        f"# CPU time, {datetime.date.today()}",
        f"Causal forward and backward, {length} tokens over {ranks} ranks (gloo), batch {BATCH}, "
        f"{HEADS} heads of {D}, float32, one thread a process, median of {repeats} rounds (least-"
        f"most). {hardware()}; torch {torch.__version__}, Python {platform.python_version()}.",
        f"`python -m benchmarks.bench_cpu --length {length} --ranks {ranks} --repeats {repeats}"
        f"{' --peers DIR' if peers else ''}`",
        table(["", "CPU s", "of it system", "relative", "target", "ranks, max / mean",
               "errors, 256 tokens"], rows),
        "*Compute alone* is the same code with a ring that hands every message back unsent."
        + PEERS_NOTE * (peers is not None),
        "float64 errors, 256 tokens: " + "; ".join(f"{n}: {e}" for n, e in exact.items()) + ".",
        "## Work of each rank",
        table(["layout", "million visible pairs of each rank", "max / mean"],
              work_rows(ranks, length)),
        "## Bytes of each rank, zigzag",
        table(["ranks", "sent, by formula", "sent, counted", "live at peak, MiB",
               "in shards of q", "live x ranks, one = 1"], memory_rows(ranks, length)),
    ])  # fmt: skip
    say("")
    click.echo(report)
    if peers is None:
        click.echo("\nno peers measured; see --peers at the top of this file")
    if save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-cpu.md"
        path.parent.mkdir(exist_ok=True)
        plot(ratios, path.with_suffix(".png"))
        path.write_text(f"{report}\n\n![relative CPU time]({path.stem}.png)\n")
        click.echo(f"\nsaved {path}")


if __name__ == "__main__":
    main()
