"""Time attention in parts: merges, keys that all ranks hold, block diffusion, positions in steps.

    python -m benchmarks parts
    torchrun --nproc-per-node 2 -m benchmarks parts --only shared diffusion errors
    python -m benchmarks parts --device cpu --tokens 64 --heads 4 2

Times are medians in milliseconds, of the slowest rank, forward and backward together. `merges` has
GPU time, all bytes that are read and written once a second beside those of a copy, and errors
against float64; `halves` two merged calls beside one. `shared` has times by turns over that of the
video alone, of its keys and the text's in one tensor, and joined in each call; `counted` the GPU's
work with and without text, by kernel; `diffusion` the time over two causal calls by the same
kernel; `steps` that over causal attention, with the tiles of a direction and the launches of
attention in both. `errors` compares shared keys with dense attention in float64.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.calls import is_first, slowest
from benchmarks.lib.options import Parser
from benchmarks.lib.spans import ATTENTION, covered, longest, recorded
from ring_attention_pytorch import RingPlan, merge_attention, ring_attn, shard_sequence
from ring_attention_pytorch.launch import torchrun_group

STEPS = (256, 32, 4)
MOST = 300  # tiles of a kernel that takes a call for each: more are counted, and not run
Drawn = Callable[..., Tensor]
Attend = Callable[[], Tensor]


def milliseconds(call: Callable[[], Any], o: Namespace) -> float:
    """Return the median time of a call on the slowest rank, after some to warm up."""
    for _ in range(2):
        call()
    return slowest(call, 1, o.rounds, o.on) / 1e3


def on_gpu(call: Callable[[], Any], o: Namespace) -> float:
    """Return the milliseconds in which the GPU works for a call; on a CPU those of the call."""
    if o.device == "cpu":
        return milliseconds(call, o)
    for _ in range(2):
        call()
    return covered(recorded(call, o.rounds, lambda: None)) / o.rounds / 1e3


def both_ways(attend: Attend, leaves: Sequence[Tensor]) -> Callable[[], Any]:
    def run() -> None:
        out = attend()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def relative(found: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the worst relative error of some tensors, by their norms."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, want)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


# --- merges ---


def merges(o: Namespace, drawn: Drawn) -> Iterator[str]:
    for n in (o.tokens, 2 * o.tokens, 4 * o.tokens):
        copied = drawn(4 * n, o.heads[0], o.dim).detach()
        time = on_gpu(copied.clone, o)
        copy = 2 * copied.nbytes / time
        yield f"a copy of {copied.nbytes / 1e6:.0f} MB: {time:.3f} ms, {copy / 1e6:.0f} GB/s"
        del copied
        for number in (2, 3):
            yield from merge_of(number, n, copy, o, drawn)


def merge_of(number: int, n: int, copy: float, o: Namespace, drawn: Drawn) -> Iterator[str]:
    heads = o.heads[0]
    outs = [drawn(n, heads, o.dim) for _ in range(number)]
    lses = [drawn(heads, n, 1)[..., 0].float().detach().requires_grad_() for _ in range(number)]
    parts = [t for pair in zip(outs, lses) for t in pair]
    dout, dlse = drawn(n, heads, o.dim).detach(), torch.randn_like(lses[0]).detach()
    both = merge_attention(*parts)
    # the graph's own nodes are used again, so that only backward is timed

    def back() -> tuple[Tensor, ...]:
        return torch.autograd.grad(both, parts, (dout, dlse), retain_graph=True)

    with torch.no_grad():
        times = [on_gpu(lambda: merge_attention(*parts), o)]
    times.append(on_gpu(back, o))
    row = outs[0].nbytes + lses[0].nbytes
    moved = (number + 1) * row, (2 * number + 1) * row
    wide = [t.detach().double().requires_grad_() for t in parts]
    exact = merge_attention(*wide)
    grads = torch.autograd.grad(exact, wide, (dout.double(), dlse.double()))
    errors = relative(both, exact), max(relative([a], [b]) for a, b in zip(back(), grads))
    for way, time, size, error in zip(("forward", "backward"), times, moved, errors):
        yield (
            f"merge of {number}, {n} x {heads} x {o.dim}, {way}: {time:.3f} ms, "
            f"{size / time / 1e6:.0f} GB/s, {size / time / copy:.2f} of a copy, error {error:.1e}"
        )


def halves(o: Namespace, drawn: Drawn) -> Iterator[str]:
    """Two calls with half of the keys each, merged, beside one call."""
    n = 2 * o.tokens
    q, k, v = drawn(n, o.heads[0], o.dim), *(drawn(n, o.heads[1], o.dim) for _ in range(2))
    half = n // 2
    for kernel in o.kernels:
        how: dict[str, Any] = dict(kernel=kernel, cross=True)
        one = RingPlan.make(q, k, v, **how)
        plan = RingPlan.make(q, k[:, :half], v[:, :half], **how)

        def merged(plan: RingPlan = plan) -> Tensor:
            first = ring_attn(q, k[:, :half], v[:, :half], plan=plan, return_lse=True)
            other = ring_attn(q, k[:, half:], v[:, half:], plan=plan, return_lse=True)
            return merge_attention(*first, *other)[0]

        def whole(one: RingPlan = one) -> Tensor:
            return ring_attn(q, k, v, plan=one)

        times = [milliseconds(both_ways(each, (q, k, v)), o) for each in (whole, merged)]
        yield (
            f"two halves of {n} keys, {one.kernel.name}: {times[1]:.3f} ms, "
            f"{times[1] / times[0]:.3f} of one call"
        )


# --- keys that all ranks hold ---


def shared(o: Namespace, drawn: Drawn) -> Iterator[str]:
    """Without causal: by the default kernel and the named ones, few heads of keys and all."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    n = 4 * o.tokens // ranks
    for key_heads in dict.fromkeys((o.heads[0], o.heads[1])):
        q, k, v = drawn(n, o.heads[0], o.dim), *(drawn(n, key_heads, o.dim) for _ in range(2))
        text = drawn(o.text, key_heads, o.dim), drawn(o.text, key_heads, o.dim)
        masked = torch.arange(o.text, device=q.device)[None] < o.text - o.text // 3
        for kernel in o.kernels:
            how: dict[str, Any] = dict(kernel=kernel, cross=True)
            alone = RingPlan.make(q, k, v, **how)
            runs = {"alone": with_shared(alone, (q, k, v), None)}
            for name, mask in (("with shared keys", None), ("padded", masked)):
                try:
                    plan = RingPlan.make(q, k, v, shared_keys=text, shared_key_mask=mask, **how)
                except ValueError:  # a named kernel has no masks
                    continue
                by = plan.shared and plan.shared.kernel.name
                runs[f"{name} ({by})"] = with_shared(plan, (q, k, v), text)
            if ranks == 1:
                whole = joined(q, k, v, *text)
                one = RingPlan.make(*whole, **how)
                runs["in one tensor"] = with_shared(one, whole, None)
                runs["joined in each call"] = with_joined(one, (q, k, v, *text))
            base, *times = in_turns([*runs.values()], o)
            line = f"{n} of video here, {o.text} of text, {o.heads[0]}/{key_heads} heads, "
            line += f"{alone.kernel.name}: {base:.3f} ms"
            for name, time in zip([*runs][1:], times):
                line += f", {name} {time / base:.3f}"
            yield line


