"""Telling: targets hear of each notice once, also after a restart, and none delays the loop. The hook, the server of
HTTP and the one of mail are real."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.fake_programs import program
from tests.support.processes import is_alive, wait_for
from unicron_ctl.controller.server.telling import DAY, FIRST_RETRY, GIVE_UP, MOST_WAITING, Telling
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event, Record
from unicron_ctl.shared.notices import notify_targets
from unicron_ctl.shared.notices.notices import Message, Notice, compose
from unicron_ctl.shared.notices.notify_targets import Hooks, NotTold, post, send_mail
from unicron_ctl.shared.settings.notify import NotifyConfig, Secrets, load_secrets, notify_problems, usable
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.mailbox import Mailbox

NOTICE = Notice(5, 0.0, "admin", "", "n3", "n3 is a suspect", "admin suspect n3")
MESSAGE = compose([NOTICE], 0, "tcp://head:7451")


def hook(folder: Path, text: str) -> str:
    return str(program(folder / "hook", text))


class Desk:
    """A Telling with one target, and the records that it appends. fails: what the target says instead of taking a
    message; deliver: takes messages in place of `heard`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, deliver: Callable[[Message], None] | None = None, **config: object
    ) -> None:
        self.heard: list[list[int]] = []
        self.fails = ""
        deliver = deliver or self._deliver
        self.results: Mailbox[Callable[[], None]] = Mailbox()
        self.told: dict[str, int] = {}
        self.records: list[records.NoticesSent] = []
        monkeypatch.setattr("unicron_ctl.controller.server.telling.targets", lambda *_: {"hook": deliver})
        self.config = NotifyConfig(**{"digest_seconds": 0.0} | config)  # type: ignore[arg-type]
        self.telling = self.begin([])

    def begin(self, events: list[Event], last: int = 0) -> Telling:
        """What unicrond does at its start."""
        self.telling = Telling(self.results, self._record)
        for event in events:
            self.telling.note(event)
        self.telling.configure(self.config, self.told, last)
        return self.telling

    def _deliver(self, message: Message) -> None:
        if self.fails:
            raise NotTold(self.fails)
        self.heard.append([one["id"] for one in message.data["notices"]])

    def _record(self, record: Record) -> None:
        assert isinstance(record, records.NoticesSent)
        self.records.append(record)
        self.told[record.target] = record.upto

    def work(self, now: float) -> None:
        self.telling.work(now)
        until = time.monotonic() + 20.0
        while any(target.sending for target in self.telling.targets.values()):
            assert time.monotonic() < until
            for result in self.results.take_all():
                result()
            time.sleep(0.001)


def lost(number: int, at: float, node: str) -> Event:
    return Event(number, at, "7", 1, records.NodeLost(node=node, element=0))


def needs_admin(number: int, at: float, key: str = "slurm") -> Event:
    return Event(number, at, "", 0, records.NeedsAdmin(key=key, reason=""))


def test_each_notice_is_told_once_also_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    log = [lost(11, 100.0, "n1"), lost(12, 101.0, "n2")]
    for event in log:
        desk.telling.note(event)
    desk.work(102.0)
    desk.work(103.0)
    assert desk.heard == [[11, 12]] and desk.told == {"hook": 12}
    log.append(lost(13, 104.0, "n3"))  # the controller dies before it is told
    desk.begin(log, last=13)
    desk.work(105.0)
    assert desk.heard == [[11, 12], [13]]
    desk.begin(log, last=13)
    desk.work(106.0)
    assert desk.heard == [[11, 12], [13]]


def test_a_new_target_hears_of_nothing_old(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.told.clear()
    desk.begin([lost(11, 100.0, "n1")], last=11)
    desk.work(200.0)
    assert desk.told == {"hook": 11} and not desk.heard
    desk.telling.note(lost(12, 201.0, "n2"))
    desk.work(202.0)
    assert desk.heard == [[12]]


def test_a_target_that_fails_is_tried_again_later_and_later_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.fails = "the server answered with status 503"
    desk.telling.note(lost(11, 100.0, "n1"))
    desk.work(100.0)
    desk.work(100.0 + FIRST_RETRY - 1)
    target = desk.telling.targets["hook"]
    assert target.tries == 1
    desk.work(100.0 + FIRST_RETRY)
    assert target.tries == 2 and target.retry_from + target.retry_after == 100.0 + 3 * FIRST_RETRY
    desk.fails = ""
    desk.telling.note(lost(12, 140.0, "n2"))
    desk.work(100.0 + 3 * FIRST_RETRY)
    assert desk.heard == [[11, 12]]


def test_notices_that_come_together_are_one_message_and_messages_are_bounded_by_the_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch, digest_seconds=10.0, most_per_hour=2)
    for number in range(40):
        desk.telling.note(lost(11 + number, 100.0 + number, f"n{number}"))
        desk.work(100.0 + number)
    assert list(map(len, desk.heard)) == [11, 11]
    desk.work(3700.0 + 9)
    assert list(map(len, desk.heard)) == [11, 11]
    desk.work(3700.0 + 10)
    assert list(map(len, desk.heard)) == [11, 11, 18]


