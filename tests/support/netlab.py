"""Machines on one Linux host: a network namespace each, with links whose bytes are counted.

    python -m tests.support.netlab                    a table of the bytes that leave a machine
    python -m tests.support.netlab --machines 3       of three machines of two ranks

It needs root and iproute2. What is real: network stacks of their own, bytes, links that are lost.
What is not: times. Ranks are processes, which exchange by gloo.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ring_attention_pytorch import RingPlan, ring_attn
from ring_attention_pytorch.comm.gather import Gather
from ring_attention_pytorch.plan.over_machines import shape_of
from ring_attention_pytorch.ranks.failures import RingError
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.schedule.relays import by_relays, crossing, members
from tests.support import random_cases
from tests.support.case import drawn
from tests.support.cases import IN_MEMORY, Attention, errors, oracle, shard, shard_of
from tests.support.lazy import kernels_by_address
from tests.support.random_draw import Case, mended

ROOT = Path(__file__).parents[2]


def ip(*words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *map(str, words)], check=check, capture_output=True, text=True, timeout=20
    )


def refusal() -> str | None:
    """Why namespaces can't be made here; None if they can."""
    if shutil.which("ip") is None:
        return "needs iproute2"
    name = f"ra{os.getpid()}p"
    made = ip("netns", "add", name, check=False)
    if made.returncode:
        return f"needs CAP_NET_ADMIN: {made.stderr.strip()}"
    veth = ip(
        "-n", name, "link", "add", "here", "type", "veth", "peer", "name", "there", check=False
    )
    ip("netns", "del", name, check=False)
    return f"no veth: {veth.stderr.strip()}" if veth.returncode else None