def in_turns(runs: Sequence[Callable[[], Any]], o: Namespace) -> list[float]:
    """Return the median milliseconds of each, by turns: a GPU's clock falls as it gets warm."""
    for run in runs:
        run()
    turns = [[slowest(run, 1, 1, o.on) / 1e3 for run in runs] for _ in range(o.rounds)]
    return [median(times) for times in zip(*turns)]


def with_shared(
    plan: RingPlan, qkv: tuple[Tensor, ...], text: tuple[Tensor, Tensor] | None
) -> Callable[[], Any]:
    q, k, v = qkv
    return both_ways(lambda: ring_attn(q, k, v, plan=plan, shared_keys=text), (*qkv, *(text or ())))


def with_joined(plan: RingPlan, leaves: Sequence[Tensor]) -> Callable[[], Any]:
    """Return a call of keys that are joined in it, of whose gradients each gets its own."""
    q, k, v, tk, tv = leaves
    return both_ways(
        lambda: ring_attn(q, torch.cat((k, tk), 1), torch.cat((v, tv), 1), plan=plan), leaves
    )


def counted(o: Namespace, drawn: Drawn) -> Iterator[str]:
    """List the GPU's work of a call, forward and backward, without and with shared keys."""
    if o.device == "cpu":
        return
    n, heads = 4 * o.tokens, o.heads[0]
    q, k, v = (drawn(n, heads, o.dim) for _ in range(3))
    text = drawn(o.text, heads, o.dim), drawn(o.text, heads, o.dim)
    for kernel in o.kernels:
        for beside in (None, text):
            plan = RingPlan.make(q, k, v, kernel=kernel, cross=True, shared_keys=beside)
            work = with_shared(plan, (q, k, v), beside)
            work()
            spans = recorded(work, 3, lambda: None)
            about = f"{plan.kernel.name}, {'with' if beside else 'without'} shared keys"
            yield f"{about}: {covered(spans) / 3e3:.3f} ms of the GPU in {len(spans) // 3} launches"
            yield from (f"    of three calls {line}" for line in longest(spans, 12))


