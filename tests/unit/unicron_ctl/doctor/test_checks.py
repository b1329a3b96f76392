"""Each check of the doctor: a sound installation passes all of them, and each has a case in which it fails."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.doctor.examination import CHECKS, DoctorResult, by_weight, examine, no_answer, summary
from unicron_ctl.doctor.facts import (
    COMPUTE,
    HEAD,
    LOGIN,
    NO_LIMIT,
    AgentFacts,
    ConfigFacts,
    ControllerFacts,
    HealthFacts,
    HostFacts,
    PluginFacts,
    Ports,
    Role,
    ScriptFacts,
    ShmFacts,
    SiteFacts,
)
from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.settings.config_file import parse
from unicron_ctl.shared.slurm import NodeInfo, PartitionInfo
from unicron_ctl.shared.slurm.slurm_settings import SlurmSettings

ADDRESS = "tcp://head:7451"
TOML = "/etc/unicron/unicron.toml"
SETTINGS = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AuthInfo": "(null)",
    "AuthType": "auth/munge",
    "BatchStartTimeout": "10 sec",
    "Epilog[0]": "/etc/slurm/epilog.d/*",
    "Epilog": "/etc/slurm/epilog.d/*",
    "HealthCheckInterval": "300 sec",
    "HealthCheckNodeState": "CYCLE,ANY",
    "HealthCheckProgram": "/usr/local/sbin/unicron-health",
    "JobRequeue": "1",
    "KillWait": "30 sec",
    "MessageTimeout": "10 sec",
    "MinJobAge": "300 sec",
    "Prolog": "/etc/slurm/prolog.d/*",
    "PrologEpilogTimeout": "65534",
    "PrologFlags": "Alloc,Contain",
    "ReturnToService": "1",
    "SLURM_VERSION": "22.05.8",
    "SchedulerParameters": "bf_interval=30,nohold_on_prolog_fail",
    "SlurmUser": "slurm(64030)",
    "SlurmdTimeout": "300 sec",
}


def host(name: str = "n1", role: Role = COMPUTE) -> HostFacts:
    """A host of a sound installation."""
    return HostFacts(
        name=name,
        role=role,
        user="alice",
        uid=1000,
        release="0.1.0",
        python="3.11.2",
        torch="2.13.0+cu126",
        megatron="0.16.1",
        config=ConfigFacts(path=TOML, digest="d1", address=ADDRESS, believed={"unicron": 990}),
        controller=ControllerFacts(address=ADDRESS, tcp=True, release="0.1.0", uid=990, ahead=0.02, within=0.01),
        users={"slurm": 64030, "unicron": 990},
        plugin=PluginFacts(
            plugstack="/etc/slurm/plugstack.conf",
            line="optional ...",
            path="/usr/local/lib/slurm/unicron.so",
            is_there=True,
            release="0.1.0",
            slurm="22.05.3",
            controller=ADDRESS,
            config=TOML,
        ),
        agent=AgentFacts(path="/opt/unicron/bin/unicron-agent", release="0.1.0"),
        prolog=ScriptFacts(found=["/p"], ours=["/p"]),
        epilog=ScriptFacts(found=["/e"], ours=["/e"]),
        health_program=ScriptFacts(found=["/h"], ours=["/h"]),
        health=HealthFacts(conf="/etc/unicron/health.conf", python="/p", seconds=4),
        shm=ShmFacts(size=50 << 30, free=40 << 30, memory=100 << 30),
        limits={"nofile": 65536, "memlock": NO_LIMIT, "core": 0},
    )


def site(config: Config | None = None, **changes: str) -> SiteFacts:
    """A sound cluster, with other settings of Slurm where `changes` name some."""
    node = NodeInfo("n1", frozenset({"IDLE"}), "", "10.0.0.1", 6818, 0.0, 8, ("gpu",))
    return SiteFacts(
        settings=SlurmSettings(SETTINGS | changes),
        nodes=(node,),
        partitions=(PartitionInfo("gpu", 1, "UP"),),
        config=config or parse({"controller": {"address": ADDRESS}, "partition": {"gpu": {"mode": "observe"}}}),
        controller_name="unicron",
        admin_level="Administrator",
    )


REACHED = Ports(agents={"n1": ""}, slurmds={"n1": ""})


def changed(facts: Any, **fields: Any) -> Any:
    """A copy with other values; `a__b` names a field of a field."""
    made = copy.deepcopy(facts)
    for path, value in fields.items():
        *way, last = path.split("__")
        target = made
        for step in way:
            target = getattr(target, step)
        setattr(target, last, value)
    return made


# (check, what is wrong with the node, the verdict)
NODE: list[tuple[str, dict[str, Any], str]] = [
    ("config", {"config__path": ""}, "problem"),
    ("config", {"config__problems": ["[health] gpuz: unknown key"]}, "problem"),
    ("config", {"config__digest": "d2"}, "problem"),
    ("config", {"config__address": ""}, "problem"),
    ("controller", {"controller__problem": "no controller answers at x"}, "problem"),
    ("release", {"controller__release": "0.3.0"}, "problem"),
    ("release", {"controller__release": "0.2.0"}, "advice"),
    ("release", {"release": "1.0.9"}, "problem"),
    ("controller-user", {"config__believed": {}}, "problem"),
    ("controller-user", {"config__believed": {"unicron": None}}, "problem"),
    ("controller-user", {"controller__problem": "x"}, "unknown"),
    ("users", {"users": {"slurm": 64031, "unicron": 990}}, "problem"),
    ("users", {"users": {"slurm": 64030, "unicron": None}}, "problem"),
    ("munge", {"munge": "munge: no socket"}, "problem"),
    ("clock", {"controller__ahead": 3.0}, "problem"),
    ("clock", {"controller__ahead": -90.0}, "problem"),
    ("clock", {"controller__problem": "x"}, "unknown"),
    ("plugin", {"plugin": PluginFacts(plugstack="/etc/slurm/plugstack.conf")}, "problem"),
    ("plugin", {"plugin": PluginFacts()}, "problem"),
    ("plugin", {"plugin__is_there": False}, "problem"),
    ("plugin", {"plugin__slurm": "24.11.5"}, "problem"),
    ("plugin", {"plugin__release": "0.3.0"}, "problem"),
    ("plugin", {"plugin__release": "0.2.0"}, "advice"),
    ("plugin", {"plugin__release": ""}, "problem"),
    ("plugin", {"plugin__required": True}, "problem"),
    ("plugin", {"plugin__late": ["spank_pyxis.so"]}, "problem"),
    ("plugin", {"plugin__controller": ""}, "problem"),
    ("plugin", {"plugin__controller": "tcp://old:7451"}, "problem"),
    ("plugin", {"plugin__config": "/etc/u.toml"}, "problem"),
    ("agent", {"agent__problem": "No such file or directory"}, "problem"),
    ("agent", {"agent__path": ""}, "problem"),
    ("agent", {"agent__release": "1.1.0"}, "problem"),
    ("agent", {"plugin": PluginFacts()}, "unknown"),
    ("python", {"torch": "2.1.0"}, "problem"),
    ("python", {"megatron": "0.10.0"}, "problem"),
    ("python", {"torch": "2.15.0"}, "problem"),
    ("python", {"python": "3.13.1"}, "problem"),
    ("containers", {"containers__enroot": True}, "problem"),
    (
        "containers",
        {"containers__enroot": True, "containers__enroot_mounts": True, "containers__enroot_missing": ["/opt/unicron"]},
        "problem",
    ),
    ("containers", {"containers__apptainer": True}, "advice"),
    ("shared-memory", {"shm__size": 0}, "problem"),
    ("shared-memory", {"shm__size": 1 << 20}, "problem"),
    ("shared-memory", {"shm__free": 1 << 20}, "problem"),
    ("shared-memory", {"shm__size": 10 << 30}, "advice"),
    ("limits", {"limits": {"nofile": 1024}}, "problem"),
    ("limits", {"limits": {"memlock": 65536}, "infiniband": True}, "problem"),
    ("limits", {"limits": {"core": NO_LIMIT}}, "advice"),
    ("limits", {"unicrond_files": 1024}, "problem"),
    ("kernel-log", {"kernel_log__restricted": True}, "problem"),
    ("kernel-log", {"kernel_log__is_there": False}, "problem"),
    ("kernel-log", {"kernel_log__readable": False}, "problem"),
    ("kernel-log", {"kernel_log__watched": False}, "advice"),
    ("prolog", {"prolog": ScriptFacts(found=["/x"])}, "problem"),
    ("prolog", {"prolog": ScriptFacts(found=["/p"], ours=["/p"], blocked=["/p"])}, "problem"),
    ("epilog", {"epilog": ScriptFacts()}, "problem"),
    ("health-check", {"health_program": ScriptFacts()}, "problem"),
    ("health-check", {"health_program": ScriptFacts(found=["/x"])}, "problem"),
    ("health-check", {"health_program": ScriptFacts(found=["/h"], ours=["/h"], blocked=["/h"])}, "problem"),
    ("health-check", {"health": HealthFacts()}, "advice"),
    ("health-check", {"health__problem": "No module named 'unicron'"}, "problem"),
]
# (check, the setting of Slurm that is a problem)
CLUSTER: list[tuple[str, dict[str, str]]] = [
    ("auth-type", {"AuthType": "auth/none"}),
    ("job-requeue", {"JobRequeue": "0"}),
    ("return-to-service", {"ReturnToService": "2"}),
    ("return-to-service", {"ReturnToService": "0"}),
    ("prolog-flags", {"PrologFlags": "(null)"}),
    ("prolog-flags", {"PrologFlags": "Alloc,NoHold"}),
    ("prolog-failure", {"SchedulerParameters": "(null)"}),
    ("prolog", {"Prolog": "(null)"}),
    ("epilog", {"Epilog": "(null)"}),
    ("health-check", {"HealthCheckProgram": "(null)"}),
    ("health-check", {"HealthCheckInterval": "0 sec"}),
    ("health-check", {"HealthCheckNodeState": "IDLE"}),
    ("time-outs", {"BatchStartTimeout": "5 sec"}),
    ("time-outs", {"PrologEpilogTimeout": "5"}),
    ("time-outs", {"PrologTimeout": "6"}),
    ("time-outs", {"AuthInfo": "socket=/x,cred_expire=7"}),
    ("time-outs", {"BatchStartTimeout": "200 sec"}),
    ("time-outs", {"KillWait": "2 sec"}),
    ("time-outs", {"KillWait": "600 sec"}),
    ("time-outs", {"SlurmdTimeout": "1 sec"}),
    ("time-outs", {"SlurmdTimeout": "0 sec"}),
    ("time-outs", {"MessageTimeout": "60 sec"}),
    ("time-outs", {"MinJobAge": "5 sec"}),
]


def found(results: list[DoctorResult], check: str) -> list[DoctorResult]:
    return [result for result in results if result.check == check]


def judged(node: HostFacts, cluster: SiteFacts | None = None, ports: Ports = REACHED) -> list[DoctorResult]:
    """All results of a login node and one compute node."""
    return examine([host("login1", LOGIN), node], cluster or site(), ports)


@pytest.mark.parametrize("role", [HEAD, LOGIN, COMPUTE])
def test_a_sound_installation_has_no_finding(role: Role) -> None:
    results = examine([host("h", role)], site())
    assert [result for result in results if result.verdict != "good"] == []


def test_all_hosts_of_a_sound_installation_are_good_and_folded_into_one_result() -> None:
    results = judged(host())
    assert {result.check for result in results} == {check.name for check in CHECKS}
    assert {result.verdict for result in results} == {"good"}
    (config,) = found(results, "config")
    assert config.hosts == ["login1", "n1"]
    assert found(results, "slurm")[0].hosts == []
    assert summary(results) == f"{len(CHECKS)} checks: {len(CHECKS)} good"


@pytest.mark.parametrize(("check", "wrong", "verdict"), NODE)
def test_a_node_that_is_not_as_it_should_be(check: str, wrong: dict[str, Any], verdict: str) -> None:
    results = [result for result in found(judged(changed(host(), **wrong)), check) if result.verdict != "good"]
    assert results and all((result.verdict, result.hosts) == (verdict, ["n1"]) for result in results), results
    assert all(result.do for result in results) or verdict == "unknown"


@pytest.mark.parametrize(("check", "wrong"), CLUSTER)
def test_a_setting_of_slurm_that_does_not_fit(check: str, wrong: dict[str, str]) -> None:
    results = [result for result in found(judged(host(), site(**wrong)), check) if result.verdict != "good"]
    assert results and all(result.verdict == "problem" and result.do for result in results), results


def test_the_words_of_all_findings(snapshot: SnapshotAssertion) -> None:
    cases = [found(judged(changed(host(), **wrong)), check) for check, wrong, _ in NODE]
    cases += [found(judged(host(), site(**wrong)), check) for check, wrong in CLUSTER]
    results = [result for case in cases for result in case if result.verdict != "good"]
    assert "".join(f"{one.verdict:8} {one.check}: {one.text}\n         > {one.do}\n" for one in results) == snapshot


@pytest.mark.parametrize("release", ["PrologEpilogTimeout", "PrologTimeout"], ids=["22.05", "with PrologTimeout"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"MessageTimeout": "600", "BatchStartTimeout": "600", "AuthInfo": "cred_expire=120"},
        {"MessageTimeout": "298", "MinJobAge": "5", "KillWait": "298"},
        {"MessageTimeout": "296"},
        {"KillWait": "600 sec", "AuthInfo": "socket=/x,cred_expire=3"},
        {"PrologTimeout": "3", "BatchStartTimeout": "2", "SlurmdTimeout": "1", "KillWait": "2"},
        {"SlurmdTimeout": "0", "MinJobAge": "1"},
    ],
)
def test_once_all_is_done_that_is_said_no_problem_is_left_and_unicrond_starts(
    wrong: dict[str, str], release: str
) -> None:
    """Defect: slurm_timeout = 600 was to be written, for which isolate_seconds is too short: unicrond ended."""
    settings = {release if name == "PrologTimeout" else name: value for name, value in wrong.items()}
    settings.setdefault(release, "600")
    ours: dict[str, float] = {}
    for line in (do for one in time_outs(settings, ours) for do in one.do.split("; with it ")):
        name, value, where = re.fullmatch(r"(\w+) ?= ?([\d.]+) in (.+?)(?:, or UNICRON.*)?", line).groups()  # type: ignore
        if where == "[controller]":
            ours[name] = float(value)
        elif where == "AuthInfo of slurm.conf":
            settings["AuthInfo"] = f"{name}={value}"
        else:
            assert where == "slurm.conf" and name in SETTINGS | settings, "a name that this release has"
            settings[name] = value
    assert time_outs(settings, ours) == [], "and unicrond takes what is written for it"


def time_outs(settings: dict[str, str], ours: dict[str, float]) -> list[DoctorResult]:
    """What is found; raises UserError where unicrond would not start."""
    cluster = dataclasses.replace(site(**settings), config=parse({"controller": ours}))
    return [one for one in found(judged(host(), cluster), "time-outs") if one.verdict != "good"]


def test_slurm_that_does_not_answer_is_a_problem_and_no_setting_is_judged() -> None:
    results = judged(host(), dataclasses.replace(site(), slurm_problem="scontrol: no answer within 10 s"))
    (slurm,) = found(results, "slurm")
    assert slurm.verdict == "problem" and "was not checked" in slurm.text
    assert not found(results, "job-requeue") and found(results, "prolog")[0].verdict == "unknown"
    assert found(results, "health-check")[0].verdict == "unknown"


@pytest.mark.parametrize(
    ("name", "accounts", "level", "wanted"),
    [
        ("unicron", True, "Operator", "sacctmgr modify user where name=unicron set adminlevel=Administrator"),
        ("unicron", True, "", "sacctmgr add user unicron account=root adminlevel=Administrator"),
        ("unicron", False, "", "User=slurm in unicrond.service"),
        ("slurm", False, "", ""),
        ("root", True, "", ""),
        ("unicron", True, "Administrator", ""),
    ],
)
def test_who_may_change_nodes(name: str, accounts: bool, level: str, wanted: str) -> None:
    kind = "accounting_storage/slurmdbd" if accounts else "accounting_storage/none"
    cluster = dataclasses.replace(site(AccountingStorageType=kind), controller_name=name, admin_level=level)
    (result,) = found(examine([host()], cluster), "admin-level")
    assert (result.verdict, result.do) == ("advice" if wanted else "good", wanted)
    acting = dataclasses.replace(cluster, config=parse({"partition": {"gpu": {"mode": "act"}}}))
    (result,) = found(examine([host()], acting), "admin-level")
    assert (result.verdict, result.do) == ("problem" if wanted else "good", wanted)


def test_an_admin_level_that_cannot_be_had_is_not_taken_for_none() -> None:
    cluster = dataclasses.replace(site(), admin_level="", level_problem="sacctmgr: no answer")
    (result,) = found(examine([host()], cluster), "admin-level")
    assert (result.verdict, result.text) == ("unknown", "sacctmgr: no answer")


def test_a_partition_that_slurm_does_not_have() -> None:
    config = parse({"partition": {"gpus": {"mode": "observe"}}})
    (result,) = found(examine([host()], site(config)), "partitions")
    assert (result.verdict, result.do) == ("problem", "name one of gpu")


def test_auth_slurm_is_said(snapshot: SnapshotAssertion) -> None:
    (result,) = found(examine([host()], site(AuthType="auth/slurm")), "auth-type")
    (munge,) = found(examine([changed(host(), munge="no socket")], site(AuthType="auth/slurm")), "munge")
    assert [(one.verdict, one.text) for one in (result, munge)] == snapshot


@pytest.mark.parametrize("check", ["agent-ports", "slurmd-port"])
def test_ports_of_nodes(check: str) -> None:
    shut = {"n1": "Connection timed out"}
    (result,) = found(judged(host(), ports=Ports(agents=shut, slurmds=shut)), check)
    assert result.verdict == "problem" and "Connection timed out" in result.text and result.do.startswith("open ")
    (result,) = found(judged(host(), ports=Ports()), check)
    assert result.verdict == "unknown"
    (result,) = found(judged(host(), ports=Ports(why_not="not from here")), check)
    assert (result.verdict, result.text) == ("unknown", "not from here")


@pytest.mark.parametrize(
    ("said", "tcp"),
    [
        ("the controller there belongs to unicron (uid 990), who is neither root", True),
        ("no answer from UDP port 7451 of 10.0.0.1", True),
        ("no controller answers", False),
        ("head: Name or service not known", None),
        ("the controller's credential: munge: Expired credential", True),
    ],
    ids=["another-user", "udp", "silent", "no-name", "credential"],
)
def test_the_way_to_the_controller(said: str, tcp: bool | None, snapshot: SnapshotAssertion) -> None:
    node = changed(host(), controller__problem=said, controller__tcp=tcp)
    (result,) = [result for result in found(judged(node), "controller") if result.hosts == ["n1"]]
    assert (result.verdict, result.do) == ("problem", snapshot)


def test_a_controller_that_no_command_asks_is_not_called_silent() -> None:
    wrong = {"controller__problem": "x", "config__problems": ["[health] gpuz: unknown key"]}
    results = [result for result in found(judged(changed(host(), **wrong)), "controller") if result.hosts == ["n1"]]
    assert [result.verdict for result in results] == ["unknown"]


def test_a_standby_is_named_in_both_places(snapshot: SnapshotAssertion) -> None:
    both = "tcp://head:7451, tcp://head2:7451"
    node = changed(host(), config__address=both.replace(" ", ""), plugin__controller=both)
    assert {result.verdict for result in found(judged(node), "plugin")} == {"good"}
    results = found(judged(changed(node, plugin__controller=ADDRESS)), "plugin")
    assert [result.text for result in results if result.verdict == "problem"] == snapshot


def test_a_login_without_torch_differs_from_no_node() -> None:
    login = changed(host("login1", LOGIN), torch="", megatron="")
    assert {result.verdict for result in found(examine([login, host()], site()), "python")} == {"good"}


def test_nodes_that_were_not_asked_or_gave_no_answer_are_said() -> None:
    results = examine([host("login1", LOGIN)], site(), None, [("n2", "in use"), ("n3", "in use")])
    (nodes,) = found(results, "nodes")
    assert (nodes.verdict, nodes.hosts) == ("unknown", ["n2", "n3"])
    (silent,) = no_answer({"n4": "no answer within 90 s", "n5": "no answer within 90 s"})
    assert (silent.verdict, silent.hosts, silent.do) == ("problem", ["n4", "n5"], "srun -w n4 hostname")
    assert "1 with a problem" in summary([*results, silent]) or "not (wholly) made" in summary(results)


def test_problems_come_first_and_the_good_last() -> None:
    results = judged(changed(host(), torch="2.1.0", limits={"core": 1}, controller__problem="x"))
    verdicts = [result.verdict for result in by_weight(results)]
    assert verdicts == sorted(verdicts, key=["problem", "unknown", "advice", "good"].index)
    assert len(set(verdicts)) == 4


def test_each_check_has_a_case_in_which_it_fails() -> None:
    here = {row[0] for row in NODE} | {row[0] for row in CLUSTER}
    beside = {"slurm", "partitions", "admin-level", "agent-ports", "slurmd-port"}  # tests of their own, above
    assert here | beside == {check.name for check in CHECKS}


def test_facts_survive_their_journey() -> None:
    facts = changed(host(), controller__tcp=None, users={"slurm": None})
    assert msgspec.json.decode(msgspec.json.encode(facts), type=HostFacts) == facts
