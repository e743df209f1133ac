"""The table of kernels, and the choice among them.

A kernel is one module that satisfies `interfaces.Kernel`, and one line in `KERNELS`. Its limits are
data (`Capabilities`), from which the choice, its explanation and the table in `docs/kernels.md` are
made. Kernels have no notion of ranks or layouts and never import one another.
"""

import importlib
import importlib.metadata
import logging
import os
from functools import lru_cache

from torch.torch_version import TorchVersion

from ring_attention_pytorch.kernels import (
    eager,
    flash_attn_2,
    flash_attn_4,
    flex,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    triton,
)
from ring_attention_pytorch.runtime.interfaces import (
    FEATURES,
    Capabilities,
    Dependency,
    Kernel,
    KernelRequest,
    SelectedKernel,
)

logger = logging.getLogger("ring_attention_pytorch")

# the fastest first, as measured on an H200 (benchmarks/results)
KERNELS: dict[str, Kernel] = {
    "flash-attn-4": flash_attn_4,
    "sdpa-cudnn": sdpa_cudnn,
    "triton": triton,
    "flash-attn-2": flash_attn_2,
    "sdpa-flash": sdpa_flash,
    "flex": flex,
    "sdpa": sdpa,
    "eager": eager,
}
# our Triton kernels are tuned for Hopper; flash attention 2 is best on GPUs before it
_BEFORE_HOPPER = ("flash-attn-2", "sdpa-flash", "triton", "flex", "sdpa", "eager")
_HOPPER = 9  # the first number of the compute capability
_WORDS = {
    "key_mask": "key mask",
    "alibi": "ALiBi",
    "unusual_scale": "scale that is zero or negative",
    "deterministic": "deterministic backward (torch.use_deterministic_algorithms)",
}


def choose(name: str | None, case: KernelRequest) -> SelectedKernel:
    """Return the fastest kernel with that name that can do the case; None allows all kernels.

    "flash-attn" matches all kernels whose names begin with it; "triton+flash-attn" takes forward
    from one and backward from another.

    Raises:
        ValueError: no such kernel, or it can't do the case. A named kernel never falls back.
    """
    if name is not None and name.count("+") == 1:
        first, second = (choose(part, case) for part in name.split("+"))
        both, traits = f"{first.name}+{second.name}", first.traits.with_backward(second.traits)
        return SelectedKernel(both, first.forward, second.backward, traits)
    if name is None:
        return _selected(_fastest(case._replace(named=False)))
    refusals = {}
    case = case._replace(named=True)
    for each in _named(name, case):
        refusals[each] = refusal(each, case)
        if refusals[each] is None:
            return _selected(each)
    told = "; ".join(f"kernel={each!r} {why}" for each, why in refusals.items())
    raise ValueError(f"{told}; leave kernel=None to have one chosen that can")


def forget() -> None:
    """Clear cached choices and packages: after a change to `KERNELS` or to installed packages."""
    _fastest.cache_clear()
    package_refusal.cache_clear()


@lru_cache(maxsize=256)
def _fastest(case: KernelRequest) -> str:
    """Return the fastest kernel that can do the case, "eager" at last; log it once per case."""
    name = next(each for each in _named(None, case) if refusal(each, case) is None)
    logger.info("kernel %s for %s", name, case)
    return name


def fewest_launches(case: KernelRequest) -> SelectedKernel | None:
    """Return the fastest kernel that computes all keys in one call, if one can do the case.

    None before Hopper, where it computes more slowly than the kernels made for those GPUs.
    """
    if _is_old(case):
        return None
    able = (n for n in KERNELS if KERNELS[n].CAN.traits.fuses_merge and refusal(n, case) is None)
    return next(map(_selected, able), None)


def for_short_documents(case: KernelRequest) -> SelectedKernel | None:
    """Return the kernel for short documents, if one can do the case.

    None except on Hopper: nothing else was measured.
    """
    hopper = case.capability is not None and case.capability[0] == _HOPPER
    return fewest_launches(case) if case.packed and hopper else None


def for_long_documents(case: KernelRequest) -> SelectedKernel | None:
    """Return the fastest kernel of all, if it is one that needs a call for each document.

    None if the kernel that is first for documents is the fastest anyway.
    """
    alone = _named(None, case._replace(packed=False)) if case.packed else []
    name = next((n for n in alone if refusal(n, case) is None), None)
    return None if name is None or name == _fastest(case) else _selected(name)


