"""Faults planted into `kernels/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "a stair goes on after a lower step", "kernels/_tile_table.py:in_steps",
        "r1 - r0 == height and wider == height", "wider == height",
    ),
    Mutant(
        "a stair goes on with the keys at an end", "kernels/_tile_table.py:in_steps",
        "r1 - r0 == height and wider == height", "r1 - r0 == height",
    ),
    Mutant(
        "a block forgets its last tile", "kernels/_tile_table.py:_tables",
        "searchsorted(table[:, start].contiguous(), at + block)",
        "searchsorted(table[:, start].contiguous(), at + block) - 1",
    ),
    Mutant(
        "ALiBi of the next head", "kernels/eager.py:visible_parts", '"(g r) -> g r 1 1"',
        '"(r g) -> g r 1 1"',
    ),
    Mutant(
        "a predicate of the first samples only", "kernels/eager.py:_samples",
        "tiles.first, tiles.first + len(keys.k),", "0, len(keys.k),",
    ),
    Mutant(
        "samples drop alike", "kernels/eager.py:_marks", "rearrange(_samples(keys, tiles).int()",
        "rearrange(0 * _samples(keys, tiles).int()",
    ),
    Mutant(
        "dropout forgotten in backward", "kernels/eager.py:backward",
        '_times_(einsum(dout, v, "b i g r d, b j g d -> b g r i j"), factor)',
        'einsum(dout, v, "b i g r d, b j g d -> b g r i j")',
    ),
    Mutant(
        "lse of the block in backward", "kernels/eager.py:backward", ".sub_(finite(lse)).exp_() dp",
        ".sub_(finite(torch.logsumexp(scores, -1, True))).exp_() dp",
    ),
    Mutant(
        "no scale on dq", "kernels/eager.py:backward",
        'dq = einsum(ds, k, "b g r i j, b j g d -> b i g r d"',
        'dq = einsum(ds / terms.scale, k, "b g r i j, b j g d -> b i g r d"',
    ),
    Mutant(
        "heads tiled, not grouped", "kernels/eager.py:by_key_head",
        '"b i (g r) d -> b i g r d", g=h_kv', '"b i (r g) d -> b i g r d", g=h_kv',
    ),
    Mutant(
        "slope of the softclamp forgotten", "kernels/eager.py:scores_of",
        "scores, slope = t * terms.softclamp, (1 - t.square()) * terms.scale",
        "scores = t * terms.softclamp",
    ),
    Mutant(
        "rows between documents keep what they held", "kernels/_varlen.py:VarlenCall.of_lse",
        "return _filled(lse, 2, self.row_gaps, -torch.inf)", "return lse",
    ),
    Mutant(
        "gradients between documents keep what they held", "kernels/_varlen.py:VarlenCall.of_cols",
        "1, self.col_gaps, 0.0)", "1, None, 0.0)",
    ),
    Mutant(
        "keys joined on the left move the diagonal", "kernels/_varlen.py:_joined",
        "None if right is None else right + width", "right",
    ),
    Mutant(
        "flash-attn 2's way with wide bounds forgotten", "kernels/_flash.py:windows",
        "for part in _apart(tile):", "for part in (tile,):",
    ),
    Mutant(
        "stretches joined over what lies between", "kernels/flex.py:_stretches",
        "free | (stops == start)", "free | (stops <= start)",
    ),
    Mutant(
        "a predicate of local places", "kernels/flex.py:_of_positions",
        "h.long(), rows_at[i], cols_at[j])", "h.long(), i.long(), j.long())",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "strides are taken to be 1", "kernels/sdpa.py:_heads_first", "t.stride(-1) != 1", "False",
    ),
    Mutant(
        "hidden scores times a scale below 0", "kernels/sdpa.py:CAN",
        '{"softclamp", "unusual_scale",', '{"softclamp",',
    ),
]  # fmt: skip
