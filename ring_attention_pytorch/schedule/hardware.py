"""Speeds of a device and of its links: what every decision about time goes by.

`H200` is for plans that measure nothing, and for what can't be measured. Its figures are those of
H200 GPUs within one NVLink domain. The network is a 400 Gb/s link for each GPU, which was not
measured.
"""

from typing import NamedTuple

# bytes and seconds of one NCCL send/recv hop between H200s, both ways at once
_HOPS = ((0, 1.0e-4), (8 << 20, 1.71e-4), (32 << 20, 5.13e-4), (128 << 20, 9.68e-4),
         (512 << 20, 1.68e-3))  # fmt: skip
# share of a kernel's speed in a burst, under load that lasts: four H100, 8k to 32k tokens each,
# 0.92 to 0.95 with cuDNN, flash-attn 4 and Triton
_LASTS = 0.94

_OF_QUERIES = 0.4  # share of a backward call that makes dq: our Triton kernels, two H100


class Hardware(NamedTuple):
    """Speeds of a device and its links: FLOP/s and bytes/s each way, seconds."""

    forward: float = 600e12  # FLOP/s of a kernel on large tiles
    backward: float = 525e12
    memory: float = 4.3e12  # read and write together
    pull: float = 350e9  # by copy engines within a domain
    beside: float = 0.95  # share of that while a kernel computes
    swap: float = 280e9  # of heads for sequence within a domain, out of shared memory
    network: float = 45e9  # between domains, for each GPU
    network_hop: float = 2e-5
    call: float = 1e-4  # seconds of a kernel's call on top: to launch, ramp up and end
    launch: float = 1e-5  # seconds of the host to launch a small operation
    host: float = 6.4e-3  # and calls that overlap, forward and backward
    domain: int = 8  # GPUs that reach one another by NVLink
    hops: tuple[tuple[int, float], ...] = _HOPS  # bytes and seconds between its neighbours
    measured: bool = False  # whether on the group at hand
    one_call: bool = False  # whether the kernel takes a single call for all tiles of a block
    keys_first: bool = False  # whether the kernel makes dk and dv first, and dq later

    def every(self, degree: int) -> "Hardware":
        """Return the machine of ranks that are `degree` places apart."""
        return self._replace(domain=max(1, self.domain // degree))

    def under_load(self) -> "Hardware":
        """Return the machine under load that lasts, if its kernels were measured: in short bursts.

        >>> H200.under_load() == H200
        True
        >>> H200._replace(measured=True).under_load().forward / H200.forward
        0.94
        """
        if not self.measured:
            return self
        return self._replace(forward=_LASTS * self.forward, backward=_LASTS * self.backward)

    @property
    def left_for_later(self) -> float:
        """Share of a call backward that the kernel may compute while dk and dv go home."""
        return _OF_QUERIES if self.keys_first else 0.0

    @property
    def beside_forward(self) -> float:
        """FLOPs of a kernel forward while a byte comes beside it."""
        return self.forward / (self.beside * self.pull)

    @property
    def beside_backward(self) -> float:
        """FLOPs of a kernel backward while a byte comes beside it."""
        return self.backward / (self.beside * self.pull)


H200 = Hardware()
# FLOP/s on an H200 of kernels that are not as fast as cuDNN's, forward and backward
_KERNELS = {
    "flash-attn-4": (650e12, 570e12),
    "triton": (530e12, 435e12),
    "flash-attn-2": (365e12, 325e12),
    "sdpa-flash": (345e12, 315e12),
}


def h200_with(kernel: str) -> Hardware:
    """Return an H200 that has the speed of a kernel, or of one forward and one backward.

    >>> h200_with("triton").forward, h200_with("triton+sdpa-flash").backward
    (530000000000000.0, 315000000000000.0)
    """
    forward, _, backward = kernel.partition("+")
    usual = H200.forward, H200.backward
    return H200._replace(
        forward=_KERNELS.get(forward, usual)[0],
        backward=_KERNELS.get(backward or forward, usual)[1],
        one_call=kernel == "triton",
        keys_first=(backward or forward) == "triton",
    )


def with_another(machine: Hardware, kernel: str, other: str) -> Hardware:
    """Return a machine with another kernel: its speeds times the ratio the two have on an H200.

    >>> with_another(H200._replace(forward=300e12), "sdpa-cudnn", "triton").forward
    265000000000000.0
    """
    old, new = h200_with(kernel), h200_with(other)
    return machine._replace(
        forward=machine.forward * new.forward / old.forward,
        backward=machine.backward * new.backward / old.backward,
        one_call=new.one_call,
        keys_first=new.keys_first,
    )
