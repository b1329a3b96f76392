"""``python -m benchmarks.detection [--rounds N] [--json FILE]``: from a fault to its classified signal at the
controller.

A real unicrond (without Slurm), real agents, real ranks of the small GPT of the process tests. The time is from just
before the fault's system call to the time of the event `failure_detected`, which the controller takes from the same
machine's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.detection import hostile
from tests.support.jobs import AGENT, FOREVER, World
from tests.support.processes import outside_slurm

FAULTS = ("lost agent", "process exit", "exception", "hang")
AIM = {"lost agent": 2.0, "process exit": 0.1, "exception": 0.1}
SETTINGS = "allow_inject = true\nhang_floor_seconds = 0.25\nheartbeat_period = 1.0\nlease_periods = 1.8\n"
NODES, LEARNED = 2, 13  # iterations after which a deadline is known


def trains(job: World, more: int = LEARNED) -> None:
    """Both nodes train again, and the deadline is learned."""

    def healed() -> bool:
        """All are in it, and not because the last failure has only just been seen."""
        last = job.job().get("last_failure")
        return job.trains(range(NODES)) and (last is None or bool(last["stepped_at"]))

    job.wait(healed, "training")
    job.trains_on(range(NODES), more)


def once(job: World, fault: str) -> dict[str, Any]:
    """One fault into slot 1, and what the controller made of it."""
    known = {failure["id"] for failure in job.failures()}
    usual, pid = job.job()["iteration_seconds"] or 0.0, job.rank(1)["pid"]
    began = time.time()
    if fault == "process exit":
        os.kill(pid, signal.SIGKILL)
    elif fault == "hang":
        os.kill(pid, signal.SIGSTOP)
    elif fault == "lost agent":
        job.agents[1].process.kill()
    else:
        job.ask("inject", fault="exception:cuda", job="7", slot=1)
    seen = job.wait(lambda: next((f for f in job.failures() if f["id"] not in known), None), fault)
    if fault == "lost agent":
        job.agents[1].wait()
        job.start_agent(1)
    elif fault == "exception":  # it strikes at the next micro-batch: the rank's clock says when
        faults = [e for e in job.events("failure_detected") if e["id"] == seen["id"]]
        began = faults[0].get("fault_at") or began
    right = seen["slots"] == [1]
    return {
        "seconds": seen["detected_at"] - began,
        "usual": usual,
        "cause": seen["cause"],
        "by": seen["detected_by"],
        "culprit": right,
    }


def measure(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """fault -> its rounds, all in one job."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in FAULTS}
    with (
        tempfile.TemporaryDirectory(prefix="unicron-detection-") as folder,
        World(Path(folder), NODES, SETTINGS, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02") as job,
    ):
        for _ in range(rounds):
            for name in found:
                trains(job)
                found[name].append(once(job, name))
    return found


def attack(count: int) -> dict[str, Any]:
    """Hostile messages to a controller with a job that trains, and to an agent with a rank that lives."""
    with (
        tempfile.TemporaryDirectory(prefix="unicron-hostile-") as folder,
        World(Path(folder), 1, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02") as job,
    ):
        job.wait(lambda: job.trains([0], 3), "training")
        before = job.job()
        hostile.to_controller(job.address, count, seed=1)
        job.wait(lambda: job.job()["iteration"] > before["iteration"] + 3, "training under attack")
        after = job.job()
        controller = {
            "alive": job.alive,
            "same_generation": after["generation"] == before["generation"],
            "failures": after["failures"],
        }
    return {"messages_each": count, "controller": controller, "agent": _attack_agent(count)}


def _attack_agent(count: int) -> dict[str, Any]:
    attacker = hostile.HostileController()
    place = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n0",
        "UNICRON_CONTROLLER": attacker.address,
        "UNICRON_NODE_ADDRESS": "127.0.0.1",
        "UNICRON_REGISTER_TIMEOUT": "60",
        "UNICRON_MODE": "session",
    }
    command = [*AGENT, "run", "--", "sleep", "600"]
    agent = subprocess.Popen(command, env=outside_slurm() | place, stderr=subprocess.DEVNULL)
    try:
        statuses = attacker.attack(count, seed=2)
        return {"alive": agent.poll() is None, "statuses_afterwards": statuses}
    finally:
        agent.terminate()
        agent.wait(10)
        attacker.close()


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """For people."""
    lines = ["| failure | median (min to max) | aim | named rightly | classified as |"]
    lines.append("|---" * 5 + "|")
    for name, rounds in found.items():
        times = [one["seconds"] for one in rounds]
        limit = AIM.get(name) or 3 * statistics.median(one["usual"] for one in rounds) + 0.5
        took = f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
        named = f"{sum(one['culprit'] for one in rounds)} of {len(rounds)}"
        causes = ", ".join(sorted({one["cause"] for one in rounds}))
        lines.append(f"| {name} | {took} | {limit:.2f} s | {named} | {causes} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each fault")
    parser.add_argument("--messages", type=int, default=1000, help="hostile, to the agent and the controller each")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    attacked = attack(options.messages)
    print(json.dumps(attacked), flush=True)
    found = measure(options.rounds) if options.rounds else {}
    print(table(found) if found else "no faults measured")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        Path(options.json).write_text(json.dumps({"faults": found, "hostile": attacked}, indent=2) + "\n")
    survived = attacked["controller"]["alive"] and attacked["agent"]["alive"]
    return 0 if survived else 1


if __name__ == "__main__":
    sys.exit(main())
