"""Ranks of this host as ranks of several machines, and the bytes between these.

Each machine is a torchrun of its own, with a name for NCCL and for us, and sockets between. Inside
one NCCL uses NVLink. Bytes and results are evidence, times are of sockets over loopback.
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

import torch

from benchmarks.lib.jobs import ROOT


def start(
    machines: int, module: str, words: Sequence[str], device: str, ranks: int | None = None
) -> int:
    """Run `python -m module words` on so many machines; return the worst exit status.

    A machine has so many `ranks`. By default it has two at least: two GPUs are those of both
    machines, and one GPU is that of all four ranks. All ranks end before this does, also if it is
    asked to by SIGTERM.
    """
    gpus = 2 * machines if device == "cpu" else torch.cuda.device_count()
    each, running = ranks or max(2, gpus // machines), []
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for number in range(machines):
        env = os.environ | {
            "NCCL_HOSTID": f"machine{number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
            "RING_ATTENTION_MACHINE": f"machine{number}",
        }  # fmt: skip
        if device != "cpu":
            mine = {(number * each + i) % gpus for i in range(each)}  # shared by machines, if few
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[i] for i in sorted(mine))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines),
            "--node-rank", str(number), "--nproc-per-node", str(each),
            "--master-addr", "127.0.0.1", "--master-port", str(port), "-m", *module.split(), *words,
        ]  # fmt: skip
        running.append(Popen(command, env=env, cwd=ROOT, start_new_session=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        return max(abs(process.wait()) for process in running)
    finally:  # each is asked once: asked again, torchrun would leave its ranks behind
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def take_gpu(rank: int, size: int) -> torch.device:
    """Make this rank's GPU the current one; where GPUs are fewer than ranks, some share one.

    Then symmetric memory must be told. NCCL must think that each rank is on a host of its own, and
    we that they are on one machine, unless it has a name.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if torch.cuda.device_count() < size:
        os.environ["NCCL_HOSTID"] = f"rank {os.environ.get('RANK', rank)}"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        os.environ.setdefault("RING_ATTENTION_MACHINE", "one machine")
    return device


def received() -> int:
    """Return the bytes that came over loopback so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])
