"""Faults planted into `nn/`: a list for each battery."""

from tests.faults.mutant import Mutant

SECOND_ORDER = [
    Mutant(
        "gathering keeps its gradients' gradients", "comm/exchange.py:_AllGather.backward",
        "_AllToAll.apply(ctx.ring, [ctx.shape] * len(grads), *grads)",
        "_swap(ctx.ring, [ctx.shape] * len(grads), grads, _CALL)",
    ),
]  # fmt: skip

ORIGINAL = [
    Mutant(
        "heads are turned by cosines of 16 bits", "nn/rotary.py:apply_rotary_pos_emb",
        "wide * pos.cos() + turned", "wide * pos.cos().to(t.dtype) + turned",
    ),
    Mutant(
        "turned heads are summed in 16 bits", "nn/rotary.py:apply_rotary_pos_emb",
        "wide * pos.cos() + turned * pos.sin()",
        "(wide * pos.cos()).to(t.dtype) + (turned * pos.sin()).to(t.dtype)",
    ),
    Mutant(
        "gathered gradients are a rank's own alone", "comm/exchange.py:_AllGather.backward",
        "_sum(mine)", "_sum(mine[:1])",
    ),
]  # fmt: skip

INFERENCE = [
    Mutant(
        "positions begin anew with each chunk", "nn/generation.py:CachedTransformer._blocks",
        "at + self.caches[0].length", "at",
    ),
    Mutant(
        "all ranks have the first one's part of the prompt",
        "nn/generation.py:CachedTransformer.prefill", "rank=ring.rank", "rank=0",
    ),
    Mutant(
        "ranks go on with what they have", "nn/generation.py:report_to_ring_of_first",
        "ring.exchange(sends, receives).wait()", "pass",
    ),
    Mutant(
        "padding is seen in generation", "nn/layer_caches.py:token_caches",
        "cache.hide_before(reading.starts)", "pass",
    ),
    Mutant(
        "padding is in the summaries of new tokens", "summaries/cache.py:SummaryCache._real",
        "if self.starts is None", "if step == 1",
    ),
    Mutant(
        "summaries of padding are seen", "summaries/cache.py:SummaryCache._unless_padding",
        "if self.starts is None", "if True",
    ),
    Mutant(
        "padding of a prompt is in its summaries", "summaries/generation.py:CachedSummaries._plan",
        "starts is None", "True",
    ),
    Mutant(
        "sequences go on after their end", "nn/generation.py:Generation._decoded",
        "token.masked_fill(ended & (token != _BROKEN), ends[0])", "token",
    ),
    Mutant(
        "generation goes on after all have ended", "nn/generation.py:Generation._decoded",
        "if ends and bool(ended.all()):", "if ends and False:",
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
        "keys are kept in the model's dtype", "nn/layer_caches.py:Reading.cache",
        "self.cache_dtype or self.dtype", "self.dtype",
    ),
    Mutant(
        "queries come in the dtype of what is kept", "inference/cache.py:RingCache.taken_as",
        "dtype if dtype in self.dtypes else self.dtype", "self.dtype",
    ),
    Mutant(
        "windows are kept that are more than all", "inference/model_cache.py:model_cache",
        "turns(w, page) >= share", "False",
    ),
    Mutant(
        "all tokens of all layers are kept", "inference/model_cache.py:model_cache",
        "turns(w, page) >= share", "True",
    ),
    Mutant(
        "spare is more than a share", "inference/model_cache.py:model_cache",
        "min(SPARE, share * page // _SHARE)", "SPARE",
    ),
    Mutant(
        "an ended sequence hides that there are no numbers", "nn/generation.py:Generation._decoded",
        "ended & (token != _BROKEN)", "ended",
    ),
    Mutant(
        "any temperature", "nn/generation.py:Sampling.check", "_COLDEST <=", "0 <",
    ),
    Mutant(
        "only NaN is no number", "nn/generation.py:Sampling.choose",
        "~largest.isfinite().squeeze(-1)", "wide.isnan().any(-1)",
    ),
    Mutant(
        "cold logits overflow", "nn/generation.py:Sampling.choose",
        "wide - largest.masked_fill(broken.unsqueeze(-1), 0.0)", "wide",
    ),
    Mutant(
        "the token that reaches top_p is left out", "nn/generation.py:Sampling.choose",
        "best.cumsum(-1) - best >= self.top_p", "best.cumsum(-1) >= self.top_p",
    ),
    Mutant(
        "one of the top_k is left out", "nn/generation.py:Sampling._kept", "logits < least",
        "least >= logits",
    ),
    Mutant(
        "a seed is ignored", "nn/generation.py:Generation.generate",
        "None if seed is None else", "None if seed is not None else",
    ),
]  # fmt: skip
