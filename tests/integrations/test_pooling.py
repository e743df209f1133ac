"""Scores of the last real token, on every rank, against a look at the whole sequence."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.pooling import last_token_head, of_last_token
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import relative_error

PAD, N = 0, 11
REAL = [[*range(N)], [*range(4)], [*range(5, N)]]  # padded at neither end, right, and left


def ids() -> Tensor:
    found = torch.full((3, N), PAD)
    for i, real in enumerate(REAL):
        found[i, real] = 1 + torch.arange(len(real))
    return found


@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (2, "zigzag"), (3, "striped")])
@pytest.mark.parametrize("pad", [PAD, None])
def test_each_rank_has_the_scores_of_the_last_real_token(size: int, layout: str, pad) -> None:
    scores = torch.randn(3, N, 2, dtype=torch.float64)
    last = [real[-1] if pad is not None else N - 1 for real in REAL]
    down = torch.randn(3, N, 2, dtype=torch.float64)

    def main(ring: Ring) -> tuple[Tensor, Tensor]:
        batch = shard_batch({"input_ids": ids()}, layout=layout, group=ring)
        at = batch["position_ids"][0]
        mine = scores[:, at].requires_grad_()
        found = of_last_token(mine, batch, SimpleNamespace(pad_token_id=pad))
        assert found.shape == mine.shape
        for i in range(3):
            assert torch.equal(found[i], scores[i, last[i]].expand(len(at), -1))
        (grad,) = torch.autograd.grad(found, mine, down[:, at])
        return at, grad

    grads = torch.empty_like(scores)
    for at, grad in threads.run(size, main)[0]:
        grads[:, at] = grad
    want = torch.zeros_like(scores)
    for i in range(3):
        want[i, last[i]] = down[i].sum(0)
    assert relative_error(grads, want) < 1e-14


def test_heads_are_those_of_models_that_take_the_last_token() -> None:
    sizes = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9, num_labels=3,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=PAD,
    )  # fmt: skip
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForSequenceClassification(config)
    found = last_token_head(model)
    assert found is not None
    assert found[0] is model.score
    assert found[1].pad_token_id == PAD
    assert last_token_head(transformers.LlamaForCausalLM(config)) is None
    model.score = None
    assert last_token_head(model) is None
    assert last_token_head(None) is None
