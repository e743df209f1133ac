"""The routed model: loss, logits and gradients of one process, over processes; and causality."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attention_pytorch import ConditionalRoutedTransformer, positions
from tests.support.reference import relative_error

N, TOKENS = 37, 30
OPTIONS = dict(
    num_tokens=TOKENS, dim=16, depth=2, num_heavy_attn_tokens_q=3, num_heavy_attn_tokens_kv=3,
    num_heavy_ff_tokens=0.3, light_window_size=4,
    block_kwargs=dict(
        heavy_dim_head=4, heavy_heads=4, light_dim_head=4, light_heads=2, num_routed_kv=2,
        router_straight_through=False, router_kwargs=dict(eps=3.0),
    ),
)  # fmt: skip


def make(causal: bool, **over) -> ConditionalRoutedTransformer:
    torch.manual_seed(5)
    window = dict(heavy_window_size=8) if causal else {}
    return ConditionalRoutedTransformer(**OPTIONS, causal=causal, **window, **over).double()


def batch(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TOKENS, (size, N), generator=draw)
    mask = torch.arange(N).expand(size, N) < torch.randint(5, N, (size, 1), generator=draw)
    return ids, mask


def averaged(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    return found


def of_rank(causal: bool, layout: str, auto: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, averaged gradients, and logits of this rank's own sequence or of its shard."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make(causal, ring_attn=True, layout=layout, auto_shard_seq=auto, ring_seq_size=10)
    ids, mask = batch(size if auto else 2)
    if auto:
        ids, mask = ids[rank : rank + 1], mask[rank : rank + 1]
    else:
        at = positions(layout, rank=rank, ring_size=size, length=N)
        ids, mask = ids[:, at], mask[:, at]
    loss = model(ids, mask, return_loss=True)
    loss.backward()
    with torch.no_grad():
        return loss.detach(), averaged(model), model(ids, mask)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("layout", "auto"), [("zigzag", True), ("striped", False)])
def test_processes_give_one_process_loss_logits_and_gradients(
    pools: Callable, causal: bool, layout: str, auto: bool
) -> None:
    size = 4
    found = pools(size).run(of_rank, causal, layout, auto)
    ids, mask = batch(size if auto else 2)
    model = make(causal)
    want = model(ids, mask, return_loss=True)
    want.backward()
    logits = model(ids, mask)
    for rank, (loss, grads, got) in enumerate(found):
        assert relative_error(loss, want) < 1e-12
        for name, p in model.named_parameters():
            assert relative_error(grads[name], p.grad) < 1e-10, name
        at = positions(layout, rank=rank, ring_size=size, length=N)
        mine = logits[rank : rank + 1] if auto else logits[:, at]
        assert relative_error(got, mine) < 1e-12


def test_a_decoder_is_causal_in_training_and_in_decoding() -> None:
    model, (ids, _) = make(True), batch(2)
    with torch.no_grad():
        want = model(ids)
        for n in range(1, N + 1):
            assert relative_error(model(ids[:, :n])[:, -1], want[:, n - 1]) < 1e-12
        for token in range(N):
            changed = ids.clone()
            changed[:, token] = (ids[:, token] + 7) % TOKENS
            assert (model(changed) - want)[:, :token].norm() < 1e-12


def test_an_encoder_sees_all_that_is_real_and_nothing_else() -> None:
    model, (ids, mask) = make(False), batch(2)
    with torch.no_grad():
        want = model(ids, mask)
        changed = ids.masked_fill(~mask, 3)
        assert relative_error(model(changed, mask)[mask], want[mask]) < 1e-12


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = make(True).float()
    ids = torch.arange(N).remainder(5).expand(4, N)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(ids, return_loss=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 < 1.0 < losses[0]


@pytest.mark.parametrize(
    "given",
    [{"causal": True}, {"dim": 8}, {"layout": "zigzag"}, {"num_heavy_ff_tokens": 3}, {1: 2}],
)
def test_options_of_blocks_are_not_the_model_s(given: dict) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"block_kwargs are options that .* got {name}; leave"):
        ConditionalRoutedTransformer(
            num_tokens=9, dim=16, depth=1, num_heavy_attn_tokens_q=2, num_heavy_attn_tokens_kv=2,
            num_heavy_ff_tokens=2, light_window_size=2, block_kwargs=given,
        )  # fmt: skip
