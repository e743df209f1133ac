"""Models of whole sequences that take the last real token: its score is fetched over the ring.

`LlamaForSequenceClassification` and others like it give all tokens scores, and take those of the
last token that is not padding. A rank has only a part of the tokens. So each token gets the scores
of the whole sequence's last one, and the model may take any.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attention_pytorch.training.batches import ShardedBatch


def last_token_head(model: PreTrainedModel | None) -> tuple[nn.Module, Any] | None:
    """Return the head whose last token a model takes, and the model's config; None if none."""
    if model is None:
        return None
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if "last_non_pad_token" not in getattr(code, "co_varnames", ()):  # of such a model's forward
        return None
    head = getattr(model, "score", None)
    return (head, model.config.get_text_config()) if isinstance(head, nn.Module) else None


def of_last_token(scores: Tensor, batch: ShardedBatch, config: Any) -> Tensor:
    """Return scores `[b, n, k]` with those of the whole sequences' last real tokens everywhere.

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
