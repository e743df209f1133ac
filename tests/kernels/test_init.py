"""Which kernel runs: chosen from data, explained, logged once, and never another than was named."""

import logging
import sys
from itertools import product
from types import ModuleType

import pytest
import torch

from ring_attention_pytorch import explain_kernel, kernels
from ring_attention_pytorch.kernels import (
    choose,
    explain,
    fewest_launches,
    flash_attn_2,
    flash_attn_4,
    for_long_documents,
    for_short_documents,
    refusal,
    triton,
)
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    KernelRequest,
    SelectedKernel,
    Traits,
)

HOPPER = KernelRequest("cuda", torch.bfloat16, d=128, d_v=128, capability=(9, 0))
AMPERE = HOPPER._replace(capability=(8, 0))


@pytest.fixture
def installed(monkeypatch):
    """`installed(triton="3.6", ...)`: as if these packages were here, and no others."""
    modules = {
        "triton": "triton",
        "flash_attn_2": "flash_attn.flash_attn_interface",
        "flash_attn_4": "flash_attn.cute.interface",
    }

    def pretend(**versions: str) -> None:
        kernels.forget()
        for name in ("triton", "flash_attn", "flash_attn.cute", *modules.values()):
            monkeypatch.setitem(sys.modules, name, None)
        for name, version in versions.items():
            parts = modules[name].split(".")
            for i in range(len(parts)):
                made = ModuleType(".".join(parts[: i + 1]))
                monkeypatch.setitem(sys.modules, made.__name__, made)
            made.__version__ = version

    yield pretend
    kernels.forget()


ALL = dict(triton="3.6.0", flash_attn_2="2.8.3.post2", flash_attn_4="4.0.0b36")


@pytest.mark.parametrize(
    ("case", "want"),
    [
        (HOPPER, "flash-attn-4"),
        (HOPPER._replace(capability=(10, 0)), "flash-attn-4"),
        (HOPPER._replace(d=256, d_v=256), "sdpa-cudnn"),
        (HOPPER._replace(d=80, d_v=80), "sdpa-cudnn"),
        (HOPPER._replace(d=80, d_v=80, window=True), "triton"),
        (HOPPER._replace(d_v=64), "sdpa-cudnn"),
        (HOPPER._replace(d=192, d_v=192), "flash-attn-4"),
        (HOPPER._replace(d=192), "sdpa-cudnn"),
        (HOPPER._replace(d=192, d_v=128), "sdpa-cudnn"),
        (HOPPER._replace(d=192, d_v=128, window=True), "triton"),
        (HOPPER._replace(window=True), "flash-attn-4"),
        (HOPPER._replace(softclamp=True), "flash-attn-4"),
        (HOPPER._replace(key_mask=True), "triton"),
        (HOPPER._replace(unusual_scale=True), "triton"),
        (HOPPER._replace(deterministic=True), "flash-attn-4"),
        (HOPPER._replace(deterministic=True, d=256, d_v=256), "triton"),
        (HOPPER._replace(dtype=torch.float32), "triton"),
        (HOPPER._replace(dtype=torch.float64), "eager"),
        (HOPPER._replace(d=512, d_v=512), "triton"),
        (HOPPER._replace(d=513), "eager"),
        (HOPPER._replace(mask_mod=True), "flex"),
        (HOPPER._replace(mask_mod=True, deterministic=True), "eager"),
        (HOPPER._replace(mask_mod=True, unusual_scale=True), "eager"),
        (AMPERE._replace(mask_mod=True, alibi=True, window=True, dtype=torch.float32), "flex"),
        (KernelRequest("cpu", torch.float32, mask_mod=True), "eager"),
        (HOPPER._replace(packed=True), "flash-attn-4"),
        (HOPPER._replace(packed=True, d=80, d_v=80), "triton"),
        (HOPPER._replace(packed=True, dtype=torch.float64), "eager"),
        (HOPPER._replace(packed=True, mask_mod=True), "flex"),
        (AMPERE, "flash-attn-2"),
        (AMPERE._replace(key_mask=True), "triton"),
        (AMPERE._replace(capability=(7, 5)), "eager"),
        (KernelRequest("cpu", torch.float32), "sdpa"),
        (KernelRequest("cpu", torch.float64, softclamp=True), "eager"),
        (KernelRequest("mps", torch.float32), "eager"),
    ],
)
def test_the_fastest_that_can(installed, case, want):
    installed(**ALL)
    assert choose(None, case).name == want
    assert explain(case).endswith(f"{want}: runs")


