"""Models that score a sequence by its last real token: its scores are fetched over the ring.

`LlamaForSequenceClassification` and others like it score all tokens, and pick the last token that
is not padding. A rank has only a part of the tokens, so each token gets the scores of the whole
sequence's last one, whichever token the model picks.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attention_pytorch.training.batches import ShardedBatch


def last_token_head(model: PreTrainedModel | None) -> tuple[nn.Module, Any] | None:
    """Return the head of a model that picks the last token, and its text config, or None."""
    if model is None:
        return None
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if "last_non_pad_token" not in getattr(code, "co_varnames", ()):  # in such models' forward
        return None
    head = getattr(model, "score", None)
    return (head, model.config.get_text_config()) if isinstance(head, nn.Module) else None


def of_last_token(scores: Tensor, batch: ShardedBatch, config: Any) -> Tensor:
    """Replace each token's scores `[b, n, k]` by the scores of its sequence's last real token.

    All ranks of the ring call this. Backward sums all ranks' gradients on the token's owner.
    """
    whole, ids = batch.unshard(scores), batch.get("input_ids")
    last = torch.full((len(whole),), batch.length - 1, device=whole.device)
    if ids is not None and config.pad_token_id is not None:
        real = batch.unshard((ids != config.pad_token_id).long())
        places = torch.arange(batch.length, device=real.device)
        last = (places * real).argmax(-1).to(whole.device)
    found = whole[torch.arange(len(whole), device=whole.device), last]
    return found[:, None].expand_as(scores)
