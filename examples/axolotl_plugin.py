"""axolotl with ring attention: a plugin that spreads each sequence over all processes.

    plugins: [examples.axolotl_plugin.RingPlugin]   # in axolotl's YAML

axolotl's own context parallelism stays off (`context_parallel_size: 1`), and so does
`sample_packing`, whose batches have several sequences in a row. The batch size is of all processes.
"""

import os
from typing import Any

from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin

from ring_attention_pytorch.integrations.accelerate import RingParallelismConfig
from ring_attention_pytorch.integrations.transformers import RingTrainerMixin, register


class RingAxolotlTrainer(RingTrainerMixin, AxolotlTrainer):
    """axolotl's trainer over spread sequences."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.model_accepts_loss_kwargs = True  # ring_forward divides by the tokens of all ranks


class RingPlugin(BasePlugin):
    """axolotl's hooks: the model's attention, the trainer and its arguments."""

    def pre_model_load(self, cfg: Any) -> None:
        for name in ("sample_packing", "rl", "orpo_alpha"):
            if cfg.get(name):
                raise ValueError(f"{name} must be off with ring attention, got {cfg.get(name)}")
        register()

    def post_model_load(self, cfg: Any, model: Any) -> None:
        model.set_attn_implementation("ring")

    def get_trainer_cls(self, cfg: Any) -> type:
        return RingAxolotlTrainer

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        mesh = RingParallelismConfig(cp_size=int(os.environ.get("WORLD_SIZE", "1")))
        return {"parallelism_config": mesh, "prediction_loss_only": True}
