"""Reading what Slurm's programs print, and what is done when they do not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.support.fake_programs import slurm_in
from tests.support.processes import ROOT
from unicron_ctl.shared.slurm import ElementInfo, NodeInfo, SlurmError, command_line
from unicron_ctl.shared.slurm.command_line import (
    CommandLineClient,
    count_gpus,
    parse_node,
    parse_reservations,
    parse_topology,
)
from unicron_ctl.shared.slurm.sizes import parse_partitions
from unicron_ctl.shared.slurm.slurm_client import PartitionInfo, Reservation, Size, SlurmTimeout
from unicron_ctl.shared.slurm.states import parse_states

SEEN = tomllib.loads((ROOT / "docs" / "behaviour" / "slurm-jobs.toml").read_text())
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.37 AvailableFeatures=a100,ib "
    "ActiveFeatures=a100,ib Gres=gpu:a100:8(S:0-1) NodeAddr=127.0.0.1 NodeHostName=head Port=21824 Version=22.05.8 "
    "OS=Linux 6.1.0 #1 SMP State=fake 2024  RealMemory=2000 AllocMem=0 FreeMem=N/A Sockets=1 Boards=1 "
    "State=DOWN*+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,long "
    "BootTime=2026-11-21T06:24:00 SlurmdStartTime=2026-11-21T07:25:07 LastBusyTime=2026-11-21T07:25:07 "
    "CfgTRES=cpu=4,mem=2000M,billing=4 AllocTRES= CapWatts=n/a "
)


def test_a_node_line_is_read_with_flags_reason_and_start_time() -> None:
    line = NODE.replace("State=fake ", "") + "Reason=unicron[node_problem]: Port=3 odd [root@2026-11-21T07:26:02]  "
    assert parse_node(line) == NodeInfo(
        name="n1",
        states=frozenset({"DOWN", "NOT_RESPONDING", "DRAIN"}),
        reason="unicron[node_problem]: Port=3 odd",
        address="127.0.0.1",
        port=21824,
        slurmd_start=1795245907.0,
        gpus=8,
        partitions=("main", "long"),
        features=frozenset({"a100", "ib"}),
        gres="gpu:a100:8",
        size=Size(cpus=4, sockets=1, cores=4, threads=1, memory=2000, to_give=2000, tmp=0),
    )


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("CPUEfctv=6 CPUTot=8 Sockets=2 RealMemory=4000", Size(6, 2, 4, 1, 4000, 4000)),
        ("CPUTot=8 Sockets=1 ThreadsPerCore=2 RealMemory=3000 MemSpecLimit=500", Size(8, 1, 4, 2, 3000, 2500)),
        ("CPUTot=4 Sockets=1 ThreadsPerCore=2 TmpDisk=10", Size(4, 1, 4, 1, 0, 0, 10)),  # a core is one CPU
        ("CPUTot=many RealMemory=-", Size(0, 1, 4, 1, 0, 0)),
    ],
)
def test_a_nodes_size(said: str, size: Size) -> None:
    info = parse_node(f"NodeName=n1 CoresPerSocket=4 {said} State=IDLE")
    assert info is not None and info.size == size


def test_a_partitions_limits() -> None:
    text = (
        "PartitionName=lim MaxNodes=2 MaxTime=00:10:00 MinNodes=0 MaxCPUsPerNode=4 State=UP TotalNodes=4 "
        "MaxMemPerNode=2500\nPartitionName=all MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=1 "
        "MaxCPUsPerNode=UNLIMITED State=UP TotalNodes=9 MaxMemPerNode=UNLIMITED GraceTime=5\n"
    )
    limited, free = parse_partitions(text)
    assert limited == PartitionInfo("lim", 4, "UP", 0.0, 600.0, 0.0, 2.0, 2500.0, 4.0) and limited.limited
    assert free == PartitionInfo("all", 9, "UP", 5.0, min_nodes=1.0) and not free.limited


@pytest.mark.parametrize(("state", "kept"), [("IDLE", False), ("MIXED+NOT_RESPONDING", False), ("IDLE+DRAIN", True)])
def test_a_node_in_service_has_no_reason(state: str, kept: bool) -> None:
    """Slurm 24.11 and 25.11 keep the reason of a node that was resumed, where there is no slurmdbd."""
    info = parse_node(f"NodeName=n1 State={state} Reason=unicron[health]: gpu: 7 of 8 [root@2026-11-21T07:26:02]")
    assert info is not None and info.reason == ("unicron[health]: gpu: 7 of 8" if kept else "")


@pytest.mark.parametrize("seen", SEEN["resumed"], ids=lambda seen: seen["release"])
def test_a_resumed_node_has_no_reason_in_any_release(seen: dict[str, str]) -> None:
    told = f" Reason={seen['reason']} [root@2026-11-28T15:01:17]" if seen["reason"] else ""
    for state in (seen["first"], seen["then"]):
        info = parse_node(f"NodeName=n1 State={state}{told}")
        assert info is not None and (info.reason, info.healthy) == ("", state == seen["then"])


def test_a_line_that_is_no_node_is_left_out() -> None:
    assert parse_node("Nodes are fine") is None
    assert parse_node("xx State=IDLE NodeName=n9") is None
    assert parse_node("NodeName=n1") is None


def test_reservations_are_known_by_node() -> None:
    line = (
        "ReservationName=night StartTime=1970-01-01T01:00:00 EndTime=1970-01-01T02:00:00 Duration=01:00:00 "
        "Nodes=n[1-2] NodeCnt=2 Users=ann State=INACTIVE"
    )
    night = Reservation("night", 3600.0, 7200.0)
    assert parse_reservations(f"{line}\nNo reservations in the system\n") == {"n1": [night], "n2": [night]}


def test_a_node_that_never_registered_has_no_start_time_and_is_not_healthy() -> None:
    info = parse_node("NodeName=n2 State=UNKNOWN+NOT_RESPONDING SlurmdStartTime=None Gres=(null)")
    assert info is not None and info.partitions == ()
    assert (info.slurmd_start, info.gpus, info.port, info.address, info.healthy) == (None, 0, 6818, "n2", False)


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("IDLE", {"IDLE"}),
        ("idle*", {"IDLE", "NOT_RESPONDING"}),
        ("DOWN*+DRAIN", {"DOWN", "NOT_RESPONDING", "DRAIN"}),
        ("IDLE~", {"IDLE", "POWERED_DOWN"}),
        ("ALLOCATED+COMPLETING", {"ALLOCATED", "COMPLETING"}),
        ("DOWN+DRAIN+INVALID_REG", {"DOWN", "DRAIN", "INVALID_REG"}),
        ("MIXED*#", {"MIXED", "NOT_RESPONDING", "POWERING_UP"}),
        ("idle%", {"IDLE", "POWERING_DOWN"}),
    ],
)
def test_states_of_old_and_new_releases(text: str, states: set[str]) -> None:
    assert parse_states(text) == states


@pytest.mark.parametrize(
    ("text", "healthy", "heard"),
    [
        ("IDLE~", True, False),
        ("IDLE#", True, False),
        ("IDLE%", True, False),
        ("idle*~", True, False),
        ("IDLE+CLOUD+POWERED_DOWN", True, False),
        ("IDLE+CLOUD+POWERING_DOWN", True, False),
        ("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", True, False),
        ("MIXED+CLOUD+POWER_DOWN", True, True),
        ("IDLE!", True, True),
        ("IDLE+DYNAMIC_NORM", True, True),
        ("IDLE+CLOUD", True, True),
        ("IDLE+PLANNED", True, True),
        ("IDLE-", True, True),
        ("IDLE+CLOUD+POWER_DOWN+POWER_DRAIN", False, False),
        ("DOWN+CLOUD+POWERED_DOWN", False, False),
        ("DOWN*#", False, False),
        ("IDLE+DRAIN+POWERED_DOWN", False, False),
        ("IDLE*", False, False),
        ("FUTURE", False, False),
        ("DOWN+DYNAMIC_NORM+NOT_RESPONDING", False, False),
    ],
)
def test_a_node_that_slurm_would_wake_counts_and_is_not_heard(text: str, healthy: bool, heard: bool) -> None:
    """Defect: what power saving had switched off did not count, and elements that would have woken it were held."""
    info = NodeInfo("n1", parse_states(text), "", "n1", 6818, None, 0)
    assert (info.healthy, info.heard) == (healthy, heard)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("(null)", 0),
        ("gpu", 1),
        ("gpu:8", 8),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a100:4(S:0,1),gpu:2,shard:8", 6),
    ],
)
def test_gpus_are_counted(gres: str, count: int) -> None:
    assert count_gpus(gres) == count


def test_what_runs_is_not_held() -> None:
    assert not ElementInfo("1", 0, "1", "RUNNING", None, "JobHeldAdmin", "", "", "", 0).held


def test_a_slurm_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(SlurmTimeout, match=r"scontrol .* 0\.2 s"):
        slurm_in(tmp_path, scontrol="exec sleep 60", timeout=0.2).nodes()


def test_listings_of_other_columns_are_tried_again_without_texts(tmp_path: Path) -> None:
    """As a release would print them that counts letters where others count bytes."""
    facts = "7|2|9|PENDING|ann|1000|1970-01-02T00:00:01|5:00|12|N/A|main|(null)||(null)|n[3-4]".replace("|", "\\037")
    squeue = (
        'case "$*" in\n'
        "*-O*Name:*) printf 'nonsense';;\n"
        "*-O*) printf '%-11s\\037%-11s\\037%-6s\\037%-9s\\037%-64s\\037\\n' 7 2 3 0 JobHeldUser;;\n"
        f"*) printf '{facts}\\n';;\n"
        "esac"
    )
    (info,) = slurm_in(tmp_path, squeue=squeue).elements()
    assert (info.job, info.element, info.restarts, info.held, info.name) == ("7", 2, 3, True, "")
    assert info.excluded_nodes == {"n3", "n4"} and info.submitted == 86401.0
    with pytest.raises(SlurmError, match="squeue: cannot read b'nonsense'"):
        slurm_in(tmp_path, squeue="printf nonsense").elements()


def test_what_slurm_says_becomes_one_line(tmp_path: Path) -> None:
    with pytest.raises(SlurmError) as raised:
        slurm_in(tmp_path, scontrol="echo 'error: one' >&2; echo 'error: two' >&2; exit 3").down("n1", "unicron[x]: x")
    assert str(raised.value) == "scontrol update NodeName=n1: error: one error: two"


def test_missing_programs_are_named_with_their_package(tmp_path: Path, snapshot) -> None:
    with pytest.raises(SlurmError) as refused:
        CommandLineClient(env={"PATH": str(tmp_path)}).nodes()
    assert str(refused.value) == snapshot


@pytest.mark.parametrize("order", ["requeue", "requeue_hold"])
@pytest.mark.parametrize(
    ("answered", "starts", "wanted"),
    [(100.05, 100.2, "now+1"), (100.95, 101.1, "now+1"), (100.8, 100.9, "now+2"), (100.05, 101.0, "now")],
)
def test_what_was_requeued_does_not_start_in_that_second(
    monkeypatch: pytest.MonkeyPatch, order: str, answered: float, starts: float, wanted: str
) -> None:
    """Defect: the second was that in which Slurm was asked. It answers later, and slurmd hears of it later still."""
    now, ran = [answered - 0.1], []

    def run(command: list[str]) -> bytes:
        ran.append(" ".join(command))
        now[0] = answered
        return b""

    monkeypatch.setattr(command_line.time, "time", lambda: now[0])
    client = CommandLineClient()
    monkeypatch.setattr(client, "_output", run)
    getattr(client, order)("7", 1, *(["why"] if order == "requeue_hold" else []))
    now[0] = starts
    client.start_now("7", 1)
    assert ran[-1] == f"scontrol update JobId=7_1 StartTime={wanted}"


def test_formats_that_people_set_for_themselves_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    client = slurm_in(tmp_path, sinfo='echo "slurm ${SQUEUE_FORMAT:-22}.${SLURM_TIME_FORMAT:-05}.8"')
    assert client.version() == "22.05.8"


def test_a_topology_tells_what_fails_together() -> None:
    tree = """SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n3,n2
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=s[1-2]
"""
    assert parse_topology(tree) == {"n1": "s1", "n2": "s1", "n3": "s2"}
    blocks = """BlockName=b1 BlockIndex=0 Nodes=node[01-02] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=node03 BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[01-03] BlockSize=4
