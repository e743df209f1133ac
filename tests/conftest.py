import gc
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of scripts that tests start, too; before torch

import pytest
import torch

from ring_attention_pytorch.plan import placement, plan_cache
from tests.support.cases import FIGURES, Figures
from tests.support.forks import set_light
from tests.support.interpreter import interpreters
from tests.support.ranks import Pool
from tests.support.sampling import leave_out, sampled

torch.set_num_threads(1)

# Files that take longest, which begin first, so that no worker is left with one at the end.
LONGEST = (
    "test_mutants", "test_machines", "test_assert", "test_types", "test_hf_examples",
    "test_transformer", "test_compile", "test_ring_attention", "test_decoding_kernels",
    "test_failing_well", "test_triton", "test_trainer", "test_routed_modules", "test_attention",
    "test_gathered_keys", "test_features", "test_generation", "test_fused_copies",
    "test_original", "test_failing_ranks", "test_examples", "test_recurrent",
    "test_caches_in_step", "test_second_order", "test_launch", "test_cache_layers",
    "test_ulysses", "test_caches", "test_cache", "test_docs", "test_packed_modules", "test_jobs",
    "test_packed_documents", "test_random", "test_dataset", "test_imports", "test_meshes",
    "test_other_models", "test_transformers", "test_guard", "test_original_modules",
    "test_warm_up", "test_probe", "test_rowwise", "test_golden", "test_adapters",
    "test_shared_keys", "test_out_of_step", "test_batches", "test_shared_memory_order",
    "test_unseen", "test_soft_topk", "test_strides", "test_every_kernel", "test_surface",
    "test_flex", "test_bench_ring", "test_families", "test_tiles", "test_models",
    "test_decoding", "test_training_runs", "test_heads", "test_docstrings", "test_words",
    "test_operators", "test_tape", "test_restart", "test_outputs", "test_stalls",
    "test_notebook",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    of = "run some of the thorough tests, which this draws: a commit, a date"
    parser.addoption("--sample", metavar="SEED", help=of)


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--sample")
    return None if seed is None else f"thorough tests are drawn by --sample {seed}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, nor look again at what was imported and collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left_out := leave_out(items, config.getoption("--sample")):
        config.hook.pytest_deselected(items=left_out)
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish() -> None:
    set_light()  # modules that were imported meanwhile have lists of their own


@pytest.fixture(scope="session")
def pools():
    """`pools(size)`: the pool of so many ranks, started when first asked for."""
    started: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return started.setdefault(size, Pool(size))

    yield pool
    for each in started.values():
        each.stop()


@pytest.fixture(scope="session")
def sample(pytestconfig: pytest.Config):
    """`sample(rows, number)`: so many of the rows under `--sample`, else all."""
    return lambda rows, number: sampled(rows, number, pytestconfig.getoption("--sample"))


@pytest.fixture(scope="module")
def interpreted():
    """A process that has Triton's interpreter."""
    with interpreters(1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def seed():
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps stacks for each GPU to come
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    plan_cache.forget()  # a test may change what plans depend on
    placement._unseen.clear()  # and look at a batch without gradients


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the figures of a worker of pytest-xdist with its last message."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = asdict(FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; one that crashed left no message."""
    if (output := getattr(node, "workeroutput", None)) is not None:
        FIGURES.merge(Figures(**output["figures"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that were measured; those that are published come from here."""
    write = terminalreporter.write_line
    for dtype, worst in FIGURES.worst.items():
        figures = "  ".join(f"{name} {error:.1e}" for name, error in worst.items())
        write(f"worst relative error, {dtype}: {figures}")
    if FIGURES.planted:
        write(f"mutants killed: {FIGURES.killed} of {FIGURES.planted}")
    if FIGURES.seconds_to_error:
        write(f"slowest error on all ranks: {FIGURES.seconds_to_error:.2f} s")