def joined(q: Tensor, k: Tensor, v: Tensor, tk: Tensor, tv: Tensor) -> tuple[Tensor, ...]:
    keys, values = (torch.cat(pair, 1).detach().requires_grad_() for pair in ((k, tk), (v, tv)))
    return q, keys, values


def errors(o: Namespace, drawn: Drawn) -> Iterator[str]:
    """Return errors with shared keys in the default dtype, against dense attention in float64."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    n, text, h, g = 512 * ranks, 97, 8, 2
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, n, h, o.dim), *[(2, n, g, o.dim)] * 2, *[(2, text, g, o.dim)] * 2]
    whole = [torch.randn(s, generator=draw).to(o.on, o.dtype) for s in (*shapes, shapes[0])]
    mask = (torch.arange(text) < torch.tensor([[text], [11]])).to(o.on)
    at = shard_sequence(torch.arange(n)[None], layout="zigzag")[0].to(o.on)
    for kernel, causal, padded in product(o.kernels, (False, True), (None, mask)):
        leaves = [t.detach().requires_grad_() for t in placed(whole[:5], at, 3)]
        text_keys = leaves[3], leaves[4]
        about = f"errors of rank {rank} of {ranks}, {'causal' if causal else 'full'}"
        about += f", {'all' if padded is None else 'padded'} text"
        try:
            plan = RingPlan.make(
                *leaves[:3], shared_keys=text_keys, shared_key_mask=padded, causal=causal,
                layout="zigzag", kernel=kernel,
            )  # fmt: skip
        except ValueError as error:
            yield f"{about}, {kernel}: {error}"
            continue
        out = ring_attn(*leaves[:3], shared_keys=text_keys, plan=plan)
        grads = torch.autograd.grad(out, leaves, whole[5][:, at])
        want = placed(dense(whole, causal, padded), at, 4)
        worst = [relative([a], [b]) for a, b in zip((out, *grads), want)]
        names = ("out", "dq", "dk", "dv", "dk shared", "dv shared")
        said = ", ".join(f"{name} {error:.1e}" for name, error in zip(names, worst))
        yield f"{about}, {plan.kernel.name} and {plan.shared and plan.shared.kernel.name}: {said}"


def placed(whole: Sequence[Tensor], at: Tensor, number: int) -> list[Tensor]:
    """Return this rank's tokens of so many tensors, and the others as they are."""
    return [t[:, at] for t in whole[:number]] + [*whole[number:]]


def dense(whole: Sequence[Tensor], causal: bool, mask: Tensor | None) -> list[Tensor]:
    """Compute out and gradients by one softmax over all keys, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in whole[:5]]
    q, k, v, tk, tv = leaves
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    seen = torch.ones(len(q), n, n + tk.shape[1], dtype=torch.bool, device=q.device)
    if causal:
        seen[..., :n].tril_()
    if mask is not None:
        seen[..., n:] &= mask[:, None]
    keys, values = (torch.cat(both, 1).repeat_interleave(group, 2) for both in ((k, tk), (v, tv)))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[5].double())]


# --- positions in steps ---


def steps(o: Namespace, drawn: Drawn) -> Iterator[str]:
    n = o.tokens
    at = torch.arange(n)
    q, k, v = drawn(n, o.heads[0], o.dim), *(drawn(n, o.heads[1], o.dim) for _ in range(2))
    how: dict[str, Any] = dict(causal=True, key_positions=at, cross=True)
    for kernel in o.kernels:
        base = 0.0
        for step in (1, *STEPS):
            last = at // step * step + step - 1
            plan = RingPlan.make(q, k, v, query_positions=last, kernel=kernel, **how)
            line = f"steps of {step}, {plan.kernel.name}: {tiles_of(plan)} tiles"
            if tiles_of(plan) > MOST and not plan.kernel.traits.fuses_merge:
                yield f"{line}, not run"
                continue
            run = both_ways(lambda plan=plan: ring_attn(q, k, v, plan=plan), (q, k, v))
            time = milliseconds(run, o)
            base = base or time
            yield f"{line}, {launches(run, o)} launches, {time:.3f} ms, {time / base:.2f} of causal"


def tiles_of(plan: RingPlan) -> int:
    """Count the tiles of this rank's queries forward, of all keys."""
    return sum(len(block) for keys in plan.blocks.keys for _, block in plan.tiles(keys))


