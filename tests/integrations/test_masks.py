"""Mask functions of transformers are read, or refused."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils

from ring_attention_pytorch.integrations.masks import visible_by


def test_masks_that_are_not_known_raise():
    def every_other(batch, head, q, kv):
        return (q - kv) % 2 == 0

    causal = masking_utils.causal_mask_function
    blocks = masking_utils.blockwise_overlay(torch.zeros(1, 4))
    unknown = [
        every_other,
        masking_utils.and_masks(causal, every_other),
        masking_utils.or_masks(causal, blocks),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1)),
        masking_utils.padding_mask_function(torch.ones(1, 4)),
    ]
    for function in unknown:
        with pytest.raises(ValueError, match="does not know"):
            visible_by(function)
    with pytest.raises(ValueError, match="window of tokens before"):
        visible_by(masking_utils.sliding_window_overlay(4))


def test_masks_of_both_sides_are_read():
    both = masking_utils.sliding_window_bidirectional_mask_function(4)
    assert visible_by(both) == (False, 4)
    assert visible_by(masking_utils.bidirectional_mask_function) == (False, None)
