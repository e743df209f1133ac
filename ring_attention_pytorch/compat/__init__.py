"""The module paths of ring-attention-pytorch 0.5.20.

The package also looks for its modules in this folder, so that old imports such as
`ring_attention_pytorch.ring_attention` find the files here. Nothing else in the package uses them.
"""

import ring_attention_pytorch

ring_attention_pytorch.__path__.extend(__path__)
