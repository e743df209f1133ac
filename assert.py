"""See ring attention equal regular attention: `python assert.py --causal`.

Spawns processes, gives every one its own batch, and compares the output, the loss and every
gradient, on every rank, with one process that runs regular attention over all batches.
"""

import signal
import sys
import time
from dataclasses import dataclass
from math import ceil
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch import RingAttention, RingTransformer
from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.launch import spawn

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}  # 16 bits: PLAIN_FACTOR times plain PyTorch
PLAIN_FACTOR = 3.0


@dataclass(frozen=True)
class Options:
    """The command line, as the workers get it."""

    world_size: int
    batch_sizes: list[int]
    seq_len: int
    dim: int
    dtype: torch.dtype
    use_cuda: bool
    attention: dict[str, Any]  # of the ring's model and its reference alike
    ring: dict[str, Any]  # of the ring's only
    reference: dict[str, Any]


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--world-size", default=8, type=click.IntRange(1), help="number of processes")
@click.option(
    "--batch-size", default=2, type=click.IntRange(1), help="samples that each process brings"
)
@click.option(
    "--num-sharded-batches",
    default=1,
    type=click.IntRange(1),
    help="rings into which the processes form",
)
@click.option("--batch-size-var-len", is_flag=True, help="let the processes' batch sizes differ")
@click.option("--causal", is_flag=True, help="autoregressive")
@click.option("--striped-ring-attn", is_flag=True, help="the same as --layout striped")
@click.option("--layout", default=None, type=click.Choice(["contiguous", "striped", "zigzag"]))
@click.option(
    "--num-buckets", default=2, type=click.IntRange(1), help="tiles of a process' queries"
)
@click.option("--seq-len", default=31, type=click.IntRange(1), help="tokens of a sequence")
@click.option("--model-dim", default=8, help="width of the model")
@click.option("--heads", default=8, help="query heads")
@click.option("--num-grouped-query-heads", default=2, help="query heads to each key head")
@click.option("--dim-head", default=16, help="width of a head")
@click.option("--lookback", default=None, type=int, help="window: tokens seen before each")
@click.option("--kernel", type=click.Choice(list(KERNELS)), help="by default the fastest there is")
@click.option("--dtype", default="float64", type=click.Choice(list(DTYPES)))
@click.option("--use-cuda", is_flag=True, help="one GPU a process, over NCCL")
@click.option(
    "--compare-regular-attn/--compare-flash-attn",
    default=True,
    help="with all scores at once (default), or with tiles, on one process",
)
def main(world_size: int, batch_size: int, num_sharded_batches: int, **given: Any) -> None:
    if world_size % num_sharded_batches != 0:
        raise click.UsageError("--num-sharded-batches must divide --world-size")
    ring_seq_size = ceil(given["seq_len"] / (world_size // num_sharded_batches))
    varied = given["batch_size_var_len"]
    options = Options(
        world_size=world_size,
        batch_sizes=[batch_size + (rank % 2 if varied else 0) for rank in range(world_size)],
        seq_len=given["seq_len"],
        dim=given["model_dim"],
        dtype=DTYPES[given["dtype"]],
        use_cuda=given["use_cuda"],
        attention={
            "causal": given["causal"],
            "heads": given["heads"],
            "dim_head": given["dim_head"],
            "num_grouped_query_heads": given["num_grouped_query_heads"],
            "max_lookback_seq_len": given["lookback"],
        },
        ring={
            "ring_attn": True,
            "ring_seq_size": ring_seq_size,
            "bucket_size": max(1, ring_seq_size // given["num_buckets"]),
            "striped_ring_attn": given["striped_ring_attn"],
            "layout": given["layout"],
            "kernel": given["kernel"],
        },
        reference={"force_regular_attn": given["compare_regular_attn"]},
    )
    if options.use_cuda and torch.cuda.device_count() < world_size:
        raise click.UsageError(f"{world_size} processes need as many GPUs")
    try:
        models(RingAttention, options, dim=options.dim, rotary_embed=True, **options.attention)
    except ValueError as error:  # better said once, here, than by every process
        raise click.UsageError(str(error)) from None
    started = time.perf_counter()
    try:
        rows, *_ = spawn(
            worker, world_size, options, backend="nccl" if options.use_cuda else "gloo"
        )
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(report(rows, options, time.perf_counter() - started))


def report(rows: dict[str, tuple[float, float]], options: Options, seconds: float) -> int:
    """Print worst relative error and limit of each result; 1 if any is beyond."""
    print(f"\n{'':44}{'relative error':>15}{'limit':>11}")
    failed = 0
    for name, (error, limit) in rows.items():
        ok = error <= limit  # False for NaN
        failed += not ok
        print(f"{name:44}{error:15.1e}{limit:11.1e}  {'ok' if ok else 'FAILED'}")
    verdict = f"{failed} of {len(rows)} differ" if failed else "outputs and gradients are the same"
    print(f"\n{verdict}: worst of {options.world_size} ranks, {options.dtype}, {seconds:.0f} s")
    return int(failed > 0)


def worker(rank: int, options: Options) -> dict[str, tuple[float, float]]:
    """Compare everything, in one of the processes; what is worst on any rank."""
    torch.set_num_threads(1)
    rows = compare_transformer(rank, options) | compare_attention(rank, options)
    worst = torch.tensor(list(rows.values()), dtype=torch.float64).nan_to_num(torch.inf)
    worst = worst.to(device(options))
    errors, limits = worst[:, 0].contiguous(), worst[:, 1].contiguous()
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    dist.all_reduce(limits, dist.ReduceOp.MIN)
    return dict(zip(rows, zip(errors.tolist(), limits.tolist()), strict=True))


def compare_transformer(rank: int, options: Options) -> dict[str, tuple[float, float]]:
    """RingTransformer under DDP: logits, loss, and the gradient of every parameter."""
    shape = {"num_tokens": 256, "dim": options.dim, "depth": 2} | options.attention
    ring, exact, plain = models(RingTransformer, options, **shape)
    ids = torch.randint(0, 256, (sum(options.batch_sizes), options.seq_len))
    ids, mine = ids.to(device(options)), my_samples(rank, options)
    ddp = DistributedDataParallel(ring)

    results = {"RingTransformer logits": (ring(ids[mine]), *(m(ids)[mine] for m in (exact, plain)))}
    losses = (ddp(ids[mine], return_loss=True), *(m(ids, return_loss=True) for m in (exact, plain)))
    results["RingTransformer loss"] = losses
    for loss in losses:
        loss.backward()
    return judge(results | gradients("RingTransformer", ring, exact, plain), options)


def compare_attention(rank: int, options: Options) -> dict[str, tuple[float, float]]:
    """RingAttention: output, and the gradients of its input and of every parameter."""
    ring, exact, plain = models(
        RingAttention, options, dim=options.dim, rotary_embed=True, auto_shard_seq=True,
        **options.attention,
    )  # fmt: skip
    x, cotangent = (
        torch.randn(sum(options.batch_sizes), options.seq_len, options.dim).to(device(options))
        for _ in range(2)
    )
    x, cotangent, mine = x.to(options.dtype), cotangent.to(options.dtype), my_samples(rank, options)
    inputs = [t.detach().clone().requires_grad_() for t in (x[mine], x.double(), x)]
    outs = [model(t) for model, t in zip((ring, exact, plain), inputs, strict=True)]
    for out, given in zip(outs, (cotangent[mine], cotangent.double(), cotangent), strict=True):
        out.backward(given)
    for parameter in ring.parameters():  # every rank has the part of its own samples
        dist.all_reduce(parameter.grad)
    results = {"RingAttention output": (outs[0], *(out[mine] for out in outs[1:]))}
    d_inputs = [t.grad for t in inputs]
    results["RingAttention d input"] = (d_inputs[0], *(grad[mine] for grad in d_inputs[1:]))
    return judge(results | gradients("RingAttention", ring, exact, plain), options)


def models(kind: type[nn.Module], options: Options, **shape: Any) -> list[nn.Module]:
    """The ring's, the reference in float64, and the reference in the ring's own precision."""
    torch.manual_seed(0)
    alone = {name: value for name, value in shape.items() if name != "auto_shard_seq"}
    ring = kind(**shape, **options.ring).to(options.dtype)
    exact = kind(**alone, **options.reference).double()
    plain = kind(**alone, **options.reference).to(options.dtype)
    for reference in (exact, plain):
        reference.load_state_dict(ring.state_dict())
    return [model.to(device(options)) for model in (ring, exact, plain)]


def gradients(title: str, *of: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    return {
        f"{title} d {named[0][0]}": tuple(parameter.grad for _, parameter in named)
        for named in zip(*(model.named_parameters() for model in of), strict=True)
    }


def judge(
    results: dict[str, tuple[Tensor, ...]], options: Options
) -> dict[str, tuple[float, float]]:
    """(error, limit) of each (the ring's, exact, plain) result."""
    rows = {}
    for name, (got, exact, plain) in results.items():
        limit = LIMITS.get(options.dtype)
        if limit is None:
            rounding = torch.finfo(options.dtype).eps
            limit = PLAIN_FACTOR * relative_error(plain, exact) + rounding
        rows[name] = (relative_error(got, exact), limit)
    return rows


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def my_samples(rank: int, options: Options) -> slice:
    first = sum(options.batch_sizes[:rank])
    return slice(first, first + options.batch_sizes[rank])


def device(options: Options) -> torch.device:
    return torch.device("cuda" if options.use_cuda else "cpu")


if __name__ == "__main__":
    main()
