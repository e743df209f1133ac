"""Old module paths: those of ring-attention-pytorch 0.5.20.

They are files here, imported by their old paths, such as
`ring_attention_pytorch.ring_attention`: this folder is one of those in which the package looks for
its modules. Nothing else in the package needs them.
"""

import ring_attention_pytorch

ring_attention_pytorch.__path__.extend(__path__)
