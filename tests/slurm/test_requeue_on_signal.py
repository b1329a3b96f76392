"""Lightning's and submitit's own requeue before a time limit (`#SBATCH --signal`), the real packages on a real Slurm:
saved, requeued, gone on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import HERE, json_lines
from tests.support.plugin_site import Site
from tests.support.processes import wait_for

NODES, STEPS = 2, 100_000
pytestmark = pytest.mark.site(nodes=2 * NODES)


@pytest.mark.wide
def test_what_is_requeued_by_its_own_framework_goes_on(site: Site) -> None:
    out = {name: site.folder / name for name in ("lightning", "submitit")}
    for folder in out.values():
        folder.mkdir()
    options = ["--parsable", "--unicron", f"-N{NODES}", "--no-kill", "--requeue", "--open-mode=append"]
    command = f"srun --no-kill python {HERE}/lightning_train.py {out['lightning']} {NODES} {STEPS} requeued"
    numbers = {"lightning": site.run("sbatch", *options, "--wrap", command)}
    numbers["submitit"] = site.run("python", HERE / "submitit_train.py", out["submitit"], NODES)

    def last(name: str) -> list[dict[str, Any]]:
        steps = [json_lines(out[name] / f"steps.{rank}") for rank in range(NODES)]
        return [each[-1] for each in steps if each]

    def trains(name: str, begun: int, more: int) -> bool:
        found = last(name)
        return len(found) == NODES and all(
            step["size"] == NODES and step["begun"] >= begun and step["step"] >= begun + more for step in found
        )

    for name in out:
        wait_for(lambda name=name: trains(name, 0, 6), lambda: f"two ranks of {out}\n{site.logs()}")
    saved = {name: min(step["step"] for step in last(name)) for name in out}
    site.run("scancel", "--signal=USR1", numbers["lightning"])
    site.run("scancel", "--signal=USR2", numbers["submitit"])
    for name in out:
        wait_for(lambda name=name: trains(name, saved[name], 1), lambda: f"more of {out}\n{site.logs()}")
        restarts = site.run("squeue", "-h", "-j", numbers[name], "-O", "RestartCnt")
        assert restarts == "1", "once, by the framework"
        assert site.job(numbers[name])["max_nodes"] == NODES
    (out["submitit"] / "stop").touch()
    wait_for(lambda: site.job(numbers["submitit"])["state"] == "ended", site.logs)
    assert site.job(numbers["submitit"])["ended"]["code"] == 0
    results = sorted(path.name for path in (out["submitit"] / "submitit").glob("*_result.pkl"))
    assert len(results) == NODES
