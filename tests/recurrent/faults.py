"""Faults planted into `recurrent/`."""

from tests.faults.mutant import Mutant

RECURRENT = [
    Mutant(
        "runs are in the order of ranks",
        "recurrent/runs.py:Runs.chains",
        "key=lambda run: run.position",
        "key=lambda run: run.rank",
    ),
    Mutant(
        "a document's state goes on in the next one",
        "recurrent/runs.py:Runs.of",
        "None if packing is None else packing[sample]",
        "None",
    ),
    Mutant(
        "maps have no gradient",
        "recurrent/scan.py:scanned",
        "t.index_select(0, route.sent) for t in (m, u)",
        "t.index_select(0, route.sent) for t in (m.detach(), u)",
    ),
    Mutant(
        "an initial state begins every document",
        "recurrent/runs.py:Runs.begins",
        "run.position == 0 and run.document == self.first[run.sample]",
        "run.position == 0",
    ),
    Mutant(
        "a run reads the state of the rank's first one",
        "recurrent/layers.py:_with_states",
        "state[number]",
        "state[0]",
    ),
    Mutant(
        "a convolution sees a token too early",
        "recurrent/plan.py:_halo_route",
        "plan.number_of[run] * width + place",
        "plan.number_of[run] * width + (place + 1) % width",
    ),
    Mutant(
        "the last state is that of the last document here",
        "recurrent/runs.py:Runs.of",
        "each.runs[-1].document",
        "each.runs[0].document",
    ),
    Mutant(
        "gates of 0 are differences of infinities",
        "recurrent/eager.py:_decays",
        "torch.where(later, g[:, :, :, None], 0.0).cumsum(2)",
        "g.cumsum(2)[:, :, :, None] - g.cumsum(2)[:, :, None]",
    ),
    Mutant(
        "doubling composes maps the wrong way round",
        "recurrent/doubling.py:composed",
        "torch.matmul(after, before)",
        "torch.matmul(before, after)",
    ),
    Mutant(
        "later runs give states no gradient",
        "recurrent/fla_passes.py:_TwoPasses._backward",
        "scan.back(own, dlast, call)",
        "scan.back(own * 0, dlast, call)",
    ),
    Mutant(
        "a rank's maps are where the first rank's are",
        "recurrent/fla_passes.py:_scanned",
        "split([*route.counts])[plan.ring.rank]",
        "split([*route.counts])[0]",
    ),
    Mutant(
        "the states within a run have no share in the gradients of its pieces",
        "recurrent/pieces.py:Pieces.back",
        "own.index_add(",
        "(own * 0).index_add(",
    ),
    Mutant(
        "later runs give a run's first pieces no gradient",
        "recurrent/pieces.py:Pieces.back",
        "self.cuts.ends, through)",
        "self.cuts.ends, through * 0)",
    ),
    Mutant(
        "the map of a run that is cut begins with its last piece",
        "recurrent/cuts.py:Cuts.of",
        "[maps[0] for maps in composed]",
        "[maps[-1] for maps in composed]",
    ),
    Mutant(
        "a run that nobody follows has no maps of pieces",
        "recurrent/cuts.py:Cuts.of",
        "if number in sent else len(cut) - 1",
        "if number in sent else 0",
    ),
    Mutant(
        "a document that begins anew begins with its sample's state",
        "recurrent/levels.py:first_states",
        "like.new_zeros(rows, *like.shape[1:])",
        "like.new_ones(rows, *like.shape[1:])",
    ),
]
