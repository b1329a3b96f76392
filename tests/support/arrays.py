"""Jobs of a real Slurm whose batch script starts an agent with a small training."""

from __future__ import annotations

from pathlib import Path

from tests.support.controller import Controller
from tests.support.jobs import AGENT, FOREVER, TINY
from tests.support.processes import ROOT, call, outside_slurm
from unicron_ctl.lab.cluster import LocalCluster

ONE_NODE = ("-N1", "--exclusive", "--gres=gpu:1")


def slurm(cluster: LocalCluster, *words: object) -> str:
    """The output of one of Slurm's commands, which succeeds."""
    done = call(*words, environment=outside_slurm() | cluster.env())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def submit_training(
    cluster: LocalCluster,
    controller: Controller,
    folder: Path,
    *options: str,
    launch: str = "",
    program: Path = TINY,
    **variables: object,
) -> str:
    """Submit a training without end, and return the number of its job.

    Its ranks write into folder/out, its elements into folder/INDEX.out. `launch` stands before the agent, as "srun".
    """
    out = folder / "out"
    out.mkdir()
    given = {"PYTHONPATH": ROOT, "UNICRON_CONTROLLER": controller.address, "UNICRON_NODE_ADDRESS": "127.0.0.1"}
    given |= {"UNICRON_RANKS_PER_NODE": 1, "UNICRON_REGISTER_TIMEOUT": 60, "OMP_NUM_THREADS": 1, "PLAIN_OUT": out}
    given |= {"TINY_OUT": out, "TINY_SAVE": 0, "TINY_ITERATIONS": FOREVER, "TINY_SLOW": 0.1} | variables
    exports = "".join(f"export {name}='{value}'\n" for name, value in given.items())
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{exports}exec {launch} {' '.join(AGENT)} run -- {AGENT[0]} {program}\n")
    usual = ("--parsable", "--requeue", "--open-mode=append", "-o", folder / "%a.out")
    return slurm(cluster, "sbatch", *usual, *options, script)


def all_but(cluster: LocalCluster, nodes: int) -> list[str]:
    """The option that leaves a job the first `nodes` nodes of the cluster."""
    others = ",".join(cluster.spec.node_names[nodes:])
    return [f"--exclude={others}"] * bool(others)
