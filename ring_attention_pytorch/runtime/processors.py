"""The multiprocessors of a GPU, for which programs are cut."""

from typing import NamedTuple

import torch


class Processors(NamedTuple):
    """The multiprocessors of a GPU, and the most bytes of shared memory of a program."""

    number: int
    shared: int

    @classmethod
    def of(cls, device: torch.device) -> "Processors":
        """Read them from a device; for a CPU return 2, for Triton's interpreter."""
        if device.type != "cuda":
            return cls(2, 1 << 20)
        found = torch.cuda.get_device_properties(device)
        return cls(
            found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 1 << 16)
        )
