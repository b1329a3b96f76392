"""The demo as a user runs it: a real Slurm, real Megatron, real failures. Its result is checked against the
contract."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
LIMIT = 560


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What `unicronctl demo --json` wrote."""
    file = tmp_path_factory.mktemp("demo") / "result.json"
    command = [str(Path(sys.executable).with_name("unicronctl")), "demo", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return json.loads(file.read_text())


@pytest.mark.timeout(LIMIT + 20)
def test_five_failures_are_detected_and_healed(result: dict) -> None:
    ranks = [("rank", 2), ("rank", 2)]
    assert [(f["kind"], f["severity"]) for f in result["failures"]] == [
        *ranks,
        ("node", 1),
        ("node", 1),
        ("flip", 1),
    ]
    for failure in result["failures"]:
        assert failure["injected_at"] <= failure["detected_at"] <= failure["resumed_at"] <= failure["restored_at"]
        # Of 12 micro-batches: what survivors had is kept, only the lost rank's are computed by others.
        assert failure["recomputed_micro_batches"] <= failure["redistributed_micro_batches"] <= 6
    assert any(failure["reused_micro_batches"] for failure in result["failures"])
    assert (result["failures"][-1]["cause"], result["failures"][-1]["job"]) == ("silent_corruption", "gpt-large")
    assert [join["job"] for join in result["joins"]] == ["gpt-small"]


@pytest.mark.timeout(30)
def test_a_rank_with_a_neighbour_on_its_node_dies_and_joins_alone(result: dict) -> None:
    assert [(f["job"], f["neighbours_kept"]) for f in result["failures"]][:2] == [("gpt-large", 0), ("gpt-small", 1)]


@pytest.mark.timeout(30)
def test_losses_and_gradients_are_those_of_an_undisturbed_run(result: dict) -> None:
    assert [job["name"] for job in result["jobs"]] == ["gpt-large", "gpt-small"]
    for job in result["jobs"]:
        assert job["iterations"] > 10
        # fp32 sums in another order differ by 1e-7, and Adam carries that on from step to step.
        assert job["max_loss_difference"] <= 1e-3
        assert abs(job["loss"] - job["reference_loss"]) <= 1e-3 * job["reference_loss"]
        # Of several generations each, the recovered iterations among them.
        assert len(job["gradient_differences"]) >= 2
        assert job["max_gradient_difference"] <= 1e-6
        assert job["ledger_violations"] == 0


@pytest.mark.timeout(30)
def test_nothing_is_left_running(result: dict) -> None:
    ours = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"unicron-demo-" in _read(p)]
    assert ours == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
