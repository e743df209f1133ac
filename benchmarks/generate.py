"""Time generation after a long prompt: a token's time in attention, in exchanges and in the rest.

    python -m benchmarks generate                                # one GPU
    torchrun --nproc-per-node 2 -m benchmarks generate           # two, and one of them alone
    torchrun --nproc-per-node 2 -m benchmarks generate --hf      # transformers' Llama
    torchrun --nproc-per-node 2 -m benchmarks generate --device cpu --tokens 300 --depth 2 --dim 64

A random model of 1.2 billion parameters, bfloat16, of the shapes of Llama 3.2 1B: 16 blocks of
width 2048, 32 query and 8 key heads of 64. The prompt is computed in chunks, then tokens follow one
by one. "one rank" is each GPU alone, with all keys.

"wall" is what a token takes. Its parts are from the first launch to the end of each, so they have
the host's time in them. "GPU" is the time of kernels alone, by a profiler. Where ranks share memory
they merge in a kernel of attention, unless --messages. A graph holds all of a token but telling it
to other ranks.
"""

import argparse
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.lib.calls import group, is_first, slowest
from benchmarks.lib.clock import wait
from benchmarks.lib.options import Parser
from benchmarks.lib.rings import device_name
from ring_attention_pytorch import RingTransformer
from ring_attention_pytorch.inference import decode_plan
from ring_attention_pytorch.inference.decode_plan import DecodePlan
from ring_attention_pytorch.nn import generation
from ring_attention_pytorch.nn.layer_caches import Reading
from ring_attention_pytorch.ranks.ring import Ring

WORDS = 128256
PARTS = ("attention", "exchanges", "the rest")
Span = tuple[str, Any, Any]


class Subject(Protocol):
    """A model that is measured, with the keys of all tokens that it has read."""

    keys: int  # bytes of keys and values on this rank

    def prefill(self, ids: Tensor, chunk: int) -> None:
        """Read a prompt `[1, n]`."""

    def logits(self, token: Tensor) -> Tensor:
        """Read a token `[1, 1]`; return its logits."""


class Ours:
    """A `RingTransformer`, by what `generate` does."""

    def __init__(self, asked: argparse.Namespace, ring: Ring, device: torch.device):
        heads, key_heads = asked.heads
        with torch.device(device):
            model = RingTransformer(
                num_tokens=WORDS if device.type == "cuda" else 99, dim=asked.dim,
                depth=asked.depth, heads=heads, num_grouped_query_heads=heads // key_heads,
                dim_head=asked.dim // heads, causal=True, ring_attn=True, group=ring,
            )  # fmt: skip
        self.model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        dtype, room = self.model.token_emb.weight.dtype, asked.tokens + asked.room
        reading = Reading(ring, 1, room, dtype, device)
        self.decoder = generation.CachedTransformer(self.model, reading)
        self.cache = self.decoder.caches[0].cache  # of all layers
        self.keys = self.cache.nbytes

    def prefill(self, ids: Tensor, chunk: int) -> None:
        for part in ids.split(chunk, dim=1):
            self.decoder.prefill(part)

    def logits(self, token: Tensor) -> Tensor:
        return self.model.to_logits(self.decoder.hidden(token))

    def rollback(self, n: int) -> None:
        self.cache.rollback(n)


class Transformers:
    """A Llama of transformers, with `RingHFCache`."""

    def __init__(self, asked: argparse.Namespace, ring: Ring, device: torch.device):
        from transformers import LlamaConfig, LlamaForCausalLM

        from ring_attention_pytorch.integrations.transformers import RingHFCache, register

        register()
        heads, key_heads = asked.heads
        config = LlamaConfig(
            vocab_size=WORDS if device.type == "cuda" else 99, hidden_size=asked.dim,
            intermediate_size=4 * asked.dim, num_hidden_layers=asked.depth,
            num_attention_heads=heads, num_key_value_heads=key_heads,
            max_position_embeddings=asked.tokens + asked.room, attn_implementation="ring",
        )  # fmt: skip
        with torch.device(device):
            model = LlamaForCausalLM(config)
        self.model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
        self.cache = RingHFCache(config, capacity=asked.tokens + asked.room, group=ring)
        names = inspect.signature(self.model.forward).parameters
        self.given = {"cache" if "cache" in names else "past_key_values": self.cache}

    @property
    def keys(self) -> int:
        return 0 if self.cache.keys is None else self.cache.keys.nbytes

    def prefill(self, ids: Tensor, chunk: int) -> None:
        self.cache.prefill(self.model, torch.cat((ids, ids[:, :1]), 1), chunk_size=chunk)

    def logits(self, token: Tensor) -> Tensor:
        return self.model(input_ids=token, use_cache=True, **self.given).logits[:, -1]

    def rollback(self, n: int) -> None:
        self.cache.crop(-n)


