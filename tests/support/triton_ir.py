"""The Triton kernels as Triton's own code, for a GPU that need not be there.

The interpreter runs what Python would; the compiler wants each variable of a loop to keep its type.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from ring_attention_pytorch.kernels._triton_backward_keys import keys_kernel
from ring_attention_pytorch.kernels._triton_backward_queries import queries_kernel
from ring_attention_pytorch.kernels._triton_forward import forward_kernel

KERNELS = forward_kernel, keys_kernel, queries_kernel
SIZES = dict(ROWS=64, COLS=32, D=64, D_V=64, EVEN=True, EVEN_V=True, PRECISION="ieee", WIDE=False,
             NEGATE=False, TMA=False)  # fmt: skip
FORKS = ("MASK", "CLAMP", "ALIBI", "DROPS", "MOVES", "FRESH", "EARLY", "STEPPED")
GIVEN = dict(mask="MASK", alibi="ALIBI", rows_at="ALIBI", cols_at="ALIBI", row_numbers="DROPS",
             col_numbers="DROPS")  # fmt: skip
TYPES = dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), "*bf16")
TYPES |= dict.fromkeys(("lse", "delta", "before", "dk_before", "dv_before"), "*fp32")
TYPES |= dict.fromkeys(("tiles", "blocks", "rows_at", "cols_at", *GIVEN), "*i32")
TYPES |= dict(mask="*u8", alibi="*fp32")
TYPES |= dict.fromkeys(("inner", "factor", "scale", "inverse"), "fp32")


def variants() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Every kernel, with and without each of what it forks for, alone and all together."""
    for kernel, chosen in product(KERNELS, [(), *((fork,) for fork in FORKS), FORKS]):
        on = dict(PACK=4 if chosen == FORKS else 1) | {fork: fork in chosen for fork in FORKS}
        # where nothing was before, what is written is new memory
        on |= dict(MOVES=on["MOVES"] or on["FRESH"], FRESH_V=on["FRESH"], OF_K=True, OF_V=True)
        yield kernel, SIZES | on
    for alone in ("OF_K", "OF_V"):
        on = dict.fromkeys((*FORKS, "FRESH_V", "OF_K", "OF_V"), False) | {alone: True}
        yield keys_kernel, SIZES | on | dict(PACK=1)


def module_of(kernel: Any, constants: dict[str, Any]) -> str:
    """Triton's own code for a kernel on Hopper.

    Raises:
        triton.compiler.errors.CompilationError: it is none.
    """
    signature, fixed = {}, {}
    for place, name in enumerate(kernel.arg_names):
        absent = name in GIVEN and not constants[GIVEN[name]]
        absent = absent or (name.endswith("before") and constants["FRESH"])
        if name.endswith("_strides"):
            signature[name] = ("i32",) * 4
        elif name in constants or absent:
            signature[name], fixed[(place,)] = "constexpr", constants.get(name)
        else:
            signature[name] = TYPES.get(name, "i32")
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(dict(num_warps=4, num_stages=2))
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    return str(
        source.make_ir(
            target, options, backend.get_codegen_implementation(options),
            backend.get_module_map(), context,
        )
    )  # fmt: skip
