"""A right call of everything public, and which numbers are right though they look wrong."""

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import ring_attention_pytorch as R
from ring_attention_pytorch import distributed, launch, ring, ring_attention, zig_zag_attention
from tests.support import surface_hf
from tests.support.surface import Call

ONE = torch.randn(1, 4, 16)
Q = torch.randn(1, 4, 2, 8)
IDS = torch.tensor([[1, 2, 3, 4]])
ROUTED = dict(dim=16, num_heavy_tokens_q=2, num_heavy_tokens_kv=2, light_window_size=2)
SIZES: dict[str, Any] = dict(dim=16, dim_head=8, heads=2)
LATENT_SIZES: dict[str, Any] = dict(dim=16, heads=2, rank=8, d_nope=4, d_rope=2, d_v=4)
MODEL: dict[str, Any] = dict(num_tokens=9, depth=1, causal=True, **SIZES)


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean()


def worker(rank: int) -> int:
    return rank


@cache
def token_file() -> str:
    path = Path(tempfile.mkdtemp()) / "tokens"
    path.write_bytes(bytes(80))
    return str(path)


def filled() -> Any:
    cache = R.RingCache(1, 2, 8)
    cache.append(Q, Q)
    return cache


def layer(**options: Any) -> Any:
    return R.RingAttention(**{**SIZES, "causal": True, **options})


def batch() -> Any:
    return R.shard_batch({"input_ids": IDS, "labels": IDS})


def of(make: Callable[[], Any], name: str, **right: Any) -> Callable[[], Call]:
    """A call of a method of what is made anew for each."""
    return lambda: Call(getattr(make(), name), right)


def to(function: Callable[..., Any], *more: Callable[..., Any], **right: Any) -> Callable[[], Call]:
    return lambda: Call(function, right, more)


def plan() -> Any:
    return R.RingPlan.make(Q, Q, Q, causal=True)


def latent_layer() -> Any:
    return R.RingLatentAttention(**LATENT_SIZES)


def summary_plan() -> Any:
    return R.SummaryPlan.make(Q, Q, Q, window=1, stride=2)


def run_plan() -> Any:
    return R.RunPlan.make(Q)


def routing_plan() -> Any:
    return R.RoutingPlan.make(ONE)


def model() -> Any:
    return R.RingTransformer(**MODEL)


