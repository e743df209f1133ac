"""Planted faults that the suite must find: batteries of cases, and how faults are planted.

Most faults are generated (`changes`, `generated`). Those that are written by hand lie beside the
tests of what they break: `tests/*/faults.py`.
"""

from importlib.util import find_spec

_INSTALLED = all(find_spec(name) for name in ("transformers", "accelerate"))
BATTERIES = (
    "attention", "compiled", "doctor", "failing", "inference", "kept", "latent", "original",
    "recurrent", "routing", "schedules", "second_order", "silent", "summaries", "training",
    *(["integrations"] if _INSTALLED else []),
)  # fmt: skip
