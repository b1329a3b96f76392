"""The pyslurm backend with a pyslurm that only takes notes: which calls go where."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.fake_pyslurm import FakePyslurm
from unicron_ctl.shared.slurm import (
    CommandLineClient,
    NodeInfo,
    SlurmError,
    choose_client,
    command_line,
    pyslurm_backend,
)
from unicron_ctl.shared.slurm.pyslurm_backend import NAMES, PyslurmClient, expand_indices, matching_pyslurm
from unicron_ctl.shared.slurm.slurm_client import Reservation


@pytest.fixture
def fake() -> FakePyslurm:
    return FakePyslurm()


@pytest.fixture
def by_command(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every command that would have gone to the command line."""
    commands: list[list[str]] = []
    monkeypatch.setattr(CommandLineClient, "_run", lambda self, command: commands.append(command) or "")
    return commands


def test_elements_without_a_record_of_their_own_are_found(fake: FakePyslurm) -> None:
    found = {(e.job, e.element): e for e in PyslurmClient(fake).elements()}
    assert sorted(found) == [("7", 0), ("7", 1), ("7", 2), ("7", 3), ("7", 4), ("9", 0)]
    assert [found["7", i].slurm_id for i in range(5)] == ["8", "7", "10", "7", "7"]
    assert found["7", 1].node is None and found["7", 0].node == "n1" and found["9", 0].reason == ""


def test_nodes_are_read(fake: FakePyslurm) -> None:
    node = SimpleNamespace(
        name="n1",
        state="DOWN+DRAIN+NOT_RESPONDING",
        reason=None,
        address="10.0.0.1",
        slurmd_port=6820,
        slurmd_start_time=1795245907,
        configured_gres={"gpu:a100": 4, "gpu": 2, "shard": 9},
        partitions=["main"],
        active_features=["ib"],
    )
    night = SimpleNamespace(name="night", nodes="n[1-4]", start_time=3600, end_time=7200)
    fake.Nodes = SimpleNamespace(load=lambda: {"n1": node})
    fake.Reservations = SimpleNamespace(load=lambda: {"night": night})
    states = frozenset({"DOWN", "DRAIN", "NOT_RESPONDING"})
    expected = NodeInfo("n1", states, "", "10.0.0.1", 6820, 1795245907.0, 6, ("main",), frozenset({"ib"}))
    more = {"gres": "gpu:a100:4,gpu:2,shard:9", "reservations": (Reservation("night", 3600.0, 7200.0),)}
    assert PyslurmClient(fake).nodes() == [replace(expected, **more)]


def test_all_that_slurm_tells_of_an_element_is_read(fake: FakePyslurm) -> None:
    info = next(e for e in PyslurmClient(fake).elements() if (e.job, e.element) == ("7", 2))
    assert (info.uid, info.submitted, info.account, info.partition, info.priority) == (1000, 86401.0, "lab", "main", 17)
    assert (info.features, info.gres, info.time_limit) == ("a100&ib", "gpu:a100:8", 3600.0)
    assert info.excluded_nodes == {"n1", "n2"} and info.admin_comment == "" and info.starts is None


def test_changes_go_to_pyslurm_only_for_elements_with_their_ownrecord(
    fake: FakePyslurm, by_command: list[list[str]]
) -> None:
    client = PyslurmClient(fake)
    client.elements()
    client.requeue_hold("7", 2, "why")
    client.pin("7", 0, "n4")
    client.start_now("9", 0)
    assert fake.notes == [
        (10, "requeue", True),
        (10, "modify", {"admin_comment": "why"}),
        (8, "modify", {"required_nodes": ["n4"]}),
        (9, "modify", {"begin_time": "now"}),
    ]
    assert by_command == []
    client.hold("7", 3, "why")
    client.release("7", 1)
    client.pin("7", 2, None)
    client.release("6", 1)  # never seen
    assert len(fake.notes) == 4, "the master record was left alone"
    assert [command[-1] for command in by_command] == ["7_3", "AdminComment=why", "7_1", "ReqNodeList=", "6_1"]


def test_what_others_requeued_does_not_start_in_that_second(fake: FakePyslurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line.time, "time", lambda: 86401.5)
    client = PyslurmClient(fake)
    client.elements()
    client.start_now("9", 0)
    fake.Jobs.load()[9].requeue_count = 1
    client.elements()
    client.start_now("9", 0)
    assert [changes["begin_time"] for _, _, changes in fake.notes] == ["now", "now+1"]


def test_an_element_that_is_pending_already_is_held_instead(fake: FakePyslurm) -> None:
    client = PyslurmClient(fake)
    client.elements()
    fake.refuse = "Job is pending execution"
    client.requeue("7", 2)
    client.requeue_hold("7", 2, "why")
    assert fake.notes == [(10, "hold"), (10, "modify", {"admin_comment": "why"})]
    fake.refuse = "Access/permission denied"
    with pytest.raises(SlurmError, match=r"requeue 7_2: Access/permission denied"):
        client.requeue("7", 2)


def test_an_element_that_has_begun_already_is_started_again_without_a_word(fake: FakePyslurm) -> None:
    client = PyslurmClient(fake)
    client.elements()
    fake.refuse, fake.refused = "Job is no longer pending execution", "modify"
    client.start_now("9", 0)
    assert fake.notes == []


