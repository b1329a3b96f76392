"""The times of an iteration's phases as real ranks measure them."""

from __future__ import annotations

import pytest

from tests.support.rank_harness import Ranks

pytestmark = pytest.mark.process
PHASES = {"data", "forward", "backward", "reduce", "step", "outside"}
FETCH = 0.02


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_phases_add_up_to_the_iteration(tmp_path, overlap):
    ranks = Ranks(
        tmp_path, 2, [], fork=True, TINY_ITERATIONS="4", TINY_SLOW=str(FETCH), TINY_SAVE="0", TINY_OVERLAP=overlap
    )
    ranks.drive()
    assert len(ranks.steps) == 8
    for step in ranks.steps:
        phases = step["phases"]
        assert set(phases) == PHASES and min(phases.values()) >= 0.0
        assert phases["data"] >= FETCH * len(step["computed"])
        assert min(phases["forward"], phases["backward"], phases["step"]) > 0.0
    inside = [sum(step["phases"].values()) - step["phases"]["outside"] for step in ranks.steps]
    assert all(seconds <= step["seconds"] + 1e-3 for seconds, step in zip(inside, ranks.steps, strict=True))
    # Where nothing else holds a rank up: a busy machine may do so between two phases.
    assert min(step["phases"]["outside"] for step in ranks.steps) < 0.5, "the script appends a line to a file"
    shares = [seconds / step["seconds"] for seconds, step in zip(inside, ranks.steps, strict=True)]
    assert max(shares) > 0.85, "what no phase covers is small"
