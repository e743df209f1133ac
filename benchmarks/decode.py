"""Time decoding against a cache: ours beside cuDNN and, on several GPUs, a short prototype.

    python -m benchmarks decode
    torchrun --nproc-per-node 2 -m benchmarks decode
    torchrun --nproc-per-node 4 -m benchmarks decode --keys 131072 1048576 --batch 1 8 --save
    python -m benchmarks decode --tune --keys 16384 131072
    torchrun --nproc-per-node 2 -m benchmarks decode --prefill 131072 8192
    torchrun --nproc-per-node 2 -m benchmarks decode --messages --brief
    torchrun --nproc-per-node 2 -m benchmarks decode --bits

One query token for each sequence, 32 query and 8 key heads of 128, bfloat16. Ours also appends the
token. Keys are counted on all GPUs together. Calls go around layers, so that no keys are still in
the GPU's cache; "graph" is a CUDA graph of 16 calls. Times are microseconds a call, medians of
rounds of the slowest rank. "floor" is the time in which one GPU reads the keys that it holds, at
the speed at which this run read memory; "of_memory" is the share of that speed.
`--prefill` times a prompt in chunks beside one call of `ring_attn` over all of it. `--brief` does
what matters most first: ours, then a prompt, then the prototype, then other cuts of the kernel.
`--ours` does ours only; `--bits` too, with keys in 16 and in 8 bits, and says how far results are
apart. What does not fit into the memory of the GPU that has least is a row that says so.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.attempts import attempt
from benchmarks.lib.calls import (
    CALLS,
    Call,
    graphed,
    group,
    is_first,
    read_speed,
    timed,
    too_much,
)
from benchmarks.lib.options import parser
from benchmarks.lib.prefill import prefill
from benchmarks.lib.results import GRAPH, ONE_BY_ONE, Row, Run, Subject, failed, rounded
from benchmarks.lib.rings import device_name, gpus, ranks
from ring_attention_pytorch import tree_attn_decode
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.decode_plan import Asked, DecodePlan
from ring_attention_pytorch.inference.partial import Scores
from ring_attention_pytorch.inference.programs import Tuning
from ring_attention_pytorch.ranks.ring import Ring

HEADS, KEY_HEADS, D = 32, 8, 128
ROOM = 2048  # tokens that are appended while one is timed, at most
SIZES = ((1, 16384), (1, 131072), (1, 524288), (8, 32768))
TUNINGS = [
    (page, Tuning(cols, warps, stages, programs, early))
    for page, cols, warps, stages, programs, early in (
        (64, 64, 4, 3, 1, False), (64, 64, 4, 3, 2, False), (64, 64, 4, 3, 1, True),
        (64, 64, 4, 4, 1, True), (64, 64, 4, 3, 3, True), (64, 64, 8, 4, 1, True),
        (64, 64, 4, 5, 1, True), (64, 64, 2, 4, 1, True), (64, 32, 2, 5, 2, True),
        (64, 32, 4, 6, 1, True), (64, 32, 1, 5, 2, True), (256, 64, 4, 4, 1, True),
        (256, 128, 4, 3, 1, True), (256, 128, 8, 3, 1, True), (256, 256, 8, 2, 1, True),
    )
]  # fmt: skip


class Case(NamedTuple):
    """Hold sequences, the keys of each on all ranks, and the ranks on which they are spread."""

    b: int
    keys: int
    ranks: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def read(self) -> int:
        """Return the bytes that one GPU reads in a call.

        >>> Case(1, 1024, 1).read // 1024, Case(8, 1024, 4, torch.float8_e4m3fn).read // 2048
        (4096, 2112)
        """
        scales = 4 if self.dtype.itemsize == 1 else 0
        token = 2 * KEY_HEADS * (D * self.dtype.itemsize + scales)
        return self.b * self.keys * token // self.ranks

    @property
    def layers(self) -> int:
        """Return how many layers' keys are more than the GPU's cache holds.

        >>> Case(1, 16384, 1).layers, Case(1, 131072, 1).layers, Case(8, 131072, 1).layers
        (16, 2, 1)
        """
        return max(1, min(CALLS, (1 << 30) // self.read))

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that it takes: all layers, and one that is being drawn."""
        return (self.layers + 1) * self.read * (self.keys + ROOM) // self.keys


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
        b, KEY_HEADS, D, layers=layers, capacity=keys + ROOM, page=page, dtype=dtype,
        device=device, group=ring,
    )  # fmt: skip
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, device=device, dtype=torch.bfloat16))
    for pool in (*cache.key_scales, *cache.value_scales):
        pool.fill_(1.0)
    cache._apply([], [keys] * b)
    return cache


def ours(case: Case, ring: Ring, q: Tensor, k: Tensor) -> Call:
    """Return calls of `ring_attn_with_cache`."""
    cache = filled(case.b, case.keys, case.layers, ring, q.device, dtype=case.dtype)
    kernel = "triton" if q.is_cuda else None
    return lambda i: ring_attn_with_cache(q, k, k, cache, layer=i, kernel=kernel)


