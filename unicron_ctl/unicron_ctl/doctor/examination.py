"""The table of checks, and how facts are judged by them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from unicron_ctl.doctor import cluster_checks, host_checks, reach_checks
from unicron_ctl.doctor.facts import COMPUTE, HEAD, LOGIN, HostFacts, Ports, SiteFacts
from unicron_ctl.doctor.verdicts import GOOD, PROBLEM, UNKNOWN, Case, Check, Finding, Verdict, unknown

EVERYWHERE = frozenset((HEAD, LOGIN, COMPUTE))
WITH_JOBS = frozenset((LOGIN, COMPUTE))
ON_NODES = frozenset((COMPUTE,))
CLUSTER: frozenset[str] = frozenset()
NODES = "nodes"  # what gave no answer; no check of the table
_ORDER: tuple[Verdict, ...] = ("problem", "unknown", "advice", "good")

CHECKS: tuple[Check, ...] = (
    Check("slurm", CLUSTER, cluster_checks.slurm),
    Check("config", EVERYWHERE, host_checks.config),
    Check("partitions", CLUSTER, cluster_checks.partitions),
    Check("controller", EVERYWHERE, reach_checks.controller),
    Check("release", EVERYWHERE, reach_checks.release),
    Check("controller-user", EVERYWHERE, reach_checks.controller_user),
    Check("users", EVERYWHERE, reach_checks.users),
    Check("admin-level", CLUSTER, cluster_checks.admin_level),
    Check("auth-type", CLUSTER, cluster_checks.auth_type),
    Check("munge", EVERYWHERE, reach_checks.munge),
    Check("clock", EVERYWHERE, reach_checks.clock),
    Check("agent-ports", ON_NODES, reach_checks.agent_ports),
    Check("slurmd-port", ON_NODES, reach_checks.slurmd_port),
    Check("plugin", WITH_JOBS, reach_checks.plugin),
    Check("agent", ON_NODES, reach_checks.agent),
    Check("python", WITH_JOBS, host_checks.python),
    Check("containers", ON_NODES, host_checks.containers),
    Check("shared-memory", ON_NODES, host_checks.shared_memory),
    Check("limits", EVERYWHERE, host_checks.limits),
    Check("kernel-log", ON_NODES, host_checks.kernel_log),
    Check("prolog", ON_NODES, host_checks.prolog),
    Check("epilog", ON_NODES, host_checks.epilog),
    Check("health-check", ON_NODES, host_checks.health_check),
    Check("job-requeue", CLUSTER, cluster_checks.job_requeue),
    Check("return-to-service", CLUSTER, cluster_checks.return_to_service),
    Check("prolog-flags", CLUSTER, cluster_checks.prolog_flags),
    Check("prolog-failure", CLUSTER, cluster_checks.prolog_failure),
    Check("time-outs", CLUSTER, cluster_checks.time_outs),
)
NEED_SLURM = frozenset(check.name for check in CHECKS if not check.roles) - {"slurm"}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One finding and the hosts that have it. hosts: none for the cluster as a whole."""

    check: str
    verdict: Verdict
    text: str
    do: str
    hosts: list[str]


def examine(
    hosts: Sequence[HostFacts], site: SiteFacts, ports: Ports | None = None, silent: Iterable[tuple[str, str]] = ()
) -> list[Result]:
    """All findings, in the order of the table; the same finding of several hosts is one result.

    hosts: the first is the one on which the doctor was started. silent: (node, why it gave no answer, or none was
    asked).
    """
    found: dict[tuple[str, Finding], list[str]] = {}
    first = hosts[0]
    for check in CHECKS:
        if not check.roles:
            if check.name not in NEED_SLURM or not site.slurm_problem:
                for finding in check.judge(Case(_node_or(hosts), first, site, ports)):
                    found.setdefault((check.name, finding), [])
            continue
        for host in hosts:
            if host.role in check.roles:
                for finding in check.judge(Case(host, first, site, ports)):
                    found.setdefault((check.name, finding), []).append(host.name)
    for node, why in silent:
        found.setdefault((NODES, unknown(f"not asked: {why}")), []).append(node)
    return [
        Result(check=check, verdict=finding.verdict, text=finding.text, do=finding.do, hosts=names)
        for (check, finding), names in found.items()
    ]


def no_answer(silent: dict[str, str]) -> list[Result]:
    """The nodes that were asked and gave no answer."""
    found: dict[str, list[str]] = {}
    for node, why in silent.items():
        found.setdefault(why, []).append(node)
    return [
        Result(check=NODES, verdict=PROBLEM, text=why, do=f"srun -w {names[0]} hostname", hosts=names)
        for why, names in found.items()
    ]


def _node_or(hosts: Sequence[HostFacts]) -> HostFacts:
    """A compute node, whose prolog is the one that counts; the first host where no node was asked."""
    return next((host for host in hosts if host.role == COMPUTE), hosts[0])


def by_weight(results: Iterable[Result]) -> list[Result]:
    """Problems first, what is good last; else in the given order."""
    return sorted(results, key=lambda result: _ORDER.index(result.verdict))


def summary(results: Sequence[Result]) -> str:
    """How many checks are good, and what the others are."""
    checks = {result.check for result in results}
    bad = {result.check for result in results if result.verdict == PROBLEM}
    open_ = {result.check for result in results if result.verdict == UNKNOWN} - bad
    fine = {result.check for result in results if result.verdict == GOOD} - bad - open_
    parts = [f"{len(checks)} checks: {len(fine)} good"]
    parts += [f"{len(bad)} with a problem"] if bad else []
    parts += [f"{len(open_)} not (wholly) made"] if open_ else []
    return ", ".join(parts)
