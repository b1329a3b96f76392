"""What the demo checks its recoveries with, for every layout of the job."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.processes import call
from tests.support.template_training import INTERLEAVED, OVERLAP, PP, SESSION, SHARDED, SMALL, TP, train
from unicron_ctl.lab.demo.stage import CHECK

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(4, TP + PP + SHARDED, marks=pytest.mark.long),
        pytest.param(2, "", marks=pytest.mark.long),
        pytest.param(4, INTERLEAVED + SHARDED + OVERLAP, marks=pytest.mark.long),
        pytest.param(2, PP + "--calculate-per-token-loss", marks=pytest.mark.long),
    ],
)
def test_saved_gradients_are_those_of_one_process_with_the_whole_model(dataset, tmp_path, ranks, options):
    train(dataset, ranks, *options.split(), "--save-gradients", tmp_path, PLAIN_LAST="3")
    assert len(list(tmp_path.glob("*.pt"))) == 2 * ranks
    words = ["--data-path", dataset, *SMALL, *options.split()]
    done = call(sys.executable, CHECK, SESSION.parent, tmp_path, *words)
    assert done.returncode == 0, done
    assert all(0 < difference < 2e-7 for difference in json.loads(done.stdout).values()), done.stdout
    assert list(json.loads(done.stdout)) == ["1", "2"]
