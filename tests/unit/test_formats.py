"""Releases one minor version apart work together: this one reads what the kept ones wrote, and refuses in one line what
is further apart. tests/support/keep_formats.py has made the copies."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from tests.support.keep_formats import ITERATION, KEPT, NUMBERS, READERS
from tests.support.kept import everything, training
from tests.support.processes import LIMIT, ROOT, wait_for
from tests.support.world import FakeAgent, World
from unicron_ctl.agent.connections.rank_socket import for_rank, from_rank
from unicron_ctl.controller.core.state_snapshot import read_state
from unicron_ctl.controller.server.server import Server
from unicron_ctl.controller.server.sockets import bind
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.store import Store, StoreError
from unicron_ctl.shared.protocol import datagrams, peer_messages, shared_plans, wire
from unicron_ctl.shared.settings.config import Config, ControllerConfig
from unicron_detector.failures.classify import Classifier
from unicron_detector.formats import HINT, IMAGE, LAUNCH, LOG, PROTOCOL, RANKS, TOGETHER, ZYGOTE, Format
from unicron_detector.processes import rank_messages, zygote
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.image_format import BadImage, read_page

RELEASES = sorted(path for path in KEPT.iterdir() if path.is_dir())
FURTHER = [-1, 1]  # from the oldest that is read, and from this release's own


def lines(release: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (release / f"{name}.jsonl").read_text().splitlines()]


def about(release: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / "about.json").read_text())
    return found


def unlike(says: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where `found` is not what was said. A struct may have more fields, an array more items at its end."""
    if isinstance(found, msgspec.Raw):
        found = msgspec.msgpack.decode(found, strict=False)
    if isinstance(says, Mapping) and not isinstance(found, Mapping):
        for name, value in says.items():
            if name not in ("kind", "v", "slot", "incarnation", "pid") or hasattr(found, name):
                yield from unlike(value, getattr(found, name, "nothing"), f"{path}.{name}")
    elif isinstance(says, Mapping):
        theirs = {str(key): value for key, value in found.items()}
        for key, value in says.items():
            yield from unlike(value, theirs.get(key, "nothing"), f"{path}[{key}]")
    elif isinstance(says, list):
        if isinstance(found, msgspec.Struct):
            found = [getattr(found, name) for name in found.__struct_fields__][: len(says)]
        if len(found) != len(says):
            yield f"{path}: {says} is read as {found}"
        for number, (mine, theirs_) in enumerate(zip(says, found, strict=False)):
            yield from unlike(mine, theirs_, f"{path}[{number}]")
    elif says != found:
        yield f"{path}: {says!r} is read as {found!r}"


