"""verl with ring attention: an engine that spreads each batch's sequences over a ring.

    export VERL_ENGINE_VENDOR=ring
    actor_rollout_ref.model.external_lib=examples.verl_engine
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4   # ranks of a ring
    +actor_rollout_ref.model.override_config.attn_implementation=ring

verl gives the ranks of a ring the same sequences, packed. Each rank computes its share of tokens,
and gets the log-probabilities of all of them, from which verl computes the loss as ever.
"""

from typing import Any

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ring_attention_pytorch import ring_token_logprobs, shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward

register()


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor="ring"
)
class RingEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine; its log-probabilities are of spread sequences, without entropies."""

    def forward_step(
        self, micro_batch: Any, loss_function: Any, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        micro_batch = micro_batch.to(next(self.module.parameters()).device)
        packed = micro_batch["input_ids"]  # a nested tensor
        whole = {"input_ids": packed.values()[None], "cu_seqlens": packed.offsets()}
        ring = None if self.ulysses_device_mesh is None else self.ulysses_device_mesh["sp"]
        batch = shard_batch(whole | {"labels": whole["input_ids"]}, group=ring)
        with ring_forward(batch, labels=False) as inputs:
            logits = self.module(**inputs).logits
        each = ring_token_logprobs(logits / float(micro_batch["temperature"]), batch)[0]
        found = {"log_probs": torch.nested.nested_tensor_from_jagged(each, packed.offsets())}
        loss, metrics = torch.ones((), device=each.device), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=found, data=micro_batch, dp_group=group)
        found = {name: t.detach() for name, t in found.items()}
        return loss, {"model_output": found, "loss": loss.detach().item(), "metrics": metrics}