def test_a_kernel_for_each_direction_is_explained_for_each(installed):
    installed(**ALL)
    told = explain(HOPPER, "triton+flash-attn").splitlines()
    assert told == ["forward:", "triton: runs", "backward:", "flash-attn-4: runs"]


@pytest.mark.parametrize(
    ("here", "hopper", "ampere"),
    [
        ({}, "sdpa-cudnn", "sdpa-flash"),
        (dict(triton="3.6.0"), "sdpa-cudnn", "sdpa-flash"),
        (dict(flash_attn_2="2.8.3"), "sdpa-cudnn", "flash-attn-2"),
        (dict(flash_attn_4="4.0.0b36"), "flash-attn-4", "sdpa-flash"),
        (dict(flash_attn_2="2.7.4", triton="2.1.0"), "sdpa-cudnn", "sdpa-flash"),
    ],
)
def test_of_what_is_installed(installed, here, hopper, ampere):
    installed(**here)
    assert choose(None, HOPPER).name == hopper
    assert choose(None, AMPERE).name == ampere


@pytest.mark.parametrize(
    ("name", "want", "wanted"),
    [
        ("flash-attn-2", {}, r'\(pip install "flash-attn>=2.8" --no-build-isolation\), which'),
        ("flash-attn-2", dict(flash_attn_2="2.7.4"), r"flash-attn 2.8 or later .*got 2.7.4"),
        ("flash-attn-4", {}, r'4.0.0b36 or .* "flash-attn-4>=4.0.0b36"\), which is not in'),
        ("triton", {}, r'triton 3.4 or later \(pip install "triton>=3.4"\), which is not'),
        ("flash-attn", {}, r"'flash-attn-4' needs .*'flash-attn-2' needs"),
        ("flex", {}, r'triton 3.4 or later \(pip install "triton>=3.4"\), which is not installed'),
        ("triton+flash-attn", dict(triton="3.6.0"), "'flash-attn-4' needs .*'flash-attn-2' needs"),
    ],
)
def test_a_missing_package_is_named_with_how_to_get_it(installed, name, want, wanted):
    installed(**want)
    with pytest.raises(ValueError, match=wanted):
        choose(name, HOPPER)


