"""Scenario files: TOML (or the same structure as a dict) to Scenario and back.

```toml
[cluster]
nodes = 16                   # n'
mtbf_node_hours = 1000.0     # D_running(n') = mtbf_node_hours * 3600 / nodes, in seconds
transition_seconds = 60.0    # D_transition, unless a job has its own
[[job]]
name = "gpt-7b"
weight = 1.0
min_nodes = 2                # T_necessary
max_nodes = 8                # optional
nodes = 4                    # x_t
lost_worker = false
transition_seconds = 30.0    # optional
transition = { continue = 5.0, move = 40.0, grow = 30.0, restart = 300.0 }     # optional, by kind
flops = { 2 = 1.0e15, 4 = 1.9e15 }       # T(t,x) by node count
layouts = { "TP2 PP2" = { 2 = 1.0e15 }, TP2 = { 1 = 0.6e15 } }  # optional, in place of flops: the same by layout
layout = "TP2 PP2"           # the one it runs in
spares = { 5 = 1.0e12 }      # optional: sizes above those in flops, with hot spares; what these save, FLOP/s
owner = "ann"                # optional: the job's owner; the nodes are divided among owners by weight
unit = 1                     # optional: nodes of a whole replica
keep = 0                     # optional: nodes that hold the state of a running job; its owner always keeps them
```
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from unicron_planner.problem.objective import Job, PlanError, Scenario

CLUSTER_KEYS = ("nodes", "mtbf_node_hours", "transition_seconds")
JOB_KEYS = tuple(field.name for field in fields(Job) if field.name != "must_run")


def load(path: str | Path) -> Scenario:
    """The scenario in a TOML file; raises PlanError with one line that names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return from_dict(tomllib.loads(text))
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a text file") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not valid TOML: {str(error).splitlines()[0]}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _check_keys(table: Mapping[str, Any], keys: tuple[str, ...], what: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(keys)}"
            raise PlanError(f"{what}: unknown key {key!r}; {hint}")


def _table(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{what} must be a table")
    return value


def _flops(value: object, what: str) -> dict[int, Any]:
    out: dict[int, Any] = {}
    for key, rate in _table(value, what).items():
        try:
            size = int(key)
        except (TypeError, ValueError):
            raise PlanError(f"{what}: {key!r} is not a node count") from None
        if size in out:
            raise PlanError(f"{what}: the node count {size} is listed twice")
        out[size] = rate
    return out


def _job(value: object, position: int) -> Job:
    table = dict(_table(value, f"job number {position}"))
    name = table.get("name")
    if name is None:
        raise PlanError(f"job number {position} has no name")
    what = f"job {name}"
    _check_keys(table, JOB_KEYS, what)
    if not {"flops", "layouts"} & table.keys():
        raise PlanError(f"{what} has no throughput: give flops = {{ nodes = FLOP/s, ... }}")
    if "flops" in table:
        table["flops"] = _flops(table["flops"], f"{what}: flops")
    layouts = _table(table.get("layouts", {}), f"{what}: layouts")
    table["layouts"] = {name: _flops(flops, f"{what}: flops as {name}") for name, flops in layouts.items()}
    table["spares"] = _flops(table.get("spares", {}), f"{what}: spares")
    names = table.get("node_names", [])
    if not isinstance(names, (list, tuple)) or not all(isinstance(node, str) for node in names):
        raise PlanError(f"{what}: node_names must be a list of names")
    table["node_names"] = tuple(names)
    return Job(**table)


def from_dict(data: Mapping[str, Any]) -> Scenario:
    """A Scenario from the structure of the TOML file; raises PlanError."""
    data = _table(data, "the scenario")
    _check_keys(data, ("cluster", "job"), "the scenario")
    if "cluster" not in data:
        raise PlanError("there is no [cluster] table: give nodes = COUNT in it")
    cluster = _table(data["cluster"], "cluster")
    _check_keys(cluster, CLUSTER_KEYS, "cluster")
    if "nodes" not in cluster:
        raise PlanError("cluster: nodes is missing: give the number of nodes that can be used")
    jobs = data.get("job", [])
    if not isinstance(jobs, (list, tuple)):
        raise PlanError("job must be an array of tables: write [[job]], not [job]")
    settings = {key: cluster[key] for key in ("mtbf_node_hours", "transition_seconds") if key in cluster}
    made = tuple(_job(job, i + 1) for i, job in enumerate(jobs))
    return Scenario(nodes=cluster["nodes"], jobs=made, **settings)


def check_minima(scenario: Scenario) -> None:
    """Refuses a scenario whose jobs can't all run at once. The planner itself can stop jobs, but a file that asks for
    more than there is usually is a mistake."""
    total = sum(job.min_nodes for job in scenario.jobs)
    if total > scenario.nodes:
        raise PlanError(
            f"the jobs' min_nodes add up to {total}, but the cluster has {scenario.nodes} nodes: lower "
            "them, or pass --oversubscribed to let the plan stop jobs"
        )
