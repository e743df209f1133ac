"""Generates from a prompt whose keys do not fit one process, spread over four. Linux only.

    python -m examples.long_prompt

Each process limits its own memory, to what it has after a short prompt and --budget MiB more. The
keys of the long prompt need more than that. Four processes hold a quarter each, and go through the
prompt in chunks. One process stops with an error under the same limit; without a limit it writes
the same text. Weights are random, and so is what they write.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch import Tensor

from ring_attention_pytorch import RingTransformer, progress
from ring_attention_pytorch.launch import spawn
from ring_attention_pytorch.ranks.ring import Ring

MIB = 2**20
FIRST = 32  # the character of token 0


class Config(NamedTuple):
    """How long the prompt is, how much is written, and what a process may take for it."""

    tokens: int = 8192
    new: int = 60
    chunk: int = 1024
    budget: int | None = 48  # MiB; None is no limit
    heads: int = 8
    depth: int = 4

    @property
    def keys(self) -> int:
        """Bytes of all keys and values, in float32."""
        return (self.tokens + self.new) * self.depth * self.heads * 32 * 2 * 4


class Written(NamedTuple):
    """A rank's record of a run; `error` instead of all else, if it failed."""

    text: str = ""
    prompt_seconds: float = 0.0  # until the first token
    tokens_a_second: float = 0.0
    sent_for_prompt: int = 0  # bytes
    sent_a_token: int = 0
    memory: int = 0  # bytes at most, beyond those of a short prompt
    error: str = ""


def write(rank: int, config: Config) -> Written:
    """Generate from the long prompt on this rank, within its limit."""
    torch.set_num_threads(1)
    if rank == 0:
        progress.show()
    torch.manual_seed(0)  # all ranks draw the same weights and prompt
    model = RingTransformer(
        num_tokens=95, dim=128, depth=config.depth, heads=config.heads, dim_head=32, causal=True,
        ring_attn=True,
    )  # fmt: skip
    ids = torch.randint(95, (1, config.tokens))
    how = dict(temperature=0.8, seed=1, prefill_chunk_size=config.chunk)
    model.generate(ids[:, : config.chunk // 2], 2, **how)  # whatever is made once
    before = memory("VmRSS")
    if config.budget is not None:
        limit = memory("VmData") + config.budget * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    stamps: list[tuple[float, int]] = []
    with counting_bytes() as sent:
        model.token_emb.register_forward_hook(
            lambda _, given, __: stamps.append((time.perf_counter(), sum(sent)))
        )
        begin = time.perf_counter()
        try:
            found = model.generate(ids, config.new, **how)
        except ValueError as error:
            return Written(error=str(error))
    tokens = stamps[-config.new :]  # those of the prompt come before
    (first, sent_first), (last, sent_last) = tokens[0], tokens[-1]
    return Written(
        text="".join(chr(FIRST + i) for i in found[0, config.tokens :].tolist()),
        prompt_seconds=first - begin,
        tokens_a_second=(config.new - 1) / (last - first),
        sent_for_prompt=sent_first,
        sent_a_token=(sent_last - sent_first) // (config.new - 1),
        memory=memory("VmHWM") - before,
    )


def memory(kind: str) -> int:
    """Return what the kernel says of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(kind)


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """List the bytes of each exchange that this rank has a part in."""
    exchange, found = Ring.exchange, []

    def counted(ring: Ring, sends: list[tuple[int, Tensor]], receives: list) -> object:
        found.append(sum(t.nbytes for _, t in sends))
        return exchange(ring, sends, receives)

    Ring.exchange = counted
    try:
        yield found
    finally:
        Ring.exchange = exchange


def compared(config: Config, processes: int) -> Iterator[str]:
    """Run with a ring, and in one process with the limit and without; yield what to print."""
    yield (
        f"{config.tokens} tokens of prompt, {config.new} new ones: {config.keys / MIB:.0f} MiB of "
        f"keys and values; a process may take {config.budget} MiB"
    )
    ring = spawn(write, processes, config)
    if ring[0].error:
        yield f"FAIL: {processes} processes: {ring[0].error}"
        return
    for rank, each in enumerate(ring):
        yield (
            f"rank {rank}: prompt {each.prompt_seconds:.1f} s, then {each.tokens_a_second:.1f} "
            f"tokens/s; sent {each.sent_for_prompt / MIB:.1f} MiB for the prompt, "
            f"{each.sent_a_token / 1024:.1f} KiB a token; memory {each.memory / MIB:.0f} MiB"
        )
    (limited,) = spawn(write, 1, config)
    yield f"one process, the same limit: {limited.error or 'it has fitted'}"
    (free,) = spawn(write, 1, config._replace(budget=None))
    yield (
        f"one process, no limit: prompt {free.prompt_seconds:.1f} s, then "
        f"{free.tokens_a_second:.1f} tokens/s; memory {free.memory / MIB:.0f} MiB"
    )
    yield f"all wrote: {free.text}"
    same = {each.text for each in ring} == {free.text}
    yield "PASS" if same and limited.error else "FAIL: it must fit a ring only, with the same text"


@click.command(help=__doc__)
@click.option("--tokens", default=Config().tokens, show_default=True, help="of the prompt")
@click.option("--new", default=Config().new, show_default=True, help="tokens that are written")
@click.option("--chunk", default=Config().chunk, show_default=True, help="of the prompt, at once")
@click.option("--budget", default=Config().budget, show_default=True, help="MiB of a process")
@click.option("--processes", default=4, show_default=True)
def main(tokens: int, new: int, chunk: int, budget: int, processes: int) -> None:
    """Print what `compared` has found."""
    line = ""
    for line in compared(Config(tokens, new, chunk, budget), processes):
        print(line, flush=True)
    if line != "PASS":
        raise SystemExit(1)


if __name__ == "__main__":
    main()