"""
    assert parse_topology(blocks) == {"node01": "b1", "node02": "b1", "node03": "b2"}
    assert parse_topology("") == parse_topology("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=(null)\n") == {}


def test_topologies_of_partitions_fill_up_what_the_default_one_leaves_out(tmp_path: Path) -> None:
    """As Slurm 26.05 shows them: without a name only the default topology, which here is flat and prints nothing."""
    shown = {
        "topology": "",
        "topology tree1": "SwitchName=s1 Level=0 LinkSpeed=0 Nodes=n[1-2]",
        "topology blk1": "BlockName=b1 BlockIndex=0 Nodes=n[2-3] BlockSize=2",
        "partition": "PartitionName=a Hidden=NO PreemptMode=OFF State=UP TotalNodes=2\n"
        "PartitionName=b Topology=tree1 State=UP TotalNodes=2\n"
        "PartitionName=c Topology=blk1 State=UP TotalNodes=2\nPartitionName=d Topology=blk1 State=UP",
    }
    cases = "".join(f"'--all --oneliner show {words}') echo '{text}';;\n" for words, text in shown.items())
    client = slurm_in(tmp_path, scontrol=f'echo "$*" >> {tmp_path}/asked\ncase "$*" in\n{cases}*) exit 1;; esac')
    assert client.domains() == {"n1": "s1", "n2": "b1", "n3": "b1"}
    assert (tmp_path / "asked").read_text().count("blk1") == 1, "each topology once"
    assert [partition.topology for partition in client.partitions()] == ["", "tree1", "blk1", "blk1"]


def test_what_the_default_topology_says_counts_first(tmp_path: Path) -> None:
    text = "SwitchName=top1 Level=0 LinkSpeed=0 Nodes=n1\\nPartitionName=b Topology=tree1 State=UP\\n"
    more = "SwitchName=s1 Level=0 LinkSpeed=0 Nodes=n[1-2]"
    client = slurm_in(tmp_path, scontrol=f"case \"$*\" in *tree1) echo '{more}';; *) printf '{text}';; esac")
    assert client.domains() == {"n1": "top1", "n2": "s1"}


def test_settings_with_a_unit_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot) -> None:
    """All releases print the unit. Defect: then KillWait was 30 s, whatever it was."""
    lines = ["KillWait = 7 sec", "PrivateData = jobs,nodes", "AccountingStorageType = (null)", "ReturnToService = 2"]
    client = slurm_in(tmp_path, scontrol=f"printf '%s\\n' '{chr(10).join(lines)}'")
    assert client.kill_wait() == 7.0 and client.private_data() == {"jobs", "nodes"}
    assert client.shrinks() == 1 and client.return_to_service() == 2 and not caplog.records
    client = slurm_in(tmp_path, scontrol="echo PrivateData = none")
    assert [client.kill_wait() for _ in range(3)] == [30.0] * 3 and client.private_data() == set()
    assert caplog.messages == snapshot


def test_lines_that_are_no_nodes_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot) -> None:
    scontrol = 'case "$*" in *node) echo NodeName=n1 State=IDLE; echo Node=n2 Health=OK;; esac'
    client = slurm_in(tmp_path, scontrol=scontrol)
    assert [[node.name for node in client.nodes()] for _ in range(3)] == [["n1"]] * 3
    assert caplog.messages == snapshot


def test_only_the_jobs_of_this_cluster_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fed_display squeue shows a federation's other clusters, too, whose nodes may have the same names."""
    monkeypatch.setenv("SLURM_CLUSTERS", "all")
    client = slurm_in(tmp_path, squeue=f'echo "$SLURM_CLUSTERS $*" >> {tmp_path}/asked')
    client.elements()
    client.others()
    client._id("7", 0)
    client._state("7", 1)
    client._admin_comment("7", 1)
    asked = (tmp_path / "asked").read_text().splitlines()
    listed = [line for line in asked if "--version" not in line]
    assert len(listed) >= 5 and all(" --local " in line and not line.startswith("all") for line in listed)


