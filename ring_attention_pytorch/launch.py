"""Launch processes of one group, which end together.

They end when all are done, when one fails, and when their parent is gone.

`spawn` starts them, in place of `torch.multiprocessing.spawn`; `torchrun_group` is for scripts that
torchrun starts.
"""

import atexit
import ctypes
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from threading import Thread, current_thread, main_thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# imported before there is a group: DDP imports it, and its default arguments keep the group of that
# time alive, whose thread can abort the process at exit
import torch.distributed.nn
from torch import multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from ring_attention_pytorch.arguments import check_least, checked
from ring_attention_pytorch.ranks.failures import RingError, fail_together

TIMEOUT = 120.0  # seconds that ranks wait for one another
_START = 300.0  # seconds until all processes must run, even on a busy machine
_END = 30.0  # seconds that a process can take to exit when all are done
_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_FIRST = 0.5  # seconds to wait for the cause of a failure that another rank may have caused


@checked
def spawn(
    worker: Callable[..., Any],
    nprocs: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float | int = TIMEOUT,
    start_method: str = "spawn",
) -> list[Any]:
    """Run `worker(rank, *args)` in `nprocs` processes of one group; return what each rank returned.

    Each process has a default group, and with NCCL the GPU of its rank. They rendezvous in a file,
    so no port is needed. All of them end when one fails, when this process is interrupted or
    terminated, and when it is gone for any other reason.

    Args:
        worker: a function at the top of a module, since it is pickled; so are `args` and results,
            which must be on the CPU.
        timeout: seconds that ranks wait for one another in the default group.
        start_method: "spawn" or "forkserver".

    Raises:
        ProcessRaisedException: a rank raised; the text names it and has its traceback.
        ProcessExitedException: a rank ended otherwise; the text names it and the way it ended.
    """
    options: dict[str, Any] = {"backend": backend, "timeout": timeout, "start_method": start_method}
    with started(worker, nprocs, *args, **options) as workers:
        workers.join()
    return workers.results


@checked
def started(
    worker: Callable[..., Any],
    nprocs: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float | int = TIMEOUT,
    start_method: str = "spawn",
) -> AbstractContextManager["Workers"]:
    """Start the processes of `spawn`; kill the ones still running when the block ends."""
    if start_method not in ("spawn", "forkserver"):
        raise ValueError(f"start_method must be 'spawn' or 'forkserver', got {start_method!r}")
    check_least(1, nprocs=nprocs)
    _check_group(backend, timeout)
    return _started(_Job(worker, args, nprocs, backend, timeout, start_method))


class _Job(NamedTuple):
    """The arguments of `spawn`."""

    worker: Callable[..., Any]
    args: tuple[Any, ...]
    nprocs: int
    backend: str
    timeout: float
    start_method: str


@contextmanager
def _started(job: _Job) -> Iterator["Workers"]:
    worker, args, nprocs, backend, timeout, start_method = job
    context: Any = multiprocessing.get_context(start_method)
    with TemporaryDirectory() as folder, _sigterm_unwinds():
        workers = Workers(nprocs)
        atexit.register(workers.kill)  # if the block is in a generator that is never closed
        try:
            for rank in range(nprocs):
                ours, theirs = context.Pipe()
                seat = _Seat(rank, nprocs, folder, backend, timeout)
                process = context.Process(target=_serve, args=(theirs, seat, worker, args))
                workers.add(process, ours)
                process.start()
                theirs.close()
            yield workers
        finally:
            workers.kill()
            atexit.unregister(workers.kill)


def _check_group(backend: str, timeout: float) -> None:
    """Raise ValueError unless a group can have this backend and timeout."""
    known = dist.Backend.backend_list
    if not all(each.rpartition(":")[2] in known for each in backend.split(",")):
        raise ValueError(f"backend must be of {', '.join(known)}, or by device, got {backend!r}")
    if not 0 < timeout < timedelta.max.total_seconds():
        raise ValueError(f"timeout must be positive and finite, got {timeout} seconds")


