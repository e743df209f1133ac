"""Time decoding against a cache: ours beside cuDNN and, on several GPUs, a short prototype.

    python -m benchmarks decode
    torchrun --nproc-per-node 2 -m benchmarks decode
    python -m benchmarks decode --tune --keys 16384 131072
    torchrun --nproc-per-node 2 -m benchmarks decode --prefill 131072 8192
    torchrun --nproc-per-node 2 -m benchmarks decode --messages --brief
    torchrun --nproc-per-node 2 -m benchmarks decode --bits

One query token for each sequence, 32 query and 8 key heads of 128, bfloat16. Ours also appends the
token. Keys are counted on all GPUs together. Calls go around layers, so that no keys are still in
the GPU's cache; "graph" is a CUDA graph of 16 calls. Times are microseconds a call, medians of
rounds of the slowest rank. "of memory" is the share of the speed at which this run read memory.
`--prefill` times a prompt in chunks beside one call of `ring_attn` over all of it. `--brief` does
what matters most first: ours, then a prompt, then the prototype, then other cuts of the kernel.
`--bits` does ours only, with keys in 16 and in 8 bits, and says how far results are apart.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.rings import device_name, joined
from ring_attention_pytorch import ring_attn, tree_attn_decode
from ring_attention_pytorch.comm.ring import Ring
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.attention import plan_decoding, ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.decode_plan import DecodePlan, Tuning
from ring_attention_pytorch.inference.explain import chunk_sizes
from ring_attention_pytorch.inference.partial import Scores

HEADS, KEY_HEADS, D, CALLS = 32, 8, 128, 16
TOKEN = 2 * KEY_HEADS * D * 2  # bytes
SIZES = ((1, 16384), (1, 131072), (1, 524288), (8, 32768))
TUNINGS = [
    (page, Tuning(cols, warps, stages, programs, early))
    for page, cols, warps, stages, programs, early in (
        (64, 64, 4, 3, 2, False), (64, 64, 4, 3, 2, True), (64, 64, 4, 4, 2, True),
        (64, 64, 4, 3, 3, True), (64, 64, 8, 4, 2, True), (64, 64, 4, 5, 1, True),
        (64, 64, 2, 4, 2, True), (64, 32, 2, 5, 4, True), (64, 32, 4, 6, 2, True),
        (64, 32, 1, 5, 4, True), (256, 64, 4, 4, 2, True), (256, 128, 4, 3, 1, True),
        (256, 128, 8, 3, 1, True), (256, 256, 8, 2, 1, True),
    )
]  # fmt: skip
Call = Callable[[int], object]  # of a layer's number


def layers_for(nbytes: int) -> int:
    """Return how many layers' keys are more than the GPU's cache holds."""
    return max(2, min(CALLS, (1 << 30) // nbytes))


def read_speed(device: torch.device) -> float:
    """Return the bytes a second at which PyTorch reads memory at best."""
    x = torch.zeros(1 << (29 if device.type == "cuda" else 22), device=device)
    found = []
    for view in (x, x.view(torch.int64), x.view(torch.int32)):
        for read in (torch.sum, torch.amax):
            took = slowest(lambda read=read, view=view: read(view), 1, 9, device)
            found.append(x.nbytes / (took / 1e6))
    return max(found)


def timed(call: Call, layers: int, device: torch.device) -> float:
    """Return microseconds a call, launched one by one."""
    times = 100 if device.type == "cuda" else 2
    for i in range(2 * layers):
        call(i % layers)
    return slowest(lambda: [call(i % layers) for i in range(times)], times, 5, device)


def graphed(call: Call, layers: int, device: torch.device) -> float:
    """Return microseconds a call, in a graph of several."""
    if device.type == "cpu":
        return float("nan")
    for i in range(layers):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i % layers)
    return slowest(lambda: [graph.replay() for _ in range(10)], 10 * CALLS, 5, device)


def slowest(run: Callable[[], object], calls: int, rounds: int, device: torch.device) -> float:
    """Return the median time of rounds of so many calls, in microseconds a call."""
    found = []
    for _ in range(rounds + 1):
        wait(device)
        if dist.is_initialized():
            dist.barrier()
        wait(device)
        begin = time.perf_counter()
        run()
        wait(device)
        took = torch.tensor((time.perf_counter() - begin) * 1e6 / calls, device=device)
        if dist.is_initialized():
            dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(took.item())
    return median(found[1:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def filled(
    b: int,
    keys: int,
    layers: int,
    ring: Ring,
    device: torch.device,
    page: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> RingCache:
    """Return a cache that holds random keys, and has room for some thousands more."""
    cache = RingCache(
        b, KEY_HEADS, D, layers=layers, capacity=keys + 8192, page=page, dtype=dtype,
        device=device, group=ring,
    )  # fmt: skip
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, device=device, dtype=torch.bfloat16))
    for pool in (*cache.key_scales, *cache.value_scales):
        pool.fill_(1.0)
    cache._apply([], [keys] * b)
    return cache


def ours(
    b: int, keys: int, layers: int, ring: Ring, q: Tensor, k: Tensor, dtype: torch.dtype
) -> Call:
    cache = filled(b, keys, layers, ring, q.device, dtype=dtype)
    kernel = "triton" if q.is_cuda else None
    return lambda i: ring_attn_with_cache(q, k, k, cache, layer=i, kernel=kernel)


def cudnn(b: int, keys: int, layers: int, q: Tensor) -> Call:
    """Return calls of cuDNN on keys of one rank: out and lse."""
    k, v = (
        [torch.randn(b, keys, KEY_HEADS, D, device=q.device, dtype=q.dtype) for _ in range(layers)]
        for _ in "kv"
    )
    op = torch.ops.aten._scaled_dot_product_cudnn_attention

    def call(i: int) -> tuple[Tensor, Tensor]:
        heads = (t.transpose(1, 2) for t in (q, k[i], v[i]))
        out, lse, *_ = op(*heads, None, True, 0.0, False, False, scale=D**-0.5)
        return out, lse

    return call


def prototype(b: int, keys: int, layers: int, q: Tensor) -> Call:
    """Return calls of cuDNN on this rank's keys, one all-gather, and PyTorch's operators."""
    local, size = cudnn(b, keys // dist.get_world_size(), layers, q), dist.get_world_size()
    every = torch.empty(size, b, HEADS, 1, D + 1, device=q.device)

    def call(i: int) -> Tensor:
        out, lse = local(i)
        mine = torch.cat((out.float(), lse.reshape(b, HEADS, 1, 1)), dim=-1)
        dist.all_gather_into_tensor(every, mine)
        weight = torch.softmax(every[..., -1:], dim=0)
        return (every[..., :-1] * weight).sum(0).to(q.dtype)

    return call


def trees(b: int, keys: int, q: Tensor) -> Call:
    n = keys // (dist.get_world_size() if dist.is_initialized() else 1)
    k, v = (torch.randn(b, KEY_HEADS, n, D, device=q.device, dtype=q.dtype) for _ in "kv")
    heads = q.transpose(1, 2)
    return lambda i: tree_attn_decode(heads, k, v, shard_kv_seq=False)


def subjects(b: int, keys: int, device: torch.device) -> dict[str, Callable[[], Call]]:
    """Return what is compared, each as a function that prepares it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(1)
    q = torch.randn(b, 1, HEADS, D, device=device, dtype=torch.bfloat16)
    k = torch.randn(b, 1, KEY_HEADS, D, device=device, dtype=torch.bfloat16)
    layers = layers_for(b * keys * TOKEN // ranks)
    found: dict[str, Callable[[], Call]] = {}
    rings = {"ours": Ring()} | ({"ours, one GPU": Ring.alone()} if ranks > 1 else {})
    for name, ring in rings.items():
        for bits, dtype in (("", torch.bfloat16), (", 8 bits", torch.float8_e4m3fn)):
            found[name + bits] = partial(ours, b, keys, layers, ring, q, k, dtype)
    if device.type == "cuda" and ranks > 1:
        found["prototype"] = lambda: prototype(b, keys, layers, q)
        found["cuDNN, own keys only"] = lambda: cudnn(b, keys // ranks, layers, q)
    elif device.type == "cuda":
        found["cuDNN"] = lambda: cudnn(b, keys, layers, q)
    found["tree_attn_decode"] = lambda: trees(b, keys, q)
    return found


def report(name: str, b: int, keys: int, speed: float, device: torch.device) -> None:
    """Measure a subject and print its row."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    make = subjects(b, keys, device)[name]
    layers = 1 if name == "tree_attn_decode" else layers_for(b * keys * TOKEN // ranks)
    floor = b * keys * TOKEN / ranks / speed * 1e6
    told = share = ""
    for measure in (graphed, timed):
        try:
            took = measure(make(), layers, device)
            told += f"{took:8.1f}"
        except Exception as error:
            took = float("nan")
            told += f" {type(error).__name__}: {error} "
        share = f"{floor / took:9.0%}" if measure is graphed else share
    told += f"{floor:8.1f}  {share}"
    if is_first():
        print(f"{f'{b} x {keys}':>12}  {name:22}{told}", flush=True)


def group(name: str) -> AbstractContextManager[torch.device]:
    """Return a block in which the processes that torchrun started are a group, on their devices.

    Each must have its own before the group's first exchange: NCCL keeps a communicator for each
    device that a rank has used, and two ranks with different ones wait for each other for ever.
    """
    if dist.is_torchelastic_launched():
        return joined(name)
    return nullcontext(torch.device(name, 0) if name == "cuda" else torch.device(name))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def tune(sizes: Sequence[tuple[int, int]], ring: Ring, device: torch.device) -> None:
    """Print times of kernels that are cut otherwise, and how far results are apart."""
    first: dict[tuple[int, int], Tensor] = {}
    for page, tuning in TUNINGS:
        told = []
        for b, keys in sizes:
            torch.manual_seed(0)
            q = torch.randn(b, 1, HEADS, D, device=device, dtype=torch.bfloat16)
            k = torch.randn(b, 1, KEY_HEADS, D, device=device, dtype=torch.bfloat16)
            layers = layers_for(b * keys * TOKEN)
            cache = filled(b, keys, layers, ring, device, page)
            try:
                call = planned(plan_decoding(q, cache, Scores(D**-0.5), tuning), q, k)
                for _ in range(3):
                    out = call(0).float()
                apart = (out - first.setdefault((b, keys), out)).abs().max().item()
                told.append(f"{b} x {keys}: {graphed(call, layers, device):7.1f} us ({apart:.0e})")
            except Exception as error:  # too much shared memory, say
                told.append(f"{b} x {keys}: {type(error).__name__}: {str(error)[:60]}")
            del cache
        if is_first():
            print(f"  {'   '.join(told)}   page {page}, {tuple(tuning)}", flush=True)


def lost(device: torch.device, keys: int = 4096) -> float:
    """Return the relative error of 8 bits beside 16, for random keys."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, HEADS, D, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, keys, KEY_HEADS, D, device=device, dtype=q.dtype).unbind(0)
    found = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = RingCache(1, KEY_HEADS, D, dtype=dtype, device=device, group=Ring.alone())
        cache.append(k, v)
        out = ring_attn_with_cache(q, k[:, :1], v[:, :1], cache)
        assert isinstance(out, Tensor)
        found.append(out.float())
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def planned(plan: DecodePlan, q: Tensor, k: Tensor) -> Callable[[int], Tensor]:
    """Return calls by a plan, without checks."""
    cache = plan.cache
    assert isinstance(cache, RingCache)

    def call(i: int) -> Tensor:
        cache.prepare(1, i, cache.in_graph)
        out, _ = plan.run(q, k, k, i)
        cache.advance(1, i, on_device=False, in_graph=cache.in_graph)
        return out

    return call


def prefill(tokens: int, chunk: int, device: torch.device) -> str:
    """Time a prompt in chunks, and in one call; and what memory chunks take beside the cache."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def drawn(n: int) -> list[Tensor]:
        heads = (HEADS, KEY_HEADS, KEY_HEADS)
        return [
            torch.randn(1, n // ranks, h, D, device=device, dtype=torch.bfloat16) for h in heads
        ]

    whole, part = drawn(tokens), drawn(chunk)
    cache = RingCache(
        1, KEY_HEADS, D, capacity=tokens, dtype=torch.bfloat16, device=device, group=Ring()
    )

    def chunks() -> None:
        cache.free(0)
        for _ in range(tokens // chunk):
            ring_attn_with_cache(*part, cache, layout="zigzag")

    def at_once() -> None:
        with torch.no_grad():
            ring_attn(*whole, causal=True, layout="zigzag", group=Ring())

    took = {
        name: slowest(run, 1, 3, device) / 1e3 for name, run in (("one", at_once), ("in", chunks))
    }
    more = float("nan")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        chunks()
        torch.cuda.synchronize()
        more = (torch.cuda.max_memory_allocated() - before) / 2**20
    sizes, held = chunk_sizes(cache, HEADS, chunk)
    return (
        f"{tokens} tokens, at once {took['one']:.1f} ms, in chunks of {chunk} {took['in']:.1f} ms: "
        f"{took['one'] / took['in']:.0%} of the speed; cache {cache.nbytes / 2**20:.0f} MiB a "
        f"rank, {more:.0f} MiB more, planned {sizes.memory(held) / 2**20:.0f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    about = argparse.ArgumentParser("decode", description=__doc__)
    about.formatter_class = argparse.RawDescriptionHelpFormatter
    about.add_argument("--keys", type=int, nargs="+")
    about.add_argument("--tune", action="store_true", help="cut the kernel in other ways, too")
    about.add_argument("--prefill", type=int, nargs=2, metavar=("TOKENS", "CHUNK"))
    about.add_argument("--brief", action="store_true")
    about.add_argument("--bits", action="store_true", help="ours only, in 16 and in 8 bits")
    about.add_argument("--messages", action="store_true", help="merge what ranks send")
    about.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    asked = about.parse_args(argv)
    sizes = SIZES if asked.keys is None else [(1, n) for n in asked.keys]
    decode_plan.PUSH = not asked.messages
    with group(asked.device) as device:
        if asked.prefill is not None:
            told = prefill(*asked.prefill, device)
            if is_first():
                print(told, flush=True)
            return
        speed = read_speed(device)
        if is_first():
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            print(f"{ranks} x {device_name(device)}, reading {speed / 1e12:.2f} TB/s")
            print(
                f"{'keys':>12}  {'':22}{'graph':>8}{'singly':>8}{'floor':>8}  of memory", flush=True
            )
        if asked.bits and is_first():
            print(f"results of 8 bits are {lost(device):.1%} from those of 16", flush=True)
        if asked.tune:
            tune(sizes, Ring(), device)
        elif asked.brief:
            brief(speed, device)
        else:
            for b, keys in sizes:
                for name in subjects(b, keys, device):
                    if name.startswith("ours") if asked.bits else "bits" not in name:
                        report(name, b, keys, speed, device)


def brief(speed: float, device: torch.device) -> None:
    """Print what matters most first."""
    sizes = [size for size in SIZES if size[0] == 1]
    for size in sizes:
        report("ours", *size, speed, device)
    told = prefill(131072, 8192, device)
    if is_first():
        print(told, flush=True)
    for name in ("ours, one GPU", "prototype"):
        for size in sizes[:2]:
            report(name, *size, speed, device)
    tune(sizes[:2], Ring.alone(), device)