def test_a_package_that_cannot_be_imported_is_as_good_as_none(installed, monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise ImportError("undefined symbol: _ZN3c104cuda")

    installed()
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", Broken("broken"))
    assert "can't be imported: undefined symbol" in refusal("flash-attn-2", HOPPER)


def test_a_name_may_be_the_beginning_of_several(installed):
    installed(**ALL)
    assert choose("flash-attn", HOPPER).name == "flash-attn-4"
    assert choose("flash-attn", AMPERE).name == "flash-attn-2"
    assert choose("sdpa", HOPPER).name == "sdpa-cudnn"
    assert choose("sdpa", HOPPER._replace(window=True)).name == "sdpa-flash"
    assert choose("sdpa", KernelRequest("cpu", torch.float32)).name == "sdpa"
    with pytest.raises(ValueError, match=r"one of .*'eager', got 'cudnn'"):
        choose("cudnn", HOPPER)


def test_one_forward_and_anothers_backward(installed):
    installed(**ALL)
    for case, backward, other in (
        (HOPPER, flash_attn_4, "flash-attn-4"), (AMPERE, flash_attn_2, "flash-attn-2"),
    ):  # fmt: skip
        pair = choose("triton+flash-attn", case)
        assert pair == SelectedKernel(
            f"triton+{other}", triton.forward, backward.backward,
            Traits(
                preemptible=case is HOPPER, taped=case is HOPPER,
            ),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"got 'triton[+]flash-attn[+]eager'"):
        choose("triton+flash-attn+eager", HOPPER)


def test_every_case_has_a_kernel_and_the_explanation_agrees(installed):
    installed(**ALL)
    dtypes = (torch.float64, torch.float32, torch.float16)
    devices = (("cpu", None), ("cuda", (7, 5)), ("cuda", (8, 9)), ("cuda", (9, 0)))
    for (device, capability), dtype, feature in product(devices, dtypes, sorted(FEATURES)):
        case = KernelRequest(device, dtype, capability=capability)._replace(**{feature: True})
        lines = explain(case).splitlines()
        assert lines[-1] == f"{choose(None, case).name}: runs"
        for line in lines[:-1]:
            name, why = line.split(": ", 1)
            assert refusal(name, case) == why


@pytest.mark.parametrize(("capability", "name"), [((8, 0), None), ((9, 0), "triton")])
def test_few_tokens_have_a_kernel_of_their_own_from_hopper_on(capability, name, installed):
    installed(**ALL)
    found = fewest_launches(KernelRequest("cuda", torch.bfloat16, capability=capability))
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("capability", "packed", "name"),
    [(None, True, None), ((8, 0), True, None), ((9, 0), True, "triton"), ((9, 0), False, None),
     ((10, 0), True, None)],
)  # fmt: skip
def test_short_documents_have_a_kernel_of_their_own_on_hopper(capability, packed, name, installed):
    """Nothing else was measured."""
    installed(**ALL)
    case = KernelRequest("cuda", torch.bfloat16, capability=capability, packed=packed)
    found = for_short_documents(case)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("there", "features", "name"),
    [({}, dict(packed=True), "sdpa-cudnn"), ({}, {}, None), (ALL, dict(packed=True), None),
     ({}, dict(packed=True, window=True), None), ({}, dict(packed=True, d=64, d_v=36), None)],
)  # fmt: skip
def test_long_documents_may_have_a_kernel_with_a_call_for_each(there, features, name, installed):
    """The fastest one, unless it is the first for documents anyway: here that is Triton."""
    installed(**there | {"triton": "3.4"})
    case = KernelRequest("cuda", torch.bfloat16, capability=(9, 0), **features)
    found = for_long_documents(case)
    assert (found and found.name) == name


def test_the_choice_is_logged_once(caplog):
    kernels.forget()
    case = KernelRequest("cpu", torch.float32, d=3)
    with caplog.at_level(logging.INFO, "ring_attention_pytorch"):
        for _ in range(3):
            choose(None, case)
        choose("eager", case)
    assert [record.getMessage() for record in caplog.records] == [f"kernel sdpa for {case}"]


def test_the_public_explanation():
    q = torch.randn(1, 6, 2, 8)
    told = explain_kernel(q, q, q, softclamp=3.0, window=2).splitlines()
    assert told[0] == "flash-attn-4: runs on CUDA, the tensors are on cpu"
    assert told[-2:] == ["sdpa: has no softclamp", "eager: runs"]
    assert explain_kernel(q, q, q, kernel="triton").endswith("none of these can do it")
    told = explain_kernel(q, q, q, alibi_slopes=torch.ones(2)).splitlines()
    assert told[-2:] == ["sdpa: has no ALiBi", "eager: runs"]
    told = explain_kernel(q, q, q, dropout=0.1).splitlines()
    assert told[-2:] == ["sdpa: has no dropout", "eager: runs"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain_kernel(q, q, q).endswith("sdpa: runs")
    with pytest.raises(ValueError, match="got 'fast'"):
        explain_kernel(q, q, q, kernel="fast")


# --- the choice, and memory ---


def test_the_fastest_kernel_that_can_do_it_is_chosen():
    assert choose(None, KernelRequest("cpu", torch.float32, softclamp=False)).name == "sdpa"
    assert choose(None, KernelRequest("cpu", torch.float32, softclamp=True)).name == "eager"


def test_a_named_kernel_never_falls_back():
    with pytest.raises(ValueError, match=r"'sdpa' has no softclamp.*kernel=None"):
        choose("sdpa", KernelRequest("cpu", torch.float32, softclamp=True))
    with pytest.raises(ValueError, match=r"one of .*'eager', got 'fast'"):
        choose("fast", KernelRequest("cpu", torch.float32, softclamp=False))
