"""A list of trainers whose losses can be spread, with the input of each loss.

    TOKENS            a sum over tokens: each rank sums its own
    PROBABILITIES     log-probabilities of whole sequences, from TRL's fused head
    SCORES            scores of whole sequences, from a reward model
    AFTER_GENERATION  as PROBABILITIES, for sequences that the trainer generates

A base class after the mixin with a loss of its own must be on the list. Others are refused: they
could take this rank's tokens for whole sequences. Classes before the mixin are written for it.
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
    "axolotl.core.trainers.base.AxolotlTrainer": TOKENS,  # without orpo_alpha
}
_COMPUTE = ("compute_loss", "_compute_loss", "training_step", "prediction_step")


def loss_of(trainer: type, mixin: type) -> str:
    """Return the input of a trainer's loss, such as TOKENS; its class derives from the mixin.

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
