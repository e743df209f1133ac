"""TRL's GRPO on spread sequences: each rank generates whole ones, log-probabilities are spread.

    RingGRPOTrainer(model, rewards, args=GRPOConfig(..., parallelism_config=...), ...).train()

Tested with TRL 1.16.0.
"""

import json
from operator import index
from typing import Any, ClassVar

import torch
from accelerate.utils import set_seed
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from ring_attention_pytorch.integrations.trainer import RingTrainerMixin
from ring_attention_pytorch.ranks.notes import unreadable
from ring_attention_pytorch.ranks.ring import as_ring


class RingGRPOTrainer(RingTrainerMixin, GRPOTrainer):
    """TRL's `GRPOTrainer`, computing log-probabilities and entropies on spread sequences.

    All ranks of a ring have the same prompts, and use completions and rewards of its first rank.
    `per_device_train_batch_size` counts a ring's samples; one process with it takes the same steps.

    Attributes:
        ring_generates: the `attn_implementation` for generation, of whole sequences on each rank.
    """

    args: Any
    model: Any
    ring_generates: ClassVar[str] = "sdpa"
    _generates: ClassVar[bool] = True

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        set_seed(self.args.seed + self.accelerator.process_index // self._alike)

    def _check_trainer(self) -> None:
        super()._check_trainer()
        if self._ring is None:
            return
        samples = self.args.per_device_train_batch_size * self.args.steps_per_generation
        if samples % self.num_generations:
            self._refuse(
                f"a ring has {samples} samples of a generation, a multiple of num_generations="
                f"{self.num_generations} is needed: groups don't reach over rings"
            )
        if (
            self.scale_rewards == "batch"
            or self.multi_objective_aggregation == "normalize_then_sum"
        ):
            self._refuse(
                "rewards would be scaled by those of all ranks, each as often as its ring is long; "
                'set scale_rewards="group" and multi_objective_aggregation="sum_then_normalize"'
            )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        everything = self.args.generation_batch_size
        self.args.generation_batch_size = everything // self._alike  # each ring's batches once
        try:
            return super()._get_train_sampler(dataset)
        finally:
            self.args.generation_batch_size = everything

    def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        before = model.config._attn_implementation
        model.set_attn_implementation(self.ring_generates)
        try:
            found = super()._generate_single_turn(*given, **more)
        finally:
            model.set_attn_implementation(before)
        ring = as_ring(self._ring)  # ranks can sample different tokens; all use the first one's
        told = json.dumps(found).encode() if ring.rank == 0 else b""
        return completions_of(ring.gather_notes("RingGRPOTrainer", told)[0])

    def _calculate_rewards(self, *given: Any, **more: Any) -> Tensor:
        """Return the rewards of all ranks, with its first rank's for each rank of a ring."""
        of_rings = self._of_first_ranks(super()._calculate_rewards(*given, **more))
        self._rewards_of_rings = of_rings.flatten(0, 1)
        return of_rings.repeat_interleave(self._alike, 0).flatten(0, 1)

    def get_high_entropy_mask(self, *given: Any, **more: Any) -> Tensor:
        """Select tokens above a quantile of entropies, in which each ring's tokens count once."""
        gather = self.accelerator.gather
        self.accelerator.gather = lambda t: self._of_first_ranks(gather(t)).flatten(0, 1)
        try:
            return super().get_high_entropy_mask(*given, **more)
        finally:
            self.accelerator.gather = gather

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Generate and score; logged metrics count each ring's samples once."""
        before = self.state.num_input_tokens_seen
        found = super()._generate_and_score_completions(inputs)
        metrics = self._metrics["train" if self.model.training else "eval"]
        self.state.num_input_tokens_seen -= before
        self.state.num_input_tokens_seen //= self._alike
        self.state.num_input_tokens_seen += before
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        rewards = self._rewards_of_rings
        for i, name in enumerate(self.reward_func_names):
            metrics[f"rewards/{name}/std"][-1] = nanstd(rewards[:, i]).item()
        weighted = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        weighted[torch.isnan(rewards).all(dim=1)] = torch.nan
        metrics["reward_std"][-1] = nanstd(weighted).item()
        return found


def completions_of(note: bytes) -> tuple[list[list[int]], list[list[float]] | None]:
    """Read the note of a ring's first rank: each completion's tokens, and their log-probabilities.

    Raises:
        ValueError: it is no such note.

    >>> completions_of(b"[[[3, 5], [7]], null]")
    ([[3, 5], [7]], None)
    """
    try:
        tokens, logprobs = json.loads(note)
        tokens = [[*map(index, each)] for each in tokens]
        return tokens, logprobs and [[*map(float, each)] for each in logprobs]
    except (ValueError, TypeError, RecursionError) as error:
        raise unreadable("RingGRPOTrainer", 0, error) from None
