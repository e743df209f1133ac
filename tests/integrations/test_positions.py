"""Positions that models use: where they go in, how models count, and whose they are."""

import pytest
import torch
from torch import Tensor, nn

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations import positions as at_work
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads

PAD = 1


class OPTLearnedPositionalEmbedding(nn.Embedding):
    """By its name it is recognised."""

    def forward(self, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(attention_mask if position_ids is None else position_ids)


class RotaryEmbedding(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x


def test_positions_go_into_tables_and_rotary_embeddings() -> None:
    model = nn.Module()
    model.wpe, model.words = nn.Embedding(4, 2), nn.Embedding(4, 2)
    model.rotary_emb, model.VisionRotary = RotaryEmbedding(), type(
        "VisionRotaryEmbedding", (RotaryEmbedding,), {}
    )()  # fmt: skip
    model.embed_positions = OPTLearnedPositionalEmbedding(4, 2)
    model.angles = type("RotaryTable", (nn.Module,), {"forward": lambda self, n: n})()
    assert at_work.places_of(dict(model.named_modules())) == {
        model.wpe: 0, model.rotary_emb: 1, model.embed_positions: 1
    }  # fmt: skip


def test_arguments_are_found_and_replaced_by_place_or_name() -> None:
    rotary, table = RotaryEmbedding(), nn.Embedding(4, 2)
    x, old, new = (torch.full((1, 3), i) for i in range(3))
    for module, at, args, given, want in (
        (rotary, 1, (x, old), {}, ((x, new), {})),
        (rotary, 1, (x,), {"position_ids": old}, ((x,), {"position_ids": new})),
        (table, 0, (), {"input": old}, ((), {"input": new})),
    ):
        assert at_work.given_at(at, args, given) is old
        assert at_work.with_positions(module, at, args, given, new) == want
    assert at_work.given_at(None, (old,), {}) is None
    assert at_work.given_at(1, (x,), {}) is None


def by_loops(real: list[list[bool]], documents: list[list[int]]) -> Tensor:
    """Each real token's number in its document, from 1."""
    found = torch.zeros(len(real), len(real[0])).long()
    for i, row in enumerate(real):
        for t, is_real in enumerate(row):
            same = [row[s] for s in range(t + 1) if documents[i][s] == documents[i][t]]
            found[i, t] = sum(same) if is_real else 0
    return found


IDS = torch.tensor([[5, 6, 7, 8, 9, 5, PAD, PAD], [PAD, PAD, 4, 4, PAD, 7, 7, 7]])
MASK = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (2, "zigzag"), (3, "striped")])
@pytest.mark.parametrize("packed", [False, True])
def test_models_count_real_tokens_over_the_whole_sequence(size: int, layout: str, packed) -> None:
    documents = [[0, 0, 0, 1, 1, 1, 1, 1], [0] * 5 + [1] * 3] if packed else [[0] * 8] * 2
    more = {"documents": torch.tensor(documents)} if packed else {}
    roberta, opt = nn.Embedding(32, 2, padding_idx=PAD), OPTLearnedPositionalEmbedding(32, 2)
    by_ids = by_loops((IDS != PAD).tolist(), documents) + PAD
    by_mask = by_loops(MASK.bool().tolist(), documents) - 1

    def main(ring: Ring) -> None:
        whole = {"input_ids": IDS, "attention_mask": MASK, **more}
        batch = shard_batch(whole, layout=layout, group=ring)
        at = torch.arange(8)[None].expand(2, -1)
        at = shard_batch({"input_ids": at}, layout=layout, group=ring)["input_ids"][0]
        assert torch.equal(at_work.counted_by(roberta, batch), by_ids[:, at])
        assert torch.equal(at_work.counted_by(opt, batch), by_mask[:, at])
        assert at_work.counted_by(nn.Embedding(4, 2), batch) is None
        assert at_work.counted_by(RotaryEmbedding(), batch) is None

    threads.run(size, main)


def test_positions_are_the_batch_s_whatever_their_shape_and_dtype() -> None:
    mine = torch.tensor([[0, 3, 4], [0, 3, 4]])
    for right in (mine, mine[:1], mine[0], mine.int(), mine.clone()):
        at_work.check_positions("A", right, mine)
    four = torch.stack([mine, mine + 1, mine + 2, mine + 3])
    for right in (four, four[0], four[1:]):
        at_work.check_positions("A", right, four)
    for wrong in (mine + 1, torch.arange(3), mine[:, :2], torch.zeros(3, 3), None, "positions"):
        with pytest.raises(ValueError, match="position_ids are not the batch's: A uses others"):
            at_work.check_positions("A", wrong, mine)
