"""Trains a small byte-level transformer on sequences that are spread over processes.

    torchrun --nproc-per-node 4 examples/train_text.py

The text is the source code of Python's own standard library, so nothing is downloaded. Every
process brings whole sequences; the model spreads each of them over all processes. The same
command without `torchrun` trains the same model in one process, with the same losses. A hybrid of
three gated delta nets for each attention:

    torchrun --nproc-per-node 4 examples/train_text.py --layers rrra --depth 4 --check

With `--checkpoint FOLDER` it can be killed at any moment, and goes on from its last checkpoint
when it is started again, on as many processes or others:

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_text.py --checkpoint run1

Then torchrun itself starts all processes again if one of them dies. Steps since the checkpoint are
repeated, with losses that are the same to the bit. On several machines the folder must be one that
all of them see, and `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` must be set for torchrun on each.
"""

import os
import re
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import einx
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ring_attention_pytorch import RingTransformer
from ring_attention_pytorch.geometry.layouts import LAYOUTS
from ring_attention_pytorch.launch import TIMEOUT, torchrun_group
from ring_attention_pytorch.progress import show

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
MOST_GRADIENT_ERROR = 1e-10


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of training. `batch` is a step's sequences, of all processes."""

    steps: int = 100
    length: int = 1024
    batch: int = 4
    dim: int = 64
    depth: int = 2
    heads: int = 4
    layout: str = "zigzag"
    lookback: int | None = None
    layers: str | None = None
    data_parallel: str = "ddp"
    dtype: str = "float32"
    seed: int = 0
    learning_rate: float = 3e-3
    device: str = "cpu"  # "cuda" is this process' current one


class Step(NamedTuple):
    """One step of training; `loss` is that of the whole batch, before the update."""

    number: int
    loss: float
    tokens_per_second: float


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """True if this process speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_gpus() -> bool:
    """True if every process of this machine can have one of its own."""
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@cache
def text() -> Tensor:
    """Python's standard library as bytes, uint8 `[characters]`."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"there is no Python source to train on in {folder}")
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def sequences(config: Config, step: int) -> Tensor:
    """The batch of a step, ids `[batch, length + 1]`: the same on any number of processes."""
    source = text()
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    last = len(source) - config.length
    starts = torch.randint(last, (config.batch,), generator=generator)
    at = einx.add("b, n -> b n", starts, torch.arange(config.length + 1))
    return source[at].long()


