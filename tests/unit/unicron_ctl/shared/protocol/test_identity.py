"""What is put into credentials, and whose word for the controller's key counts; without munge."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from unicron_ctl.shared.protocol import claims, controller_discovery, datagrams, encryption, munge, structs, wire
from unicron_ctl.shared.system import addresses
from unicron_ctl.shared.system.errors import UserError

KEY = "k" * 40
REGISTER = wire.Register(
    job="7", element=1, agent="a", node="n1", address="x", slots=[1], settings=structs.Settings(name="j", user="ann")
)


def test_each_claim_is_good_for_one_purpose_and_one_connection() -> None:
    made = {claims.of_controller(KEY), claims.of_asker(KEY), claims.of_agent(REGISTER, KEY)}
    assert len(made) == 3 and claims.of_asker(KEY) != claims.of_asker("o" * 40)
    for change in ({"job": "8"}, {"element": 2, "slots": [2]}, {"node": "n2"}, {"agent": "b"}):
        other = wire.msgspec.structs.replace(REGISTER, **change)
        assert claims.of_agent(other, KEY) not in made, change


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b'["unicron"]',
        claims.of_asker(KEY).encode(),
        json.dumps(["slurm", "controller", KEY]),
    ],
)
def test_only_a_controller_s_claim_holds_its_key(payload: bytes) -> None:
    assert claims.controller_key(payload) == ""
    assert claims.controller_key(claims.of_controller(KEY).encode()) == KEY


def test_whose_controller_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def scontrol(command: list[str], *options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout=b"SlurmUser               = slurm(64030)\nSlurmctldPort = 6817\n")

    monkeypatch.setattr(controller_discovery.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(controller_discovery, "run_program", scontrol)
    monkeypatch.setattr(controller_discovery, "_slurm_user", controller_discovery._SlurmUser())
    assert controller_discovery.trusted(0) and controller_discovery.trusted(1000) and not asked
    assert controller_discovery.trusted(64030) and not controller_discovery.trusted(1001) and len(asked) == 1
    assert controller_discovery.trusted(65534, ["no such user", "nobody"])


def test_a_slurm_that_does_not_answer_is_not_asked_for_every_forged_datagram(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def scontrol(*words: object, **options: object) -> None:
        asked.append(words)
        raise OSError("no such program")

    monkeypatch.setattr(controller_discovery, "run_program", scontrol)
    monkeypatch.setattr(controller_discovery, "_slurm_user", controller_discovery._SlurmUser())
    assert not any(controller_discovery.trusted(54321) for _ in range(10)) and len(asked) == 1


@pytest.mark.parametrize(
    "address", ["", "here", "tcp://", "tcp://here", "tcp://here:port", "tcp://:1", "tcp://h:99999"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UserError, match="write tcp://HOST:PORT"):
        addresses.endpoint(address)


def test_addresses() -> None:
    assert addresses.endpoint("tcp://head:7451") == ("head", 7451)
    assert addresses.endpoint("tcp://[::1]:7451") == ("::1", 7451)


def test_a_question_is_not_shorter_than_its_answer() -> None:
    """Or anybody could have a flood of answers sent to somebody else."""
    answer = wire.encode(datagrams.Introduction(credential="c" * 600))
    question = wire.encode(datagrams.Hello(padding=" " * controller_discovery.HELLO_BYTES))
    assert len(answer) <= controller_discovery.HELLO_BYTES <= len(question)


@pytest.mark.parametrize(
    ("host", "believed"), [("127.0.0.1", True), ("::1", True), ("192.0.2.1", False), ("2001:db8::1", False)]
)
def test_who_encrypts_nothing_is_believed_on_this_machine_alone(host: str, believed: bool) -> None:
    hello = controller_discovery.Hello("tcp://127.0.0.1:9")
    target = addresses.Target(socket.AF_INET, (host, 9))
    answer = controller_discovery.Answer(datagrams.Introduction(plain=True), target)
    found = hello.first_believed([answer])
    assert (found is not None and found.key == encryption.PLAIN) is believed
    assert believed or "loopback address only" in hello.problem


def test_the_key_that_somebody_has_configured(tmp_path: Path) -> None:
    def key(text: str) -> str | None:
        return encryption.public_key({"UNICRON_PUBLIC_KEY": text, "HOME": str(tmp_path)})

    assert key("") is None and key("none") == encryption.PLAIN and key(KEY) == KEY
    with pytest.raises(UserError, match="is not a public key"):
        key("short")


@pytest.mark.parametrize(
    ("text", "socket"),
    [
        ("AuthType=auth/munge\nAuthInfo=socket=/run/other/socket\n", "/run/other/socket"),
        ("  authinfo=cred_expire=5,socket=/m/s,ttl=60  # ours\n", "/m/s"),
        ("#AuthInfo=socket=/no\nAuthAltInfo=socket=/no\n", ""),
        ("AuthInfo=cred_expire=5 # socket=/no\n", ""),
    ],
)
def test_munged_is_found_where_slurm_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, socket: str
) -> None:
    (tmp_path / "slurm.conf").write_text(text)
    monkeypatch.delenv("MUNGE_SOCKET", raising=False)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert munge._socket() == socket
    monkeypatch.setenv("MUNGE_SOCKET", "/mine")
    assert munge._socket() == "/mine"


def test_a_munge_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    held = threading.Event()
    monkeypatch.setattr(munge, "TIME_LIMIT", 0.05)
    with pytest.raises(munge.MungeError, match="has not answered") as caught:
        munge._within(held.wait)
    held.set()
    assert caught.value.outage


@pytest.mark.parametrize("credential", ["", "M" * 5000])
def test_what_cannot_be_a_credential_is_not_shown_to_munge(monkeypatch: pytest.MonkeyPatch, credential: str) -> None:
    monkeypatch.setattr(munge, "_decode", lambda text: pytest.fail("asked"))
    with pytest.raises(munge.MungeError) as caught:
        munge.unmunge(credential)
    assert not caught.value.outage
