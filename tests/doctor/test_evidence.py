"""Records of a run are of forward only, and nothing of the model is changed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import ring_attn
from ring_attention_pytorch.doctor.evidence import watched
from ring_attention_pytorch.plan.ring_plan import RingPlan


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).unflatten(-1, (2, 4))
        for _ in range(2):
            x = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else (
                self.attend(x)
            )  # fmt: skip
        return F.cross_entropy(self.head(x.flatten(2)).flatten(0, 1), labels.flatten())

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return ring_attn(x, x, x, causal=True)


IDS = torch.tensor([[1, 2, 3, 4, 5]])
LABELS = torch.tensor([[2, 3, 4, -100, 0]])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_inputs_losses_and_attention_are_seen_once_each(checkpointed: bool) -> None:
    model = Model(checkpointed)
    with watched(model) as seen:
        loss = model(IDS, LABELS)
        loss.backward()
    assert torch.equal(seen.inputs["embed", "input"], IDS)
    assert [t.tolist() for t in seen.labels] == [LABELS.flatten().tolist()]
    assert (seen.counted, seen.ignored) == (4, -100)
    assert seen.entropy == pytest.approx(4 * loss.item(), rel=1e-6)
    assert len(seen.attention) == 2
    (_, (q, *_)), (_, (later, *_)) = seen.attention
    assert torch.equal(q, model.embed(IDS).unflatten(-1, (2, 4)))
    assert later.is_meta  # its shape is enough
    assert seen.plans == []  # over several ranks


def test_nothing_stays() -> None:
    model, before = Model(), (F.cross_entropy, RingPlan.check)
    with pytest.raises(ZeroDivisionError), watched(model) as seen:
        raise ZeroDivisionError
    model(IDS, LABELS)
    assert (F.cross_entropy, RingPlan.check) == before
    assert not seen.inputs
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_probabilities_are_no_labels() -> None:
    with watched(nn.Linear(1, 1)) as seen:
        F.cross_entropy(torch.zeros(2, 3), torch.full((2, 3), 1 / 3))
    assert (seen.labels, seen.counted, seen.entropy) == ([], 0, 0.0)
