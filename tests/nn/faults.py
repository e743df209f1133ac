"""Faults planted into `nn/`: a list for each battery."""

from tests.faults.mutant import Mutant

SECOND_ORDER = [
    Mutant(
        "collectives keep their gradients' gradients", "comm/collectives.py:_Linear.backward",
        "ctx.back(grads, ctx.caller)", "ctx.back([g.detach() for g in grads], ctx.caller)",
    ),
]  # fmt: skip

ORIGINAL = [
    Mutant(
        "heads are turned by cosines of 16 bits", "nn/rotary.py:apply_rotary_pos_emb",
        "wide * pos.cos() + turned", "wide * pos.cos().to(t.dtype) + turned",
    ),
    Mutant(
        "gathered gradients are a rank's own alone", "comm/collectives.py:_sum_on_owners",
        "sums[ring.rank]", "pieces[ring.rank]",
    ),
]  # fmt: skip

INFERENCE = [
    Mutant(
        "all ranks have the first one's part of the prompt",
        "nn/generation.py:CachedTransformer.prefill", "rank=ring.rank", "rank=0",
    ),
    Mutant(
        "layers have no window in generation", "nn/layer_caches.py:TokenCache.attend",
        "window=attn.window", "window=None",
    ),
    Mutant(
        "layers have no softclamp in generation", "nn/layer_caches.py:TokenCache.attend",
        "softclamp=attn.softclamp", "softclamp=None",
    ),
    Mutant(
        "only NaN is no number", "nn/generation.py:Sampling.choose",
        "~largest.isfinite().squeeze(-1)", "wide.isnan().any(-1)",
    ),
]  # fmt: skip
