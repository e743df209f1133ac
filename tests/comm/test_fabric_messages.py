"""A fabric of messages: swaps, and which keys come by which message."""

import pytest
import torch

from ring_attention_pytorch.comm.fabric_messages import MessageChannel, Messages
from ring_attention_pytorch.geometry.layouts import LAYOUTS, all_segments
from ring_attention_pytorch.geometry.segments import segment_positions
from ring_attention_pytorch.geometry.tiles import Mask
from ring_attention_pytorch.runtime.interfaces import KVBlock
from ring_attention_pytorch.schedule.pieces import Workload, rounds_of
from ring_attention_pytorch.schedule.steps import KEYS, Block, gather
from tests.support import threads
from tests.support.swaps import check_swapped


def test_each_rank_gets_its_head_of_all_tokens():
    check_swapped(Messages)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, window=5)], ids=str)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_keys_come_as_the_program_says_and_no_others(layout, mask):
    """Keys are their positions, so what has come is read off them."""
    shards = all_segments(layout, 4, 27)
    work = Workload(shards, shards, mask)
    program = gather(work, [*map(Block.of, rounds_of(work, at_once=3))]).forward
    last = len(program.blocks) - 1

    def main(ring):
        mine = segment_positions(shards[ring.rank]).double().view(1, -1, 1, 1)
        own = KVBlock(mine, -mine.expand(-1, -1, -1, 2), None, shards[ring.rank])
        channel, came = MessageChannel(Messages(ring), program, own, None), []
        for transfer in program.transfers:
            if transfer.kind == KEYS:
                channel.put(transfer)
                came.append(channel.take(transfer))
        return came

    results, hub = threads.run(4, main)
    for rank, came in enumerate(results):
        keys = torch.cat([k for k, _ in came], 1).flatten().long().tolist()
        values = torch.cat([v for _, v in came], 1)[0, :, 0, 1].long().tolist()
        want = []
        for chunk in program.chunks(last, rank):
            if chunk.owner != rank:
                want += segment_positions(shards[chunk.owner])[chunk.cols].tolist()
        assert keys == want
        assert values == [-at for at in want]
    needed = sum(
        c.segment.length for r in range(4) for c in program.chunks(last, r) if c.owner != r
    )
    padding = 16 * 2 * 4 * 3  # at most, of each tensor in each message
    assert 0 <= sum(hub.sent_bytes) - 8 * 3 * needed < padding


def test_only_what_sends_nothing_can_be_replayed():
    for idle in (False, True):
        fabric = Messages(None, idle=idle)
        assert (fabric.taped, fabric.sends_messages) == (idle, not idle)