class Workers:
    """The processes that `started` has started.

    Attributes:
        results: each rank's result; None until it has returned.
    """

    @checked
    def __init__(self, nprocs: int):
        check_least(0, nprocs=nprocs)
        self.results: list[Any] = [None] * nprocs
        self._processes: list[BaseProcess] = []
        self._running: dict[Connection, int] = {}
        self._failures: dict[int, _Failure] = {}
        self._busy = set(range(nprocs))

    def add(self, process: BaseProcess, pipe: Connection) -> None:
        """Add the process of the next rank, and our end of its pipe."""
        self._running[pipe] = len(self._processes)
        self._processes.append(process)

    @checked
    def join(self, timeout: float | int | None = None) -> bool:
        """Wait until all have ended, at most `timeout` seconds; return whether they have.

        Raises:
            ProcessRaisedException: a rank raised; the text names it and has its traceback.
            ProcessExitedException: a rank ended otherwise; the text names it and the way it ended.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be None or at least 0 seconds, got {timeout}")
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._running and all(failure.doubt for failure in self._failures.values()):
            if self._failures:
                end = min(end, time.monotonic() + _FIRST)
            left = None if end == math.inf else max(0.0, end - time.monotonic())
            if not (ready := wait(list(self._running), left)):
                break
            for pipe in ready:
                self._listen(pipe)
        if self._failures:
            raise min(self._failures.values(), key=lambda failure: failure.doubt).error
        return not self._running

    def kill(self) -> None:
        """Kill the processes that still run, and wait until they have ended."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()

    def _listen(self, pipe: Any) -> None:
        """Receive a rank's result, failure or end from its pipe."""
        rank = self._running[pipe]
        process, name = self._processes[rank], f"rank {rank} of {len(self._processes)}"
        failure = None
        try:
            self.results[rank], raised = pipe.recv()
            if raised is not None:
                text = f"{name} failed:\n\n{raised.text}"
                error = ProcessRaisedException(text, rank, process.pid or 0)
                failure = _Failure(error, raised.doubt)
        except (EOFError, ConnectionResetError):
            del self._running[pipe]
            process.join(_END)
            if process.exitcode != 0:
                failure = _Failure(_ended(name, rank, process), doubt=0)
        if failure is None:
            self._done(rank)
        else:  # after a failure, the end of the same rank is not news
            self._failures.setdefault(rank, failure)

    def _done(self, rank: int) -> None:
        """Make all processes end once all are done: until then peers may need their connections."""
        if rank not in self._busy:
            return
        self._busy.remove(rank)
        if not self._busy:
            for pipe in self._running:
                with suppress(OSError):  # it has ended already
                    pipe.send("end")


class _Failure(NamedTuple):
    """The failure of one rank, as the error to raise."""

    error: ProcessRaisedException | ProcessExitedException
    doubt: int  # 0: no other rank can be the cause; 1: one can be; 2: one is


class _Raised(NamedTuple):
    """The failure of one rank, as it is sent to the parent."""

    text: str  # the traceback
    doubt: int


def _ended(name: str, rank: int, process: BaseProcess) -> ProcessExitedException:
    """Return the error for a process that has ended, with the way it ended."""
    if (code := process.exitcode) is None:
        text = f"{name} is done but does not exit"
        return ProcessExitedException(text, rank, process.pid or 0, 0)
    if code >= 0:
        text = f"{name} exited with code {code}"
        return ProcessExitedException(text, rank, process.pid or 0, code)
    try:
        how = signal.Signals(-code).name
    except ValueError:
        how = f"signal {-code}"
    return ProcessExitedException(f"{name} was ended by {how}", rank, process.pid or 0, code, how)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in this block, unless it has a handler already."""
    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Seat(NamedTuple):
    """A process' place in its group."""

    rank: int
    size: int
    folder: str  # the rendezvous
    backend: str
    timeout: float


