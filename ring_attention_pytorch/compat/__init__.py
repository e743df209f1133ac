"""Old module paths: those of ring-attention-pytorch 0.5.20, and those of 1.0 that have moved.

Modules of 0.5.20 are files here, imported by their old paths, such as
`ring_attention_pytorch.ring_attention`: this folder is one of those in which the package looks for
its modules. `_moved.py` has the others. Nothing else in the package needs them.
"""

import sys

import ring_attention_pytorch
from ring_attention_pytorch.compat._moved import MovedFinder

ring_attention_pytorch.__path__.extend(__path__)
sys.meta_path.append(MovedFinder())
