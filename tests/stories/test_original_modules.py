"""Modules, names and scripts of ring-attention-pytorch 0.5.20: all import here, and are right."""

import doctest
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ring_attention_pytorch.distributed import (
    AllGather,
    all_gather_variable_dim,
    gather_sizes,
    has_only_one_value,
    split_by_rank,
)
from ring_attention_pytorch.ring import all_ring_pass, one_ring_pass, ring_pass, send_and_receive_
from ring_attention_pytorch.ring_attention import (
    RingAttention,
    RingTransformer,
    sharded_batch_to_sharded_seq,
)
from ring_attention_pytorch.zig_zag_attention import zig_zag_attn, zig_zag_shard
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ring_attention_pytorch import (
    RingError,
    distributed,
    tensor_typing,
    triton_flash_attn,
    zig_zag_attention,
)
from ring_attention_pytorch import ring as ring_module
from ring_attention_pytorch import ring_attention as ring_attention_module
from tests.support.module_cases import gradient_errors, made
from tests.support.original import NAMES, Errors, attended, check, everyones
from tests.support.reference import relative_error


def test_every_path_and_name_imports() -> None:
    for path, names in NAMES.items():
        module = import_module(f"ring_attention_pytorch{path}")
        assert all(getattr(module, name) is not None for name in names.split()), path


def test_paths_of_0_5_import_without_a_warning_whichever_module_comes_first() -> None:
    """Here `ring_attention` does, which is imported by all that follows."""
    imports = "from ring_attention_pytorch.ring_attention import RingTransformer\n"
    imports += "from ring_attention_pytorch.ring import ring_pass\n"
    imports += "".join(f"import ring_attention_pytorch{path}\n" for path in NAMES)
    subprocess.run([sys.executable, "-W", "error", "-c", imports], check=True, timeout=900)


@pytest.mark.parametrize(
    "module",
    [
        distributed,
        ring_module,
        ring_attention_module,
        tensor_typing,
        triton_flash_attn,
        zig_zag_attention,
    ],
)
def test_the_examples_of_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0


def transformed(model: RingTransformer, ids: Tensor, causal: bool) -> Tensor:
    tokens, angles = model.token_emb(ids), model.rotary_emb(torch.arange(ids.shape[1]))
    for attn, ff in model.layers:
        tokens = tokens + attended(attn, tokens, causal, angles)
        tokens = tokens + ff(tokens)
    return model.to_logits(tokens)


def module_against_dense(script: str, options: dict[str, Any]) -> Errors:
    """assert.py and assert_attn.py: a module under DDP that shards by itself."""
    n, rings, var_len = options.pop("n"), options.pop("rings", 1), options.pop("var_len", False)
    rank, size = dist.get_rank(), dist.get_world_size()
    kind: Any = RingTransformer if script == "assert" else RingAttention
    given = dict(ring_attn=True, auto_shard_seq=True, ring_seq_size=ceil(n / size) * rings)
    module = made(kind, options | given)
    dense = made(kind, options | dict(force_regular_attn=True, striped_ring_attn=False))
    width = dense.token_emb.num_embeddings if script == "assert" else dense.to_out.out_features
    inputs = (
        everyones(var_len, n, ids=width) if script == "assert" else everyones(var_len, n, width)
    )
    cotangents = [t.flip(1) for t in everyones(var_len, n, width)]
    mine = inputs[rank].clone()
    if script != "assert":
        for x in (mine, *inputs):
            x.requires_grad_()
    oracle = transformed if script == "assert" else attended
    outs = [oracle(dense, x, options.get("causal", False)) for x in inputs]
    torch.autograd.backward(outs, [c / size for c in cotangents])  # DDP takes the mean
    parallel = DistributedDataParallel(module)  # which must live until backward
    out = parallel(mine)
    out.backward(cotangents[rank])
    found = {"out": relative_error(out, outs[rank])}
    if script != "assert":
        found["dx"] = relative_error(mine.grad, inputs[rank].grad * size)
    return found | gradient_errors(module, dense, ranks="own")


SCRIPTS = [
    pytest.param(
        script, dict(n=n, **options), marks=[pytest.mark.thorough] if "rings" in options else []
    )
    for script in ("assert", "assert_attn")
    for n, options in (
        (31, {}),
        (31, dict(causal=True)),
        (31, dict(causal=True, striped_ring_attn=True, var_len=True)),
        (30, dict(causal=True, rings=2)),
        (31, dict(rings=2, var_len=True, num_grouped_query_heads=4)),
        (31, dict(causal=True, striped_ring_attn=True, rings=2)),
        (5, dict(causal=True, num_grouped_query_heads=1)),
    )
]


@pytest.mark.parametrize(("script", "options"), SCRIPTS)
def test_assert_and_assert_attn(pools: Callable, script: str, options: dict[str, Any]) -> None:
    check(pools(4).run(module_against_dense, script, dict(options)))


def test_alone_all_of_it_works_without_a_group() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(AllGather()(x)[0], x)
    assert torch.equal(one_ring_pass(x)[0], x)
    assert torch.equal(split_by_rank((x,))[0], x)
    assert has_only_one_value(gather_sizes(x, dim=1))
    assert not has_only_one_value(torch.tensor([1, 2]))
    ((_, ((got,), _)),) = all_ring_pass(x)
    assert got is x


def refusals() -> list[str]:
    """Return each call's error on this rank, where ranks disagree or one is wrong."""
    rank, said = dist.get_rank(), []
    x, q = torch.zeros(2, 3 + rank), torch.zeros(1, 4, 2, 8)
    for call in (
        lambda: all_gather_variable_dim(x, 0),
        lambda: all_gather_variable_dim(x, 2 * rank),
        lambda: ring_pass(1, x),
        lambda: ring_pass(1 + rank, x[:, :3]),
        lambda: ring_pass(1, x[:, :3], torch.zeros(2, 5 - 2 * rank)),
        lambda: ring_pass("1" if rank else 1, x[:, :3]),
        lambda: send_and_receive_(x[:, :3].clone(), torch.zeros(2, 3), 1, 1),
        lambda: zig_zag_attn(q, q[:, : 3 + rank], q[:, : 3 + rank]),
        lambda: zig_zag_attn(q, q, q, attn_mask=torch.zeros(2, 2 + 2 * rank)),
        lambda: zig_zag_shard(torch.zeros(1, 4 + rank, 2), all_gather_batch=True),
        lambda: sharded_batch_to_sharded_seq(torch.zeros(2, 5, 2), None, 3),
        lambda: split_by_rank((x,)),
    ):
        try:
            call()
            said.append("nothing")
        except (ValueError, RingError) as error:
            said.append(f"{type(error).__name__}: {error}")
    ring_pass(1, torch.zeros(2))  # which goes on
    return said


def test_ranks_that_disagree_all_hear_the_same(pools: Callable) -> None:
    first, second = pools(2).run(refusals)
    assert first == second
    words = (
        "rest of the shape", "no dimension 2", "shape must be the same",
        "num_ring_passes must be the same", "receive_buffer must be", "parameter num_ring_passes",
        "who is sent to must receive", "h a multiple of h_kv", "attn_mask must be",
        "rest of the shape", "seq_size times a divisor", "a part for each of 2 ranks",
    )  # fmt: skip
    for said, word in zip(first, words, strict=True):
        assert word in said
