"""Steps of training on GPUs, where backward runs in threads of autograd."""

import pytest
import torch

from ring_attention_pytorch import shard_batch
from tests.support import training
from tests.support.late_losses import check_told_later, logprobs_told_later, told_later
from tests.support.reference import relative_error
from tests.support.training import KINDS, Model, batch_of, spread, spread_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def all_kinds(how: str, checkpointed: bool) -> dict[str, float]:
    """For a pool: the worst error of each kind of batch."""
    found = {}
    for kind in KINDS:
        got, want = spread(kind, how, checkpointed, device="cuda"), training.one_process(kind)
        pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
        found[kind] = max(relative_error(a.cpu(), b) for a, b in pairs)
    return found


@pytest.mark.parametrize("how", ["logits", "head"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_on_gpus_is_that_of_one_process(how, checkpointed, nccl):
    for found in nccl(2).run(all_kinds, how, checkpointed):
        assert max(found.values()) < 1e-10, found


def outside() -> str:
    """Recomputing outside of the block raises, in whatever thread that is."""
    batch, model = shard_batch(batch_of("plain")).to("cuda"), Model(spread_attention, True).cuda()
    with batch:
        loss = model(batch["input_ids"], batch["position_ids"]).sum()
    try:
        loss.backward()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_recomputing_outside_of_the_block_raises(nccl):
    assert all("inside `with batch:`" in told for told in nccl(2).run(outside))


@pytest.mark.parametrize("what", ["labels", "weights"])
def test_a_wrong_value_is_nan_on_all_ranks_and_then_an_error(what, nccl):
    found = nccl(2).run(told_later, what, "cuda")
    check_told_later(found, what)
    assert all("(on rank 1)" in told for _, _, told, _ in found)


def test_a_label_that_is_no_class_has_nan_and_then_an_error(nccl):
    for where, told in nccl(2).run(logprobs_told_later, "cuda"):
        assert where == [[0, 5]]
        assert "(on rank 1)" in told
