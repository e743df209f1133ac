"""Faults planted into `summaries/`."""

from tests.faults.mutant import Mutant

SUMMARIES = [
    Mutant(
        "a window's edge opens a key too many", "summaries/cells.py:edge_queries",
        "before[token]", "(before + 1)[token].clamp(max=rule.stride - 1)",
    ),
    Mutant(
        "documents are numbered one upon the other", "summaries/cells.py:Places.of",
        "borders[-1], rule.count(tokens)", "0, rule.count(tokens)",
    ),
    Mutant(
        "parts of ranks weigh alike", "summaries/pooling.py:_merged",
        "key_parts = softmax_mean(keys, key_lse[..., 0])",
        "key_parts = softmax_mean(keys, 0 * key_lse[..., 0].nan_to_num())",
    ),
    Mutant(
        "values are weighed as keys are", "summaries/pooling.py:summarize",
        "zip((k, v), weights, queries)", "zip((k, v), weights[:1] * 2, queries)",
    ),
    Mutant(
        "ties go to the later cell", "top_keys.py:best_of", "left.max(-1)",
        "(lambda m: (m[0], left.shape[-1] - 1 - m[1]))(left.flip(-1).max(-1))",
    ),
    Mutant(
        "gradients of cells chosen twice are kept once", "summaries/select.py:_OfChosen.backward",
        "dkv.index_add_(0, rows.flatten(), grads[1].flatten(0, 2))",
        "dkv.index_copy_(0, rows.flatten(), grads[1].flatten(0, 2))",
    ),
    Mutant(
        "cells that some queries of a part see are not scored", "summaries/select.py:_within",
        "int(reach[1, part].max())", "int(reach[1, part].max()) - 1",
    ),
    Mutant(
        "all query groups choose alike", "summaries/select.py:Selection._chosen",
        ".softmax(-1).sum(2)", ".softmax(-1).sum((0, 2))[None].repeat(2, 1, 1)",
    ),
    Mutant(
        "gates change places", "summaries/attention.py:_sum_of_parts",
        "gates[..., 1:] * far[0]", "gates[..., :1] * far[0]",
    ),
    Mutant(
        "queries of a group read others' keys", "summaries/attention.py:_far",
        '"(r w) (g h) d -> 1 r (g h w) d"', '"(r w) (h g) d -> 1 r (g h w) d"',
    ),
    Mutant(
        "summaries never restart", "summaries/layer.py:SummaryLayer._summarized",
        "in_documents=self.restart", "in_documents=False",
    ),
    Mutant(
        "rows of the far part are tokens of documents", "schedule/policy.py:_seconds",
        "sum(mask.documents.lengths)", "sum(map(count, queries))",
    ),
]  # fmt: skip