class Lab:
    """Some machines, joined by a bridge."""

    def __init__(self, machines: int) -> None:
        self.name, self.machines = f"ra{os.getpid() % 100000}", machines
        self.running: list[subprocess.Popen[str]] = []

    def spaces(self) -> list[str]:
        return [f"{self.name}m{number}" for number in range(self.machines)]

    def up(self) -> None:
        bridge = f"{self.name}b"
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for number, space in enumerate(self.spaces()):
            veth = f"{self.name}v{number}"
            ip("netns", "add", space)
            ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", veth, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"10.9.0.{number + 1}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", space, "link", "set", link, "up")

    def down(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        for number, space in enumerate(self.spaces()):
            ip("netns", "del", space, check=False)
            ip("link", "del", f"{self.name}v{number}", check=False)
        ip("link", "del", f"{self.name}b", check=False)

    def cut(self, machine: int) -> None:
        """Take a machine's link down."""
        ip("-n", self.spaces()[machine], "link", "set", "eth0", "down")

    def mend(self, machine: int) -> None:
        """Take a machine's link up again."""
        ip("-n", self.spaces()[machine], "link", "set", "eth0", "up")

    def start(self, ranks: int, *words: object) -> None:
        """Start workers, so many on each machine; ranks are numbered machine by machine."""
        for number in range(self.machines):
            for local in range(ranks):
                env = {
                    "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": "29517", "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(self.machines * ranks), "RANK": str(number * ranks + local),
                }  # fmt: skip
                module = "tests.support.netlab", "--work"
                self._start(number, env, "-m", *module, *map(str, words), stdout=subprocess.PIPE)

    def torchrun(self, ranks: int, folder: Path, *words: str) -> None:
        """Start torchrun on each machine, as in docs/guide/machines.md; its words are in files."""
        for number in range(self.machines):
            how = [
                f"--nnodes={self.machines}", f"--nproc-per-node={ranks}", "--max-restarts=3",
                "--rdzv-backend=c10d", "--rdzv-endpoint=10.9.0.1:29500",
                # hosts here have one name, by which torchrun would know whose the endpoint is
                f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr=10.9.0.{number + 1}",
            ]  # fmt: skip
            env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with (folder / f"machine{number}").open("w") as file:
                torchrun = "-m", "torch.distributed.run", *how
                self._start(number, env, *torchrun, *words, stdout=file)

    def _start(self, machine: int, env: dict[str, str], *words: str, stdout: Any) -> None:
        """Start Python on a machine."""
        env = os.environ | env | {
            "NCCL_HOSTID": f"m{machine}", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["ip", "netns", "exec", self.spaces()[machine], sys.executable, *words]
        started = subprocess.Popen(
            command, env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=stdout,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.running.append(started)

    def say(self) -> None:
        """Let all workers go on."""
        for process in self.running:
            process.stdin.write("\n")
            process.stdin.flush()

    def heard(self, timeout: float) -> list[Any]:
        """Return each worker's line of JSON; an AssertionError if one says something else."""
        found, end = [], time.monotonic() + timeout
        for process in self.running:
            lines = []
            while time.monotonic() < end and (line := process.stdout.readline()):
                lines.append(line)
                if line.startswith("{"):
                    found.append(json.loads(line))
                    break
            else:
                raise AssertionError("".join(lines)[-3000:])
        return found


@contextmanager
def lab(machines: int) -> Iterator[Lab]:
    made = Lab(machines)
    try:
        made.up()
        yield made
    finally:
        made.down()


# --- what ranks do ---


def sent() -> int:
    """Bytes that this machine has sent over its link."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


CASES: list[dict[str, Any]] = [
    dict(layout="zigzag", causal=True, length=41),
    dict(layout="zigzag", causal=True, length=41, heads=3, key_heads=1),
    dict(layout="striped", causal=True, window=7, length=37, transport="gather"),
    dict(masked=True, length=29, transport="gather", memory=0, softclamp=5.0),
    dict(layout="zigzag", causal=True, length=30, ids=((0,) * 9 + (1,) * 21,), transport="gather"),
    dict(layout="zigzag", causal=True, length=33, transport="ring"),
]


def exact() -> None:
    """Say the worst error of each case on this rank."""
    ring, worst = Ring(), []
    for how in CASES:
        case = Attention(**how)
        found = errors(case, ring.rank, ring.size, shard(case, ring), oracle(case))
        worst.append(max(found.values()))
    say(machines=ring.machines, worst=worst)


def random(cases: int) -> None:
    """Say what is wrong with random cases of all features, each by its number."""
    ring, wrong = Ring(), dict[int, str]()
    for seed in range(cases):
        case = mended(drawn(Case, seed, size=ring.size))
        if case.transport in IN_MEMORY:
            case = replace(case, transport="gather")
        with kernels_by_address() if case.lazy else nullcontext():
            mine = shard_of(case, ring)
        got: list[Any] = [None] * ring.size
        dist.all_gather_object(got, mine)
        for (name, rank), (eps, _) in random_cases.errors(case, got).items():
            if not eps < random_cases.BOUND:
                wrong[seed] = f"{name} of rank {rank}: {eps:.3g} eps of its magnitude: {case}"
    say(wrong=wrong, cases=cases)


def all_of(cases: int, tokens: int) -> None:
    """Say what the other functions do, one after another."""
    exact()
    random(cases)
    table(tokens)


def table(tokens: int) -> None:
    """Say the bytes that this machine sends, by key heads and way, forward and both passes."""
    ring, found = Ring(), []
    for key_heads in (8, 2, 1):
        q, k, v = (
            torch.randn(1, tokens, heads, 64, requires_grad=True)
            for heads in (8, key_heads, key_heads)
        )
        for name, how in WAYS.items():
            plan = RingPlan.make(q, k, v, causal=True, layout="zigzag", **how)
            if name == "gather":
                plan = plan.by(Gather.make(ring, plan.blocks, ring.size))
            call = partial(ring_attn, q, k, v, plan=plan)
            found.append([key_heads, name, _bytes(call), _bytes(partial(_both, call))])
        found.append([key_heads, "lower bound", *least(plan, (q, k, v))])
    say(rows=found, mine=2 * tokens * 64 * 4)


def _both(call: Callable[[], torch.Tensor]) -> None:
    call().sum().backward()


def least(plan: RingPlan, qkv: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """The fewest bytes that the first machine can send, forward and in both passes.

    Each key that another machine needs crosses to it once, and each sum of gradients once.
    """
    machines = plan.ring.machines
    found = crossing(
        by_relays(plan.shards, machines, len(machines)), machines, shape_of(*qkv), relayed=True
    )
    first = members(machines, 0)
    forward, backward = (sum(each[rank] for rank in first) for each in found)
    return forward, forward + backward


WAYS: dict[str, dict[str, Any]] = {
    "ring": dict(transport="ring", ulysses=1),
    "gather": dict(transport="gather", ulysses=1),
    "gather by relays": dict(transport="gather", ulysses=1),
    "ulysses=2, gather": dict(transport="gather", ulysses=2),
    "default": dict(),
}


def _bytes(call: Callable[[], object]) -> int:
    """Bytes that this machine sends while all ranks make a call; the last one of two."""
    for _ in range(2):
        dist.barrier()
        time.sleep(0.15)
        before = sent()
        dist.barrier()  # no rank of this machine sends before all have looked
        call()
        dist.barrier()
        time.sleep(0.15)
    return sent() - before


def lost() -> None:
    """Say what a rank hears if a machine is lost in the middle of backward, and how soon."""
    exact()
    _fail(lambda: sys.stdin.readline())


def late(rank: int, seconds: float) -> None:
    """Say what ranks hear if one computes in backward for longer than the others wait."""
    _fail(lambda: time.sleep(seconds) if dist.get_rank() == rank else None)


def _fail(pause: Callable[[], object]) -> None:
    """Pause in backward, while the first keys are on their way; say what is raised, how soon."""
    q = torch.randn(1, 64, 3, 8, requires_grad=True)
    plan = RingPlan.make(q, q, q, causal=True, layout="zigzag")
    kernel, began = plan.kernel, list[float]()

    def backward(*given: Any, **named: Any) -> Any:
        if not began:
            say(ready=True, by=type(plan.transport.fabric).__name__)
            pause()
            began.append(time.monotonic())
        return kernel.backward(*given, **named)

    object.__setattr__(plan, "kernel", kernel._replace(backward=backward))
    try:
        ring_attn(q, q, q, plan=plan).sum().backward()
        say(raised=None)
    except RingError as error:
        say(raised=str(error), ranks=error.ranks, seconds=time.monotonic() - began[0])
    time.sleep(60)  # the first rank has the store, which others read; all are killed


def work(what: str, timeout: float, *numbers: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    does = {"exact": exact, "all": all_of, "table": table, "lost": lost, "late": late}
    does[what](*numbers)
    dist.barrier()
    dist.destroy_process_group()


def counted(made: Lab, ranks: int) -> dict[tuple[int, str], tuple[float, float]]:
    """Return what the first machine counts as sent: forward, and in both passes.

    In units of its own keys, by the number of key heads and the way.
    """
    first, found = made.heard(300)[0], {}
    for key_heads, name, forward, both in first["rows"]:
        unit = first["mine"] * key_heads * ranks
        found[key_heads, name] = forward / unit, both / unit
    return found


def rows(machines: int, ranks: int, tokens: int) -> list[str]:
    """The table of bytes that the first machine sends, as lines."""
    lines = [f"| key heads | way | forward | both passes | ({machines} machines of {ranks} ranks)"]
    with lab(machines) as made:
        made.start(ranks, "table", 120, tokens)
        found = counted(made, ranks)
    for (key_heads, name), (forward, both) in found.items():
        lines.append(f"| {key_heads} | {name} | {forward:.2f} | {both:.2f} |")
    return lines


def main() -> int:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ask.add_argument("--machines", type=int, default=2)
    ask.add_argument("--ranks", type=int, default=2, help="of each machine")
    ask.add_argument("--tokens", type=int, default=2048, help="of each rank")
    ask.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    asked = ask.parse_args()
    if asked.work:
        what, timeout, *numbers = asked.work
        work(what, float(timeout), *map(int, numbers))
        return 0
    if (why := refusal()) is not None:
        print(why)
        return 1
    print(*rows(asked.machines, asked.ranks, asked.tokens), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
