"""Speeds of a device and of its links, on which every decision about time depends.

They are constants, by the device's name, so that plans are the same in every run. Other devices
are given relative to `H200`: H200 GPUs within one NVLink domain. The network is a 400 Gb/s link for
each GPU, which was not measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

# bytes and seconds of one NCCL send/recv hop between H200s, both ways at once
_HOPS = ((0, 1.0e-4), (8 << 20, 1.71e-4), (32 << 20, 5.13e-4), (128 << 20, 9.68e-4),
         (512 << 20, 1.68e-3))  # fmt: skip
_OF_QUERIES = 0.4  # share of a backward call that makes dq: our Triton kernels, two H100


class Hardware(NamedTuple):
    """Speeds of a device and its links: FLOP/s and bytes/s each way, seconds."""

    forward: float = 600e12  # FLOP/s of a kernel on large tiles
    backward: float = 525e12
    memory: float = 4.3e12  # read and write together
    pull: float = 350e9  # by copy engines within a domain
    overlap_rate: float = 0.95  # share of `pull` while a kernel computes
    swap: float = 280e9  # of heads for sequence within a domain, out of shared memory
    network: float = 45e9  # between domains, for each GPU
    network_hop: float = 2e-5
    call: float = 1e-4  # seconds of overhead per kernel call: to launch, ramp up and end
    launch: float = 1e-5  # seconds of the host to launch a small operation
    host: float = 6.4e-3  # the same for calls that overlap, forward and backward
    domain: int = 8  # GPUs that reach one another by NVLink
    hops: tuple[tuple[int, float], ...] = _HOPS  # bytes and seconds between neighbours
    device: str = "H200"
    one_call: bool = False  # the kernel computes all tiles of a block in a single call
    keys_first: bool = False  # the kernel makes dk and dv first, and dq later

    def every(self, degree: int) -> "Hardware":
        """Return the machine for a ring of every `degree`-th rank: fewer of them in a domain."""
        return self._replace(domain=max(1, self.domain // degree))

    @property
    def deferred_share(self) -> float:
        """Share of a backward call that the kernel can compute while dk and dv are sent."""
        return _OF_QUERIES if self.keys_first else 0.0

    @property
    def forward_flops_per_byte(self) -> float:
        """FLOPs of a forward kernel in the time of one byte's overlapping transfer."""
        return self.forward / (self.overlap_rate * self.pull)

    @property
    def backward_flops_per_byte(self) -> float:
        """FLOPs of a backward kernel in the time of one byte's overlapping transfer."""
        return self.backward / (self.overlap_rate * self.pull)


H200 = Hardware()
# FLOP/s on an H200 of kernels slower than cuDNN's, forward and backward
_KERNELS = {
    "flash-attn-4": (650e12, 570e12),
    "triton": (530e12, 435e12),
    "flash-attn-2": (365e12, 325e12),
    "sdpa-flash": (345e12, 315e12),
}
# the same of heads of more than 128 dims: 192 with values of 128, and 256, 8k and 16k tokens
_WIDE = 128
_OF_WIDE_HEADS = {"sdpa-cudnn": (580e12, 420e12), "triton": (450e12, 245e12)}


class _Device(NamedTuple):
    """How a device differs from an H200."""

    name: str
    forward: float = float("inf")  # FLOP/s of any kernel, at most
    backward: float = float("inf")
    memory: float = H200.memory
    pull: float = H200.pull


# the slowest first. Nothing was measured on an A100: kernel speeds are flash-attn 2's figures,
# its link and memory speeds an H200's times the ratio in NVIDIA's figures; so is an H100's memory
_DEVICES = (
    _Device("A100", 220e12, 190e12, memory=1.8e12, pull=230e9),
    _Device("H100", memory=3.0e12),
    _Device("H200"),
)


def number_of(device: str) -> int:
    """Return a device's place among the known ones, the slowest first; 0 for an unknown one.

    >>> [number_of(f"NVIDIA {name}") for name in ("A100-SXM4-80GB", "H100 80GB HBM3", "L4")]
    [0, 1, 0]
    """
    places = [place for place, known in enumerate(_DEVICES) if known.name in device]
    return places[-1] if places else 0


def hardware(
    kernel: str, device: int = -1, domain: int = H200.domain, head_size: int = _WIDE
) -> Hardware:
    """Return a machine of devices of that number, with a kernel's speed, or with one's each way.

    >>> hardware("triton").forward, hardware("triton+sdpa-flash").backward
    (530000000000000.0, 315000000000000.0)
    >>> hardware("flash-attn-2", number_of("A100")).forward
    220000000000000.0
    >>> hardware("triton", head_size=192).backward
    245000000000000.0
    """
    forward, _, backward = kernel.partition("+")
    at_most = _DEVICES[device]
    return H200._replace(
        forward=min(_speeds(forward, head_size)[0], at_most.forward),
        backward=min(_speeds(backward or forward, head_size)[1], at_most.backward),
        memory=at_most.memory,
        pull=at_most.pull,
        domain=domain,
        device=at_most.name,
    )


def _speeds(kernel: str, head_size: int) -> tuple[float, float]:
    """Return a kernel's FLOP/s on an H200, forward and backward."""
    usual = _KERNELS.get(kernel, (H200.forward, H200.backward))
    return _OF_WIDE_HEADS.get(kernel, usual) if head_size > _WIDE else usual


def with_another(machine: Hardware, kernel: str, other: str, head_size: int = _WIDE) -> Hardware:
    """Return a machine with another kernel: speeds are scaled by the two kernels' ratio on an H200.

    >>> with_another(H200._replace(forward=300e12), "sdpa-cudnn", "triton").forward
    265000000000000.0
    """
    old, new = (hardware(name, head_size=head_size) for name in (kernel, other))
    return machine._replace(
        forward=machine.forward * new.forward / old.forward,
        backward=machine.backward * new.backward / old.backward,
    )


def share_one_host(hosts: Sequence[int]) -> int:
    """Return the largest size of consecutive groups of ranks that each share a host.

    >>> share_one_host([1, 1, 2, 2]), share_one_host([1, 1, 1]), share_one_host([1, 2, 2])
    (2, 3, 1)
    """
    for size in range(len(hosts), 1, -1):
        firsts = range(0, len(hosts), size)
        if len(hosts) % size == 0 and all(len({*hosts[i : i + size]}) == 1 for i in firsts):
            return size
    return 1
