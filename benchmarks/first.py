"""Time a model's first steps in a new process, where no kernel is compiled yet, and where all are.

    python -m benchmarks first --kernels triton sdpa-cudnn
    python -m benchmarks first --device cpu --kernels sdpa --tokens 256
    python -m benchmarks first --warm-up
    python -m benchmarks first --package ../other-revision    # with another revision of the package

A `RingTransformer` of two layers, causal, 16 query and 4 key heads of 64. "import" is that of torch
and of the package; "warm-up" is `warm_up` of the plan of a layer, if it is asked for; "first" is
the first forward and the first backward; "later" is a step when all is made, both ways. Each row
is a process. "kept" is one that finds what the row above it compiled.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.options import parser
from ring_attention_pytorch import RingTransformer

ROOT = Path(__file__).parents[1]
LATER = 5  # steps of which the shortest counts
CODE = """
import json, sys, time
begin = time.perf_counter()
import ring_attention_pytorch
seconds = {{"import": time.perf_counter() - begin}}
sys.path.insert(0, {root!r})  # not before: it has this revision of the package
from benchmarks.first import steps
print(json.dumps(seconds | steps{given}))
"""


def steps(kernel: str, tokens: int, device: str, warm_up: bool) -> dict[str, float]:
    """Make the model, take its first steps; return the seconds of each."""
    model = RingTransformer(
        num_tokens=256, dim=1024, depth=2, causal=True, dim_head=64, heads=16,
        num_grouped_query_heads=4, kernel=kernel, ring_attn=True, auto_shard_seq=False,
    )  # fmt: skip
    model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(0, 256, (1, tokens), device=device)

    def timed(run: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        out = run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, out

    attn, _ = model.layers[0]
    x = torch.randn(1, tokens, 1024, device=device, dtype=next(model.parameters()).dtype)
    warm, _ = timed(lambda: attn.plan(x).warm_up() if warm_up else None)
    forward, loss = timed(lambda: model(ids, labels=ids))
    backward, _ = timed(loss.backward)
    later = [timed(lambda: model(ids, labels=ids).backward())[0] for _ in range(LATER)]
    first = {"first forward": forward, "first backward": backward}
    return {"warm-up": warm, **first, "later": min(later)}


def in_a_process(package: Path, cache: str, *given: object) -> dict[str, float]:
    """Return the seconds of a new process, which keeps what it compiles in a folder."""
    code = CODE.format(given=given, root=str(ROOT))
    folders = dict(
        TRITON_CACHE_DIR=f"{cache}/triton",
        TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
        PYTHONPATH=os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]),
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | folders, cwd=cache, check=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parser("first", __doc__, device="cuda", tokens=[2048], kernels=["triton"])
    options.add_argument("--package", type=Path, default=ROOT, help="folder that has the package")
    options.add_argument("--warm-up", action="store_true", help="before the first step")
    asked = options.parse_args(argv)
    print(
        "| kernel | tokens | cache | import | warm-up | first forward | first backward | later, s |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for kernel in asked.kernels:
        for tokens in asked.tokens:
            with tempfile.TemporaryDirectory() as cache:
                for name in ("empty", "kept"):
                    given = kernel, tokens, asked.device, asked.warm_up
                    found = in_a_process(asked.package.absolute(), cache, *given)
                    told = " | ".join(f"{seconds:.3g}" for seconds in found.values())
                    print(f"| {kernel} | {tokens} | {name} | {told} |", flush=True)