def cudnn(case: Case, q: Tensor) -> Call:
    """Return calls of cuDNN on keys of one rank: out and lse."""
    shape = case.b, case.keys // case.ranks, KEY_HEADS, D
    k, v = (
        [torch.randn(shape, device=q.device, dtype=q.dtype) for _ in range(case.layers)]
        for _ in "kv"
    )
    op = torch.ops.aten._scaled_dot_product_cudnn_attention

    def call(i: int) -> tuple[Tensor, Tensor]:
        heads = (t.transpose(1, 2) for t in (q, k[i], v[i]))
        out, lse, *_ = op(*heads, None, True, 0.0, False, False, scale=D**-0.5)
        return out, lse

    return call


def prototype(case: Case, q: Tensor) -> Call:
    """Return calls of cuDNN on this rank's keys, one all-gather, and PyTorch's operators."""
    local = cudnn(case, q)
    every = torch.empty(case.ranks, case.b, HEADS, 1, D + 1, device=q.device)

    def call(i: int) -> Tensor:
        out, lse = local(i)
        mine = torch.cat((out.float(), lse.reshape(case.b, HEADS, 1, 1)), dim=-1)
        dist.all_gather_into_tensor(every, mine)
        weight = torch.softmax(every[..., -1:], dim=0)
        return (every[..., :-1] * weight).sum(0).to(q.dtype)

    return call


def trees(case: Case, q: Tensor) -> Call:
    """Return calls of `tree_attn_decode` on keys that are given, the same ones each time."""
    shape = case.b, KEY_HEADS, case.keys // case.ranks, D
    k, v = (torch.randn(shape, device=q.device, dtype=q.dtype) for _ in "kv")
    heads = q.transpose(1, 2)
    return lambda i: tree_attn_decode(heads, k, v, shard_kv_seq=False)


Subjects = dict[str, tuple[Case, Callable[[], Call]]]


def subjects(b: int, keys: int, device: torch.device) -> Subjects:
    """Return what is compared: where its keys are, and a function that prepares it."""
    torch.manual_seed(1)
    q = torch.randn(b, 1, HEADS, D, device=device, dtype=torch.bfloat16)
    k = torch.randn(b, 1, KEY_HEADS, D, device=device, dtype=torch.bfloat16)
    spread = Case(b, keys, ranks())
    found: Subjects = {}
    rings: dict[str, tuple[Callable[[], Ring], Case]] = {"ours": (Ring, spread)}
    if spread.ranks > 1:
        rings["ours, one GPU"] = Ring.alone, spread._replace(ranks=1)
    for name, (ring, case) in rings.items():
        for bits, dtype in (("", torch.bfloat16), (", 8 bits", torch.float8_e4m3fn)):
            kept = case._replace(dtype=dtype)
            found[name + bits] = kept, partial(ours, kept, ring(), q, k)
    if device.type == "cuda" and spread.ranks > 1:
        found["prototype"] = spread, partial(prototype, spread, q)
        found["cuDNN, own keys only"] = spread, partial(cudnn, spread, q)
    elif device.type == "cuda":
        found["cuDNN"] = spread, partial(cudnn, spread, q)
    found["tree_attn_decode"] = spread, partial(trees, spread, q)
    return found


def rows(name: str, b: int, keys: int, speed: float, device: torch.device) -> Iterator[Row]:
    """Measure a subject in a graph and one by one; `speed` is that of memory, in bytes a second."""
    case, make = subjects(b, keys, device)[name]
    layers = 1 if name == "tree_attn_decode" else case.layers
    floor = case.read / speed * 1e6
    shape = {"heads": [HEADS, KEY_HEADS], "head_dim": D, "dtype": "bfloat16"}
    about = {"batch": b, "tokens": keys, "mask": "causal", **shape}
    lack = too_much(case.nbytes, device)
    for mode, measure in ((GRAPH, graphed), (ONE_BY_ONE, timed)):
        if mode == GRAPH and device.type == "cpu":
            continue
        of_mode = about | Subject(name, None, mode).about()
        if lack is not None:
            yield from failed(of_mode, lack)
            continue
        took = attempt(lambda measure=measure: measure(make(), layers, device))
        if isinstance(took, str):
            yield from failed(of_mode, took)
            continue
        figures = dict(microseconds=took, floor=floor, of_memory=floor / took)
        yield of_mode | {"pass": "both"} | {each: rounded(x) for each, x in figures.items()}


