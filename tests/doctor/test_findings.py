"""Findings from facts: broken installations get a right diagnosis."""

from dataclasses import replace
from typing import Any

import pytest

from ring_attention_pytorch.doctor.facts import Facts
from ring_attention_pytorch.doctor.findings import Finding, findings_of, keeps_from_trying

WELL = Facts(
    python="3.12.1",
    torch="2.11.0",
    ours="1.0.0",
    place="/somewhere",
    listed=("1.0.0",),
    numpy="2.4.6",
    packages={"triton": None, "flash-attn-4": None},
    device="cuda",
    kernels={"sdpa-cudnn": None, "sdpa": "runs on the CPU, the tensors are on cuda"},
    gpus=("H200", "H200"),
    apart=(),
    backends=("gloo", "nccl"),
    launched=0,
)


def told(facts: Facts, subject: str, backend: str = "nccl", nproc: int = 2) -> Finding:
    (found,) = [f for f in findings_of(facts, backend, nproc) if f.subject == subject]
    return found


def test_a_good_installation_is_well() -> None:
    found = findings_of(WELL, "nccl", 2)
    assert {f.status for f in found} == {"ok"}
    assert not any(map(keeps_from_trying, found))


# subject, what is otherwise, how bad that is, words of the diagnosis, whether nothing can be tried
BROKEN: list[tuple[str, dict[str, Any], str, str, bool]] = [
    ("numpy", {"numpy": None}, "ok", "nothing here needs it", False),
    ("package", {"listed": ("1.0.0", "0.5.20")}, "bad", "0.5.20 of that name", False),
    ("processes", {"launched": 2}, "bad", "there is no process group", True),
    ("backend", {"device": "cpu"}, "bad", "nccl moves tensors on GPUs, yours are on cpu", True),
    ("backend", {"backends": ("gloo",)}, "bad", "this torch has no nccl; it has gloo", True),
    ("backend", {"backends": ()}, "bad", "it has none", True),
    ("GPUs' memory", {"apart": ((0, 1), (1, 0))}, "note", "not shared: 0 to 1, 1 to 0", False),
    ("processes", {"gpus": ("H200",)}, "bad", "2 processes need as many GPUs, got 1", True),
    ("GPUs", {"gpus": ()}, "bad", "none is seen", True),
    ("kernels", {"kernels": {"sdpa": "needs this"}}, "bad", "no kernel runs on cuda", True),
    ("kernel sdpa", {"kernels": {"sdpa": "needs this"}}, "note", "needs this", True),
]


@pytest.mark.parametrize(("subject", "otherwise", "status", "words", "ends"), BROKEN)
def test_what_is_broken_gets_its_diagnosis(
    subject: str, otherwise: dict[str, Any], status: str, words: str, ends: bool
) -> None:
    facts = replace(WELL, **otherwise)
    finding = told(facts, subject)
    assert finding.status == status
    assert words in finding.text
    assert bool(finding.advice) == (status == "bad" or subject == "GPUs' memory")
    assert any(map(keeps_from_trying, findings_of(facts, "nccl", 2))) == ends


def test_gloo_with_tensors_on_gpus_is_told() -> None:
    finding = told(WELL, "backend", backend="gloo")
    assert finding.status == "bad"
    assert 'init_process_group("nccl")' in finding.advice
