"""The exactness benchmark's comparison of losses."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.exactness.__main__ import apart


@pytest.mark.parametrize(("losses", "difference"), [([4.0, 2.0], 0.0), ([4.0, 3.0], 0.5), ([math.nan, 2.0], math.inf)])
def test_a_loss_that_is_no_number_is_no_match(tmp_path, losses, difference):
    for name, values in (("reference", [4.0, 2.0]), ("healed", losses)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"iteration": number, "loss": value}) for number, value in enumerate(values)]
        (tmp_path / name / "losses.0").write_text("\n".join(lines) + "\n")
    assert apart(tmp_path / "healed", tmp_path / "reference") == difference
