"""Hugging Face's accelerate: a mesh with a dimension "cp" whose ranks share a sequence.

accelerate gives all ranks of "cp" the same batches, and FSDP2 shards parameters over them too. Its
own context parallelism would replace every mask by a causal one; it stays off.

Tested with accelerate 1.15.0.
"""

from dataclasses import dataclass
from typing import Any

from accelerate import DistributedType, ParallelismConfig


@dataclass(repr=False)
class RingParallelismConfig(ParallelismConfig):
    """A `ParallelismConfig` whose dimension "cp" is a ring, without accelerate's own attention.

    Pass it to `Accelerator` or `TrainingArguments`, with `cp_size`. The ring is
    `accelerator.torch_device_mesh["cp"]`.

    >>> RingParallelismConfig(cp_size=4).cp_size
    4
    """

    @property
    def cp_enabled(self) -> bool:
        """False: True would turn on accelerate's context parallelism, in models and trainers."""
        return self._asks_for_mesh

    def build_device_mesh(self, device_type: str) -> Any:
        """Build the device mesh, with "cp" and the dimensions joined with it."""
        return self._of_mesh(super().build_device_mesh, device_type)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh dimensions over which FSDP shards parameters."""
        return self._of_mesh(lambda: ParallelismConfig.fsdp_dim_names.fget(self))

    def _validate_accelerator(self, accelerator: Any) -> None:
        # accelerate has FSDP2 on GPUs only; on CPUs DDP averages over all ranks, "cp" included
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            self._of_mesh(super()._validate_accelerator, accelerator)
        elif self.total_size != accelerator.num_processes:
            raise ValueError(
                f"the mesh of {self!r} has {self.total_size} ranks, there are "
                f"{accelerator.num_processes} processes"
            )

    _asks_for_mesh = False

    def _of_mesh(self, function: Any, *given: Any) -> Any:
        """Call a function that must see the dimension "cp", with `cp_enabled` on."""
        self._asks_for_mesh = self.cp_size > 1
        try:
            return function(*given)
        finally:
            self._asks_for_mesh = False
