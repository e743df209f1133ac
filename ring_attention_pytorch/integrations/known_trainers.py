"""Trainers whose losses can be spread, by a list: of each, what its loss is of.

    TOKENS            a sum over tokens: each rank computes that of its own
    PROBABILITIES     whole sequences' log-probabilities, which TRL's fused head makes
    SCORES            whole sequences' scores, which a reward model makes
    AFTER_GENERATION  as PROBABILITIES, of sequences that the trainer generates

A class that comes after the mixin and computes a loss of its own is on the list, or it is refused:
nobody knows what it would do with this rank's tokens. One before the mixin knows of it.
"""

TOKENS, PROBABILITIES, SCORES = "tokens", "probabilities", "scores"
AFTER_GENERATION = "after generation"
_LOSSES = {
    "transformers.trainer.Trainer": TOKENS,
    "trl.trainer.sft_trainer.SFTTrainer": TOKENS,
    "trl.trainer.dpo_trainer.DPOTrainer": PROBABILITIES,
    "trl.trainer.kto_trainer.KTOTrainer": PROBABILITIES,
    "trl.trainer.reward_trainer.RewardTrainer": SCORES,
    "trl.trainer.grpo_trainer.GRPOTrainer": AFTER_GENERATION,
}
_COMPUTE = ("compute_loss", "_compute_loss", "training_step", "prediction_step")


def loss_of(trainer: type, mixin: type) -> str:
    """Return what the loss of a trainer is of, whose class has the mixin.

    Raises:
        ValueError: a class after the mixin computes a loss, and is not on the list.
    """
    order = trainer.__mro__
    for each in order[order.index(mixin) + 1 :]:
        name = f"{each.__module__}.{each.__qualname__}"
        if name in _LOSSES:
            return _LOSSES[name]
        if own := [method for method in _COMPUTE if method in vars(each)]:
            known = ", ".join(name.rpartition(".")[2] for name in _LOSSES)
            raise ValueError(
                f"{trainer.__name__}: {each.__name__} has a {own[0]} of its own, which would take "
                f"this rank's tokens for whole sequences; known are those of {known}; override "
                f"compute_loss in a subclass of both, or use ring_forward in a loop of your own"
            )
    return TOKENS