def launches(run: Callable[[], Any], o: Namespace) -> int | str:
    if o.device == "cpu":
        return "no"
    return sum(span.kind == ATTENTION for span in recorded(run, 1, lambda: None))


def diffusion(o: Namespace, drawn: Drawn) -> Iterator[str]:
    """Block diffusion, as in examples/block_diffusion.py; over a ring in zigzag."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    n, length = o.tokens, o.tokens * ranks
    (q, qc), (k, v, kc, vc) = (
        [drawn(n, heads, o.dim) for _ in range(number)] for heads, number in zip(o.heads, (2, 4))
    )
    leaves = (q, qc, k, v, kc, vc)
    for kernel in o.kernels:
        causal = RingPlan.make(q, k, v, causal=True, kernel=kernel, layout="zigzag")

        def two(causal: RingPlan = causal) -> Tensor:
            return torch.cat((ring_attn(q, k, v, plan=causal), ring_attn(qc, kc, vc, plan=causal)))

        base = milliseconds(both_ways(two, leaves), o)
        for step in STEPS:
            own, clean = plans_of_diffusion(leaves, step, length, kernel)
            line = f"block diffusion, {n} of {length} tokens, blocks of {step}, {own.kernel.name} "
            line += f"and {clean.kernel.name}, {tiles_of(clean)} tiles"
            if tiles_of(clean) > MOST and not clean.kernel.traits.fuses_merge:
                yield f"{line}, not run"
                continue

            def blocks(own: RingPlan = own, clean: RingPlan = clean) -> Tensor:
                near = ring_attn(q, k, v, plan=own, return_lse=True)
                out, lse = ring_attn(torch.cat((q, qc), 1), kc, vc, plan=clean, return_lse=True)
                noisy = merge_attention(*near, out[:, :n], lse[..., :n])[0]
                return torch.cat((noisy, out[:, n:]))

            time = milliseconds(both_ways(blocks, leaves), o)
            yield f"{line}: {time:.3f} ms, {time / base:.2f} of two causal calls"


def plans_of_diffusion(
    leaves: Sequence[Tensor], step: int, length: int, kernel: str | None
) -> tuple[RingPlan, RingPlan]:
    """Return the plans of noisy blocks by themselves, and of both kinds of queries to clean keys.

    Blocks of documents are for the kernel that a plan chooses.
    """
    q, qc, k, v, kc, vc = leaves
    at = shard_sequence(torch.arange(length)[None], layout="zigzag")[0]
    own = RingPlan.make(q, k, v, cu_seqlens=[*range(0, length, step), length], layout="zigzag")
    first = at // step * step
    placed: dict[str, Any] = dict(
        query_positions=torch.cat((first - 1, first + step - 1)), key_positions=at, cross=True
    )
    how: dict[str, Any] = dict(causal=True, kernel=kernel, layout="zigzag", **placed)
    return own, RingPlan.make(torch.cat((q, qc), 1), kc, vc, **how)


PARTS = {f.__name__: f for f in (merges, halves, shared, counted, diffusion, steps, errors)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = Parser(__doc__, "parts")
    options.add_argument("--tokens", type=int, default=8192, help="on each rank")
    options.add_argument("--text", type=int, default=512, help="tokens of the shared keys")
    options.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries and keys")
    options.add_argument("--dim", type=int, default=128)
    options.add_argument("--device", default="cuda")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--kernels", nargs="+", default=["default", "sdpa-cudnn", "triton"])
    options.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    o = options.parse_args(arguments)
    o.kernels = [None if name == "default" else name for name in o.kernels]
    o.kernels = [None] if o.device == "cpu" else o.kernels
    o.dtype = torch.bfloat16 if o.device == "cuda" else torch.float32

    with torchrun_group("nccl" if o.device == "cuda" else "gloo"):
        o.on = torch.device("cpu")
        if o.device == "cuda":
            o.on = torch.device("cuda", torch.cuda.current_device())

        def drawn(*shape: int) -> Tensor:
            return torch.randn(1, *shape, device=o.on, dtype=o.dtype).requires_grad_()

        for name in o.only:
            if dist.is_initialized() and name in ("merges", "halves", "counted", "steps"):
                continue  # of one GPU
            for line in PARTS[name](o, drawn):
                if is_first() or name == "errors":
                    print(line, flush=True)


if __name__ == "__main__":
    main()
