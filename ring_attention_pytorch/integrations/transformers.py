"""Hugging Face's transformers on sequences spread over processes: all public names.

    register()                                           attn_implementation="ring"
    with ring_forward(shard_batch(batch)) as inputs:     in a loop of your own
        model(**inputs).loss.backward()
    class RingTrainer(RingTrainerMixin, Trainer): ...    with Trainer, or TRL's SFTTrainer
    model.generate(ids, past_key_values=RingHFCache(model.config))

Tested with transformers 5.17.0 and 5.24.0.
"""

from ring_attention_pytorch.integrations.cache import RingHFCache
from ring_attention_pytorch.integrations.models import RingForward, register, ring_forward
from ring_attention_pytorch.integrations.trainer import RingTrainerMixin

__all__ = ["RingForward", "RingHFCache", "RingTrainerMixin", "register", "ring_forward"]