def test_resume_waits_until_slurm_has_heard_the_nodes_slurmd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that Slurm 24.11 shows for a moment as not responding, and one that stays so."""
    heard = f"case $(wc -l < {tmp_path}/asked) in 3) echo NodeName=n1 State=IDLE;; *) $silent;; esac"
    silent = "silent='echo NodeName=$5 State=IDLE+NOT_RESPONDING'\n"
    client = slurm_in(tmp_path, scontrol=f"{silent}case $* in *show*) echo >> {tmp_path}/asked; {heard};; esac")
    client.resume("n1")
    assert (tmp_path / "asked").read_text().count("\n") == 3
    monkeypatch.setattr(command_line, "ANSWER_SECONDS", 0.3)
    client.resume("n2")
    assert (tmp_path / "asked").read_text().count("\n") > 3


@pytest.mark.parametrize(
    ("said", "port"), [("7003", 7003), ("7003-7005", 7003), ("", 6818), ("6818", 6818), ("(null)", 6818)]
)
def test_slurmds_port_is_slurm_confs_but_where_a_node_names_its_own(tmp_path: Path, said: str, port: int) -> None:
    """scontrol prints a node's port only where it differs from slurm.conf's. Defect: 6818 was taken for all others."""
    scontrol = (
        'case "$*" in\n'
        f"*config*) echo x >> {tmp_path}/asked; printf 'SlurmctldPort  = 6817\\nSlurmdPort     = {said}\\n';;\n"
        "*node*) printf 'NodeName=n1 State=IDLE NodeAddr=n1\\nNodeName=n2 Port=7100 State=IDLE NodeAddr=n2\\n';;\n"
        "esac"
    )
    client = slurm_in(tmp_path, scontrol=scontrol)
    for _ in range(3):
        assert [node.port for node in client.nodes()] == [port, 7100]
    assert (tmp_path / "asked").read_text().count("x") == 1, "the configuration is asked for once a minute"
