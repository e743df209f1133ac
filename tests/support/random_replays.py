"""Random series of calls that tapes replay, beside calls that none replays: equal to the bit.

    python -m tests.support.random_replays --series 1000

A series has a few plans, and for each a twin without tapes. A call gets new values, perhaps in
tensors with other strides; its results are dropped, or differentiated at once, later, twice or in
a checkpoint. In between are errors, calls without gradients, and on GPUs other streams.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.plan import plan_cache

N, H, G, D = 24, 4, 2, 16  # tokens, heads, key heads, head size
OPTIONS = (
    dict(causal=True), dict(), dict(causal=True, window=5), dict(softclamp=4.0),
    dict(causal=True, dropout=0.25, dropout_seed=3), dict(causal=True, prefix=7),
)  # fmt: skip


class Series:
    """One series: its plans, with a twin each, and what is still to be differentiated."""

    def __init__(self, seed: int, device: str, kernel: str | None) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.kernel = device, kernel
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.later: list[Callable[[], None]] = []
        self.wrong: list[str] = []
        self.calls = 0
        self.made: list[RingPlan] = []
        self.plans = [self.plan() for _ in range(self.draw.randint(1, 3))]

    def plan(self) -> tuple[RingPlan, RingPlan]:
        """Make a plan and its twin, perhaps with documents of its own."""
        options = dict(self.draw.choice(OPTIONS))
        if self.draw.random() < 0.4 and "prefix" not in options:
            borders = sorted(self.draw.sample(range(1, N), 2))
            options["cu_seqlens"] = [0, *borders, N]
        plans = []
        for _ in range(2):
            plan_cache.forget()  # the twin must not be the same plan
            plans.append(RingPlan.make(*self.given("plain"), kernel=self.kernel, **options))
        object.__setattr__(plans[1], "tapes", None)
        self.made.append(plans[0])
        return plans[0], plans[1]

    def given(self, strides: str) -> list[Tensor]:
        """Draw q, k and v."""

        def drawn(*shape: int) -> Tensor:
            t = torch.randn(*shape, generator=self.generator, device=self.device)
            return t.to(self.dtype)

        if strides == "fused":
            return list(drawn(2, N, H + 2 * G, D).split((H, G, G), dim=2))
        if strides == "heads first":
            return [drawn(2, h, N, D).transpose(1, 2) for h in (H, G, G)]
        if strides == "shifted":
            return [drawn(2 * N * h * D + 3)[3:].view(2, N, h, D) for h in (H, G, G)]
        return [drawn(2, N, h, D) for h in (H, G, G)]

    def stream(self) -> AbstractContextManager[object]:
        """Return a block on the current stream, or on another one that has waited for it."""
        if self.device == "cpu" or self.draw.random() < 0.7:
            return nullcontext()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(side)

    def compare(self, what: str, pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
        if not all(torch.equal(a, b) for a, b in pairs):
            self.wrong.append(f"call {self.calls}: {what}")

    def call(self) -> None:
        """Make one call of a plan and of its twin."""
        self.calls += 1
        plans = self.draw.choice(self.plans)
        strides = self.draw.choice(("plain", "plain", "plain", "fused", "heads first", "shifted"))
        whole, fate = self.given(strides), self.draw.choice(FATES)
        leaves = [[t.detach().requires_grad_(fate != "no grad") for t in whole] for _ in plans]
        dout = torch.randn(2, N, H, D, generator=self.generator, device=self.device).to(self.dtype)
        if self.draw.random() < 0.2:
            dout = dout[:1, :1].expand(2, N, H, D)
        with self.stream():
            if fate == "error":
                self.fail(plans[0], leaves[0])
            results = [self.attend(fate, plan, of) for plan, of in zip(plans, leaves)]
            self.compare("forward", zip(*results))
            if fate in ("dropped", "no grad"):
                return
            if fate == "later":
                self.later.append(lambda: self.back(results, leaves, dout, 1))
            else:
                self.back(results, leaves, dout, 2 if fate == "twice" else 1)

    def attend(self, fate: str, plan: RingPlan, given: list[Tensor]) -> list[Tensor]:
        if fate == "checkpoint":
            return [checkpoint(lambda *t: ring_attn(*t, plan=plan), *given, use_reentrant=False)]
        return list(ring_attn(*given, plan=plan, return_lse=True))

    def back(
        self, results: list[list[Tensor]], leaves: list[list[Tensor]], dout: Tensor, times: int
    ) -> None:
        """Differentiate both calls, so many times."""
        for number in range(times):
            last = number == times - 1
            grads = [
                torch.autograd.grad(out, given, dout, retain_graph=not last)
                for (out, *_), given in zip(results, leaves)
            ]
            self.compare("backward", zip(*grads))

    def fail(self, plan: RingPlan, given: list[Tensor]) -> None:
        """Make a wrong call, or one whose backward an error ends."""
        if self.draw.random() < 0.5:
            try:
                ring_attn(given[0][:, 1:], *given[1:], plan=plan)
            except ValueError:
                return
            self.wrong.append(f"call {self.calls}: no error of a wrong shape")
        out = ring_attn(*(t * 1 for t in given), plan=plan)

        def stop(_: Tensor) -> None:
            raise MemoryError

        out.register_hook(stop)
        try:
            out.sum().backward()
        except MemoryError:
            return
        self.wrong.append(f"call {self.calls}: an error is lost")

    def run(self, calls: int) -> list[str]:
        """Make so many calls, and what is then left to do; return what was wrong."""
        for _ in range(calls):
            if self.draw.random() < 0.1:
                self.plans[self.draw.randrange(len(self.plans))] = self.plan()
            self.call()
            while self.later and self.draw.random() < 0.4:
                self.later.pop(self.draw.randrange(len(self.later)))()
        for each in self.later:
            each()
        return self.wrong

    def replayed(self) -> int:
        """Count the tapes that replay calls."""
        tapes = [plan.tapes for plan in self.made if plan.tapes is not None]
        return sum(tape.replay is not None for each in tapes for tape in each.by_kind.values())


FATES = (
    "at once", "at once", "at once", "later", "twice", "checkpoint", "dropped", "no grad", "error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20, help="of a series")
    parser.add_argument("--first", type=int, default=0, help="seed")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = (None, "triton", "eager") if device == "cuda" else (None, "eager")
    wrong = replayed = 0
    for seed in range(asked.first, asked.first + asked.series):
        series = Series(seed, device, kernels[seed % len(kernels)])
        if found := series.run(asked.calls):
            wrong += 1
            print(seed, found[:3], flush=True)
        replayed += series.replayed()
    print(f"{wrong} of {asked.series} series wrong; {replayed} tapes")


if __name__ == "__main__":
    main()
