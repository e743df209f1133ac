"""Several machines in network namespaces: exact; and what ranks hear if one of them is lost.

Where namespaces can't be made, they are skipped; `python -m tests.support.netlab` shows how many
bytes cross.
"""

from typing import Any

import pytest

from tests.support import netlab
from tests.support.netlab import CASES, lab

needs_namespaces = pytest.mark.skipif(
    netlab.refusal() is not None, reason=f"no machines can be made: {netlab.refusal()}"
)


def check_exact(found: list[dict[str, Any]], machines: int, ranks: int) -> None:
    for rank in found:
        assert rank["machines"] == [m for m in range(machines) for _ in range(ranks)]
        assert len(rank["worst"]) == len(CASES)
        assert max(rank["worst"]) < 1e-12, rank["worst"]


@needs_namespaces
@pytest.mark.thorough
def test_attention_over_three_machines_is_exact():
    with lab(3) as made:
        made.start(2, "exact", 60)
        check_exact(made.heard(200), 3, 2)


@needs_namespaces
@pytest.mark.thorough
def test_if_a_machine_is_lost_every_rank_names_who_is_missing_in_time():
    """Its link is taken down between forward and backward."""
    with lab(2) as made:
        made.start(2, "lost", 8)
        check_exact(made.heard(200), 2, 2)
        assert made.heard(100) == [{"ready": True}] * 4
        made.cut(1)
        made.say()
        found = made.heard(60)
    for rank, each in enumerate(found):
        assert each["raised"], f"rank {rank} goes on"
        assert each["ranks"], each
        assert {*each["ranks"]} <= ({2, 3} if rank < 2 else {0, 1}), each
        assert 8 <= each["seconds"] + 0.5 < 8 + 5