def test_what_needs_an_admin_waits_behind_no_healed_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, most_per_hour=2)
    for number in range(5):
        desk.telling.note(lost(11 + number, 100.0 + number, f"n{number}"))
        desk.work(100.0 + number)
    assert desk.heard == [[11], [12]], "the hour's messages are used up"
    desk.telling.note(needs_admin(20, 110.0))
    desk.work(110.0)
    assert desk.heard[2:] == [[13, 14, 15, 20]]
    for number in range(2):
        desk.telling.note(needs_admin(21 + number, 120.0, f"take {number}"))
        desk.work(121.0 + number)
    assert len(desk.heard) == 4, "this is bounded, too"


def test_among_thousands_what_needs_an_admin_is_kept_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, digest_seconds=10.0)
    desk.telling.note(needs_admin(1, 100.0))
    for number in range(MOST_WAITING + 10):
        desk.telling.note(lost(2 + number, 100.0, f"n{number}"))
    desk.work(110.0)
    (heard,) = desk.heard
    assert 1 in heard and len(heard) < MOST_WAITING


@pytest.mark.parametrize("back", [30.0, 6 * 3600.0])
def test_a_clock_that_steps_back_silences_nobody(monkeypatch: pytest.MonkeyPatch, back: float) -> None:
    desk = Desk(monkeypatch, digest_seconds=10.0, most_per_hour=1)
    desk.fails = "it is away"
    start = 100_000.0
    desk.telling.note(needs_admin(1, start))
    desk.work(start + 10.0)
    desk.fails = ""
    desk.telling.note(needs_admin(2, start - back))
    desk.work(start + 10.0 - back)
    assert desk.heard == [[1, 2]]


