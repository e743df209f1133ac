"""Train an embedding model and a reranker: sequences are spread over ranks, what is pooled is whole.

    torchrun --nproc-per-node 4 examples/embed_texts.py
    python examples/embed_texts.py

Both print the same losses. All ranks have the same pairs. Over several rings put negatives together
by `torch.distributed.nn.all_gather` of the vectors, over the mesh's other dimension.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ring_attention_pytorch import shard_batch
from ring_attention_pytorch.integrations.transformers import register, ring_forward
from ring_attention_pytorch.launch import torchrun_group
