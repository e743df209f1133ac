"""Trainers of Hugging Face over sequences that are spread: `Trainer`, and TRL's `SFTTrainer`.

    get_batch_samples                   whole batches -> this rank's parts; real tokens are counted
    _prepare_context_parallel_inputs    the block of a batch, which the trainer opens for each step
    compute_loss                        the trainer's own: a rank's sum, over all real tokens
    prediction_step                     the same for evaluation

Loaders must give all ranks of a ring the same batches, as `RingParallelismConfig` makes them.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ring_attention_pytorch.comm.ring import Group
from ring_attention_pytorch.integrations.models import RingForward, opened, ring_forward
from ring_attention_pytorch.training.batches import ShardedBatch, shard_batch

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the trainer comes after the mixin

# what collators add for kernels of documents; position ids say the same
_OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class RingTrainerMixin(_Trainer):
    """What makes a trainer's batches, losses and evaluation those of spread sequences.

    It stands before the trainer, whose model has `attn_implementation="ring"`:

        class RingTrainer(RingTrainerMixin, Trainer): ...

        config = RingParallelismConfig(cp_size=4)
        args = TrainingArguments(..., parallelism_config=config, prediction_loss_only=True)
        RingTrainer(model, args, train_dataset=dataset).train()

    Attributes:
        ring_layout: as `layout` of `shard_batch`.
        ring_options: as `options` of `ring_forward`.
    """

    ring_layout: ClassVar[Any] = "auto"
    ring_options: ClassVar[Mapping[str, Any]] = {}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[ShardedBatch], Tensor | None]:
        """Return the next batches, sharded, and how many real tokens they and other rings have."""
        self._check_trainer()
        batches: list[ShardedBatch] = []
        for whole in epoch_iterator:
            batches.append(self._shard(whole))
            if len(batches) == num_batches:
                break
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | None:
        """Count real tokens of batches and of those of other rings, each sequence once."""
        forward = opened()
        sharded = [forward.batch] if forward else batch_samples
        counts: list[Tensor] = [b.num_items for b in sharded if b.num_items is not None]
        if not counts:
            return None
        items = torch.stack(counts).sum().to(device)
        alike = sharded[0].ring_size * self.get_tp_size()  # ranks that have the same sequences
        return self.accelerator.gather(items).sum() / alike

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return what opens a batch's block, and the inputs in it."""
        if opened() is not None:  # evaluation has opened it
            return nullcontext, inputs
        batch = inputs if isinstance(inputs, ShardedBatch) else self._shard(inputs)
        forward = ring_forward(batch, **self.ring_options)
        return lambda: forward, dict(forward.inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as the trainer does: that of this rank's tokens, over all of them."""
        forward = _needed()
        if num_items_in_batch is None:  # some trainers don't count when they evaluate
            num_items_in_batch = self._get_num_items_in_batch([], self.args.device)
        forward.num_items = num_items_in_batch
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the loss of a batch of the evaluation.

        Raises:
            ValueError: logits are asked for, too; a rank has its own tokens' only.
        """
        self._check_trainer()
        if not prediction_loss_only:
            raise ValueError(
                f"{type(self).__name__}: logits are spread over ranks, and metrics need whole "
                "ones; set prediction_loss_only=True, and no compute_metrics"
            )
        block, mine = self._prepare_context_parallel_inputs(model, self._prepare_inputs(inputs))
        with _as_block(block()):
            loss, *_ = super().prediction_step(model, mine, prediction_loss_only, ignore_keys)
        if loss is not None:  # the same on all ranks: of a last, shorter batch trainers drop some
            loss = self.accelerator.reduce(loss, reduction="mean")
        return loss, None, None

    @property
    def _ring(self) -> Group:
        """The ring: the dimension "cp" of accelerate's mesh; None if this process is alone."""
        mesh = self.accelerator.torch_device_mesh
        if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
            return None
        return mesh["cp"]

    def _shard(self, whole: Mapping[str, Any]) -> ShardedBatch:
        """Return this rank's part of a batch of whole sequences."""
        given = {name: t for name, t in whole.items() if name not in _OF_KERNELS and t is not None}
        if wrong := [name for name in ("shift_labels", "loss_weights") if name in given]:
            raise ValueError(
                f"{type(self).__name__}: batches have labels of the tokens themselves, which all "
                f"count alike; got {', '.join(wrong)}"
            )
        if given.get("cu_seqlens") is None and "position_ids" not in given:
            given |= _documents(whole)
        return shard_batch(given, layout=self.ring_layout, group=self._ring)

    def _check_trainer(self) -> None:
        """Raise ValueError if the trainer would compute with shards as if they were whole."""
        if self.accelerator.num_processes > 1 and self._ring is None:
            problem = (
                "nothing says which ranks share a sequence; set "
                "parallelism_config=RingParallelismConfig(cp_size=...)"
            )
        elif getattr(self.accelerator.parallelism_config, "cp_enabled", False):
            problem = (
                "accelerate's own context parallelism would drop masks; take "
                "RingParallelismConfig in place of ParallelismConfig"
            )
        elif self.label_smoother is not None or self.compute_loss_func is not None:
            problem = (
                "label_smoothing_factor and compute_loss_func take labels of whole sequences; "
                "override compute_loss, where inputs['shift_labels'] are those of its tokens"
            )
        elif not (self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices):
            problem = (
                "the loss must be over the real tokens of all ranks; the model must take "
                "num_items_in_batch, and average_tokens_across_devices must be True"
            )
        elif getattr(self, "aux_loss_enabled", False):
            problem = "the routers' loss would be each shard's; set output_router_logits=False"
        else:
            return
        raise ValueError(f"{type(self).__name__}: {problem}")


def _needed() -> RingForward:
    forward = opened()
    if forward is None:
        raise ValueError("RingTrainerMixin: compute_loss is for batches whose block is open")
    return forward


def _as_block(block: Any) -> AbstractContextManager[Any]:
    return block


def _documents(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return documents that a collator says for kernels only."""
    borders = whole.get("cu_seq_lens_q")
    return {} if borders is None else {"cu_seqlens": borders.tolist()}
