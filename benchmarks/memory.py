"""The memory of a training step on one GPU, as if others shared the model: torchtitan's Llama 3.1.

    python -m benchmarks memory --ranks 4 --tokens 8192 32768 --save
    python -m benchmarks memory --ranks 1 --layers 8 --tokens 8192
    python -m benchmarks memory --ranks 4 --layers 8 --tokens 131072 --chunk 4096 --offload

FSDP2 runs over a group whose collectives send nothing (PyTorch's "fake" backend), and allocate all
that they would. Attention and loss are of this rank's tokens alone. Beside what PyTorch's allocator
held at most, after the steps, is what `python -m ring_attention_pytorch memory` counts of that: all
but the memory that ranks share, and NCCL's. It needs torchtitan (0.2.2 goes with PyTorch 2.11).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run
from examples import train_torchtitan
from ring_attention_pytorch import chunk_tokens, ring_attn, ring_cross_entropy
from ring_attention_pytorch.doctor.memory import Sizes, Training, allocated
from ring_attention_pytorch.ranks.ring import Ring


class Attention(train_torchtitan.RingAttention):
    """Attention to own tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return ring_attn(q, k, v, causal=True, group=Ring.alone()).transpose(1, 2)


class Head(train_torchtitan.FusedHead):
    """The last layer with its loss, of own tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return ring_cross_entropy(x, self.labels, head=self.weight, group=Ring.alone())


class MeteredTrainer(train_torchtitan.MeteredTrainer):
    """torchtitan's trainer, of own tokens."""

    keep: AbstractContextManager[Any] = nullcontext()

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, **_: Any
    ) -> Tensor:
        ids, model = input_dict["input"], self.model_parts[0]
        model.output.labels = labels
        with self.keep:
            loss = model(ids, positions=torch.arange(ids.shape[1], device=ids.device)[None])
        loss.backward()
        return loss


@contextmanager
def trained(ranks: int, layers: int, longest: int, small: bool) -> Iterator[MeteredTrainer]:
    """Make a trainer whose group has so many ranks; this process is the first."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}  # torchtitan asks for them
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    spec = train_torchtitan.get_train_spec()
    args = replace(spec.model_args["8B"], n_layers=layers)
    spec = replace(spec, model_args=dict(spec.model_args, of_layers=args))
    patch = mock.patch.multiple(
        train_torchtitan, get_train_spec=lambda: spec, RingAttention=Attention, FusedHead=Head,
        MeteredTrainer=MeteredTrainer,
    )  # fmt: skip
    with patch:
        trainer = train_torchtitan.trainer_of("ring", "tiny" if small else "of_layers", longest)
    try:
        yield trainer
    finally:
        trainer.close()
        dist.destroy_process_group()


def row(trainer: MeteredTrainer, how: Training, layers: int, steps: int) -> Row:
    """Train, and return what was held at most, in GiB, beside what is counted."""
    trainer.dataloader.length = how.here
    train_torchtitan.free()
    train_torchtitan.steps(trainer, steps)
    counted = allocated(Sizes(layers=layers), how) / 2**30
    return {
        "subject": "torchtitan", "ranks": how.ranks, "layers": layers, "tokens": how.here,
        "mask": "causal",
        "chunk": how.chunk, "offload": how.offload, "steps": steps,
        "allocated_gib": round(train_torchtitan.allocated_gib(), 2),
        "peak_gib": round(train_torchtitan.peak_gib(), 2), "counted_gib": round(counted, 2),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    options = parser("memory", __doc__, save="memory", tokens=[8192])
    options.add_argument("--ranks", type=int, default=4, help="that would share the model")
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--steps", type=int, default=2, help="at each length")
    options.add_argument("--chunk", type=int, help="tokens of feed-forwards at a time")
    options.add_argument("--offload", action="store_true", help="inputs of layers on the host")
    options.add_argument("--small", action="store_true", help="a tiny model, to try this")
    asked = options.parse_args(argv)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    run = Run("memory", argv, name, asked.save)
    with trained(asked.ranks, asked.layers, max(asked.tokens), asked.small) as trainer:
        if asked.chunk is not None:
            layers = trainer.model_parts[0].layers.values()
            chunk_tokens(*(layer.feed_forward for layer in layers), tokens=asked.chunk)
        if asked.offload:
            pin = torch.cuda.is_available()
            trainer.keep = torch.autograd.graph.save_on_cpu(pin_memory=pin)
        for tokens in asked.tokens:
            how = Training(
                tokens * asked.ranks, asked.ranks, chunk=asked.chunk, offload=asked.offload
            )
            run.add([row(trainer, how, asked.layers, asked.steps)])
    run.finish()


if __name__ == "__main__":
    main()