def own_sequences(config: Config, step: int) -> Tensor:
    """This process' share of the batch."""
    if config.batch % world_size():
        raise ValueError(
            f"batch must be a multiple of the {world_size()} processes, got {config.batch}"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    return sequences(config, step).chunk(world_size())[rank].to(config.device)


def make_model(config: Config, *, ring: bool) -> RingTransformer:
    """Make a model, with the same weights everywhere; with `ring` its sequences are sharded."""
    torch.manual_seed(config.seed)
    model = RingTransformer(
        num_tokens=256,
        dim=config.dim,
        depth=config.depth,
        heads=config.heads,
        dim_head=config.dim // config.heads,
        causal=True,
        max_lookback_seq_len=config.lookback,
        layers=config.layers,
        ring_attn=ring,
        ring_seq_size=-(-config.length // world_size()),  # so that one ring is all processes
        layout=config.layout if ring else None,
    )
    # half precision is for the arithmetic, under autocast; weights stay in single
    return model.to(config.device, torch.promote_types(DTYPES[config.dtype], torch.float32))


def data_parallel(model: RingTransformer, config: Config) -> nn.Module:
    """The model with gradients averaged over processes: here exactly one process' gradients."""
    if world_size() == 1:
        return model
    if config.data_parallel == "ddp":
        return DistributedDataParallel(model)
    # a module that ends in a linear layer returns a view; nothing here changes it in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(config.device, (world_size(),))
    for attention, feed_forward in model.layers:
        fully_shard(attention, mesh=mesh)
        fully_shard(feed_forward, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: nn.Module, ids: Tensor, config: Config) -> Tensor:
    """The mean cross entropy of every next byte of every process' sequences."""
    dtype = DTYPES[config.dtype]
    with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype == torch.bfloat16):
        return model(ids, return_loss=True)


class Checkpoints:
    """Models and optimizers in a folder of files, by the number of steps that are done.

    A checkpoint has its name only once it is complete, and the one before it is removed after that:
    whenever a process dies, there is one to load.
    """

    def __init__(self, folder: str | Path, every: int = 10):
        self.folder, self.every = Path(folder), every
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process

    def load(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Load the newest, if there is any; return how many steps it has done."""
        found = [self._newest() if is_first() else 0]
        if world_size() > 1:
            dist.broadcast_object_list(found)
        if found[0]:
            state = _state(model, optimizer)
            dcp.load(state, checkpoint_id=self._named(found[0]))
            set_state_dict(
                model, optimizer,
                model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            )  # fmt: skip
        return found[0]

    def save(self, model: nn.Module, optimizer: Optimizer, done: int) -> None:
        """Save, on all ranks, what has done so many steps."""
        partial = self.folder / "partial"
        # returns once all ranks have written
        dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if is_first():
            os.replace(partial, self._named(done))
            self._remove_all_but(done)
        if world_size() > 1:
            dist.barrier()  # the next one's parts have the same name

    def _named(self, done: int) -> Path:
        return self.folder / f"step-{done}"

    def _newest(self) -> int:
        found = max((int(p.name[5:]) for p in self.folder.glob("step-*")), default=0)
        self._remove_all_but(found)
        return found

    def _remove_all_but(self, done: int) -> None:
        for other in {*self.folder.glob("step-*"), self.folder / "partial"} - {self._named(done)}:
            shutil.rmtree(other, ignore_errors=True)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Named alike whatever wraps the model."""
    state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": optimizer_state}


def train(config: Config, checkpoints: Checkpoints | None = None) -> Iterator[Step]:
    """Train on all processes of the default group, or on this one alone.

    With checkpoints it begins where the last one ended.
    """
    model = data_parallel(make_model(config, ring=world_size() > 1), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    done = 0 if checkpoints is None else checkpoints.load(model, optimizer)
    if done:  # after its first backward ddp adds in another order, in which it has to go on
        loss_of(model, own_sequences(config, 0), config).backward()
    for number in range(done, config.steps):
        start = time.perf_counter()
        loss = loss_of(model, own_sequences(config, number), config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        tokens = config.batch * config.length
        yield Step(number, value, tokens / (time.perf_counter() - start))
        done = number + 1
        if checkpoints is not None and (done % checkpoints.every == 0 or done == config.steps):
            checkpoints.save(model, optimizer, done)


def gradient_errors(config: Config) -> dict[str, float]:
    """Relative errors of the first step's gradients against one process, largest of a group.

    A group is the parameters of one name, whatever the layer.
    """
    alone = make_model(config, ring=False)
    loss_of(alone, sequences(config, 0).to(config.device), config).backward()
    model = make_model(config, ring=world_size() > 1)
    # kept till backward is over: gradients are averaged by the wrapper
    wrapped = data_parallel(model, config)
    loss_of(wrapped, own_sequences(config, 0), config).backward()
    worst: dict[str, float] = {}
    for (name, ours), wanted in zip(model.named_parameters(), alone.parameters()):
        got, want = ours.grad, wanted.grad
        if isinstance(got, DTensor):
            got = got.full_tensor()
        error = ((got - want).norm() / want.norm()).nan_to_num(nan=torch.inf)
        if world_size() > 1:
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
        group = re.sub(r"\.\d+\.", ".*.", name, count=1)
        worst[group] = max(worst.get(group, 0.0), error.item())
    return worst


def check(config: Config, say: bool) -> bool:
    """Print the errors of gradients; whether all are as small as rounding in double."""
    errors = gradient_errors(config)
    good = all(error <= MOST_GRADIENT_ERROR for error in errors.values())
    if say:
        print("gradients of the first step against one process, largest relative error:")
        for group, error in errors.items():
            print(f"  {group:<28} {error:.1e}")
        print(f"{'PASS' if good else 'FAIL'}: allowed is {MOST_GRADIENT_ERROR:.0e}", flush=True)
    return good


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=100, help="Steps of training.")
@click.option("--length", default=1024, help="Bytes of a sequence, over all processes.")
@click.option("--batch", default=4, help="Sequences of a step, of all processes together.")
@click.option("--dim", default=64, help="Width of the model.")
@click.option("--depth", default=2, help="Blocks of the model.")
@click.option("--heads", default=4, help="Heads of attention, dim / heads wide.")
@click.option("--layout", type=click.Choice(list(LAYOUTS)), default="zigzag")
@click.option("--lookback", type=int, default=None, help="See only so many bytes back.")
@click.option("--layers", default=None, help="Kinds of blocks, as rrra: recurrent ones, too.")
@click.option("--data-parallel", type=click.Choice(["ddp", "fsdp2"]), default="ddp")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32")
@click.option("--seed", default=0)
@click.option("--check", "checked", is_flag=True, help="First compare gradients, in float64.")
@click.option("--checkpoint", type=click.Path(file_okay=False), help="Save here, and go on.")
@click.option("--checkpoint-every", default=10, type=click.IntRange(1), help="Steps between.")
@click.option("--losses", type=click.Path(dir_okay=False), help="Append steps and exact losses.")
@click.option("--timeout", default=TIMEOUT, help="Seconds that processes wait for one another.")
def main(
    checked: bool, checkpoint: str | None, checkpoint_every: int, losses: str | None,
    timeout: float, **options: int | str | None,
) -> None:  # fmt: skip
    """Train a byte-level transformer on Python's standard library."""
    config = Config(**options, device="cuda" if on_gpus() else "cpu")
    checkpoints = None if checkpoint is None else Checkpoints(checkpoint, checkpoint_every)
    show()
    with torchrun_group("nccl" if config.device == "cuda" else "gloo", timeout):
        if checked and not check(replace(config, dtype="float64"), say=is_first()):
            sys.exit(1)
        for step in train(config, checkpoints):
            if is_first():
                report(step, config, losses)


def report(step: Step, config: Config, losses: str | None) -> None:
    """Print every tenth step and the last; append all to the file of losses, to the last bit."""
    if losses is not None:
        with open(losses, "a") as file:
            file.write(f"{step.number} {step.loss.hex()}\n")
    if step.number % 10 == 0 or step.number == config.steps - 1:
        speed = f"{step.tokens_per_second:,.0f} tokens/s"
        print(f"step {step.number:>5}   loss {step.loss:.4f}   {speed}", flush=True)


if __name__ == "__main__":
    main()