def tune(sizes: Sequence[tuple[int, int]], ring: Ring, device: torch.device) -> None:
    """Print times of kernels that are cut otherwise, and how far results are apart."""
    first: dict[tuple[int, int], Tensor] = {}
    for page, tuning in TUNINGS:
        told = []
        for b, keys in sizes:
            torch.manual_seed(0)
            q = torch.randn(b, 1, HEADS, D, device=device, dtype=torch.bfloat16)
            k = torch.randn(b, 1, KEY_HEADS, D, device=device, dtype=torch.bfloat16)
            layers = Case(b, keys, 1).layers
            cache = filled(b, keys, layers, ring, device, page)
            try:
                scores, kernel = Scores(D**-0.5), "triton" if q.is_cuda else "eager"
                asked = Asked(tuple(q.shape), True, False, scores, False, False, kernel)
                call = planned(DecodePlan(cache.pools, asked, tuning), cache, q, k)
                for _ in range(3):
                    out = call(0).float()
                apart = (out - first.setdefault((b, keys), out)).abs().max().item()
                told.append(f"{b} x {keys}: {graphed(call, layers, device):7.1f} us ({apart:.0e})")
            except Exception as error:  # too much shared memory, say
                told.append(f"{b} x {keys}: {type(error).__name__}: {str(error)[:60]}")
            del cache
        if is_first():
            print(f"  {'   '.join(told)}   page {page}, {tuple(tuning)}", flush=True)


def lost(device: torch.device) -> float:
    """Return the relative error of 8 bits beside 16, for random keys."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, HEADS, D, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 4096, KEY_HEADS, D, device=device, dtype=q.dtype).unbind(0)
    found = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = RingCache(1, KEY_HEADS, D, dtype=dtype, device=device, group=Ring.alone())
        cache.append(k, v)
        out = ring_attn_with_cache(q, k[:, :1], v[:, :1], cache)
        assert isinstance(out, Tensor)
        found.append(out.float())
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


def planned(plan: DecodePlan, cache: RingCache, q: Tensor, k: Tensor) -> Callable[[int], Tensor]:
    """Return calls by a plan of a cache, without checks."""

    def call(i: int) -> Tensor:
        cache.prepare(1, i, cache.in_graph)
        out, _ = plan.run(q, k, k, i)
        if not cache.in_graph:
            cache.advance(1, i, on_device=False)
        return out

    return call


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with `--save` keep."""
    about = parser("decode", __doc__, save="decode", device="cuda")
    about.add_argument("--keys", type=int, nargs="+", help="of a sequence, on all ranks")
    about.add_argument("--batch", type=int, nargs="+", help="with each of --keys; 1 without it")
    what = about.add_mutually_exclusive_group()
    what.add_argument("--tune", action="store_true", help="cut the kernel in other ways, too")
    what.add_argument("--prefill", type=int, nargs=2, metavar=("TOKENS", "CHUNK"))
    what.add_argument("--brief", action="store_true")
    what.add_argument("--ours", action="store_true", help="ours only")
    what.add_argument("--bits", action="store_true", help="ours only, in 16 and in 8 bits")
    about.add_argument("--messages", action="store_true", help="merge what ranks send")
    asked = about.parse_args(argv)
    if asked.batch is not None and asked.keys is None:
        about.error("--batch goes with --keys; without them lengths and batches are given")
    decode_plan.PUSH = not asked.messages
    with group(asked.device) as device:
        run = Run("decode", argv, device_name(device), asked.save, **gpus(device))
        if asked.prefill is not None:
            run.add(prefill(*asked.prefill, device))
        else:
            decode(asked, run, device)
        run.finish()


def decode(asked: Namespace, run: Run, device: torch.device) -> None:
    """Measure all that is asked for but prompts."""
    sizes = SIZES if asked.keys is None else [*product(asked.batch or [1], asked.keys)]
    speed = read_speed(device)
    if is_first():
        print(f"{ranks()} x {device_name(device)}, reading {speed / 1e12:.2f} TB/s", flush=True)
    if asked.bits and is_first():
        print(f"results of 8 bits are {lost(device):.1%} from those of 16", flush=True)
    if asked.tune:
        tune(sizes, Ring(), device)
    elif asked.brief:
        brief(run, speed, device)
    else:
        for b, keys in sizes:
            for name in filter(partial(is_asked, asked), subjects(b, keys, device)):
                run.add(rows(name, b, keys, speed, device))


def is_asked(asked: Namespace, name: str) -> bool:
    """Tell whether a subject is to be measured.

    >>> asked = Namespace(ours=True, bits=False)
    >>> [is_asked(asked, name) for name in ("ours", "ours, one GPU", "ours, 8 bits", "cuDNN")]
    [True, True, False, False]
    """
    ours = name.startswith("ours") or not (asked.ours or asked.bits)
    return ours and (asked.bits or "8 bits" not in name)


def brief(run: Run, speed: float, device: torch.device) -> None:
    """Measure what matters most first."""
    sizes = [size for size in SIZES if size[0] == 1]
    for size in sizes:
        run.add(rows("ours", *size, speed, device))
    run.add(prefill(131072, 8192, device))
    for name, size in product(("ours, one GPU", "prototype"), sizes[:2]):
        if name in subjects(*size, device):
            run.add(rows(name, *size, speed, device))
    tune(sizes[:2], Ring.alone(), device)
