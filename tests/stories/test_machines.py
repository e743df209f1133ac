"""Several machines in network namespaces: exact; and what ranks hear if one of them is lost.

Where namespaces can't be made, they are skipped; `python -m tests.support.netlab` shows how many
bytes cross.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
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
def test_attention_over_three_machines_is_exact_and_relays_send_the_least():
    """Bytes of a link, with all that TCP adds; docs/guide/machines.md has this of more tokens."""
    with lab(3) as made:
        made.start(2, "all", 60, 8, 512)
        check_exact(made.heard(200), 3, 2)
        assert {str(each) for each in made.heard(200)} == {str({"wrong": {}, "cases": 8})}
        found = netlab.counted(made, 2)
    for key_heads in (8, 2, 1):
        sent = {name: both for (heads, name), (_, both) in found.items() if heads == key_heads}
        least = sent.pop("lower bound")
        assert 0.99 * least < sent["gather by relays"] < 1.05 * least, sent
        assert sent["default"] < 1.05 * min(sent.values()), sent
        assert sent["gather"] > 1.9 * least, sent
        assert sent["ring"] > 1.8 * least, sent


READY = {"ready": True, "by": "Relays"}
SILENT = r"ranks? ([\d, ]+): no word"  # in the text of an error


@needs_namespaces
@pytest.mark.thorough
def test_if_a_machine_is_lost_every_rank_names_who_is_missing_in_time():
    """Its link is taken down in the middle of backward; the first machine has the store."""
    with lab(2) as made:
        made.start(2, "lost", 6)
        check_exact(made.heard(200), 2, 2)
        assert made.heard(100) == [READY] * 4
        made.cut(1)
        made.say()
        found = made.heard(60)
    for rank, each in enumerate(found):
        assert each["raised"], f"rank {rank} goes on"
        assert 6 <= each["seconds"] + 0.5 < 6 + 5
        missing = {*map(int, re.search(SILENT, each["raised"])[1].split(", "))}
        if rank < 2:
            assert missing <= {2, 3}, each
        else:
            assert "store with the ranks' words did not answer" in each["raised"], each


@needs_namespaces
@pytest.mark.thorough
def test_if_a_rank_is_late_errors_say_who_waits_for_whom_since_when():
    with lab(2) as made:
        made.start(2, "late", 3, 1, 5)  # rank 1 for 5 s, the others wait for 3
        assert made.heard(200) == [READY] * 4
        told = [each["raised"] for each in made.heard(60)]
    for text in told[:1] + told[2:]:
        assert re.search(SILENT, text)[1] == "1", text
    assert re.search(r"rank 0 waits in [^;]+ for rank 1 since \d\d:\d\d:\d\d UTC", told[1]), told[1]
    assert "this rank came too late" in told[1]


def losses(file: Path) -> dict[int, list[str]]:
    """Read all losses ever written of each step: several where it was repeated."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in file.read_text().splitlines() if file.exists() else ():
        step, loss = line.split()
        found[int(step)].append(loss)
    return found


@needs_namespaces
@pytest.mark.thorough
def test_when_a_link_is_back_training_goes_on_from_its_checkpoint(tmp_path):
    """By the guide's lines for torchrun; steps that are repeated have the same bits."""
    tiny = [
        "--steps=20", "--checkpoint-every=5", "--length=48", "--batch=6", "--dim=16", "--heads=2",
        "--depth=1", "--timeout=3", f"--losses={tmp_path}/losses", f"--checkpoint={tmp_path}/run",
    ]  # fmt: skip
    with lab(2) as made:
        made.torchrun(1, tmp_path, str(netlab.ROOT / "examples" / "train_text.py"), *tiny)

        def until(happens: Callable[[], bool], seconds: float) -> None:
            end = time.monotonic() + seconds
            while not happens():
                said = [(tmp_path / f"machine{n}").read_text()[-2000:] for n in range(2)]
                assert time.monotonic() < end, said
                time.sleep(0.02)

        until(lambda: len(losses(tmp_path / "losses")) > 6, 120)
        made.cut(1)
        time.sleep(5)  # ranks wait for 3
        made.mend(1)
        until(lambda: all(each.poll() is not None for each in made.running), 120)
        assert [each.returncode for each in made.running] == [0, 0]
    found = losses(tmp_path / "losses")
    assert sorted(found) == [*range(20)]
    assert any(len(each) > 1 for each in found.values()), "nothing was repeated"
    assert all(len({*each}) == 1 for each in found.values())
