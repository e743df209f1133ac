"""Faults planted into `latent/` and the decoding of blocks."""

from tests.faults.mutant import Mutant

LATENT = [
    Mutant(
        "a group of heads adds to the gradient of the first one's parameters",
        "runtime/codec.py:Decoding.backward",
        "so_far[heads or slice(None)] += part",
        "so_far[: len(part)] += part",
    ),
    Mutant(
        "parameters have the gradient of the last block alone",
        "runtime/codec.py:Decoding.backward",
        "so_far[heads or slice(None)] += part",
        "so_far[heads or slice(None)] = part.to(so_far.dtype)",
    ),
    Mutant(
        "results of a group of heads are those of the first",
        "runtime/codec.py:Joined.take",
        "_of_heads(room, heads)",
        "_of_heads(room, slice(0, heads.stop - heads.start))",
    ),
    Mutant(
        "groups of heads read the first one's delta",
        "runtime/interfaces.py:Residuals.heads",
        "self.delta[:, which]",
        "self.delta[:, : which.stop - which.start]",
    ),
    Mutant(
        "heads that terms count are decoded apart",
        "runtime/codec.py:groups_of_a_call",
        "if counted or not codec.by_heads:",
        "if not codec.by_heads:",
    ),
    Mutant(
        "the rotated key has the gradient of one head",
        "latent/codecs.py:LatentKeys.pull_back",
        "dk[..., self.d_nope :].sum(dim=2, keepdim=True)",
        "dk[:, :, :1, self.d_nope :].clone()",
    ),
    Mutant(
        "under Ulysses every rank decodes the first heads",
        "attention.py:attention",
        "[p[swap.heads] for p in params]",
        "[p[: p.shape[0] // swap.together.size] for p in params]",
    ),
    Mutant(
        "latents are scaled in decoding as their own width says",
        "latent/decoding.py:mla_attn_with_cache",
        "scale=d**-0.5 if scale is None else scale",
        "scale=scale",
    ),
]
