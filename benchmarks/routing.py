"""Measure tokens per second and memory of a routed block against a dense one.

    python -m benchmarks routing --save                             # one GPU
    torchrun --nproc-per-node 4 -m benchmarks routing               # the sequence over four
    python -m benchmarks routing --device cpu --lengths 2048 4096   # a rough idea

A dense block is attention to all tokens and a feed-forward of 4 dims; a routed one is CoLT5's,
with a share of the tokens in its heavy branches. Time is of forward and backward. Of the routed
block's time, "share_scores" is that of its three routers' scores, and "share_top_k" that of soft
top-k and selection. Tokens are those of the whole sequence.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib.clock import all_done, slowest_rank
from benchmarks.lib.options import parser
from benchmarks.lib.results import Row, Run
from benchmarks.lib.rings import device_name, gpus, joined
from ring_attention_pytorch import ConditionalRoutedTransformerBlock, RingAttention, RoutingPlan
from ring_attention_pytorch.nn.transformer import feed_forward

LENGTHS = [2**14, 2**15, 2**16, 2**17, 2**18, 2**19, 2**20]


@dataclass(frozen=True)
class Setting:
    """Say what is measured."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    dim: int = 512
    heads: int = 8
    share: float = 1 / 16
    window: int = 256
    causal: bool = False
    repeats: int = 3


class Figures(NamedTuple):
    """Hold the figures of one block at one length."""

    seconds: float
    gib: float  # the highest memory of any rank beside its input; 0 where it can't be told


class Dense(nn.Module):
    """Be the block that is compared against."""

    def __init__(self, setting: Setting, layout: str):
        super().__init__()
        ring = dist.is_initialized()
        self.attn = RingAttention(
            setting.dim, dim_head=setting.dim // setting.heads, heads=setting.heads,
            causal=setting.causal, rotary_embed=True, ring_attn=ring,
            layout=layout if ring else None,
        )  # fmt: skip
        self.ff = feed_forward(setting.dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ff(x)


def routed_block(setting: Setting, layout: str) -> ConditionalRoutedTransformerBlock:
    """Make a block with a share of its tokens in the heavy branches."""
    head, ring = setting.dim // setting.heads, dist.is_initialized()
    k = max(int(setting.window * setting.share), 1) if setting.causal else setting.share
    return ConditionalRoutedTransformerBlock(
        setting.dim, num_heavy_attn_tokens_q=k, num_heavy_attn_tokens_kv=k, num_heavy_ff_tokens=k,
        light_window_size=setting.window, light_heads=setting.heads // 2, light_dim_head=head,
        heavy_heads=setting.heads, heavy_dim_head=head, rotary_emb=True, causal=setting.causal,
        ring_attn=ring, layout=layout if ring else None,
    )  # fmt: skip


def measured(run: Callable[[], None], setting: Setting) -> Figures:
    """Return the least time of a few, of the slowest rank."""
    cuda = setting.device == "cuda"
    run()  # compiles, allocates
    start_bytes = 0
    if cuda:
        start_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(setting.repeats):
        start = all_done(setting.device)
        run()
        times.append(all_done(setting.device) - start)
    peak = (torch.cuda.max_memory_allocated() - start_bytes) / 2**30 if cuda else 0.0
    return Figures(*slowest_rank([min(times), peak], setting.device))


def step(block: nn.Module, x: Tensor) -> Callable[[], None]:
    """Make a call of forward and backward."""

    def run() -> None:
        block.zero_grad()
        block(x).sum().backward()

    return run


def routing(
    block: ConditionalRoutedTransformerBlock, x: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make calls of a block's scores; and of all that chooses tokens, the scores included."""
    attn, ff = block.conditional_attn, block.conditional_ff
    causal = ff.window is not None
    picks = [
        (attn.q_router, attn.num_heavy_tokens_q, causal),
        (attn.kv_router, attn.num_heavy_tokens_kv, False),
        (ff.router, ff.num_heavy_tokens, causal),
    ]

    def scores() -> None:
        block.zero_grad()
        torch.stack([r.scores(x).sum() for r, *_ in picks]).sum().backward()

    plan = RoutingPlan.make(x, layout=block.spread.layout, group=block.spread.ring(
        block.spread.ring_attn, None
    ))  # fmt: skip

    def all_of_it() -> None:
        block.zero_grad()
        found = [r.choose(x, plan, k, size=ff.window, causal=c) for r, k, c in picks]
        torch.stack([each.gates.sum() for each in found]).sum().backward()

    return scores, all_of_it


def compare(length: int, setting: Setting, layout: str, dense: bool = True) -> dict[str, Figures]:
    """Measure the blocks at one length."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    own = length // ranks
    x = torch.randn(1, own, setting.dim, device=setting.device, dtype=setting.dtype)
    x.requires_grad_()
    found = {}
    makers = {"dense": lambda: Dense(setting, layout)} if dense else {}
    for name, make in (makers | {"routed": lambda: routed_block(setting, layout)}).items():
        block = make().to(setting.device, setting.dtype)
        found[name] = measured(step(block, x), setting)
        if name == "routed":
            names = ("scores", "routing")
            found |= {n: measured(run, setting) for n, run in zip(names, routing(block, x))}
        del block
    return found


def rows(length: int, found: dict[str, Figures], setting: Setting) -> list[Row]:
    """Make a row of each block."""
    routed, dense = found["routed"], found.get("dense")
    about = {"tokens": length, "mask": "causal" if setting.causal else "full", "pass": "both"}
    scores, routing = (found[name].seconds / routed.seconds for name in ("scores", "routing"))
    made = [
        {
            **about, "subject": name, "peak_gib": round(found[name].gib, 2),
            "tokens_per_second": round(length / found[name].seconds),
        }
        for name in ("dense", "routed") if name in found
    ]  # fmt: skip
    made[-1] |= {"share_scores": round(scores, 3), "share_top_k": round(routing - scores, 3)}
    if dense is not None:
        made[-1]["times_faster"] = round(dense.seconds / routed.seconds, 2)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options = parser("routing", __doc__, save="routing", device=default)
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--share", type=float, default=1 / 16, help="of tokens that are routed")
    options.add_argument("--window", type=int, default=256)
    options.add_argument("--causal", action="store_true")
    options.add_argument("--dense-up-to", type=int, default=2**20, help="the longest dense block")
    asked = options.parse_args(argv)
    together = dist.is_torchelastic_launched()
    with joined(asked.device) if together else nullcontext(torch.device(asked.device)) as device:
        dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
        setting = Setting(
            asked.device, dtype, asked.dim, asked.heads, asked.share, asked.window, asked.causal
        )
        layout = "zigzag" if asked.causal else "contiguous"
        heads = {"heads": [asked.heads] * 2, "head_dim": asked.dim // asked.heads}
        run = Run(
            "routing", argv, device_name(device), asked.save, **gpus(device), dim=asked.dim, **heads
        )
        for length in asked.lengths:
            found = compare(length, setting, layout, dense=length <= asked.dense_up_to)
            run.add(rows(length, found, setting))
        run.finish()
