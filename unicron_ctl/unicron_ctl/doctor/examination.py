"""The table of checks: the functions that collect the facts for each on a host, and the one that judges them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from unicron_ctl.doctor import cluster_checks as cluster
from unicron_ctl.doctor import host_checks as host
from unicron_ctl.doctor import reach_checks as reach
from unicron_ctl.doctor.facts import (
    COMPUTE,
    GOOD,
    HEAD,
    LOGIN,
    PROBLEM,
    UNKNOWN,
    Case,
    Check,
    Finding,
    HostFacts,
    Ports,
    SiteFacts,
    Verdict,
    unknown,
)

EVERYWHERE = frozenset((HEAD, LOGIN, COMPUTE))
WITH_JOBS = frozenset((LOGIN, COMPUTE))
ON_NODES = frozenset((COMPUTE,))
CLUSTER: frozenset[str] = frozenset()
NODES = "nodes"  # the results about nodes that did not answer, which belong to no check
_ORDER: tuple[Verdict, ...] = ("problem", "unknown", "advice", "good")
CHECKS: tuple[Check, ...] = (
    Check("slurm", CLUSTER, cluster.slurm),
    Check("config", EVERYWHERE, host.config, {"config": lambda asked: asked.config_facts}),
    Check("partitions", CLUSTER, cluster.partitions),
    Check("controller", EVERYWHERE, reach.controller, {"controller": reach.controller_facts}),
    Check("release", EVERYWHERE, reach.release),
    Check("controller-user", EVERYWHERE, reach.controller_user),
    Check("users", EVERYWHERE, reach.users, {"users": reach.user_numbers}),
    Check("admin-level", CLUSTER, cluster.admin_level),
    Check("auth-type", CLUSTER, cluster.auth_type),
    Check("munge", EVERYWHERE, reach.munge, {"munge": reach.munge_problem}),
    Check("clock", EVERYWHERE, reach.clock),
    Check("agent-ports", ON_NODES, reach.agent_ports),
    Check("slurmd-port", ON_NODES, reach.slurmd_port),
    Check("plugin", WITH_JOBS, reach.plugin, {"plugin": lambda asked: asked.plugin}),
    Check("agent", ON_NODES, reach.agent, {"agent": reach.agent_facts}),
    Check(
        "python",
        WITH_JOBS,
        host.python,
        {"torch": lambda _: host.release_of("torch"), "megatron": lambda _: host.release_of("megatron-core")},
    ),
    Check("containers", ON_NODES, host.containers, {"containers": host.container_facts}),
    Check("shared-memory", ON_NODES, host.shared_memory, {"shm": host.shm_facts}),
    Check("limits", EVERYWHERE, host.limits, {"limits": host.step_limits, "unicrond_files": host.unicrond_files}),
    Check("kernel-log", ON_NODES, host.kernel_log, {"kernel_log": host.kernel_log_facts}),
    Check("prolog", ON_NODES, host.prolog, {"prolog": lambda asked: host.scripts(asked.question.prolog)}),
    Check("epilog", ON_NODES, host.epilog, {"epilog": lambda asked: host.scripts(asked.question.epilog)}),
    Check(
        "health-check",
        ON_NODES,
        host.health_check,
        {"health_program": lambda asked: host.scripts([asked.question.health_program]), "health": host.health},
    ),
    Check("job-requeue", CLUSTER, cluster.job_requeue),
    Check("return-to-service", CLUSTER, cluster.return_to_service),
    Check("prolog-flags", CLUSTER, cluster.prolog_flags),
    Check("prolog-failure", CLUSTER, cluster.prolog_failure),
    Check("time-outs", CLUSTER, cluster.time_outs),
)
NEED_SLURM = frozenset(check.name for check in CHECKS if not check.roles) - {"slurm"}


class DoctorResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finding and the hosts that have it."""

    check: str
    verdict: Verdict
    text: str
    do: str
    """Advice that mends it."""
    hosts: list[str]
    """None for a finding about the whole cluster."""


def examine(
    hosts: Sequence[HostFacts], site: SiteFacts, ports: Ports | None = None, silent: Iterable[tuple[str, str]] = ()
) -> list[DoctorResult]:
    """Return all findings, in the order of the table; the same finding of several hosts is one result.

    hosts: the first is the one on which the doctor was started. silent: pairs of a node and the reason why it was not
    asked.
    """
    found: dict[tuple[str, Finding], list[str]] = {}
    first = hosts[0]
    node = next((one for one in hosts if one.role == COMPUTE), first)  # a node's prolog counts, if any was asked
    for check in CHECKS:
        if not check.roles:
            if check.name not in NEED_SLURM or not site.slurm_problem:
                for finding in check.judge(Case(node, first, site, ports)):
                    found.setdefault((check.name, finding), [])
            continue
        for one in hosts:
            if one.role in check.roles:
                for finding in check.judge(Case(one, first, site, ports)):
                    found.setdefault((check.name, finding), []).append(one.name)
    for name, why in silent:
        found.setdefault((NODES, unknown(f"not asked: {why}")), []).append(name)
    return [
        DoctorResult(check=check, verdict=finding.verdict, text=finding.text, do=finding.do, hosts=names)
        for (check, finding), names in found.items()
    ]


def no_answer(silent: dict[str, str]) -> list[DoctorResult]:
    """Return a problem for each reason for which nodes that were asked did not answer."""
    found: dict[str, list[str]] = {}
    for node, why in silent.items():
        found.setdefault(why, []).append(node)
    return [
        DoctorResult(check=NODES, verdict=PROBLEM, text=why, do=f"srun -w {names[0]} hostname", hosts=names)
        for why, names in found.items()
    ]


def by_weight(results: Iterable[DoctorResult]) -> list[DoctorResult]:
    """Sort the results, problems first, and else in the order of the table."""
    return sorted(results, key=lambda result: _ORDER.index(result.verdict))


def summary(results: Sequence[DoctorResult]) -> str:
    """Return how many checks are good, have a problem, or could not be made."""
    checks = {result.check for result in results}
    bad = {result.check for result in results if result.verdict == PROBLEM}
    open_ = {result.check for result in results if result.verdict == UNKNOWN} - bad
    fine = {result.check for result in results if result.verdict == GOOD} - bad - open_
    parts = [f"{len(checks)} checks: {len(fine)} good"]
    parts += [f"{len(bad)} with a problem"] if bad else []
    parts += [f"{len(open_)} not (wholly) made"] if open_ else []
    return ", ".join(parts)
