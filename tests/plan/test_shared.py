"""Keys that all ranks hold must fit the others, and have no positions."""

import pytest
import torch

from ring_attention_pytorch import ring_attn

Q, K = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 1, 4)
TWO = K[:, :2], K[:, :2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(shared_keys=(K[..., :3], K)), "shared_keys must be"),
        (dict(shared_keys=(K, K[:, :2])), "shared_keys must be"),
        (dict(shared_keys=(Q, Q)), "shared_keys must be"),
        (dict(shared_keys=(K.double(), K.double())), "torch.float32 on cpu as q"),
        (dict(shared_key_mask=torch.ones(1, 2) > 0), "needs shared_keys"),
        (dict(shared_keys=TWO, shared_key_mask=torch.ones(1, 3) > 0), r"bool \[1, 2\]"),
        (dict(shared_keys=TWO, shared_key_mask=torch.ones(1, 2)), r"bool \[1, 2\]"),
        (dict(shared_keys=TWO, dropout=0.1), "have no positions"),
        (dict(shared_keys=TWO, alibi_slopes=torch.ones(2)), "have no positions"),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        ring_attn(Q, K, K, **options)
