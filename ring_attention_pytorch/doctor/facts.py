"""Facts of an installation, gathered from the machine; `findings` draws the conclusions."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist

import ring_attention_pytorch
from ring_attention_pytorch.kernels import KERNELS, package_refusal, refusal
from ring_attention_pytorch.ranks.machines import machine_name
from ring_attention_pytorch.runtime.interfaces import Dependency, KernelRequest


@dataclass(frozen=True)
class Facts:
    """Facts of one installation and its machine.

    Attributes:
        python, torch: versions.
        ours, place: version and folder of the package that runs.
        listed: versions of the installed distributions of its name.
        numpy: its version; None if it is not installed.
        packages: for each package that a kernel needs, why it can't be used; None if it can.
        kernels: for each kernel, why it can't run on the device; None if it can.
        gpus, apart: names of the GPUs, and pairs of them without access to each other's memory.
        backends: backends available to torch.distributed.
        launched: number of processes that torchrun started, this one included; 0 without torchrun.
        machine: its name, by which ranks decide who shares memory.
    """

    python: str
    torch: str
    ours: str
    place: str
    listed: tuple[str, ...]
    numpy: str | None
    packages: Mapping[str, str | None]
    device: str
    kernels: Mapping[str, str | None]
    gpus: tuple[str, ...]
    apart: tuple[tuple[int, int], ...]
    backends: tuple[str, ...]
    launched: int
    machine: str = ""


def gather_facts(device: str) -> Facts:
    """Gather the facts of this process' installation, for tensors on a device."""
    gpus = tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    pairs = permutations(range(len(gpus)), 2)
    return Facts(
        python=platform.python_version(),
        torch=str(torch.__version__),
        ours=ring_attention_pytorch.__version__,
        place=str(Path(ring_attention_pytorch.__file__).parent),
        listed=_listed(),
        numpy=_numpy(),
        packages={package.name: package_refusal(package) for package in _packages()},
        device=device,
        kernels={name: why_not(name, device) for name in KERNELS},
        gpus=gpus,
        apart=tuple(p for p in pairs if not torch.cuda.can_device_access_peer(*p)),
        backends=_backends(),
        launched=int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 0,
        machine=machine_name(),
    )


def request(name: str, device: str) -> KernelRequest:
    """Return the request that a kernel is tried with, in the widest dtype that it supports."""
    dtypes = KERNELS[name].CAN.dtypes
    order = (torch.float64, torch.float32, torch.bfloat16)
    dtype = next(d for d in order if dtypes is None or d in dtypes)
    capability = None
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    return KernelRequest(device, dtype, capability=capability, named=True)


def why_not(name: str, device: str) -> str | None:
    """Return why a kernel can't run on a device; None if it can."""
    return refusal(name, request(name, device))


def _packages() -> dict[Dependency, None]:
    every = (kernel.CAN.package for kernel in KERNELS.values())
    return dict.fromkeys(package for package in every if package is not None)


def _listed() -> tuple[str, ...]:
    found = importlib.metadata.distributions(name="ring-attention-pytorch")
    return tuple(dict.fromkeys(each.version for each in found))


def _numpy() -> str | None:
    try:
        return importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, is_there in there.items() if is_there)
