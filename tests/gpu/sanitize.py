"""Our Triton kernels on small blocks, for compute-sanitizer: `make sanitize-gpu`."""

from dataclasses import replace

import torch

from ring_attention_pytorch.runtime.rowwise import merge_, sum_of_products
from tests.support.kernel_cases import CASES, KernelCase, faults

SMALL = [
    CASES[2],
    CASES[6],
    KernelCase(150, 150, ((0, 150, 0, 150, None, 0),), d=(64, 64)),
    KernelCase(70, 130, d=(128, 128), heads=(4, 2)),
]


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for case in SMALL:
            found = faults(replace(case, dtype=dtype), "triton", "cuda")
            assert not found, (case, dtype, found)
        rows = [torch.randn(2, 33, 3, 40, device="cuda").to(dtype) for _ in range(3)]
        lse = [torch.randn(2, 3, 33, device="cuda") for _ in range(3)]
        merge_(rows[0], lse[0], rows[1], lse[1], rows[2], lse[2])
        assert sum_of_products(rows[0], rows[1]).isfinite().all()
    torch.cuda.synchronize()
    print("all right")


if __name__ == "__main__":
    main()