def read(reader: str, data: bytes) -> Any:
    """The message as this release's program reads it."""
    match reader:
        case "rank":
            return rank_messages.decode(data)
        case "agent, of a rank":
            return from_rank(data)[1]
        case "controller, of the plugin":
            return datagrams.hint(data)
        case "agent, of a plan":
            return msgspec.msgpack.decode(data, type=shared_plans.PlanCommon)
        case _:
            return wire.decode(data, READERS[reader])


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
class TestKept:
    """What a release before this one wrote."""

    def test_each_message_is_read_and_says_the_same(self, release: Path) -> None:
        kept = lines(release, "messages")
        assert len(kept) > 50
        for one in kept:
            what = f"{one['kind']} to the {one['reader']}"
            found = read(one["reader"], bytes.fromhex(one["data"]))
            assert list(unlike(one["says"], found)) == [], what

    def test_each_record_is_read_and_says_the_same(self, release: Path) -> None:
        kept = lines(release, "records")
        assert len(kept) > 50
        for one in kept:
            found = records.decode(one["kind"], bytes.fromhex(one["data"]))
            assert one["kind"] == "unreadable" or not isinstance(found, records.Unreadable), found
            assert list(unlike(one["says"], found)) == [], one["kind"]

    @pytest.mark.parametrize("states", ["saved", "gone"])
    def test_the_event_log_is_read_from_its_saved_states_and_from_its_beginning(
        self, release: Path, states: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shutil.copy(release / "events.sqlite", tmp_path)
        if states == "gone":
            with sqlite3.connect(tmp_path / "events.sqlite") as opened:
                opened.execute("DELETE FROM state")
            opened.close()
        store = Store(tmp_path / "events.sqlite")
        try:
            state, told = read_state(store), about(release)["log"]
            assert {job: seen.phase for job, seen in state.jobs.items()} == told["jobs"]
            assert state.last_event == told["events"]
            assert not [event for event in store.replay() if isinstance(event.record, records.Unreadable)]
        finally:
            store.close()
        assert "cannot be used" not in caplog.text

    def test_a_checkpoint_is_read_bit_for_bit(self, release: Path, tmp_path: Path) -> None:
        shutil.copytree(release / "checkpoint", tmp_path / "checkpoint")
        state = training(seed=11)
        assert Checkpoints(tmp_path / "checkpoint").load(state) == ITERATION
        assert [tensor.double().flatten().tolist() for tensor in everything(state)] == about(release)["tensors"]


def test_the_newest_copy_has_the_numbers_of_this_release() -> None:
    """A number that rises means a new copy, and that the one before is still read."""
    newest = about(RELEASES[-1])["numbers"]
    for name, form in NUMBERS.items():
        assert form.oldest <= newest[name] <= form.number, f"{name}: the last release wrote {newest[name]}"


def test_the_plugin_in_c_and_the_zygote_have_the_same_numbers() -> None:
    assert zygote.FORMAT == ZYGOTE.number
    spank = ROOT / "slurm_plugin/spank"
    assert re.search(rf"^#define UNICRON_HINT_NUMBER {HINT.number}\b", (spank / "notify.h").read_text(), re.M)
    assert f'#define UNICRON_LAUNCH_NUMBER "{LAUNCH.number}"' in (spank / "launch.h").read_text()


# ---------------------------------------------------------------- what is further apart
def other(form: Format, step: int) -> int:
    return form.oldest - 1 if step < 0 else form.number + 1


def is_refusal(text: str, step: int) -> bool:
    """One line with who is older, and which side is to be upgraded."""
    release, side = ("an earlier release", "the other side") if step < 0 else ("a later release", "this side")
    return release in text and f"upgrade {side}" in text and "\n" not in text


def test_numbers_in_between_are_read() -> None:
    form = Format("protocol", 5, 4)
    assert form.refusal(4) == form.refusal(5) == ""
    assert re.match("protocol 3 .* earlier .* 4 to 5: .* other side; " + TOGETHER, form.refusal(3))
    assert re.match("protocol 6 .* later .* 4 to 5: .* this side; " + TOGETHER, form.refusal(6))


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_a_message_of_a_release_too_far_away_is_refused_in_one_line(step: int) -> None:
    number = other(PROTOCOL, step)
    said = [
        (wire.encode(FakeAgent(World(), "1", 0, "n1").registration()), wire.ToController),
        (wire.encode(wire.Ping()), wire.ToAgent),
        (wire.encode(wire.Answer(ok=True)), wire.Answer),
        (wire.encode(peer_messages.PlanRequest(generation=1, element=0)), peer_messages.AnyPeer),
        (wire.encode(datagrams.Hello()), datagrams.Hello),
        (msgpack.packb({"kind": "register", "what": "nobody knows yet"}), wire.ToController),
    ]
    for data, kind in said:
        fields = msgpack.unpackb(data, strict_map_key=False) | {"v": number}
        with pytest.raises(wire.OtherRelease) as caught:
            wire.decode(msgpack.packb(fields), kind)
        assert is_refusal(str(caught.value), step)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    store = Store(tmp_path / "events.sqlite")
    config = Config(controller=ControllerConfig(auth="none"))
    server = Server(config, store, bind("tcp://127.0.0.1:0"), None, Classifier())
    yield server
    server.close()
    store.close()


def complaints(server: Server) -> list[str]:
    server.flush()
    return [event.record.reason for event in server.store.of_kinds([records.BadMessage])]


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_a_controller_tells_an_agent_of_another_release_and_its_own_log(server: Server, step: int) -> None:
    message = FakeAgent(World(), "1", 0, "n1").registration()
    message.v = other(PROTOCOL, step)
    sent: list[Any] = []
    server._send = lambda route, answer: sent.append(answer)  # type: ignore[method-assign]
    server._on_message((b"route",), wire.encode(message), "", "10.0.0.5")
    assert is_refusal(sent[0].reason, step) and isinstance(sent[0], wire.Refusal)
    assert [is_refusal(line, step) for line in complaints(server)] == [True]
    assert not server.core.state.jobs


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_a_controller_says_that_a_plugin_is_of_another_release(server: Server, step: int) -> None:
    hint = datagrams.Hint(v=other(HINT, step), kind="task_exit", job="1", element=0, node="n1", status=9)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to,
    ):
        here.bind(("127.0.0.1", 0))
        here.setblocking(False)
        for _ in range(3):
            to.sendto(wire.encode(hint), here.getsockname())

        def told() -> list[str]:
            server._receive_datagrams(here)
            return complaints(server)

        wait_for(told, "the controller's complaint", limit=10.0)
    assert len(told_once := complaints(server)) == 1
    assert "the plugin at 127.0.0.1" in told_once[0] and is_refusal(told_once[0], step)


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_an_agent_of_another_release_than_the_plugin_runs_the_command_and_says_so(step: int) -> None:
    command = [
        sys.executable,
        "-m",
        "unicron_ctl.agent.start.entry",
        "run",
        "--",
        "sh",
        "-c",
        "echo ${_UNICRON_LAUNCH-no}",
    ]
    environment = os.environ | {"_UNICRON_LAUNCH": str(other(LAUNCH, step))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout == "no\n", "the command runs, with none of the launcher's variables"
    (line,) = done.stderr.splitlines()
    assert is_refusal(line, step) and "runs unprotected" in line


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_a_zygote_that_was_installed_under_a_running_agent_says_that_its_ranks_start_cold(step: int) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        command = [sys.executable, zygote.__file__, str(its.fileno()), "train.py"]
        started = subprocess.Popen(command, pass_fds=[its.fileno()])
        task = {"format": other(ZYGOTE, step), "agent": os.getpid(), "preload": [], "told": []}
        ours.send(json.dumps(task).encode())
        ours.settimeout(LIMIT)
        assert "another release" in json.loads(ours.recv(4096))["off"]
        assert started.wait(LIMIT) == 0


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_an_agent_says_that_a_rank_is_of_another_release(step: int) -> None:
    fields = msgpack.unpackb(rank_messages.encode(rank_messages.CollectiveProgress(7), 0, 0)) | {
        "v": other(RANKS, step)
    }
    with pytest.raises(msgspec.ValidationError) as caught:
        from_rank(msgpack.packb(fields))
    assert is_refusal(str(caught.value), step)
    fields = msgpack.unpackb(for_rank(rank_messages.StopRank())) | {"v": other(RANKS, step)}
    assert rank_messages.decode(msgpack.packb(fields)) is None, "the agent has said so"


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_an_image_of_another_release_is_refused_in_one_line(step: int, tmp_path: Path) -> None:
    (image,) = (RELEASES[-1] / "checkpoint").rglob("*.image")
    page = bytearray(image.read_bytes())
    page[8:12] = other(IMAGE, step).to_bytes(4, "little")
    (tmp_path / "a.image").write_bytes(page)
    with pytest.raises(BadImage) as caught:
        read_page(tmp_path / "a.image")
    assert is_refusal(str(caught.value), step)


@pytest.mark.parametrize("step", FURTHER, ids=["older", "newer"])
def test_a_log_of_another_release_is_refused_in_one_line_and_stays_as_it_is(step: int, tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    shutil.copy(RELEASES[-1] / "events.sqlite", path)
    with sqlite3.connect(path) as opened:
        opened.execute(f"PRAGMA user_version={other(LOG, step)}")
    opened.close()
    with pytest.raises(StoreError) as caught:
        Store(path)
    said = str(caught.value)
    assert ("an earlier release" if step < 0 else "a later release") in said and "go back to" in said
    assert "\n" not in said
    with sqlite3.connect(path) as opened:
        assert opened.execute("PRAGMA user_version").fetchone() == (other(LOG, step),)
        assert opened.execute("SELECT count(*) FROM event").fetchone()[0] > 10
    opened.close()
