"""Random faults of a job of plain programs on a real Slurm with a link for each host: never two worlds that write."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fence import cuts, timeline
from tests.support.links import NEEDS_ROOT

pytestmark = [pytest.mark.slurm, NEEDS_ROOT]


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_a_few_of_them(tmp_path: Path) -> None:
    stage = cuts.play(tmp_path, count=3, seed=5, jobs=1)
    assert sum(stage.deeds.values()) >= 3 and all(cuts.two_worlds(path) == [] for path in stage.files)
    assert all(map(cuts.worlds, stage.files))


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_the_stages_from_a_silent_node_to_the_next_step_stand_in_their_order(tmp_path: Path) -> None:
    found = timeline.measure(tmp_path, proof=True)
    assert list(found) == list(timeline.STAGES)
    assert sorted(found.values()) == list(found.values()) and found["found"] > 0.0
