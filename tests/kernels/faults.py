"""Faults planted into `kernels/`: a list for each battery."""

from tests.faults.mutant import Mutant

ATTENTION = [
    Mutant(
        "a block forgets the tile that began before it", "kernels/_tile_table.py:_tables",
        "searchsorted(stops, at, right=True)",
        "searchsorted(table[:, start].contiguous(), at)",
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
        '_less(einsum(dout, v, "b i g r d, b j g d -> b g r i j"), left)',
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
        "only one head of a group in dk", "kernels/eager.py:backward",
        'einsum(ds, q, "b g r i j, b i g r d -> b j g d")',
        'einsum(ds[:, :, :1], q[:, :, :, :1], "b g r i j, b i g r d -> b j g d")',
    ),
    Mutant(
        "only one head of a group in dv", "kernels/eager.py:backward",
        'einsum(p, dout, "b g r i j, b i g r d -> b j g d")',
        'einsum(p[:, :, :1], dout[:, :, :, :1], "b g r i j, b i g r d -> b j g d")',
    ),
    Mutant(
        "slope of the softclamp forgotten", "kernels/eager.py:scores_of",
        "scores, slope = t * terms.softclamp, (1 - t.square()) * terms.scale",
        "scores = t * terms.softclamp",
    ),
    Mutant(
        "dk overwritten by each tile", "kernels/eager.py:backward", "running[1][:, cols] +=",
        "running[1][:, cols] =",
    ),
    Mutant(
        "an unseen row has a finite lse", "kernels/sdpa.py:forward",
        "masked_fill(call.unseen.unsqueeze(1), -torch.inf)", "contiguous()",
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
        "rows twice in a call", "kernels/_varlen.py:_follows",
        "ascends = last.rows.stop <= tile.rows.start", "ascends = True",
    ),
    Mutant(
        "keys joined on the left move the diagonal", "kernels/_varlen.py:_joined",
        "None if right is None else right + width", "right",
    ),
    Mutant(
        "keys of one sample for all", "kernels/_varlen.py:_sequences",
        "starts = [i * length + at.start", "starts = [at.start",
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
        "cells that hide something are full", "kernels/flex.py:_mask", "*_in_order(count == full)",
        "*_in_order(count > 0)",
    ),
    Mutant(
        "a predicate of local places", "kernels/flex.py:_of_positions",
        "h.long(), rows_at[i], cols_at[j])", "h.long(), i.long(), j.long())",
    ),
    Mutant(
        "a predicate's samples count anew", "kernels/flex.py:_block", "tiles.first + torch.arange",
        "torch.arange",
    ),
    Mutant(
        "a part's delta is the whole's", "kernels/flex.py:backward", "- weight * saved.delta",
        "- saved.delta",
    ),
]  # fmt: skip

SILENT = [
    Mutant(
        "strides are taken to be 1", "kernels/sdpa.py:_dense",
        "t if t.stride(-1) == 1 else t.contiguous()", "t",
    ),
    Mutant(
        "hidden scores times a scale below 0", "kernels/sdpa.py:CAN",
        '{"softclamp", "unusual_scale",', '{"softclamp",',
    ),
    Mutant(
        "the CPU's kernel makes parts in float16", "kernels/sdpa.py:backward",
        "if q.dtype == torch.float16 or saved.dlse is not None:", "if saved.dlse is not None:",
    ),
    Mutant(
        "what was compiled for other strides", "kernels/sdpa_cudnn.py:_with_strides_of",
        "if t.stride() == strides:", "if True:",
    ),
    Mutant(
        "cells of a mask that all plans share", "kernels/flex.py:_calls", "of_mask=True",
        "of_mask=False",
    ),
]  # fmt: skip

SECOND_ORDER = [
    Mutant(
        "values stand still", "kernels/eager_jvp.py:forward",
        "einsum(part.less(part.p), part.tv,", "0 * einsum(part.less(part.p), part.tv,",
    ),
]  # fmt: skip
