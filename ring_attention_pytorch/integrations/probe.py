"""A trainer's first batch, by the model with and without the ring: logits, loss, gradients.

trainer.compute_loss, as it will train          over the ring
its package's, with transformers' attention     each rank for itself, of whole sequences
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
    """Compare a step of a trainer with that of its own package in one process.

    Nothing of the trainer is changed. Models are in evaluation, so that nothing is dropped out.
    Each rank needs memory for the whole batch, and for all its scores.

    Raises:
        ValueError: they differ, on some ring; on all ranks.
    """
    given = {name: value for name, value in whole.items() if value is not None}
    with _as_it_was(trainer, model):
        report = check_parity(_Step(trainer, model), given, group=trainer._ring)
    report = replace(report, mistakes=())  # those of code that was written by hand
    same = torch.tensor(int(report.same), device=trainer.args.device)
    if not bool(trainer.accelerator.gather(same).all()):
        raise ValueError(f"{type(trainer).__name__}: the probe of the first batch failed. {report}")
    return report


class _Step(nn.Module):
    """A trainer's loss of whole sequences; in a world of one process that of its own package."""

    trainer: Any

    def __init__(self, trainer: Any, model: nn.Module):
        super().__init__()
        self.model = model
        self.__dict__["trainer"] = trainer  # it is no module

    def forward(self, **whole: Any) -> dict[str, Tensor]:
        if not in_one_process:
            return self.trainer._loss_for_probe(self.model, whole)
        with _theirs(self.model), _theirs(getattr(self.trainer, "ref_model", None)):
            return self.trainer._loss_alone(self.model, whole)


@contextmanager
def _theirs(model: Any) -> Iterator[None]:
    """Let a model of transformers attend by transformers' own attention."""
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
    """Put back what a trainer has logged, and whether its model trains."""
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