def _serve(pipe: Connection, seat: _Seat, worker: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run a new process: take part in the group, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends this process
    _wake_with_parent()
    Thread(target=_end_with_parent, args=(seat.folder,), daemon=True).start()
    try:
        with _telling(pipe):
            _take(seat, pipe, worker, args)
    except (Exception, SystemExit) as error:
        _exit(error)


def _take(seat: _Seat, pipe: Connection, worker: Callable[..., Any], args: Sequence[Any]) -> None:
    """Join the group, run the worker's function, and send its result to the parent."""
    store = _rendezvous(seat)
    if "nccl" in seat.backend:
        torch.cuda.set_device(seat.rank)
    with _group(seat.backend, seat.timeout, store, seat.rank, seat.size):
        with _telling(pipe):  # before other ranks fail because this one does
            result = worker(seat.rank, *args)
        pipe.send((result, None))
        pipe.recv()  # until all are done


@contextmanager
def _telling(pipe: Connection) -> Iterator[None]:
    """Send an error in this block to the parent, and reraise it."""
    try:
        yield
    except Exception as error:
        # gloo raises RuntimeError if another rank has failed
        doubt = isinstance(error, RuntimeError) + isinstance(error, RingError)
        with suppress(OSError):  # the parent is gone
            pipe.send((None, _Raised(traceback.format_exc(), doubt)))
        raise


def _wake_with_parent() -> None:
    """Make Linux send SIGCONT to this process when its parent is gone.

    A stopped process then ends with the others. It is not killed, because it has to clean up.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a libc without prctl
            ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGCONT, 0, 0, 0)


def _end_with_parent(folder: str) -> None:
    """Wait until the parent is gone, then end this process, even if it is blocked."""
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _rendezvous(seat: _Seat) -> dist.Store:
    """Wait until all ranks have started, at most `_START` seconds, or `timeout` if longer."""
    store = dist.FileStore(f"{seat.folder}/store", seat.size)
    store.set(f"rank {seat.rank} has started", "yes")
    everyone = [f"rank {rank} has started" for rank in range(seat.size)]
    store.wait(everyone, timedelta(seconds=max(_START, seat.timeout)))
    return dist.PrefixStore("group", store)


@contextmanager
def _group(backend: str, timeout: float, store: dist.Store, rank: int, size: int) -> Iterator[None]:
    """Set up a default group for this block; if one rank fails, no other waits for it.

    The group is destroyed after the block, except if the block fails: that can take long.
    """
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    with fail_together():
        yield
    dist.destroy_process_group()


@checked
def torchrun_group(
    backend: str = "gloo", timeout: float | int = TIMEOUT
) -> AbstractContextManager[None]:
    """Set up the group of processes that torchrun has started; do nothing without torchrun.

    Put the whole script into this block. An error in it ends the process at once, after its
    traceback, so that torchrun ends or restarts the others. The process also ends when torchrun is
    gone. Restarted workers on one machine find one another, although torchrun keeps its store.

    Args:
        backend: gloo, nccl, or both as "cpu:gloo,cuda:nccl". With nccl each process of a machine
            takes the GPU of its local rank, or the only one that it sees, and makes it the current
            device; to use another one, call `torch.cuda.set_device` afterwards. Fewer GPUs than
            processes are an error.
        timeout: seconds that ranks wait for one another in the default group.
    """
    _check_group(backend, timeout)
    return _torchrun_group(backend, timeout)


@contextmanager
def _torchrun_group(backend: str, timeout: float) -> Iterator[None]:
    if not dist.is_torchelastic_launched():
        yield
        return
    _wake_with_parent()
    Thread(target=_end_with_agent, args=(os.getppid(),), daemon=True).start()
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # the store still has keys of workers that died
        store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    try:
        if "nccl" in backend:  # it hangs if all ranks have the same current device
            local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            torch.cuda.set_device(_gpu_of(local, gpus))
        with _group(backend, timeout, store, rank, size):
            yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        _exit(error)


def _gpu_of(local: int, gpus: int) -> int:
    """Return the GPU for process `local` of a machine, out of the `gpus` that it sees.

    Raises:
        ValueError: there are too few GPUs.

    >>> _gpu_of(1, gpus=4), _gpu_of(1, gpus=1)  # each process sees only its own
    (1, 0)
    """
    if gpus == 1 or local < gpus:
        return local % gpus
    raise ValueError(
        f"nccl needs a GPU for each process of a machine; this is process {local} of those that "
        f"see {gpus} GPUs; start as many as there are GPUs, or take gloo"
    )


def _exit(error: BaseException) -> None:
    """Exit at once with the error's code; an orderly exit can wait for the group's exchanges."""
    code = error.code if isinstance(error, SystemExit) else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _end_with_agent(agent: int) -> None:
    """Wait until process `agent` is no longer the parent, then end this process."""
    while os.getppid() == agent:
        time.sleep(1.0)
    os._exit(1)
