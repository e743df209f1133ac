"""Hugging Face's accelerate: a mesh with a dimension "cp" whose ranks share a sequence.

accelerate gives all ranks of "cp" the same batches, and FSDP2 the parameters of all ranks. Its own
context parallelism would replace every mask by a causal one; here it is left out.

Tested with accelerate 1.15.0.
"""

from dataclasses import dataclass
from typing import Any

from accelerate import DistributedType, ParallelismConfig


@dataclass(repr=False)
class RingParallelismConfig(ParallelismConfig):
    """accelerate's `ParallelismConfig` whose dimension "cp" is a ring, and nothing but that.

    Give it to `Accelerator` or `TrainingArguments`, with `cp_size`. The ring is
    `accelerator.torch_device_mesh["cp"]`.

    >>> RingParallelismConfig(cp_size=4).cp_size
    4
    """

    @property
    def cp_enabled(self) -> bool:
        """False: it asks for accelerate's own context parallelism, of models and in trainers."""
        return self._asks_for_mesh

    def build_device_mesh(self, device_type: str) -> Any:
        """Build the mesh, with "cp" and what is joined with it."""
        return self._of_mesh(super().build_device_mesh, device_type)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions over which parameters are sharded."""
        return self._of_mesh(lambda: ParallelismConfig.fsdp_dim_names.fget(self))

    def _validate_accelerator(self, accelerator: Any) -> None:
        # accelerate has FSDP2 on GPUs only; on CPUs DDP averages over all ranks, those of "cp", too
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            self._of_mesh(super()._validate_accelerator, accelerator)
        elif self.total_size != accelerator.num_processes:
            raise ValueError(
                f"the mesh of {self!r} has {self.total_size} ranks, there are "
                f"{accelerator.num_processes} processes"
            )

    _asks_for_mesh = False

    def _of_mesh(self, function: Any, *given: Any) -> Any:
        """Call what must know that the mesh has a dimension "cp"."""
        self._asks_for_mesh = self.cp_size > 1
        try:
            return function(*given)
        finally:
            self._asks_for_mesh = False
