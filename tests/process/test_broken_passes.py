"""After a pass of a sharded module was broken off at any moment, the next ones are as if it had never been, and nothing
keeps memory: two real ranks and gloo, without a session."""

from __future__ import annotations

import json

import pytest

from tests.support.broken_passes import KINDS
from tests.support.processes import ROOT, outside_slurm
from tests.support.warm import Script

pytestmark = pytest.mark.process

LIMIT = 300.0  # ten seconds of CPU each, on a busy machine, too
SCRIPT = ROOT / "tests" / "support" / "broken_passes.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, tuple[int, list[str]]]:
    """Kind -> how many moments there were, and what was wrong in either rank."""
    folder = tmp_path_factory.mktemp("passes")
    ranks = [Script(SCRIPT, str(rank), str(folder), environment=outside_slurm()) for rank in range(2)]
    found: dict[str, tuple[int, list[str]]] = {}
    for ended in [rank.wait(LIMIT) for rank in ranks]:
        assert ended.returncode == 0, ended.stderr
        for kind, moments, wrong in map(json.loads, ended.stdout.splitlines()):
            found[kind] = moments, [*found.get(kind, (0, []))[1], *wrong]
    return found


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_the_passes_after_a_broken_one_are_as_without_it(reports, kind):
    moments, wrong = reports[kind]
    assert moments >= 8 and not wrong
