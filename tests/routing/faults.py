"""Faults planted into `routing/`: a list for each battery."""

from tests.faults.mutant import Mutant

SILENT = [
]  # fmt: skip

ROUTING = [
    Mutant(
        "one gate too few at 1", "routing/soft_topk.py:fixed_point",
        "(top + alpha >= 0).sum(-1).minimum(most)",
        "((top + alpha >= 0).sum(-1) - 1).clamp(min=0).minimum(most)",
    ),
    Mutant(
        "descent forgets the steps before the last", "routing/soft_topk.py:descent",
        "weight = weight * share", "weight = weight * 0",
    ),
    Mutant(
        "the last part is taken for the sum", "comm/collectives.py:sum_parts",
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
        "soft gates for as many as are routed", "routing/router.py:CoordinateDescentRouter.choose",
        "count * self.fetch_k_ratio", "count * 1.0",
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
