"""Faults planted into `routing/`: a list for each battery."""

from tests.faults.mutant import Mutant

SILENT = [
    Mutant(
        "routed layers share plans by what one rank has",
        "routing/attention.py:HeavyAttention.attend",
        "causal, counts, q.shape[2:], k.shape[2:],", "causal, q.shape, k.shape,",
    ),
]  # fmt: skip

ROUTING = [
    Mutant(
        "one gate too few at 1", "routing/soft_topk.py:fixed_point",
        "(top + alpha >= 0).sum(-1).minimum(most)",
        "((top + alpha >= 0).sum(-1) - 1).clamp(min=0).minimum(most)",
    ),
    Mutant(
        "no gradient through a", "routing/soft_topk.py:_Threshold.backward",
        "return -grad * slopes", "return 0 * grad * slopes",
    ),
    Mutant(
        "a's gradient of this rank only", "routing/soft_topk.py:_Threshold.backward",
        'sum_over_ranks(grad, ctx.ring, "routing")', "grad",
    ),
    Mutant(
        "descent forgets the steps before the last", "routing/soft_topk.py:descent",
        "weight = weight * share", "weight = weight * 0",
    ),
    Mutant(
        "the last part is taken for the sum", "comm/exchange.py:_sum",
        "total += part", "total = part",
    ),
    Mutant(
        "ties to the later token", "routing/selection.py:best",
        "order = scores.sort(dim=-1, descending=True, stable=True).indices",
        "order = scores.shape[-1] - 1 - scores.flip(-1).sort(dim=-1, descending=True, "
        "stable=True).indices",
    ),
    Mutant(
        "a window's own tokens say who of them is chosen", "routing/selection.py:causal_choice",
        "torch.cat((never, least[..., :-1]), -1)", "least",
    ),
    Mutant(
        "gates of a window by its own tokens", "routing/router.py:CoordinateDescentRouter._gates",
        "(window - int(causal)).clamp(min=0)", "window",
    ),
    Mutant(
        "soft gates for as many as are routed", "routing/router.py:CoordinateDescentRouter.choose",
        "count * self.fetch_k_ratio", "count * 1.0",
    ),
    Mutant(
        "cosines are not scaled", "routing/router.py:CoordinateDescentRouter._toward",
        "self.cosine_scale * self.dim**-0.5", "self.dim**-0.5",
    ),
    Mutant(
        "cosines of tokens keep their size", "routing/router.py:CoordinateDescentRouter.scores",
        "F.normalize(x.to(toward.dtype), dim=-1)", "x.to(toward.dtype)",
    ),
    Mutant(
        "cosines of directions that keep their size",
        "routing/router.py:CoordinateDescentRouter._toward", "F.normalize(toward, dim=-1) * scale",
        "toward * scale",
    ),
    Mutant(
        "the source's directions are of half its mean", "routing/cross_attention.py:mean_token",
        "real.clamp(min=1)", "real.clamp(min=1) / 2",
    ),
    Mutant(
        "ties broken by rounding", "routing/router.py:CoordinateDescentRouter.choose",
        "ranked = rounded(whole, self._toward(scores.dtype, routing_tokens))", "ranked = whole",
    ),
    Mutant(
        "scores in the order of ranks", "routing/plan.py:RoutingPlan.whole",
        ".index_select(-1, self.order)", "",
    ),
    Mutant(
        "all samples get the first one's tokens", "routing/dispatch.py:Dispatch.make",
        "tokens = places + n * samples", "tokens = places + 0 * samples",
    ),
    Mutant(
        "results home to the wrong slots", "routing/dispatch.py:Dispatch.home",
        "flat.index_select(0, land)", "flat.index_select(0, land.flip(0))",
    ),
    Mutant(
        "a window's keys before its queries", "routing/autoregressive.py:Turns.make",
        "turn % (queries + keys) < queries", "turn % (queries + keys) >= keys",
    ),
    Mutant(
        "null key weighed the wrong way", "routing/attention.py:HeavyAttention.with_null",
        "(score - lse).sigmoid()", "(lse - score).sigmoid()",
    ),
    Mutant(
        "no gate on values", "routing/attention.py:HeavyAttention.keys", "v * gates",
        "v + 0 * gates",
    ),
    Mutant(
        "rotary by slots", "routing/attention.py:HeavyAttention._rotate",
        "self.rotary_embed(positions.flatten().clamp(min=0))",
        "self.rotary_embed(torch.arange(positions.numel()))",
    ),
    Mutant(
        "the mean of this rank's tokens", "routing/cross_attention.py:mean_token",
        "torch.stack(parts).sum(0)", "parts[0]",
    ),
]  # fmt: skip

INFERENCE = [
    Mutant(
        "routed queries see their window's last keys only",
        "routing/generation.py:CachedRoutedTransformer._attend",
        '"b k h d -> b 1 (h k) d"', '"b k h d -> b 1 (k h) d"',
    ),
]  # fmt: skip
