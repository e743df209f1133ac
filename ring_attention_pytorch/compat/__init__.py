"""Modules of ring-attention-pytorch 0.5.20 that are elsewhere now, or nowhere else.

They are imported by their old paths, `ring_attention_pytorch.ring_attention` say: this folder is
one of those in which the package looks for its modules. Nothing else in the package needs them.
"""

import ring_attention_pytorch

ring_attention_pytorch.__path__.extend(__path__)