def test_a_server_that_drips_is_given_up_and_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte begins the time limit of a socket anew."""
    came = threading.Semaphore(0)
    answers, ended = [b"", b"HTTP/1.0 200 OK\r\n\r\n"], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20.0)

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            came.release()
            threading.Thread(target=drip, args=(connection, answer)).start()

    def drip(connection: socket.socket, answer: bytes) -> None:
        with connection, connection.makefile("rb") as request:
            request.readline()
            request.read(int(http.client.parse_headers(request)["Content-Length"]))
            connection.sendall(answer or b"HTTP/1.0 200 OK\r\nX: ")
            while not answer and not ended.wait(0.05):
                connection.sendall(b"a")

    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    desk = Desk(monkeypatch, lambda message: post(url, message.data, 60.0), timeout=1.0)
    server = threading.Thread(target=serve)
    server.start()
    try:
        desk.telling.note(lost(11, 100.0, "n1"))
        desk.telling.work(100.0)
        assert came.acquire(timeout=20.0)
        target = desk.telling.targets["hook"]
        desk.telling.work(100.0 + GIVE_UP - 1.0)
        assert target.sending is not None
        desk.telling.work(100.0 + GIVE_UP)
        assert target.sending is None and target.tries == 1 and target.lost == 1
        desk.work(100.0 + FIRST_RETRY)
        assert desk.told == {"hook": 11}
        ended.set()
        wait_for(lambda: [result() for result in desk.results.take_all()], "its thread has ended", 20.0)
        assert target.lost == 0
    finally:
        ended.set()
        server.join(20.0)
        listener.close()


def test_what_is_a_day_old_is_not_told_and_kinds_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, kinds=("admin",))
    desk.telling.note(lost(11, 100.0, "n1"))
    desk.telling.note(needs_admin(12, 100.0))
    desk.work(100.0 + DAY - 1)
    assert desk.heard == [[12]], "no node is told of"
    desk.telling.note(needs_admin(13, 200.0, "n3"))
    desk.work(200.0 + DAY)
    assert desk.heard == [[12]] and desk.telling.targets["hook"].left_out == 1


def hooked(folder: Path, text: str, timeout: float) -> tuple[Telling, Mailbox[Callable[[], None]]]:
    """A Telling whose hook is this script, and that has a notice for it."""
    results: Mailbox[Callable[[], None]] = Mailbox()
    telling = Telling(results, lambda record: None)
    telling.configure(NotifyConfig(hook=hook(folder, text), digest_seconds=0.0, timeout=timeout), {"hook": 0}, 0)
    telling.note(lost(11, 100.0, "n1"))
    return telling, results


def test_a_hanging_hook_delays_no_turn_of_the_loop(tmp_path: Path) -> None:
    telling, results = hooked(tmp_path, "sleep 100", 3.0)
    began = time.monotonic()
    telling.work(101.0)
    telling.work(102.0)
    assert time.monotonic() - began < 3.0, "nobody waits for it"
    while not telling.targets["hook"].tries:
        assert time.monotonic() - began < 20.0
        for result in results.take_all():
            result()
        time.sleep(0.01)
    results.close()


def test_no_hook_outlives_the_controller(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    telling, results = hooked(tmp_path, f"sleep 300 & echo $$ $! > {mark}.new; mv {mark}.new {mark}; wait", 60.0)
    telling.work(101.0)
    wait_for(mark.exists, "the hook runs", 20.0)
    telling.close()
    for pid in mark.read_text().split():
        wait_for(lambda pid=pid: not is_alive(int(pid)), "it has ended", 20.0)
    wait_for(lambda: results.take_all(), "its thread has ended", 20.0)
    with pytest.raises(NotTold, match="unicrond ends"):
        telling.targets["hook"].deliver(MESSAGE)
    results.close()


# ---------------------------------------------------------------- targets
def test_the_hook_gets_json_and_nothing_of_the_controllers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTP_PASSWORD", "hunter2")
    Hooks().run(hook(tmp_path, f"cat > {tmp_path}/said; env > {tmp_path}/environment"), 20.0, MESSAGE)
    said = json.loads((tmp_path / "said").read_text())
    assert said["notices"] == [NOTICE.as_dict()] and said["controller"] == "tcp://head:7451"
    assert "hunter2" not in (tmp_path / "environment").read_text()


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("exit 3", 0o755, "ended with status 3"),
        ("", 0o757, "others can write"),
        ("", 0o775, "others can write"),
        ("", 0o644, "no program"),
    ],
)
def test_a_hook_that_fails_or_that_others_can_write_is_said(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = hook(tmp_path, text)
    os.chmod(path, mode)
    with pytest.raises(NotTold, match=says):
        Hooks().run(path, 20.0, MESSAGE)


def test_a_hook_below_a_folder_that_others_can_write_is_not_run(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    folder = tmp_path / "site" / "hooks"
    folder.mkdir(parents=True)
    path = hook(folder, f"touch {tmp_path}/ran")
    folder.parent.chmod(0o775)
    with pytest.raises(NotTold) as refused:
        Hooks().run(path, 20.0, MESSAGE)
    assert str(refused.value).replace(str(tmp_path), "FOLDER") == snapshot
    assert not (tmp_path / "ran").exists()
    folder.parent.chmod(0o755)
    Hooks().run(path, 20.0, MESSAGE)
    assert (tmp_path / "ran").exists()


class Web(BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, object]]]
    status: int

    def do_POST(self) -> None:
        data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.headers.get("Authorization", ""), data))
        self.send_response(self.status)
        if self.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[tuple[str, type[Web]]]:
    served = type("Served", (Web,), {"got": [], "status": 200})
    server = HTTPServer(("127.0.0.1", 0), served)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/T0/B0/topsecret", served
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook_gets_the_notices_and_slack_gets_text(web: tuple[str, type[Web]]) -> None:
    url, served = web
    secrets = Secrets(slack=url, webhook=url, webhook_token="t0ken")
    found = notify_targets.targets(NotifyConfig(), secrets, Hooks())
    assert sorted(found) == ["slack", "webhook"]
    found["webhook"](MESSAGE)
    found["slack"](MESSAGE)
    assert served.got[0] == ("Bearer t0ken", MESSAGE.data)
    assert "n3 is a suspect" in str(served.got[1][1]["text"])


@pytest.mark.parametrize("status", [302, 403, 500])
def test_no_secret_is_in_what_is_said_of_a_server_that_refuses_and_no_redirection_is_followed(
    web: tuple[str, type[Web]], status: int
) -> None:
    url, served = web
    served.status = status
    with pytest.raises(NotTold, match=f"status {status}") as error:
        notify_targets.targets(NotifyConfig(), Secrets(webhook=url), Hooks())["webhook"](MESSAGE)
    assert "topsecret" not in str(error.value) and len(served.got) == 1


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(NotTold, match="cannot be reached"):
        post("http://127.0.0.1:1/x", {}, 5.0)


def test_a_server_has_one_limit_for_all_that_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: each byte began the time limit of a socket anew, and the thread never ended."""
    monkeypatch.setattr(notify_targets, "PROGRAM", ("/bin/sleep", "300"))  # whatever it waits for
    monkeypatch.setattr(notify_targets, "WHOLE", 0.02)
    found = notify_targets.targets(NotifyConfig(mail=["a@b"]), Secrets(webhook="https://x", slack="https://x"), Hooks())
    assert found.keys() == {"mail", "webhook", "slack"}
    for deliver in found.values():
        with pytest.raises(NotTold, match=r"not through within 0\.4 s"):
            deliver(MESSAGE)


