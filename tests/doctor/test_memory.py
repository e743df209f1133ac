"""Memory by cause: beside peaks that were measured, and tensors of a layer that are counted."""

import json
import re
import shlex
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from docs import draw_memory
from ring_attention_pytorch import chunk_tokens
from ring_attention_pytorch.doctor import commands
from ring_attention_pytorch.doctor.memory import Sizes, Training, _layer, allocated, peak

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "memory.md"
SMALL = Sizes(dim=64, layers=3, heads=4, key_heads=2, width=16, ffn=192, classes=100)
N = 1 << 14


class Counted(TorchDispatchMode):
    """The bytes of tensors that are alive, and the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            memory = t.untyped_storage() if isinstance(t, Tensor) else None
            if memory is not None and memory._cdata not in self.alive:
                self.alive[memory._cdata] = memory.nbytes()
                weakref.finalize(memory, self.alive.pop, memory._cdata, None)
        self.most = max(self.most, self.now)
        return out

    @property
    def now(self) -> int:
        return sum(self.alive.values())


class Norm(torch.autograd.Function):
    """A norm's memory on GPUs: it keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


class Attention(torch.autograd.Function):
    """Attention's memory: it keeps q, k, v and out, and makes their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(sizes.dim, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * self.gate(x))


class Layer(nn.Module):
    """A Llama's layer, with the kernels of GPUs in place of the CPU's."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner, keys = sizes.heads * sizes.width, sizes.key_heads * sizes.width
        self.to_q, self.to_out = (
            nn.Linear(*shape, bias=False) for shape in ((sizes.dim, inner), (inner, sizes.dim))
        )
        self.to_k, self.to_v = (nn.Linear(sizes.dim, keys, bias=False) for _ in range(2))
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        y = Norm.apply(x)
        x = x + self.to_out(Attention.apply(self.to_q(y), self.to_k(y), self.to_v(y)))
        return x + self.feed_forward(Norm.apply(x))


@pytest.mark.parametrize("chunk", [None, N // 8])
@pytest.mark.parametrize("again", [True, False])
def test_a_layer_holds_what_is_counted_of_its_tensors(chunk: int | None, again: bool) -> None:
    kept, work = _layer(SMALL, Training(N, 1, chunk=chunk))
    with torch.device("meta"), Counted() as counted:
        layer = Layer(SMALL).bfloat16()
        if chunk is not None:
            chunk_tokens(layer.feed_forward, tokens=chunk)
        x = torch.empty(1, N, SMALL.dim, dtype=torch.bfloat16, requires_grad=True)
        before = counted.now
        y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        before += y.nbytes
        assert counted.now - before == pytest.approx(0 if again else kept, rel=0.01, abs=N)
        grad = torch.empty_like(y)
        counted.most = 0
        y.backward(grad)
    assert counted.most - before == pytest.approx(work, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(65536, 4096), (65536, 8192), (8192, 1024), (8192, 4096)]
)
def test_gradients_of_weights_are_summed_over_chunks(tokens: int, chunk: int) -> None:
    """They are large beside a chunk's tensors in layers of a usual size."""
    _, work = _layer(Sizes(), Training(tokens, 1, chunk=chunk))
    with torch.device("meta"), Counted() as counted:
        layer = Layer(Sizes()).bfloat16()
        chunk_tokens(layer.feed_forward, tokens=chunk)
        for weight in layer.parameters():
            weight.grad = torch.empty_like(weight)
        x = torch.empty(1, tokens, Sizes().dim, dtype=torch.bfloat16, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False)
        before, grad = counted.now, torch.empty_like(y)
        counted.most = 0
        y.backward(grad)
    assert counted.most - before == pytest.approx(work, rel=0.01)


def test_weights_are_those_of_the_layer() -> None:
    with torch.device("meta"):
        layer = Layer(SMALL)
    assert SMALL.of_layer == sum(p.numel() for p in layer.parameters()) + 2 * SMALL.dim


def rows(name: str) -> list[dict[str, Any]]:
    """Read the figures measured on GPUs."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def name_of(row: dict[str, Any]) -> str:
    return f"{row['gpus']}-{row['subject']}-{row['length']}"


@pytest.mark.parametrize("row", rows("llama"), ids=name_of)
def test_the_peak_is_that_of_four_gpus_within_five_per_cent(row: dict[str, Any]) -> None:
    """Two GPUs held up to 8 % more, as the page says."""
    parts = peak(Sizes(), Training(row["length"], row["gpus"]))[1]
    if row["subject"] != "ring":  # other attention shares no memory, and has no side streams
        del parts["attention"]
    bound = 0.05 if row["gpus"] == 4 else 0.08
    assert sum(parts.values()) / 2**30 == pytest.approx(row["peak_gib"], rel=bound)


@pytest.mark.parametrize("row", rows("memory"), ids=str)
def test_what_the_allocator_holds_is_that_of_a_gpu_within_five_per_cent(
    row: dict[str, Any],
) -> None:
    """With chunks a GPU held up to 11 % more, as the page says."""
    ranks = row["ranks"]
    how = Training(row["tokens"] * ranks, ranks, chunk=row["chunk"], offload=row["offload"])
    counted = allocated(Sizes(layers=row["layers"]), how) / 2**30
    assert counted == pytest.approx(row["peak_gib"], rel=0.05 if row["chunk"] is None else 0.11)
    assert counted == pytest.approx(row["counted_gib"], abs=0.01)


def test_the_picture_is_what_its_script_draws() -> None:
    assert draw_memory.drawing() == (ROOT / "docs" / "memory.svg").read_text()


def tables() -> list[tuple[str, str]]:
    """Return the commands of the page's tables, and the tables."""
    return re.findall(
        r"^    python -m ring_attention_pytorch (memory .+)\n\n((?:\|.*\n)+)",
        PAGE.read_text(),
        re.M,
    )


def test_tables_of_the_guide_are_what_their_commands_print(capsys: Any) -> None:
    assert len(tables()) == 2
    for command, table in tables():
        assert commands.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == table


def test_one_way_to_train_is_described_in_lines(capsys: Any) -> None:
    assert commands.main(["memory", "--tokens", "131072", "--ranks", "4"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "131072 tokens on 4 GPUs" in first
    figures = [float(line.split()[-2]) for line in lines]
    assert sum(figures[:-1]) == pytest.approx(figures[-1], abs=0.5)


def test_heads_that_do_not_divide_are_refused(capsys: Any) -> None:
    assert commands.main(["memory", "--heads", "4", "--key-heads", "3"]) == 2
    assert "must divide 4" in capsys.readouterr().err


def most(**how: Any) -> int:
    """Return the most bytes, of 128k tokens on four GPUs."""
    return sum(peak(Sizes(), Training(1 << 17, 4, **how))[1].values())


def test_what_bounds_memory_does() -> None:
    plain = most()
    assert most(chunk=4096) < plain
    assert most(offload=True) < plain
    assert most(checkpoint=False) > 3 * plain
    assert most(logits=None) > plain
    assert most(float32=True) > plain