@pytest.mark.parametrize(
    ("text", "indices"), [("4", [4]), ("0-3", [0, 1, 2, 3]), ("0-6:2,9", [0, 2, 4, 6, 9]), ("1,3-4%2", [1, 3, 4])]
)
def test_index_lists(text: str, indices: list[int]) -> None:
    assert expand_indices(text) == indices


def _whole(without: str = "") -> ModuleType:
    """A pyslurm with all that is read of it, but for one name."""
    module = ModuleType("pyslurm")
    for name, attributes in NAMES.items():
        found = {one: None for one in attributes.split() if f"{name}.{one}" != without}
        if name != without:
            setattr(module, name, type(name, (), found))
    return module


@pytest.mark.parametrize(
    ("version", "release", "fits"),
    [
        ("25.11.2", "25.11.0", True),
        ("26.5.0", "26.05.5", True),
        ("25.11.2", "25.05.1", False),
        ("25.11.2", "22.05.8", False),
        ("22.5.1", "22.05.8", False),
        ("24.11.0", "24.11.5", False),
        ("25.5.0", "25.05.3", False),
        ("25.11.0", "25.11.7", False),
        ("18.8.0.1", "22.05.8", False),
        ("25", "25.11.1", False),
        ("", "22.05.8", False),
    ],
)
def test_pyslurm_is_used_only_for_its_own_release(
    version: str, release: str, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not fit is not imported: before 25.11.2 that may end the process. One line says which is used."""
    module, loaded = _whole(), list[str]()

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return module

    with caplog.at_level(logging.INFO):
        assert (matching_pyslurm(release, load, lambda: version) is module) is fits
    assert len(loaded) == fits and len(caplog.records) == bool(version)
    assert not version or f"pyslurm {version}" in caplog.text


def test_a_pyslurm_that_cannot_be_imported_is_no_error(caplog: pytest.LogCaptureFixture, snapshot) -> None:
    def load(name: str) -> ModuleType:
        raise ImportError("libslurm.so.44: cannot open shared object file")

    assert matching_pyslurm("25.11.8", load, lambda: "25.11.2") is None
    assert caplog.messages == snapshot


@pytest.mark.parametrize("name", ["Reservations", "Reservations.load", "Job.gres_per_node", "Node.slurmd_port"])
def test_a_pyslurm_without_a_name_that_is_read_is_not_chosen(
    name: str, caplog: pytest.LogCaptureFixture, snapshot
) -> None:
    """Defect: with pyslurm 24.11.0, which has no Reservations, unicrond had no nodes for ever."""
    assert matching_pyslurm("26.05.5", lambda _: _whole(name), lambda: "26.5.1") is None
    assert caplog.messages == snapshot


def test_all_that_the_backend_reads_is_in_the_table_of_names() -> None:
    """Each attribute of a record that the module's source has."""
    text = Path(pyslurm_backend.__file__).read_text()
    for word, name in (("record", "Job"), ("node", "Node"), ("one", "Reservation")):
        read = set(re.findall(rf"(?<![\w.]){word}\.([a-z_]+)\b", text)) - {"split"}
        assert read and read <= set(NAMES[name].split()), (name, read - set(NAMES[name].split()))
    assert set(re.findall(r"self\._pyslurm\.(\w+)", text)) <= NAMES.keys()


def test_without_an_answer_of_slurm_its_library_is_not_initialised(
    monkeypatch: pytest.MonkeyPatch, fake: FakePyslurm, caplog: pytest.LogCaptureFixture
) -> None:
    """libslurm ends the process where there is no slurm.conf."""

    def settings(self: CommandLineClient) -> None:
        raise SlurmError("scontrol show config: no configuration file")

    monkeypatch.setattr("unicron_ctl.shared.slurm.pyslurm_backend.matching_pyslurm", lambda release: fake)
    monkeypatch.setattr(CommandLineClient, "version", lambda self: "25.11.8")
    monkeypatch.setattr(CommandLineClient, "settings", settings)
    assert type(choose_client()) is CommandLineClient
    assert fake.notes == [] and "no configuration file" in caplog.text


def test_another_cluster_than_this_processes_own_is_reached_by_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    assert type(choose_client({"SLURM_CONF": "/elsewhere/slurm.conf"})) is CommandLineClient
    assert os.environ["SLURM_CONF"] == "/etc/slurm/slurm.conf"


def test_choose_client_asks_the_cluster_for_its_release(monkeypatch: pytest.MonkeyPatch, fake: FakePyslurm) -> None:
    monkeypatch.setenv("SLURM_CONF", "/c/slurm.conf")
    monkeypatch.setattr(
        "unicron_ctl.shared.slurm.pyslurm_backend.matching_pyslurm",
        lambda release: fake if release == "25.11.1" else None,
    )
    monkeypatch.setattr(CommandLineClient, "settings", lambda self: None)
    for release, backend in (("25.11.1", PyslurmClient), ("22.05.8", CommandLineClient)):
        monkeypatch.setattr(CommandLineClient, "version", lambda self, release=release: release)
        assert type(choose_client()) is backend
    assert fake.notes == [("init", "/c/slurm.conf")]