class MailServer(threading.Thread):
    """As much of SMTP as one mail needs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.mail = self.listener.getsockname()[1], ""

    def run(self) -> None:
        connection, _ = self.listener.accept()
        with connection, connection.makefile("rwb", buffering=0) as lines:
            lines.write(b"220 here\r\n")
            while line := lines.readline():
                word = line[:4].upper()
                lines.write({b"DATA": b"354 go on\r\n", b"QUIT": b"221 bye\r\n"}.get(word, b"250 fine\r\n"))
                if word == b"DATA":
                    while (text := lines.readline()) not in (b".\r\n", b""):
                        self.mail += text.decode()
                    lines.write(b"250 taken\r\n")
                elif word == b"QUIT":
                    return


def test_mail_is_sent(snapshot: SnapshotAssertion) -> None:
    server = MailServer()
    server.start()
    config = NotifyConfig(mail=["ops@example.org"], smtp=f"127.0.0.1:{server.port}", mail_from="unicron@example.org")
    notify_targets.targets(config, Secrets(), Hooks())["mail"](MESSAGE)
    server.join(20.0)
    server.listener.close()
    assert [line for line in server.mail.splitlines() if line.startswith("Subject: ")] == snapshot
    assert "To: ops@example.org" in server.mail and "n3 is a suspect" in server.mail.partition("\r\n\r\n")[2]


class GuardedMailServer(MailServer):
    """A mail server that says which words it was sent. certificate: of its STARTTLS; it offers none without one."""

    def __init__(self, certificate: Path | None) -> None:
        super().__init__()
        self.certificate, self.words = certificate, list[bytes]()

    def run(self) -> None:
        connection, _ = self.listener.accept()
        with contextlib.suppress(OSError), connection:
            self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        lines = connection.makefile("rwb", buffering=0)
        lines.write(b"220 here\r\n")
        while line := lines.readline():
            self.words.append(line.split()[0].upper())
            offers = b"STARTTLS" if self.certificate else b"HELP"
            said = b"250-here\r\n250-AUTH PLAIN LOGIN\r\n250 %s\r\n" % offers
            lines.write({b"EHLO": said, b"QUIT": b"221 bye\r\n"}.get(self.words[-1], b"220 go on\r\n"))
            if self.words[-1] == b"STARTTLS" and self.certificate:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.certificate)
                self._talk(context.wrap_socket(connection, server_side=True))
                return


@pytest.mark.parametrize("certificate", [None, Path(__file__).parents[4] / "data" / "tls" / "self-signed.pem"], ids=str)
def test_a_password_goes_to_no_mail_server_that_proves_nothing(certificate: Path | None) -> None:
    """Whoever sits between could say that there is no encryption, or encrypt himself."""
    server = GuardedMailServer(certificate)
    server.start()
    config = NotifyConfig(
        mail=["ops@example.org"], smtp=f"127.0.0.1:{server.port}", mail_from="u@example.org", timeout=10.0
    )
    with pytest.raises((ssl.SSLCertVerificationError, smtplib.SMTPNotSupportedError)):
        send_mail(config, Secrets(smtp_user="unicron", smtp_password="hunter2"), MESSAGE)
    server.join(20.0)
    server.listener.close()
    assert server.words and not {b"AUTH", b"MAIL", b"DATA"} & set(server.words)
    assert (b"STARTTLS" in server.words) is (certificate is not None)


# ---------------------------------------------------------------- the section
def test_secrets_are_read_from_a_file_that_nobody_else_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secrets"
    path.write_text('slack = "https://hooks.slack.com/services/T/B/topsecret"\n')
    path.chmod(0o600)
    config = NotifyConfig(secrets=str(path))
    assert load_secrets(config).slack.endswith("topsecret") and notify_problems(config) == []
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    (problem,) = notify_problems(config)
    assert "or own it" in problem, "its owner could make it readable"
    monkeypatch.undo()
    os.chown(path, os.getuid(), -1)
    path.chmod(0o640)
    (problem,) = notify_problems(config)
    assert "others can read it" in problem and "topsecret" not in problem


def test_the_secrets_that_are_read_are_those_that_were_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of a file that takes their place between the two, and nothing of a pipe, which might never answer."""
    path, good = tmp_path / "secrets", tmp_path / "good"
    for file, mode in ((path, 0o644), (good, 0o600)):
        file.write_text('slack = "https://hooks.slack.com/services/T/B/topsecret"\n')
        file.chmod(mode)
    looked = os.stat(good)
    monkeypatch.setattr(os, "stat", lambda *_, **__: looked)
    with pytest.raises(UserError, match="others can read it"):
        load_secrets(NotifyConfig(secrets=str(path)))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="no plain file"):
        load_secrets(NotifyConfig(secrets=str(tmp_path / "pipe")))


