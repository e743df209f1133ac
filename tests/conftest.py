import os
from dataclasses import asdict
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of scripts that tests start, too; before torch

import pytest
import torch

from ring_attention_pytorch.plan import placement, plan_cache
from tests.support.cases import FIGURES, Figures
from tests.support.interpreter import interpreters
from tests.support.ranks import Pool

torch.set_num_threads(1)

# Files that take longest, which begin first, so that no worker is left with one at the end.
LONGEST = (
    "test_mutants", "test_compile", "test_failing_ranks", "test_launch", "test_examples",
    "test_trainer", "test_bench_ring", "test_hf_examples", "test_restart", "test_types",
    "test_transformers", "test_cache", "test_features", "test_ring_attention", "test_assert",
    "test_out_of_step", "test_triton", "test_outputs", "test_gathered_keys", "test_transformer",
    "test_fused_copies", "test_caches", "test_docs", "test_stalls", "test_generation",
    "test_notebook", "test_routed_modules", "test_commands", "test_guard", "test_decoding_kernels",
    "test_ulysses", "test_failing_well", "test_attention", "test_rowwise",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session")
def pools():
    """`pools(size)`: the pool of so many ranks, started when first asked for."""
    started: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return started.setdefault(size, Pool(size))

    yield pool
    for each in started.values():
        each.stop()


@pytest.fixture(scope="module")
def interpreted():
    """A process that has Triton's interpreter."""
    with interpreters(1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    plan_cache.forget()  # a test may change what plans depend on
    placement._unseen.clear()  # and look at a batch without gradients


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What a worker of pytest-xdist measured goes home with its last message."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = asdict(FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; one that crashed left no message."""
    if (output := getattr(node, "workeroutput", None)) is not None:
        FIGURES.merge(Figures(**output["figures"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured: the figures that are published come from here."""
    write = terminalreporter.write_line
    for dtype, worst in FIGURES.worst.items():
        figures = "  ".join(f"{name} {error:.1e}" for name, error in worst.items())
        write(f"worst relative error, {dtype}: {figures}")
    if FIGURES.planted:
        write(f"mutants killed: {FIGURES.killed} of {FIGURES.planted}")
    if FIGURES.seconds_to_error:
        write(f"slowest error on all ranks: {FIGURES.seconds_to_error:.2f} s")
