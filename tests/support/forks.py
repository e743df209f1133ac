"""Processes that are forked from one in which they find all that they import.

An import of PyTorch takes two seconds of a CPU, of transformers three more: too much for each of a
test's ranks. `context` has a fork server of its own, whatever anybody else lets the usual one
import. In that there must be no Triton: its interpreter is asked for before it is imported.
"""

import multiprocessing as mp
import sys
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from threading import Lock
from unittest import mock

LIGHT = [
    "tests.support.still",  # first
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "ring_attention_pytorch",
    "tests.support.reference",
]
_MORE = [  # of these, all that the tests have imported
    "pytest",
    "hypothesis",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "tests.support.cases",
]
_server, _launching = forkserver.ForkServer(), Lock()


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        _server.set_forkserver_preload([*LIGHT, *(name for name in _MORE if name in sys.modules)])
        by_ours = _server.connect_to_new_process
        with _launching, mock.patch.object(forkserver, "connect_to_new_process", by_ours):
            super()._launch(process_obj)


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


context = _Context()
light = mp.get_context("forkserver")


def set_light() -> None:
    """Let the usual fork server, if it has not started, import what most processes need."""
    light.set_forkserver_preload(LIGHT)