class AsItWas(torch.nn.Linear):
    """A module that keeps its forward, so that it may be passed again."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "forward":
            super().__setattr__(name, value)


def summed() -> tuple[Any, Any]:
    p = summary_plan()
    return p, R.summarize(Q, Q, plan=p)


CROSS = dict(dim=16, num_tokens_q=2, num_tokens_kv=2, heads=2, dim_head=8)
FEED = dict(dim=16, num_heavy_tokens=2)
BLOCK = dict(
    dim=16,
    num_heavy_attn_tokens_q=2,
    num_heavy_attn_tokens_kv=2,
    num_heavy_ff_tokens=2,
    light_window_size=2,
)
ROUTED_MODEL = dict(
    num_tokens=9,
    dim=16,
    depth=1,
    num_heavy_attn_tokens_q=2,
    num_heavy_attn_tokens_kv=2,
    num_heavy_ff_tokens=2,
    light_window_size=2,
    causal=True,
)
QKV = dict(q=Q, k=Q, v=Q)
LATENTS = dict(
    q_nope=Q, q_rope=Q[..., :2], latent=ONE, k_rope=ONE[..., :2], w_up=torch.randn(2, 11, 16)
)
FIRST = Q.transpose(1, 2)
GATES = Q[..., 0].sigmoid()
Attention = R.ConditionalRoutedAttention

CALLS: dict[str, Callable[[], Call]] = {
    "ring_attn": to(R.ring_attn, **QKV),
    "ulysses_attn": to(R.ulysses_attn, R.ring_attn, **QKV),
    "mla_ring_attn": to(R.mla_ring_attn, R.ring_attn, **LATENTS),
    "mla_attn_with_cache": lambda: Call(
        R.mla_attn_with_cache, LATENTS | dict(cache=R.RingCache(1, 1, 18, value_dim=16))
    ),
    "RingLatentAttention": to(R.RingLatentAttention, **LATENT_SIZES),
    "RingLatentAttention.forward": lambda: Call(
        latent_layer().forward, dict(x=ONE, plan=latent_layer().make_plan(ONE))
    ),
    "RingLatentAttention.make_plan": of(latent_layer, "make_plan", x=ONE),
    "RingLatentAttention.make_cache": of(latent_layer, "make_cache", sequences=1),
    "RingLatentAttention.decode": lambda: Call(
        latent_layer().decode, dict(x=ONE, cache=latent_layer().make_cache(1))
    ),
    "mla_plan": to(R.mla_plan, R.ring_attn, **LATENTS),
    "tied_ring_attn": to(R.tied_ring_attn, R.ring_attn, q=Q, kv=Q),
    "tied_plan": to(R.tied_plan, R.ring_attn, q=Q, kv=Q),
    "top_keys": to(R.top_keys, scores=torch.rand(2, 4), positions=torch.arange(4), k=2),
    "merge_attention": lambda: Call(partial(R.merge_attention, Q, Q[..., 0].mT), {}),
    "chunk_tokens": lambda: Call(partial(R.chunk_tokens, AsItWas(2, 2)), dict(tokens=2)),
    "explain_kernel": to(R.explain_kernel, **QKV),
    "default_attention": to(R.default_attention, **QKV),
    "ring_flash_attn": to(R.ring_flash_attn, **QKV),
    "ring_flash_attn_": to(R.ring_flash_attn_, **QKV),
    "ring_flash_attn_cuda": lambda: Call(R.ring_flash_attn_cuda, QKV, alone=False),
    "ring_flash_attn_cuda_": lambda: Call(R.ring_flash_attn_cuda_, QKV, alone=False),
    "tree_attn_decode": to(R.tree_attn_decode, q=FIRST[:, :, :1], k=FIRST, v=FIRST),
    "zig_zag_attn": to(zig_zag_attention.zig_zag_attn, q=FIRST, k=FIRST, v=FIRST),
    "zig_zag_pad_seq": to(zig_zag_attention.zig_zag_pad_seq, t=ONE),
    "zig_zag_shard": to(zig_zag_attention.zig_zag_shard, t=ONE),
    "RingPlan.make": to(R.RingPlan.make, **QKV),
    "RingPlan.for_layer": of(plan, "for_layer", number=0),
    "RingPlan.positions": of(plan, "positions"),
    "RingPlan.statistics": lambda: Call(plan().statistics, {}, alone=False),
    "explain_plan": lambda: Call(R.explain_plan, dict(plan=plan())),
    "observe": to(R.observe),
    "fail_together": to(R.fail_together),
    "shard_sequence": to(R.shard_sequence, x=ONE),
    "unshard_sequence": to(R.unshard_sequence, x=ONE, length=4),
    "positions": to(R.positions, layout="zigzag", rank=0, ring_size=2, length=8),
    "balanced": to(R.balanced, cu_seqlens=[0, 3, 8], ring_size=2),
    "apply_rotary_pos_emb": to(R.apply_rotary_pos_emb, pos=torch.zeros(4, 8), t=Q),
    "RingRotaryEmbedding": to(R.RingRotaryEmbedding, dim=8),
    "RingRotaryEmbedding.forward": of(lambda: R.RingRotaryEmbedding(8), "__call__", seq=4),
    "RingAttention": to(R.RingAttention, **SIZES),
    "RingAttention.forward": of(layer, "forward", x=ONE),
    "RingAttention.plan": of(layer, "plan", x=ONE),
    "RingAttention.split_projections": lambda: Call(
        layer().split_projections, dict(mesh=object.__new__(DeviceMesh)), alone=False
    ),
    "RingTransformer": to(R.RingTransformer, **MODEL),
    "RingTransformer.forward": of(model, "forward", x=IDS),
    "RingTransformer.plans": of(model, "plans", x=IDS),
    "RingTransformer.generate": of(model, "generate", ids=IDS, max_new_tokens=2),
    "SummaryAttention": to(R.SummaryAttention, R.RingAttention, window=1, stride=2, **SIZES),
    "Summaries": to(R.Summaries, window=1),
    "Summaries.layer": of(lambda: R.Summaries(1), "layer", key_heads=2, **SIZES),
    "SummaryPlan.make": to(R.SummaryPlan.make, **QKV, window=1, stride=2),
    "SummaryPlan.summary_positions": of(summary_plan, "summary_positions"),
    "GatedDeltaNet": to(R.GatedDeltaNet, **SIZES),
    "GatedDeltaNet.forward": lambda: Call(
        R.GatedDeltaNet(**SIZES).forward, dict(x=ONE, plan=R.RunPlan.make(ONE))
    ),
    "Mamba2": to(R.Mamba2, **SIZES),
    "Mamba2.forward": lambda: Call(
        R.Mamba2(**SIZES).forward, dict(x=ONE, plan=R.RunPlan.make(ONE))
    ),
    "GatedDeltaNet.read": lambda: Call(
        R.GatedDeltaNet(**SIZES).read, dict(x=ONE, mask=None, plan=R.RunPlan.make(ONE), before=None)
    ),
    "Mamba2.read": lambda: Call(
        R.Mamba2(**SIZES).read, dict(x=ONE, mask=None, plan=R.RunPlan.make(ONE), before=None)
    ),
    "RunPlan.make": to(R.RunPlan.make, x=Q),
    "RunPlan.of": lambda: Call(R.RunPlan.of, dict(plan=plan())),
    "RunPlan.explain": of(run_plan, "explain", heads=2, d_k=4, d_v=4),
    "ring_scan": lambda: Call(
        R.ring_scan,
        dict(m=Q[..., 0, 0], u=Q, plan=run_plan(), initial=Q),
    ),
    "ring_halo": lambda: Call(R.ring_halo, dict(x=Q, width=1, plan=run_plan())),
    "ring_short_conv": lambda: Call(
        R.ring_short_conv, dict(x=ONE, weight=torch.ones(16, 2), plan=run_plan())
    ),
    "ring_gated_delta_rule": lambda: Call(
        R.ring_gated_delta_rule, dict(**QKV, g=-GATES, beta=GATES, plan=run_plan())
    ),
    "ring_kda": lambda: Call(
        R.ring_kda, dict(**QKV, g=-Q.abs(), beta=GATES, plan=run_plan())
    ),
    "ring_mamba2": lambda: Call(
        R.ring_mamba2, dict(x=Q, dt=GATES, a=-GATES[0, 0], b=Q, c=Q, plan=run_plan())
    ),
    "summarize": lambda: Call(R.summarize, dict(k=Q, v=Q, plan=summary_plan())),
    "summary_attn": lambda: Call(
        R.summary_attn,
        dict(**QKV, summary_k=summed()[1][0], summary_v=summed()[1][1], plan=summary_plan()),
    ),
    "SummaryAttention.prefill": of(
        lambda: R.SummaryAttention(window=1, stride=2, **SIZES), "prefill", x=ONE
    ),
    "SummaryAttention.step": lambda: _step(),
    "RingCache": to(R.RingCache, sequences=1, key_heads=2, head_dim=8),
    "RingCache.append": of(filled, "append", k=Q, v=Q),
    "RingCache.fork": of(filled, "fork", source=0),
    "RingCache.free": of(filled, "free", sequence=0),
    "RingCache.hide_before": of(filled, "hide_before", starts=[1]),
    "RingCache.load_state_dict": lambda: Call(
        partial(filled().load_state_dict, filled().state_dict()), {}
    ),
    "RingCache.owner": of(filled, "owner", token=0),
    "RingCache.reorder": of(filled, "reorder", beams=[0]),
    "RingCache.reserve": of(filled, "reserve", tokens=1),
    "RingCache.rollback": of(filled, "rollback", n=1),
    "RingCache.rounded": of(filled, "rounded", t=Q),
    "RingCache.state_dict": of(filled, "state_dict"),
    "ring_attn_with_cache": lambda: Call(R.ring_attn_with_cache, dict(**QKV, cache=filled())),
    "explain_cache": lambda: Call(R.explain_cache, dict(cache=filled(), heads=2)),
    "shard_batch": to(R.shard_batch, batch={"input_ids": IDS}),
    "RingCollator": to(R.RingCollator, R.shard_batch, inner=dict, rank=0, ring_size=2),
    "ShardedBatch.over": of(batch, "over", group=None),
    "ShardedBatch.roll": of(batch, "roll", x=IDS, ahead=1, nothing=-100),
    "ShardedBatch.to": of(batch, "to", device="cpu"),
    "ShardedBatch.unshard": of(batch, "unshard", x=IDS),
    "SequenceShardedDataset": to(
        R.SequenceShardedDataset, source=[[1, 2, 3]], length=2, batch_size=1, rank=0, ring_size=1
    ),
    "SequenceShardedDataset.state_dict": of(lambda: data(), "state_dict"),
    "SequenceShardedDataset.load_state_dict": of(
        lambda: data(), "load_state_dict", state=dict(sequences=0, seed=None, length=2)
    ),
    "TokenFile": lambda: Call(R.TokenFile, dict(path=token_file())),
    "ring_cross_entropy": to(R.ring_cross_entropy, x=torch.randn(1, 4, 9), labels=IDS),
    "ring_token_logprobs": lambda: Call(
        R.ring_token_logprobs, dict(x=torch.randn(1, 4, 9), batch=batch())
    ),
    "check_parity": lambda: Call(
        R.check_parity, dict(model=Squares(), batch={"x": ONE})
    ),
    "ConditionalRoutedAttention": to(Attention, **ROUTED),
    "ConditionalRoutedAttention.forward": of(lambda: Attention(**ROUTED), "forward", x=ONE),
    "ConditionalRoutedAutoregressiveAttention": to(
        R.ConditionalRoutedAutoregressiveAttention, Attention, **ROUTED
    ),
    "ConditionalRoutedAutoregressiveAttention.forward": of(
        lambda: R.ConditionalRoutedAutoregressiveAttention(**ROUTED), "forward", x=ONE
    ),
    "ConditionalRoutedCrossAttention": to(R.ConditionalRoutedCrossAttention, **CROSS),
    "ConditionalRoutedCrossAttention.forward": of(
        lambda: R.ConditionalRoutedCrossAttention(**CROSS), "forward", x=ONE, context=ONE
    ),
    "ConditionalRoutedFeedForward": to(R.ConditionalRoutedFeedForward, **FEED),
    "ConditionalRoutedFeedForward.forward": of(
        lambda: R.ConditionalRoutedFeedForward(**FEED), "forward", x=ONE
    ),
    "ConditionalRoutedImageAttention": to(
        R.ConditionalRoutedImageAttention, Attention, **ROUTED
    ),
    "ConditionalRoutedImageAttention.forward": of(
        lambda: R.ConditionalRoutedImageAttention(**ROUTED), "forward", x=ONE.view(1, 2, 2, 16)
    ),
    "ConditionalRoutedTransformer": to(R.ConditionalRoutedTransformer, **ROUTED_MODEL),
    "ConditionalRoutedTransformer.forward": of(
        lambda: R.ConditionalRoutedTransformer(**ROUTED_MODEL), "forward", x=IDS
    ),
    "ConditionalRoutedTransformer.generate": of(
        lambda: R.ConditionalRoutedTransformer(**ROUTED_MODEL), "generate", ids=IDS,
        max_new_tokens=2,
    ),
    "ConditionalRoutedTransformerBlock": to(
        R.ConditionalRoutedTransformerBlock, **BLOCK
    ),
    "ConditionalRoutedTransformerBlock.forward": of(
        lambda: R.ConditionalRoutedTransformerBlock(**BLOCK), "forward", x=ONE
    ),
    "CoordinateDescentRouter": to(R.CoordinateDescentRouter, dim=16),
    "CoordinateDescentRouter.forward": of(
        lambda: R.CoordinateDescentRouter(16), "forward", x=ONE, num_tokens=2
    ),
    "CoordinateDescentRouter.route_back": lambda: _route_back(),
    "RoutingPlan.make": to(R.RoutingPlan.make, x=ONE),
    "RoutingPlan.positions": of(routing_plan, "positions"),
    "coordinate_descent": to(R.coordinate_descent, scores=ONE[..., 0], n_iters=3, k=2),
    "select_topk": to(R.select_topk, scores=ONE[..., 0], k=2),
    "soft_topk": to(R.soft_topk, scores=ONE[..., 0], k=2),
    "spawn": lambda: Call(launch.spawn, dict(worker=worker, nprocs=1), alone=False),
    "started": lambda: Call(launch.started, dict(worker=worker, nprocs=1), alone=False),
    "torchrun_group": to(launch.torchrun_group),
    "Workers.join": of(lambda: launch.Workers(0), "join"),
    "AllGather": to(distributed.AllGather),
    "AllGather.forward": of(distributed.AllGather, "forward", x=ONE),
    "all_gather": to(distributed.all_gather, t=ONE),
    "all_gather_same_dim": to(distributed.all_gather_same_dim, t=ONE),
    "all_gather_variable_dim": to(distributed.all_gather_variable_dim, t=ONE),
    "gather_sizes": to(distributed.gather_sizes, t=ONE, dim=0),
    "get_rank": to(distributed.get_rank),
    "get_world_size": to(distributed.get_world_size),
    "has_only_one_value": to(distributed.has_only_one_value, t=ONE),
    "is_distributed": to(distributed.is_distributed),
    "split_by_rank": to(distributed.split_by_rank, x=ONE),
    "all_ring_pass": lambda: Call(ring.all_ring_pass, {}),
    "null_ring_pass": lambda: Call(ring.null_ring_pass, {}),
    "circular_index_left": to(ring.circular_index_left, pos=0, ring_size=2),
    "circular_index_right": to(ring.circular_index_right, pos=0, ring_size=2),
    "circular_rank_left": to(ring.circular_rank_left),
    "circular_rank_right": to(ring.circular_rank_right),
    "one_ring_pass": to(ring.one_ring_pass, x=ONE),
    "ring_pass": to(ring.ring_pass, num_ring_passes=1, x=ONE),
    "send_and_receive_": to(
        ring.send_and_receive_, x=ONE, receive_buffer=ONE.clone(), send_to_rank=0,
        receive_from_rank=0,
    ),
    "FeedForward": to(ring_attention.FeedForward, dim=4),
    "RMSNorm": to(ring_attention.RMSNorm, dim=4),
    "RMSNorm.forward": of(lambda: ring_attention.RMSNorm(4), "forward", x=torch.ones(2, 4)),
    "pad_at_dim": to(ring_attention.pad_at_dim, t=ONE, pad=(0, 1)),
    "pad_dim_to": to(distributed.pad_dim_to, t=ONE, length=3),
    "pad_to_multiple": to(ring_attention.pad_to_multiple, x=ONE, length=3),
    "rotate_half": to(ring_attention.rotate_half, x=ONE),
    "softclamp": to(ring_attention.softclamp, t=ONE, value=3),
    "maybe_pad_seq_and_mask": to(
        ring_attention.maybe_pad_seq_and_mask, x=ONE, mask=None, seq_size=3
    ),
    "sharded_batch_to_sharded_seq": to(
        ring_attention.sharded_batch_to_sharded_seq, x=ONE, mask=None, seq_size=4
    ),
    "sharded_seq_to_sharded_batch": to(
        ring_attention.sharded_seq_to_sharded_batch, logits=ONE, sizes=torch.tensor([1])
    ),
    **surface_hf.CALLS,
}  # fmt: skip


def data() -> Any:
    return R.SequenceShardedDataset([[1, 2, 3]], length=2, batch_size=1, rank=0, ring_size=1)


def _step() -> Call:
    attn = R.SummaryAttention(window=1, stride=2, **SIZES)
    return Call(attn.step, dict(x=ONE[:, :1], cache=attn.prefill(ONE)[1]))


def _route_back() -> Call:
    router = R.CoordinateDescentRouter(16)
    found = router(ONE, num_tokens=2)
    return Call(
        router.route_back,
        dict(src=ONE, routed_tokens=found.routed_tokens, dispatch=found.dispatch),
    )


# numbers and texts that look wrong and are right, by parameter, or of one function only
RIGHT: dict[str, str] = {
    "window": "0", "max_lookback_seq_len": "0", "SummaryAttention.max_lookback_seq_len": "",
    "scale": "0 0.0 -1 -1.0", "dropout": "0 0.0", "attn_dropout": "0 0.0", "ring_attn.memory": "0",
    "ulysses_attn.memory": "0", "RingPlan.make.memory": "0",
    "mla_ring_attn.memory": "0", "mla_plan.memory": "0", "tied_ring_attn.memory": "0",
    "tied_plan.memory": "0", "RingLatentAttention.make_plan.memory": "0",
    "RingLatentAttention.rank": "", "rank": "0", "shard_batch.rank": "",
    "circular_rank_left.rank": "0 -1", "circular_rank_right.rank": "0 -1", "pos": "0 -1",
    "num": "0 -1", "ignore_index": "0 -1", "temperature": "0 0.0", "eos": "0", "select": "0",
    "layer": "0", "source": "0", "sequence": "0", "token": "0", "RingCache.rollback.n": "0",
    "RingCache.reserve.tokens": "0", "ahead": "0", "nothing": "0 -1", "replica": "0",
    "SequenceShardedDataset.seed": "0 -1", "SequenceShardedDataset.source": "Tensor", "number": "0",
    "pad_value": "0 0.0 -1 -1.0 nan inf -inf", "pad_at_dim.value": "0 0.0 -1 -1.0 nan inf -inf",
    "picture": "text", "caller": "text", "num_ring_passes": "0 -1", "send_to_rank": "0",
    "receive_from_rank": "0", "positions.length": "0", "RingTransformer.depth": "0",
    "RMSNorm.eps": "0 0.0",
    "Workers.join.timeout": "0 0.0 inf", "pad_dim_to.dim": "0", "ShardedBatch.unshard.dim": "-1",
    "shard_sequence.dim": "0 -1", "all_gather.dim": "0 -1", "all_gather_variable_dim.dim": "0 -1",
    "gather_sizes.dim": "0 -1", "AllGather.dim": "0 -1", "pad_at_dim.dim": "0 -1",
    "chunk_tokens.dim": "0 -1",
    "ring_cross_entropy.scale": "", "ring_token_logprobs.scale": "",
    "ring_token_logprobs.ignore_index": "", "ring_forward.dropout_seed": "0",
    "register.name": "text", "ring_forward.memory": "0", "ring_halo.width": "0",
}  # fmt: skip

# other words for a parameter in what is said of it
SAID: dict[str, str] = {
    "max_lookback_seq_len": "window", "attn_dropout": "dropout", "rotary_embed_theta": "theta",
    "num_heavy_attn_tokens_q": "num_heavy_tokens_q",
    "num_heavy_attn_tokens_kv": "num_heavy_tokens_kv", "num_heavy_ff_tokens": "num_heavy_tokens",
    "sequence": "sequences", "source": "sequences", "light_dim_head": "dim_head",
    "light_heads": "heads", "unshard_sequence.length": "tokens", "unshard_sequence.dim": "tokens",
    "ShardedBatch.unshard.dim": "tokens", "send_to_rank": "to", "receive_from_rank": "from",
    "path": "file", "RoutingPlan.make.check": "RoutingPlan", "RingCache.rollback.n": "rollback",
    "pad_dim_to.dim": "length",
}  # fmt: skip

# classes that users get and do not make, and methods that this package calls by itself
RESULTS = {
    "Direction", "Hop", "ParityReport", "RingError", "RingInfo", "ShardOutput", "Statistics",
    "AllGatherFunction", "RingFlashAttentionFunction", "RingFlashAttentionCUDAFunction",
    "TorchTyping", "Float", "Int", "Bool", "flash_attn_forward", "flash_attn_backward",
}  # fmt: skip
WITHIN = {
    # of plans
    "by", "call", "calls", "check", "homes", "keys", "of", "run", "tiles", "warm_up", "whole",
    "agree_once", "check_numbers", "check_tokens", "error", "halo_route", "indices",
    "once", "route",
    # of modules
    "all_rows", "choose", "heads_here", "make_projections", "plan_over", "problem", "project",
    "rotate_summaries", "scores",
    # of caches
    "advance", "check_last", "check_layer", "check_new", "even_lengths", "lengths_in",
    "memory", "prepare", "taken_as", "state_note", "values",
    # of caches of transformers, which it calls by itself
    "attend", "batch_repeat_interleave", "batch_select_indices", "crop", "expect", "length",
    "mask", "new_length", "reorder_cache", "reset",
    # of others
    "add", "kill", "pin_memory", "sample",
}  # fmt: skip