def explain(case: KernelRequest, name: str | None = None) -> str:
    """Explain which kernel does the case, and why the faster ones can't, a line each."""
    if name is not None and name.count("+") == 1:
        first, second = (explain(case, part) for part in name.split("+"))
        return f"forward:\n{first}\nbackward:\n{second}"
    lines: list[str] = []
    for each in _named(name, case):
        why = refusal(each, case._replace(named=name is not None))
        if why is None:
            return "\n".join([*lines, f"{each}: runs"])
        lines.append(f"{each}: {why}")
    return "\n".join([*lines, "none of these can do it"])


def refusal(name: str, case: KernelRequest) -> str | None:
    """Return why the kernel with this name can't do the case; None if it can."""
    can, sizes = KERNELS[name].CAN, f"got {case.d} and {case.d_v}"
    if (why := _device_refusal(can, case)) is not None:
        return why
    if can.dtypes is not None and case.dtype not in can.dtypes:
        return f"has no {case.dtype}"
    if can.max_head_dim is not None and max(case.d, case.d_v) > can.max_head_dim:
        return f"has no head size above {can.max_head_dim}, {sizes}"
    if case.d % can.head_dim_multiple or case.d_v % can.head_dim_multiple:
        return f"needs head sizes that are multiples of {can.head_dim_multiple}, {sizes}"
    if can.head_dims is not None and not {case.d, case.d_v} <= {*can.head_dims}:
        return f"needs head sizes of {', '.join(map(str, can.head_dims))}, {sizes}"
    unequal = can.unequal_head_dims
    if case.d != case.d_v and unequal is not None and (case.d, case.d_v) not in unequal:
        known = "".join(f", or {d} and {d_v}" for d, d_v in unequal)
        return f"needs one head size for q, k and v{known}, {sizes}"
    for feature in sorted(FEATURES - can.features):
        if getattr(case, feature):
            return f"has no {_WORDS.get(feature, feature)}"
    return None if can.package is None else package_refusal(can.package)


def _selected(name: str) -> SelectedKernel:
    found = KERNELS[name]
    return SelectedKernel(name, found.forward, found.backward, found.CAN.traits)


def _named(name: str | None, case: KernelRequest) -> list[str]:
    order = list(dict.fromkeys((*(_BEFORE_HOPPER if _is_old(case) else ()), *KERNELS)))
    if case.packed:  # many short calls take longer than one call of a slower kernel
        order = sorted(order, key=lambda n: not KERNELS[n].CAN.varlen)
    check_name(name)
    return [n for n in order if name is None or _is_called(n, name)]


def check_name(name: str | None) -> None:
    """Raise ValueError if a name, or one of the two in "first+second", matches no kernel."""
    if name is None:
        return
    for part in name.split("+") if name.count("+") == 1 else (name,):
        if not any(_is_called(each, part) for each in KERNELS):
            raise ValueError(
                f"kernel must be None or one of {', '.join(map(repr, KERNELS))}, got {part!r}"
            )


def _is_called(kernel: str, name: str) -> bool:
    return kernel == name or kernel.startswith(f"{name}-")


def _is_old(case: KernelRequest) -> bool:
    """True if the GPU is older than Hopper."""
    return case.capability is not None and case.capability < (9, 0)


def _device_refusal(can: Capabilities, case: KernelRequest) -> str | None:
    devices = can.devices or (case.device,)
    interprets = "interpreter" in devices and case.named and _interprets(case.device)
    if not (case.device in devices or interprets):
        where = {"cuda": "CUDA", "cpu": "the CPU"}[devices[0]]
        return f"runs on {where}, the tensors are on {case.device}"
    if case.capability is None:
        return None
    got, oldest, newest = case.capability, can.min_capability, can.max_capability
    if oldest is not None and got < oldest:
        return f"needs compute capability {_dotted(oldest)} or later, got {_dotted(got)}"
    if newest is not None and got > newest:
        return f"needs compute capability {_dotted(newest)} or earlier, got {_dotted(got)}"
    return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _interprets(device: str) -> bool:
    """True if Triton's interpreter runs kernels on the device."""
    return device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=16)
def package_refusal(package: Dependency) -> str | None:
    """Return why the package can't be used; None if it is installed and new enough."""
    wanted = f"needs {package.name} {package.min_version} or later ({package.command})"
    try:
        found = importlib.import_module(package.module)
        version = getattr(found, "__version__", None) or importlib.metadata.version(package.name)
    except Exception as error:  # a package built for another torch fails in ways of its own
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacks and f"{package.module}.".startswith(f"{lacks}."):  # not one of its dependencies
            return f"{wanted}, which is not installed"
        return f"{wanted}; the one that is installed can't be imported: {error}"
    return None if TorchVersion(version) >= package.min_version else f"{wanted}, got {version}"
