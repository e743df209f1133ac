"""Train one model over a ring of threads that share one GPU, and keep its losses.

    python -m tests.gpu.curves --ranks 4 --mask documents --seconds 100 --save FILE.json

The model, the text, the order and the steps are those of `benchmarks curves`, and so are the rows:
their "ranks" are threads, which share the weights, so that gradients need no messages; what ranks
exchange in attention and in the loss is copied within the GPU. Speeds mean nothing.
"""

import threading
import time
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.curves import MASKS, RATE, WARM_UP, Whole, wholes
from benchmarks.lib.options import parser
from benchmarks.lib.results import Run
from examples.train_documents import Model
from ring_attention_pytorch import ring_cross_entropy, shard_batch
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads

Sizes = dict[str, int]


class Trained:
    """A model that threads train together: a barrier before and after each step's update."""

    def __init__(self, ranks: int, sizes: Sizes, device: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Model(**sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=device != "cpu")
        self.warming = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1 / WARM_UP, total_iters=WARM_UP
        )
        self.ranks, self.device, self.losses = ranks, device, list[float]()
        self.together, self.late = threading.Barrier(ranks, timeout=threads.PATIENCE), False

    def step(self, whole: Whole, ring: Ring, end: float) -> None:
        """Compute a rank's share of a step; the first rank updates the weights."""
        wide = torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu")
        batch = shard_batch(whole, group=ring)
        with wide, batch:
            logits = self.model(batch["input_ids"], batch["position_ids"])
            loss = ring_cross_entropy(logits, batch.labels, group=ring)
            loss.backward()
        self.together.wait()
        if ring.rank == 0:
            for each in self.model.parameters():
                if each.grad is not None:
                    each.grad /= self.ranks
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.warming.step()
            self.losses.append(loss.item())
            self.late = time.monotonic() > end
        self.together.wait()


def train(
    mask: str, ranks: int, sizes: Sizes, steps: int, seconds: float, device: str
) -> list[float]:
    """Train for these steps, or as many as fit in the seconds; return the loss of each."""
    trained, end = Trained(ranks, sizes, device), time.monotonic() + seconds
    given = [*wholes(steps, sizes["length"], mask, torch.device(device))]

    def rank_main(ring: Ring) -> None:
        with torch.autograd.set_multithreading_enabled(False):  # ranks wait for one another
            for whole in given:
                if not trained.late:
                    trained.step(whole, ring, end)

    threads.run(ranks, rank_main)
    return trained.losses


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print the first and the last losses, and with `--save` keep all."""
    options = parser("curves", __doc__, save="curves", device="cuda")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--mask", choices=MASKS, default="documents")
    options.add_argument("--seconds", type=float, default=240.0, help="at most")
    for name, default in dict(steps=500, length=16384, dim=768, depth=12, heads=12).items():
        options.add_argument(f"--{name}", type=int, default=default)
    asked = options.parse_args(argv)
    sizes = {name: getattr(asked, name) for name in ("length", "dim", "depth", "heads")}
    weights = sum(p.numel() for p in Model(**sizes).parameters())
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    run = Run("curves", argv, device, asked.save)
    command = run.facts["command"].replace("-m benchmarks curves", "-m tests.gpu.curves")
    run.facts["command"] = command
    losses = train(asked.mask, asked.ranks, sizes, asked.steps, asked.seconds, asked.device)
    last = losses[-20:]
    about = {"subject": "ring", "ranks": asked.ranks, "gpus": 1, "mask": asked.mask}
    about |= {"tokens": sizes["length"] // asked.ranks, "weights": weights}
    about |= {"dim": sizes["dim"], "depth": sizes["depth"], "first": round(losses[0], 4)}
    about |= {"last": round(sum(last) / len(last), 4), "losses": [round(x, 6) for x in losses]}
    run.add([about])
    run.finish()


if __name__ == "__main__":
    main()
