"""Steps a second of a small Llama of transformers, by adapters to attention over spread sequences.

    torchrun --nproc-per-node 4 -m benchmarks hf                      # gloo, float32
    torchrun --nproc-per-node 2 -m benchmarks hf --device cuda --tokens 8192 32768 --dim 2048

"by hand" is what one writes without `ring_forward`, and all that it can forget; "one process" is
transformers' SDPA over the whole sequence, on every rank at the same time; "context_parallel" is
PyTorch's, which has no causal attention on CPUs. Ids are on the host at first, as from a loader.
Subjects take turns of a few steps back to back, as in training; times are lower quartiles.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.lib.options import parser
from ring_attention_pytorch import positions, ring_attn, shard_batch, shard_sequence
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.launch import torchrun_group
from ring_attention_pytorch.progress import counted

WORDS = 512
TURN = 4  # steps without a wait for the GPU between them
Step = Callable[[nn.Module, Tensor], Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    options = parser("hf", __doc__, rounds=8)
    options.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of the sequence")
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = options.parse_args(argv)
    torch.set_num_threads(1)
    with torchrun_group("nccl" if args.device == "cuda" else "gloo"):
        register()
        AttentionInterface.register("hand", _by_hand)
        AttentionInterface.register("pytorch", sdpa_attention_forward)
        for name in ("hand", "pytorch"):
            AttentionMaskInterface.register(name, lambda **_: None)
        for tokens in args.tokens:
            found = seconds(args.device, tokens, args.dim, args.layers, args.rounds)
            if dist.get_rank() == 0:
                print(table(args.device, tokens, found), flush=True)


def steps(device: str) -> dict[str, tuple[str, Step]]:
    """Return by name which attention a model has, and a step's loss."""
    found = {
        "one process": ("sdpa", whole),
        "ring_forward": ("ring", by_ring_forward),
        "by hand": ("hand", by_hand),
    }
    return found if device == "cpu" else {**found, "context_parallel": ("pytorch", by_pytorch)}


def seconds(device: str, tokens: int, dim: int, layers: int, rounds: int) -> dict[str, float]:
    """Return the lower quartile of a step's seconds, forward and backward, by each."""
    torch.manual_seed(0)
    where = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
    ids = torch.randint(WORDS, (1, tokens))  # on the host, as from a loader
    heads = dict(num_attention_heads=dim // 64, num_key_value_heads=max(1, dim // 128))
    sizes = dict(hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers)
    config = dict(**sizes, **heads, vocab_size=WORDS, max_position_embeddings=tokens)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    subjects = {}
    for name, (attention, step) in steps(device).items():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation=attention))
        subjects[name] = (model.to(where, dtype), step)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in counted(range(rounds + 2), "by turns", rounds + 2, "rounds"):
        for name, (model, step) in subjects.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(TURN):
                step(model, ids)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                times[name].append((time.perf_counter() - begin) / TURN)
    return {name: statistics.quantiles(each)[0] for name, each in times.items()}


def table(device: str, tokens: int, found: dict[str, float]) -> str:
    lines = [f"\n{tokens} tokens over {dist.get_world_size()} processes, {device}"]
    for name, each in found.items():
        lines.append(f"{name:18}{1 / each:8.2f} steps/s  {1000 * each:8.1f} ms")
    return "\n".join(lines)


def whole(model: nn.Module, ids: Tensor) -> Tensor:
    ids = ids.to(model.device, non_blocking=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def by_ring_forward(model: nn.Module, ids: Tensor) -> Tensor:
    batch = shard_batch({"input_ids": ids, "labels": ids})  # compared without a wait for the GPU
    with ring_forward(batch.to(model.device, non_blocking=True)) as inputs:
        loss = model(**inputs).loss
        loss.backward()
    return loss


def by_hand(model: nn.Module, ids: Tensor) -> Tensor:
    ids = ids.to(model.device, non_blocking=True)
    size, rank, n = dist.get_world_size(), dist.get_rank(), ids.shape[1]
    labels = shard_sequence(F.pad(ids[:, 1:], (0, 1), value=-100), layout="zigzag")
    at = positions("zigzag", rank=rank, ring_size=size, length=n).to(ids.device)[None]
    mine = shard_sequence(ids, layout="zigzag")
    logits = model(input_ids=mine, position_ids=at, use_cache=False).logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * size / (n - 1)
    loss.backward()
    return loss


def by_pytorch(model: nn.Module, ids: Tensor) -> Tensor:
    mesh, n = init_device_mesh("cuda", (dist.get_world_size(),)), ids.shape[1]
    ids = ids.to(model.device, non_blocking=True, copy=True)  # it is cut in place
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    at = torch.arange(n, device=ids.device)[None]
    buffers = [ids, labels, at]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        logits = model(input_ids=ids, position_ids=at, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * dist.get_world_size() / (n - 1)).backward()
    return loss


def _by_hand(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: object
) -> tuple[Tensor, None]:
    qkv = (t.transpose(1, 2) for t in (q, k, v))
    return ring_attn(*qkv, causal=True, layout="zigzag", scale=given["scaling"]), None


if __name__ == "__main__":
    main()
