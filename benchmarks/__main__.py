"""Run a benchmark: `python -m benchmarks NAME [options]`; without a name it lists them.

    python -m benchmarks
    python -m benchmarks cpu --help
    torchrun --nproc-per-node 4 -m benchmarks ring --save

What is slow to import, such as torch, is imported by the benchmark that runs.
"""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
NAMES = {
    "balance": "balance",
    "bursts": "bursts",
    "compiled": "compiled",
    "cpu": "cpu",
    "curves": "curves",
    "decode": "decode",
    "defaults": "defaults",
    "documents": "documents",
    "errors": "errors",
    "everything": "everything",
    "few": "few",
    "first": "first",
    "generate": "generate",
    "hf": "hf",
    "host": "host",
    "kernels": "kernels",
    "latents": "latents",
    "masks": "masks",
    "memory": "memory",
    "parts": "parts",
    "peers": "peers",
    "rank": "rank",
    "reading-path": "reading_path",
    "recurrent": "recurrent",
    "report": "report",
    "ring": "ring",
    "routing": "routing",
    "summaries": "summaries",
    "sustained": "sustained",
    "sweep": "sweep",
    "timeline": "timeline",
}  # to the module


def about(name: str) -> str:
    """Return the first line of a benchmark's docstring; nothing is imported for it."""
    source = (HERE / f"{NAMES[name]}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the benchmark that is named first, with the rest as its options."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in NAMES:
        import_module("ring_attention_pytorch.progress").show()
        return import_module(f"benchmarks.{NAMES[name]}").main(rest)
    print("python -m benchmarks NAME [options]\n")
    for each in NAMES:
        print(f"  {each:14}{about(each)}")
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    raise SystemExit(main())
