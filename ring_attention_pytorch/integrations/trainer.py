"""Hugging Face's trainers on spread sequences: `Trainer`, and a list of TRL's.

A loss over tokens (Trainer, SFTTrainer):

    get_batch_samples                   shards whole batches, counts their real tokens
    _prepare_context_parallel_inputs    returns a batch's block, which the trainer opens per step
    compute_loss                        the trainer's own: a rank's sum, over all real tokens
    prediction_step                     the same for evaluation

A loss over whole sequences (reward models, DPO, KTO, GRPO): batches stay whole, the model is spread
(`whole.py`), and each rank computes the same loss.

Data loaders must give all ranks of a ring the same batches; `RingParallelismConfig` does that.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.known_trainers import (
    AFTER_GENERATION,
    SCORES,
    TOKENS,
    loss_of,
)
from ring_attention_pytorch.integrations.models import RingForward, mask_of, ring_forward
from ring_attention_pytorch.integrations.probe import probe
from ring_attention_pytorch.integrations.watched import opened
from ring_attention_pytorch.integrations.whole import (
    check_no_images,
    spread_probabilities,
    spread_scores,
    without_loss,
)
from ring_attention_pytorch.ranks.ring import Group
from ring_attention_pytorch.training.batches import ShardedBatch, shard_batch

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the trainer's class follows the mixin

# collators add these for varlen kernels; position ids have the same information
_OF_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_LENGTHS = "lengths_in_row"  # of the sequences that a collator put into one row


class RingTrainerMixin(_Trainer):
    """Make a trainer shard its batches, and train and evaluate on spread sequences.

    Put it before the trainer's class; the model needs `attn_implementation="ring"`:

        class RingTrainer(RingTrainerMixin, Trainer): ...

        config = RingParallelismConfig(cp_size=4)
        args = TrainingArguments(..., parallelism_config=config, prediction_loss_only=True)
        RingTrainer(model, args, train_dataset=dataset).train()

    Attributes:
        ring_layout: as `layout` of `shard_batch`.
        ring_options: keyword arguments of `ring_forward`, for how attention is computed.
        ring_probe: compare the first batch with the trainer's own package in one process: loss,
            gradients, and logits if it has some. A difference raises ValueError on all ranks. Each
            rank needs memory for the whole batch, so take a short one.
    """

    ring_layout: ClassVar[Any] = "auto"
    ring_options: ClassVar[Mapping[str, Any]] = {}
    ring_probe: ClassVar[bool] = False
    _generates: ClassVar[bool] = False
    _probing: bool = False
    model_wrapped: Any

    def __init__(self, *given: Any, **more: Any) -> None:
        self._loss_is_of = loss_of(type(self), RingTrainerMixin)
        super().__init__(*given, **more)
        self._spread_models()

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with loaders and metrics for rings."""
        launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
        if launched and self.args.parallelism_config is None:  # `accelerate launch` sets sizes
            self.args.parallelism_config = RingParallelismConfig()
        super().create_accelerator_and_postprocess()
        if getattr(self.args, "precompute_ref_log_probs", False):
            self._refuse("precompute_ref_log_probs must be False: their loader knows no rings")
        self.accelerator.gather_for_metrics = self._gather_for_metrics
        self.gather_function = self._gather_for_metrics
        loaders = self.accelerator.dataloader_config
        if loaders.dispatch_batches is None:
            loaders.dispatch_batches = False  # ranks of a ring would get parts of a batch

    def train(self, *given: Any, **more: Any) -> Any:
        """Train as the trainer does, with gradients averaged over all ranks.

        accelerate leaves a model as it is that an evaluation has prepared: it is not wrapped then,
        and each rank would train on its own gradients.
        """
        model: Any = self.model
        outside: Any = self.model_wrapped
        wrapped = any(isinstance(each, DistributedDataParallel) for each in outside.modules())
        if not (wrapped or self.is_fsdp_enabled or self.is_deepspeed_enabled):
            self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            model._is_accelerate_prepared = False
            self.model_wrapped = model
        return super().train(*given, **more)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the next batches, sharded, and the number of real tokens over all rings."""
        self._check_trainer()
        if self._loss_is_of != TOKENS:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches: list[ShardedBatch] = []
        for whole in epoch_iterator:
            self._probe_once(self._prepare_inputs(whole))
            batches.append(self._shard(whole))
            if len(batches) == num_batches:
                break
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | None:
        """Count the real tokens of batches over all rings, each sequence once."""
        if self._loss_is_of != TOKENS:
            return None
        forward = opened()
        sharded = [forward.batch] if forward else batch_samples
        counts: list[Tensor] = [b.num_items for b in sharded if b.num_items is not None]
        if not counts:
            return None
        items = torch.stack(counts).sum().to(device)
        return self.accelerator.gather(items).sum() / self._alike

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return a function that returns the batch's block, and the model's inputs."""
        if self._loss_is_of != TOKENS or opened() is not None:  # evaluation has opened it
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
        """Compute the trainer's loss: the sum over this rank's tokens, divided by all tokens."""
        if self._loss_is_of != TOKENS:
            if model.training:
                self._probe_once({"whole": inputs})
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
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
        """Compute the loss of an evaluation batch.

        Raises:
            ValueError: logits are requested, but a rank has only its own tokens' logits.
        """
        self._check_trainer()
        if not prediction_loss_only:
            raise ValueError(
                f"{type(self).__name__}: logits are spread over ranks, and metrics need whole "
                "ones; set prediction_loss_only=True, and no compute_metrics"
            )
        if self._loss_is_of != TOKENS:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        whole = self._without_added(self._prepare_inputs(inputs))
        block, mine = self._prepare_context_parallel_inputs(model, whole)
        with _as_block(block()):
            loss, *_ = super().prediction_step(model, mine, prediction_loss_only, ignore_keys)
        if loss is not None:  # the mean over all rings, the same on all ranks
            loss = self.accelerator.reduce(loss, reduction="mean")
        return loss, None, None

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return this rank's share of the operations; of whole batches, which a ring has once."""
        found = super().floating_point_ops(inputs)
        return found if self._loss_is_of == TOKENS else found / self._alike

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        if self._loss_is_of != TOKENS:  # the same batch on all ranks of a ring
            added = self.state.num_input_tokens_seen - before
            self.state.num_input_tokens_seen = before + added // self._alike

    def _get_dataloader(self, *given: Any, is_training: bool = False, **more: Any) -> Any:
        """Make a loader; batches of evaluations have the lengths of sequences in a row."""
        before: Any = vars(self)["data_collator"]
        if self._loss_is_of == TOKENS and not is_training:
            self.data_collator = partial(_with_lengths, before)
        try:
            return super()._get_dataloader(*given, is_training=is_training, **more)
        finally:
            self.data_collator = before

    def _without_added(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Mask the labels of sequences that accelerate adds to fill up the last batch of rings."""
        state, labels = self.accelerator.gradient_state, whole.get("labels")
        given = {name: value for name, value in whole.items() if name != _LENGTHS}
        if labels is None or not state.end_of_dataloader or state.remainder <= 0:
            return given
        lengths = whole.get(_LENGTHS)
        samples = len(labels if lengths is None else lengths)
        first = self.accelerator.process_index // self._alike * samples
        real = max(0, state.remainder - first)  # the others were added
        added = torch.zeros_like(labels, dtype=torch.bool)
        if lengths is None:
            added[real:] = True
        elif real < samples:
            end, positions = int(lengths[:real].sum()), whole.get("position_ids")
            if positions is None or end >= labels.shape[1] or int(positions[0, end]):
                self._refuse(
                    "sequences that accelerate has added to the last batch would count, and can't "
                    "be found in its row: no position 0 follows the others' tokens; use TRL's or "
                    "transformers' collator"
                )
            added[:, end:] = True
        return {**given, "labels": labels.masked_fill(added, -100)}

    def _gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does: in a batch's block, the values of all ranks.

        Outside of one the ranks of a ring have the same values, and the first rank's are gathered.
        """
        gather, state = self.accelerator.gather, self.accelerator.gradient_state
        if self._probing:  # one ring only, to compare with one process
            return recursively_apply(torch.atleast_1d, input_data)
        if opened() is not None:
            return gather(input_data)
        last = state.remainder if state.end_of_dataloader else 0

        def of_rings(t: Tensor) -> Tensor:
            found = gather(t)
            if found.ndim == 0:  # of one process, gathered as it is
                return found
            if self.accelerator.num_processes > 1:
                found = self._of_first_ranks(found).flatten(0, 1)
            return found[:last] if last > 0 else found

        if use_gather_object:
            self._refuse("eval_use_gather_object must be False: objects would count once per rank")
        return recursively_apply(of_rings, input_data, error_on_other_type=True)

    def _of_first_ranks(self, gathered: Tensor) -> Tensor:
        """Return the parts of each ring's first rank, `[rings, ...]`, of a gathered tensor."""
        ranks = gathered.unflatten(0, (self.accelerator.num_processes, -1))
        return ranks[:: self._alike]

    def _spread_models(self) -> None:
        """Spread the models from whose outputs the loss is computed."""
        policy: Any = getattr(self, "model", None)
        if self._loss_is_of == TOKENS:
            if policy is not None:
                without_loss(policy)
            return
        self._check_trainer()
        if self._loss_is_of == SCORES:
            spread_scores(_base_of(policy), self._shard, self.ring_options)
            return
        for model in (policy, getattr(self, "ref_model", None)):
            if model is not None:
                spread_probabilities(_base_of(model), self._shard, self.ring_options)

    def _probe_once(self, whole: Mapping[str, Any]) -> None:
        """Probe the batch if it is the first, and `ring_probe` is set."""
        if not self.ring_probe or "_probing" in vars(self):
            return
        self._probing = True
        try:
            probe(self, self.accelerator.unwrap_model(self.model), whole)
        finally:
            self._probing = False

    def _loss_for_probe(self, model: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the loss of a batch as in training, but over this ring's sequences only."""
        if self._loss_is_of != TOKENS:
            return {"loss": self.compute_loss(model, dict(whole["whole"]))}
        batch = self._shard(whole)
        rings = self.accelerator.num_processes // batch.ring_size  # trainers multiply by it
        items = None if batch.num_items is None else batch.num_items * rings
        block, mine = self._prepare_context_parallel_inputs(model, batch)
        with _as_block(block()):
            return _with_logits(self, self.compute_loss, model, mine, num_items_in_batch=items)

    def _loss_alone(self, model: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the same loss by the trainer's package, in one process."""
        if self._loss_is_of != TOKENS:
            return {"loss": self.compute_loss(model, dict(whole["whole"]))}
        given = {name: t for name, t in whole.items() if name not in _OF_KERNELS}
        return _with_logits(self, super().compute_loss, model, given)

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"{type(self).__name__}: {problem}")

    @property
    def _alike(self) -> int:
        """The number of ranks that have the same sequences."""
        ring: Any = self._ring
        size = 1 if ring is None else ring.size()
        return size * self.get_tp_size()

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
        check_no_images(type(self).__name__, given)
        if getattr(given.get("labels"), "ndim", 2) < 2:
            self._refuse(
                "labels are one a sequence, and its batches are cut into tokens; for a model that "
                "scores sequences by their last token take TRL's RewardTrainer after the mixin, or "
                "ring_forward(batch, labels=False) in a loop of your own, with a loss of its logits"
            )
        if wrong := [name for name in ("shift_labels", "loss_weights") if name in given]:
            raise ValueError(
                f"{type(self).__name__}: batches have labels of the tokens themselves, which all "
                f"count alike; got {', '.join(wrong)}"
            )
        if given.get("cu_seqlens") is None and "position_ids" not in given:
            given |= _documents(whole)
        shift = not _keeps_labels(self.model)
        batch = shard_batch(given, layout=self.ring_layout, group=self._ring, shift_labels=shift)
        if "attention_mask" in given:  # trainers count tokens by it
            batch["attention_mask"] = mask_of(batch)
        return batch

    def _check_trainer(self) -> None:
        """Raise ValueError if the trainer would compute with shards as if they were whole."""
        if self._loss_is_of == AFTER_GENERATION and not self._generates:
            problem = (
                "it generates; take RingGRPOTrainer, of ring_attention_pytorch.integrations.grpo"
            )
        elif self.accelerator.num_processes > 1 and self._ring is None:
            problem = (
                "nothing says which ranks share a sequence; set "
                "parallelism_config=RingParallelismConfig(cp_size=...)"
            )
        elif getattr(self.accelerator.parallelism_config, "cp_enabled", False):
            problem = (
                "accelerate's own context parallelism would drop masks; take "
                "RingParallelismConfig in place of ParallelismConfig"
            )
        elif self.accelerator.num_processes > 1 and self.accelerator.dispatch_batches:
            problem = (
                "ranks of a ring would get parts of a batch; set "
                'accelerator_config={"dispatch_batches": False}'
            )
        elif self._ring is not None and self.neftune_noise_alpha is not None:
            problem = (
                "NEFTune's noise is drawn alike on all ranks, and grows as shards get shorter; set "
                "neftune_noise_alpha=None"
            )
        elif getattr(self, "aux_loss_enabled", False):
            problem = (
                "the routers' loss would be each shard's; set router_aux_loss_coef=0 and "
                "output_router_logits=False"
            )
        elif self._loss_is_of != TOKENS:
            return
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


def _with_logits(
    trainer: Any, compute: Any, model: nn.Module, given: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Compute a loss; return it with the logits, if the trainer has some."""
    if hasattr(trainer, "_metrics"):  # TRL's heads return none
        return {"loss": compute(model, given, **more)}
    loss, out = compute(model, given, return_outputs=True, **more)
    return {"loss": loss, "logits": out["logits"]}


def _base_of(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def _keeps_labels(model: Any) -> bool:
    """Return whether a model predicts masked tokens instead of the next ones."""
    return getattr(_base_of(model), "loss_type", None) in ("ForMaskedLM", "ForTokenClassification")


def _with_lengths(collator: Any, samples: list[Any]) -> dict[str, Any]:
    """Make a batch; if all samples are in one row of it, with the length of each."""
    batch = dict(collator(samples))
    if len(samples) > 1 and "input_ids" in batch and len(batch["input_ids"]) == 1:
        lengths = [len(sample["input_ids"]) for sample in samples]
        batch[_LENGTHS] = torch.tensor(lengths)
    return batch


def _documents(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the documents' borders that a collator gives for kernels only."""
    borders = whole.get("cu_seq_lens_q")
    return {} if borders is None else {"cu_seqlens": borders.tolist()}
