"""The benchmark beside other libraries, with a TransformerEngine of a few lines on CPUs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib import spans, transformer_engine
from ring_attention_pytorch.geometry.layouts import positions
from tests.support.launched import launched

SMALL = ["--device", "cpu", "--heads", "4", "2", "--dim-head", "16", "--repeats", "1"]
# as its documentation says: each document in 2 P chunks, of which rank r has r and 2 P - 1 - r
STUB = """
import torch, torch.distributed as dist
from torch.distributed.nn.functional import all_gather

class DotProductAttention(torch.nn.Module):
    def __init__(self, heads, d, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type,
                 window_size=(-1, -1)):
        super().__init__()
        self.form, self.causal = qkv_format, attn_mask_type.endswith("causal")
        self.padding, self.before = attn_mask_type.startswith("padding"), window_size[0]

    def set_context_parallel_group(self, group, ranks, stream, mode):
        assert ranks == list(range(dist.get_world_size())) and mode in ("p2p", "all_gather", "a2a")
        if mode == "p2p" and self.before >= 0:
            raise AssertionError("no window by p2p")

    def forward(self, q, k, v, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None):
        assert self.padding == (self.form == "thd") == (cu_seqlens_q is not None)
        assert cu_seqlens_q_padded is cu_seqlens_q and cu_seqlens_kv_padded is cu_seqlens_kv
        size, rank = dist.get_world_size(), dist.get_rank()
        q, k, v = (t if t.dim() == 3 else t[0] for t in (q, k, v))
        n = len(q) * size
        cut = [0, n] if cu_seqlens_q is None else cu_seqlens_q.tolist()
        order = [[] for _ in range(size)]
        document = torch.empty(n, dtype=torch.long)
        for number, (start, stop) in enumerate(zip(cut, cut[1:])):
            document[start:stop] = number
            chunks = torch.arange(start, stop).chunk(2 * size)
            for r in range(size):
                order[r] += [chunks[r], chunks[2 * size - 1 - r]]
        order = torch.cat([torch.cat(each) for each in order]) if self.causal else torch.arange(n)
        k, v = (torch.cat(all_gather(t.contiguous())) for t in (k, v))
        here = order[rank * len(q):(rank + 1) * len(q)]
        seen = document[here][:, None] == document[order]
        if self.causal:
            seen &= here[:, None] >= order
        if self.before >= 0:
            seen &= order >= here[:, None] - self.before
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        return out if self.form == "thd" else out[None]
"""
SCRIPT = """
from benchmarks import peers

peers.main()
"""
CHOICE = "_attention_backends = {}\n"


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder with the package."""
    inner = tmp_path / "transformer_engine" / "pytorch"
    (inner / "attention" / "dot_product_attention").mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text(STUB)
    (inner / "attention" / "__init__.py").write_text("")
    (inner / "attention" / "dot_product_attention" / "__init__.py").write_text(CHOICE)
    return tmp_path


def saved(stub: Path, *options: str) -> list[dict[str, Any]]:
    """Run the benchmark on two ranks; return its rows of both passes."""
    file = stub / "rows.json"
    (script := stub / "peers.py").write_text(SCRIPT)  # beside it, the package is found
    how = ["--tokens", "48", "--rounds", "1", "--load", "0", "--kernels", "sdpa"]
    ran = launched(str(script), *SMALL, *how, "--save", str(file), *options, ranks=2)
    # not the exit status: gloo can abort a process that has done all and ends
    assert file.exists(), ran.stderr
    rows = [row for row in json.loads(file.read_text()) if row["pass"] == "both"]
    assert all(error < 1e-5 for row in rows for error in row.get("errors", {}).values()), rows
    return rows


@pytest.mark.parametrize(
    ("options", "mask", "modes"),
    [
        ((), "causal", ("p2p", "all_gather", "a2a")),
        pytest.param(
            ("--window", "16"), "window 16", ("all_gather", "a2a"), marks=pytest.mark.thorough
        ),
        pytest.param(
            ("--mask", "full"), "full", ("p2p", "all_gather", "a2a"), marks=pytest.mark.thorough
        ),
        pytest.param(
            ("--documents", "of 1 to 60 tokens"), "documents of 1 to 60 tokens",
            ("p2p", "all_gather", "a2a"), marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_each_mode_is_measured_and_right(
    stub: Path, options: tuple[str, ...], mask: str, modes: tuple[str, ...]
) -> None:
    """Tokens lie as they do there; what a mode refuses is no row."""
    rows = saved(stub, *options)
    assert {row["mask"] for row in rows} == {mask}
    names = [row["subject"] for row in rows if "errors" in row]
    assert names == ["ours", *(f"TransformerEngine {mode}, cuDNN" for mode in modes)]


def test_without_the_package_there_is_no_peer() -> None:
    assert not transformer_engine.has("transformer_engine")
    assert transformer_engine.engine(transformer_engine.Asked(True)) == {}


def test_each_document_is_in_zigzag() -> None:
    layout = transformer_engine.each_in_zigzag([0, 8, 12], 2)
    held = [positions(layout, rank=rank, ring_size=2, length=12).tolist() for rank in range(2)]
    assert held == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    with pytest.raises(ValueError, match="multiple of 4"):
        transformer_engine.each_in_zigzag([0, 8, 14], 2)


def test_one_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are off, so that none is taken in its place."""
    for kernel in ("cuDNN", *transformer_engine.VERSIONS):
        found = transformer_engine.settings(kernel)
        families = [found["NVTE_FUSED_ATTN"], found["NVTE_FLASH_ATTN"]]
        assert sorted(families) == ["0", "1"]
        versions = [found[f"NVTE_FLASH_ATTN_V{n}"] for n in (2, 3, 4)]
        assert versions.count("1") == (kernel != "cuDNN")


def test_parts_of_a_timeline_sum_to_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    names = ["sdpa_fprop", "ncclDevKernel_SendRecv", "vectorized_elementwise", "Memcpy PtoP"]
    starts = torch.randint(0, 1000, (60,), generator=draw).tolist()
    work = [spans.Span(s, s + 5 + i, names[i % 4]) for i, s in enumerate(starts)]
    parts = spans.split(work)
    busy = [False] * 1100
    attends, moves = busy[:], busy[:]
    for start, stop, name in work:
        for at in range(int(start), int(stop)):
            busy[at] = True
            attends[at] |= "sdpa" in name
            moves[at] |= "nccl" in name or "PtoP" in name
    assert parts.attention == sum(attends)
    assert parts.transfer == sum(m and not a for m, a in zip(moves, attends))
    assert parts.attention + parts.transfer + parts.other == sum(busy)
    assert sum(parts[:4]) == parts.whole


def test_examples_are_as_shown() -> None:
    import doctest

    for module in (spans, transformer_engine):
        failed, attempted = doctest.testmod(module)
        assert (failed, attempted > 0) == (0, True)
    assert sys.modules.get("transformer_engine") is None
