"""Every feature on GPUs: on one by every kernel that has it, and on rings over NCCL.

Each result by itself, by the rule of its dtype, against dense attention in float64.
"""

from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ring_attention_pytorch.kernels import KERNELS
from ring_attention_pytorch.ranks.ring import Ring
from tests.gpu.memory import poison
from tests.support.features import FEATURES, N, Problem, together
from tests.support.ranks import gpu_ranks
from tests.support.reference import excess

DEVICE = "cuda"
GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not GPUS, reason="there is no CUDA device")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = dict(n=11 * N, d=64)  # several blocks of every kernel, and a head size that all have
TOGETHER = [
    *((name,) for name in FEATURES),
    # what kernels do otherwise under a causal mask, or where a gradient comes through lse
    *(("causal", name) for name in ("window", "key mask", "one key head", "gradient of lse")),
    *((name, "gradient of lse") for name in ("sinks", "documents", "bias", "mask_mod", "dropout")),
    ("causal", "cu_seqlens", "dropout"),
    ("causal", "cu_seqlens", "window"),
    ("documents", "window"),
    ("documents", "dropout"),
    ("documents", "mask_mod"),
]
# of a kernel that compiles for each predicate no more than what only it has
KINDS = [
    (names, kernel)
    for names, kernel in product(TOGETHER, (None, *KERNELS))
    if kernel != "sdpa" and (kernel != "flex" or "mask_mod" in names)
]


class Trial(NamedTuple):
    """Features together, and how they are computed."""

    names: tuple[str, ...]
    kernel: str | None
    dtype: torch.dtype
    layout: str = "contiguous"
    transport: str | None = None
    ulysses: int = 1
    taped: bool = False


def faults(trial: Trial, ring: Ring | None = None) -> dict[str, str]:
    """List one rank's results that are worse than their dtype allows; None is all ranks."""
    ring = Ring() if ring is None else ring
    problem = Problem(together(trial.names, **SIZES), trial.dtype, DEVICE)
    plain = problem.dense(trial.dtype)
    poison()
    # what was captured has gone by the third call: who reads it still finds NaN
    replayed = partial(problem.shard_replayed, between=poison)
    shard = replayed if trial.taped else problem.shard
    got = shard(ring, trial.layout, trial.kernel, transport=trial.transport, ulysses=trial.ulysses)
    if "dsinks" in got:  # ranks have a part each
        got["dsinks"] = got["dsinks"].double()
        if ring.size > 1:
            dist.all_reduce(got["dsinks"])
    case, said = problem.by(trial.layout, trial.kernel), {}
    exact, rough = (case.part(whole, ring) for whole in (problem.want, plain))
    for name in got:
        times = 2 if name in ("out", "lse") else 3
        said[name] = excess(got[name], exact[name], rough[name], times)
    return {name: why for name, why in said.items() if why is not None}


def faults_alone(trial: Trial) -> dict[str, str]:
    """On one rank, where the kernel has these features."""
    try:
        return faults(trial, Ring.alone())
    except ValueError as error:
        if trial.kernel in (None, "eager") or f"kernel={trial.kernel!r} " not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("names", "kernel"), KINDS, ids=lambda x: " + ".join(x) if isinstance(x, tuple) else str(x)
)
def test_every_feature_on_one_gpu(names, kernel, dtype):
    assert not faults_alone(Trial(names, kernel, dtype))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("kernel", [*KERNELS])
def test_every_feature_taped(name, kernel):
    if kernel == "flex" and name != "mask_mod":
        pytest.skip("compiles for each predicate what others have")
    assert not faults_alone(Trial((name,), kernel, torch.bfloat16, taped=True))


# --- rings ---

LAYOUTS = ("zigzag", "balanced", "striped")
SWAPPED = [("dropout",), ("documents", "dropout"), ("sinks", "alibi", "bias of heads")]


def trials(kernel: str | None, transport: str) -> list[Trial]:
    """Each feature once, and dropout with documents; and with heads swapped what draws by heads."""
    later = transport == "gather"  # in another layout
    wanted = [((name,), 1) for name in FEATURES] + [(("documents", "dropout"), 1)]
    wanted += [(names, 2) for names in SWAPPED]
    return [
        Trial(names, kernel, torch.bfloat16, LAYOUTS[(i + later) % 3], transport, ulysses)
        for i, (names, ulysses) in enumerate(wanted)
        if kernel is None or "mask_mod" not in names
    ]


TRIALS = [
    t for kernel in ("triton", None) for way in ("gather", "ring") for t in trials(kernel, way)
]


TRIALS += [t._replace(taped=True) for t in trials(None, "gather")]


@pytest.mark.parametrize(
    "trial",
    TRIALS,
    ids=lambda t: (
        f"{t.kernel}-{t.transport}-{t.ulysses}-{' + '.join(t.names)}" + "-taped" * t.taped
    ),
)
def test_every_feature_over_nccl(nccl, trial):
    assert not any(nccl(gpu_ranks()).run(faults, trial))