class Clock:
    """Time spent in functions, on the GPU's clock if there is one."""

    def __init__(self, device: torch.device):
        self.device, self.spans = device, []

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def apart(self, begin: Any, end: Any) -> float:
        """Return the microseconds between two times."""
        if self.device.type != "cuda":
            return (end - begin) * 1e6
        return begin.elapsed_time(end) * 1e3

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and notes when."""

        def timed(*args: Any, **given: Any) -> Any:
            begin = self.now()
            result = function(*args, **given)
            self.spans.append((part, begin, self.now()))
            return result

        return timed

    def of(self, part: str) -> float:
        """Return the microseconds of a part in all."""
        return sum(self.apart(begin, end) for name, begin, end in self.spans if name == part)


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Watch attention and exchanges in this block."""
    places: list[tuple[Any, str, str]] = [
        (DecodePlan, "run", "run"), (decode_plan, "gather_to_merge", "merged"),
        (generation, "report_to_ring_of_first", "told"),
    ]  # fmt: skip
    before = [getattr(place, name) for place, name, _ in places]
    for (place, name, part), function in zip(places, before):
        setattr(place, name, clock.around(part, function))
    try:
        yield
    finally:
        for (place, name, _), function in zip(places, before):
            setattr(place, name, function)


def step(subject: Subject, ring: Ring, token: Tensor) -> None:
    """Make the next token of one, in place, as `generate` does."""
    if ring.rank == 0 or isinstance(subject, Transformers):
        token.copy_(subject.logits(token).argmax(-1).unsqueeze(1))
    else:  # only the first rank makes logits
        subject.decoder.hidden(token)
    generation.report_to_ring_of_first(ring, token)


def parts(subject: Subject, ring: Ring, token: Tensor, tokens: int) -> list[float]:
    """Return microseconds a token: wall, attention, exchanges, the rest; on this rank."""
    clock = Clock(token.device)
    with watched(clock):
        begin = clock.now()
        for _ in range(tokens):
            step(subject, ring, token)
        end = clock.now()
    wait(token.device)
    wall = clock.apart(begin, end)
    run, merged, told = (clock.of(part) for part in ("run", "merged", "told"))
    found = wall, run - merged, merged + told, wall - run - told
    return [us / tokens for us in found]


def busy(subject: Subject, ring: Ring, token: Tensor, tokens: int) -> list[float]:
    """Return microseconds of kernels a token: all, attention, exchanges, the rest."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(tokens):
            step(subject, ring, token)
        wait(token.device)
    found = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        name = event.key.lower()
        part = "the rest"
        if "nccl" in name:
            part = "exchanges"
        elif "attend_kernel" in name or "merge_kernel" in name:
            part = "attention"
        found[part] += event.self_device_time_total / tokens
    return [sum(found.values()), *found.values()]


def graphed(subject: Subject, token: Tensor, tokens: int) -> float:
    """Return microseconds of a token's graph."""
    subject.rollback(1)  # room for what the capture does not append
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(subject.logits(token).argmax(-1).unsqueeze(1))
    return slowest(lambda: [graph.replay() for _ in range(tokens)], tokens, 3, token.device)


def measure(name: str, ring: Ring, asked: argparse.Namespace, device: torch.device) -> None:
    """Measure one subject and print its rows."""
    torch.manual_seed(0)
    subject = (Transformers if asked.hf else Ours)(asked, ring, device)
    ids = torch.randint(99, (1, asked.tokens), device=device)
    wait(device)
    begin = time.perf_counter()
    subject.prefill(ids, asked.chunk)
    wait(device)
    took = time.perf_counter() - begin
    token = ids[:, -1:].clone()
    for _ in range(3):
        step(subject, ring, token)
    wait(device)
    wall = slowest(
        lambda: [step(subject, ring, token) for _ in range(asked.new)], asked.new, 3, device
    )
    rows = {"wall": parts(subject, ring, token, asked.new)}
    if device.type == "cuda":
        rows["GPU"] = busy(subject, ring, token, 4)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    said = [
        f"{name}: prompt {took:.2f} s, then {wall / 1e3:.3f} ms a token ({1e6 / wall:.0f} tokens/s)"
        f"; keys {subject.keys / 2**20:.0f} MiB a rank, memory {memory:.2f} GiB"
    ]
    for kind, (total, *each) in rows.items():
        told = ", ".join(f"{part} {us / 1e3:.3f}" for part, us in zip(PARTS, each))
        said.append(f"  {kind:5}{total / 1e3:8.3f} ms: {told}")
    if device.type == "cuda":
        try:
            said.append(f"  graph{graphed(subject, token, asked.new) / 1e3:8.3f} ms")
        except Exception as error:  # exchanges by messages, say
            said.append(f"  graph: {type(error).__name__}: {str(error)[:100]}")
    if is_first():
        print("\n".join(said), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    about = Parser(__doc__, "generate")
    about.add_argument("--tokens", type=int, default=131072, help="of the prompt")
    about.add_argument("--new", type=int, default=50, help="tokens of a round")
    about.add_argument("--chunk", type=int, default=8192, help="of the prompt, at once")
    about.add_argument("--dim", type=int, default=2048)
    about.add_argument("--depth", type=int, default=16)
    about.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("Q", "K"))
    about.add_argument("--hf", action="store_true", help="transformers' Llama")
    about.add_argument("--messages", action="store_true", help="merge ranks by messages")
    about.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    asked = about.parse_args(argv)
    asked.room = 10 * asked.new + 64
    decode_plan.PUSH = not asked.messages
    with group(asked.device) as device, torch.no_grad():
        ranks = Ring().size
        if is_first():
            print(f"{ranks} x {device_name(device)}, {asked.tokens} tokens of prompt", flush=True)
        if ranks > 1:
            measure(f"{ranks} ranks", Ring(), asked, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        measure("one rank", Ring.alone(), asked, device)
