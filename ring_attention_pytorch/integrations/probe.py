"""Compare a trainer's first batch with and without the ring: logits, loss, gradients.

trainer.compute_loss, as in training            over the ring
its package's, with transformers' attention     each rank by itself, on whole sequences
check_parity                                    compares them, on all ranks
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ring_attention_pytorch.doctor.parity import ParityReport, check_parity
from ring_attention_pytorch.ranks.alone import in_one_process


def probe(trainer: Any, model: nn.Module, whole: Mapping[str, Any]) -> ParityReport:
    """Compare a step of a trainer with the same step of its own package in one process.

    The trainer's state is restored. Models run in evaluation mode, without dropout. Each rank needs
    memory for the whole batch, and for all its scores.

    Raises:
        ValueError: they differ, on some ring; on all ranks.
    """
    given = {name: value for name, value in whole.items() if value is not None}
    with _as_it_was(trainer, model):
        report = check_parity(_Step(trainer, model), given, group=trainer._ring)
    report = replace(report, mistakes=())  # they are for training loops written by hand
    same = torch.tensor(int(report.same), device=trainer.args.device)
    if not bool(trainer.accelerator.gather(same).all()):
        raise ValueError(f"{type(trainer).__name__}: the probe of the first batch failed. {report}")
    return report


class _Step(nn.Module):
    """A trainer's loss of whole sequences; within `in_one_process`, its own package's loss."""

    trainer: Any

    def __init__(self, trainer: Any, model: nn.Module):
        super().__init__()
        self.model = model
        self.__dict__["trainer"] = trainer  # not a submodule

    def forward(self, **whole: Any) -> dict[str, Tensor]:
        if not in_one_process:
            return self.trainer._loss_for_probe(self.model, whole)
        with _theirs(self.model), _theirs(getattr(self.trainer, "ref_model", None)):
            return self.trainer._loss_alone(self.model, whole)


@contextmanager
def _theirs(model: Any) -> Iterator[None]:
    """Make a model use transformers' own attention in the block."""
    base = getattr(model, "module", model)
    base = getattr(base, "get_base_model", lambda: base)()
    if base is None:
        yield
        return
    before, config = base.config._attn_implementation, base.config.get_text_config()
    softcap = getattr(config, "attn_logit_softcapping", None)  # PyTorch's attention has none
    sdpa = getattr(base, "_supports_sdpa", False) and softcap is None
    base.set_attn_implementation("sdpa" if sdpa else "eager")
    try:
        yield
    finally:
        base.set_attn_implementation(before)


@contextmanager
def _as_it_was(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Restore a trainer's logs and its model's training mode after the block."""
    kept = {
        name: copy.deepcopy(value) for name, value in vars(trainer).items()
        if name in ("_metrics", "_total_train_tokens", "state")
    }  # fmt: skip
    training = model.training
    with ExitStack() as block:
        block.callback(model.train, training)
        block.callback(vars(trainer).update, kept)
        model.eval()
        yield