def test_without_its_secrets_a_section_tells_the_hook_alone_until_they_can_be_read(tmp_path: Path) -> None:
    """The secrets say, too, that mail has to be encrypted on its way. Their file system may be mounted later."""
    secrets = tmp_path / "mount" / "secrets"
    config = NotifyConfig(hook=hook(tmp_path, ""), mail=["a@b"], secrets=str(secrets))
    results: Mailbox[Callable[[], None]] = Mailbox()
    told: dict[str, int] = {"slack": 3}
    telling = Telling(results, lambda record: None)
    telling.note(lost(11, 100.0, "n1"))
    telling.configure(config, told, 11)
    assert set(telling.targets) == {"hook"}
    telling.work(100.0)
    telling._looking.join(20.0)
    assert not results.take_all() and set(telling.targets) == {"hook"}
    secrets.parent.mkdir()
    secrets.write_text('slack = "https://hooks.slack.com/services/T/B/topsecret"\nsmtp_user = "u"\n')
    secrets.chmod(0o600)
    telling.work(100.0 + FIRST_RETRY - 1)
    assert not results.take_all(), "it is looked for now and then"
    telling.work(100.0 + FIRST_RETRY)
    telling._looking.join(20.0)
    for result in results.take_all():
        result()
    assert set(telling.targets) == {"hook", "mail", "slack"}
    assert [notice.id for notice in telling.targets["slack"].waiting] == [11], "it has missed nothing"
    telling.work(100.0 + 3 * FIRST_RETRY)
    assert not telling._looking.is_alive() and telling._unread is None
    results.close()


def test_what_is_wrong_in_a_section_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    path = hook(tmp_path, "")
    config, secrets, read = usable(NotifyConfig(hook=path, mail=["ops"], most_per_hour=0, timeout=float("nan")))
    assert (config, read) == (NotifyConfig(hook=path), True) and not secrets.words
    config, _, _ = usable(NotifyConfig(hook="bin/tell", mail=["a@b"], digest_seconds=5.0))
    assert config == NotifyConfig(mail=["a@b"], digest_seconds=5.0)
    assert usable(NotifyConfig(mail=["a@b"], secrets="here"))[0].mail == []


@pytest.mark.parametrize(
    "text", ['slack = "http://x/topsecret"', "slack = topsecret", 'slak = "topsecret"', "slack = 7"]
)
def test_wrong_secrets_are_said_without_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secrets"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError) as error:
        load_secrets(NotifyConfig(secrets=str(path)))
    assert "topsecret" not in str(error.value) and "\n" not in str(error.value)
