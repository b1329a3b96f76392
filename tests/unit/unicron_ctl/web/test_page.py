"""The page of `unicronctl web`: who sees what, and what strangers can do to its server."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.questions import told
from tests.support.web_page import HOSTILE, ROOT, Site, busy_world, hurt
from tests.support.world import World
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.shared.protocol import audience, claims, munge
from unicron_ctl.shared.protocol.answer_schema import Scenario, Status
from unicron_ctl.shared.protocol.audience import Sight, Viewer
from unicron_ctl.shared.protocol.client import as_struct
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.web import page, page_server, page_sessions, page_source
from unicron_ctl.web.page_sessions import LinkRefused, Sessions
from unicron_ctl.web.page_source import AnswerKeeper, Busy, Source

ANN, BOB, EVE, NOBODY = Viewer(1000, "ann"), Viewer(1001, "bob"), Viewer(1002, "eve"), Viewer(65534, "nobody")
CAROL, WEB, OWN = Viewer(1003, "carol"), Viewer(1004, "web"), Viewer(os.geteuid(), "own")
LINE = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.fixture(scope="module")
def world() -> World:
    made = busy_world(24, 3, 1)
    made.core.config.admins.append("carol")
    made.core.config.readers.append("web")
    hurt(made, "4200", 3, LINE)
    hurt(made, "4201", 1, f"ValueError: {HOSTILE}")
    owner = made.core.state.jobs["4202"]
    owner.uid = None  # it began without a credential, so only its owner's name is known
    owner.settings.user = "eve"
    for job, uid in (("4200", 1000), ("4201", 1001)):
        made.core.state.jobs[job].uid = uid
    return made


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(world, tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.fixture
def site(served: Site) -> Site:
    served.begin_anew()
    return served


@pytest.fixture
def other_site(world: World, tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Makes a site of another kind, which is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(contextlib.closing(Site(world, tmp_path, **how)))


# ---------------------------------------------------------------- who sees what
@pytest.mark.parametrize("private", [(), ("jobs",), ("nodes",), ("jobs", "nodes")], ids=str)
@pytest.mark.parametrize("viewer", [ANN, BOB, EVE, NOBODY, CAROL, WEB, Viewer(1000, ""), Viewer(0, "root")], ids=str)
def test_the_page_tells_each_viewer_what_the_controller_would(site: Site, viewer: Viewer, private, monkeypatch) -> None:
    monkeypatch.setattr(site.world.core.view.slurm, "private", frozenset(private))
    config = site.world.core.config
    asker = Asker(
        viewer.uid, viewer.user, viewer.uid == 0 or viewer.user in config.admins, viewer.user in config.readers
    )
    whole = as_struct(site.ask(page_source.STATUS), Status)
    assert whole.sharing is not None and whole.failures and whole.attention
    sight = Sight(whole, whole.sharing, viewer)
    told_them = as_struct(told(site.world.core, "status", asker, site.store, brief=True), Status)
    assert sight.reads_all is asker.reads_all and sight.status() == told_them
    scenario = as_struct(site.ask({"kind": "scenario"}), Scenario)
    assert sight.scenario(scenario) == as_struct(told(site.world.core, "scenario", asker, site.store), Scenario)


def test_others_failures_do_not_push_a_users_own_off_the_page(site: Site, monkeypatch) -> None:
    for module in (answers, audience):
        monkeypatch.setattr(module, "LAST_FAILURES", 1)
    for viewer, job in ((ANN, "4200"), (BOB, "4201"), (ROOT, "4201")):
        _, answer, _ = site.get("/view", site.token(Viewer(viewer.uid, viewer.user), monkeypatch))
        assert [failure["job"] for failure in answer["failures"]] == [job], viewer


def test_an_owner_reads_why_and_others_do_not(site: Site, monkeypatch) -> None:
    ann, bob = (site.token(viewer, monkeypatch) for viewer in (ANN, BOB))
    status, answer, _ = site.get("/job?id=4200", ann)
    assert status == 200 and answer["failures"][0]["cause"] == "ecc_error" and answer["decisions"]
    assert "second-best plan" in answer["plan"] and dict(answer["second"]).keys() == {"4200", "4201", "4202"}
    for token, job in ((bob, "4200"), (ann, "4201"), (ann, "llama-70b"), (ann, ""), (bob, "%00")):
        assert site.get(f"/job?id={job}", token)[0] == 404
    shown = json.dumps(site.get("/view", bob)[1])
    assert "4201" in shown and "ecc" not in shown.lower() and "needs an admin" not in shown
    assert "needs an admin" in json.dumps(site.get("/view", site.token(Viewer(0, "root"), monkeypatch))[1])
    assert "explain" in site.asked, "the refused questions reached nobody"
    assert site.asked.count("explain") == 1


def test_the_plan_is_the_one_that_the_viewer_may_know(site: Site, monkeypatch) -> None:
    _, answer, _ = site.get("/plan", site.token(ANN, monkeypatch))
    assert [job["job"] for job in answer["jobs"]] == ["4200", "4201", "4202"] and answer["jobs"][0]["reason"]
    monkeypatch.setattr(site.world.core.view.slurm, "private", frozenset({"jobs"}))
    site.begin_anew()
    _, answer, _ = site.get("/plan", site.token(BOB, monkeypatch))
    assert [job["job"] for job in answer["jobs"]] == ["4201"]


def test_a_page_whose_user_is_no_admin_serves_that_user_alone(other_site: Callable[..., Site], monkeypatch) -> None:
    site = other_site(asker=Asker(1000, "ann"))
    for viewer in (ANN, BOB):
        status, answer, _ = site.get("/view", site.token(viewer, monkeypatch))
        assert status == 403 and "serves that user only" in answer["error"]
    monkeypatch.setattr("unicron_ctl.web.page.os.geteuid", lambda: 1000)
    status, answer, _ = site.get("/view", site.token(ANN, monkeypatch))
    assert status == 200 and {job["job"] for job in answer["jobs"]} == {"4200", "4201", "4202"}
    assert {failure["job"] for failure in answer["failures"]} == {"4200"}


def test_without_sessions_only_a_controller_without_munge_is_shown(
    other_site: Callable[..., Site], world: World, monkeypatch
) -> None:
    site = other_site(viewers=False)
    monkeypatch.setattr(world.core.config, "auth", "munge")
    assert site.get("/view")[0] == 403
    monkeypatch.setattr(world.core.config, "auth", "none")
    site.begin_anew()
    status, answer, _ = site.get("/view")
    assert status == 200 and answer["admin"] and not answer["session"]


def test_nobody_is_told_anything_without_a_session(site: Site) -> None:
    for path in ("/view", "/plan", "/job?id=4200"):
        for token in ("", "guessed", "a" * 5000):
            status, answer, headers = site.get(path, token)
            assert (status, headers["Cache-Control"]) == (401, "no-store") and "unicronctl web link" in answer["error"]
    assert site.asked == [], "strangers cost the controller nothing"


# ---------------------------------------------------------------- links and sessions
class Munge:
    """A munged that knows some credentials."""

    def __init__(self, monkeypatch) -> None:
        self.known: dict[str, munge.Credential] = {}
        monkeypatch.setattr(page_sessions, "unmunge", self.unmunge)

    def unmunge(self, credential: str) -> munge.Credential:
        if credential not in self.known:
            raise munge.MungeError("munge: Invalid credential", outage=False)
        return self.known[credential]


def post(site: Site, path: str, body: str, **headers: str) -> tuple[int, dict[str, str], http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=20)
    connection.request("POST", path, body, {"Origin": f"http://{site.host}", **headers})
    answer = connection.getresponse()
    data = json.loads(answer.read())
    connection.close()
    return answer.status, data, answer.headers


def test_a_link_begins_a_session_for_who_made_it(site: Site, monkeypatch) -> None:
    known = Munge(monkeypatch).known
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ann"))
    good = claims.of_viewer(f"http://{site.host}").encode()
    known |= {
        "MUNGE:good:": munge.Credential(1000, good),
        "MUNGE:used:": munge.Credential(1000, good, replayed=True),
        "MUNGE:asker:": munge.Credential(1000, claims.of_asker("key").encode()),
        "MUNGE:other:": munge.Credential(1000, claims.of_viewer("http://elsewhere:7454").encode()),
    }
    for credential, reason in (
        ("MUNGE:used:", "used before"),
        ("MUNGE:asker:", "another address"),
        ("MUNGE:other:", "another address"),
        ("MUNGE:forged:", "Invalid credential"),
        ("letmein", "no link"),
        ("", "no link"),
    ):
        status, answer, headers = post(site, "/session", credential)
        assert status == 403 and reason in answer["error"] and "Set-Cookie" not in headers, credential
    status, answer, headers = post(site, "/session", "MUNGE:good:")
    cookie = headers["Set-Cookie"]
    assert status == 200 and {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert answer["user"] == "ann", "the page says whose session it is: the link may be somebody else's"
    half = cookie.split(";")[0].partition("=")[2]
    token = f"{half}.{answer['half']}"
    assert site.get("/view", token)[1]["failures"], "it is ann's"
    for less in (half, f"{half}.", f"{half}.{half}", f".{answer['half']}"):
        assert site.get("/view", less)[0] == 401, "other ports of the host get the cookie, too"
    assert post(site, "/leave", "", Cookie=cookie.split(";")[0])[0] == 200
    assert site.get("/view", token)[0] == 200, "nor do they end it"
    assert post(site, "/leave", "", Cookie=cookie.split(";")[0], **{page_server.HALF: answer["half"]})[0] == 200
    assert site.get("/view", token)[0] == 401


def test_only_the_page_itself_begins_a_session(site: Site) -> None:
    for origin in ("http://evil.example", "null", f"http://{site.host}.evil.example"):
        assert post(site, "/session", "MUNGE:x:", Origin=origin)[0] == 403
    assert post(site, "/view", "")[0] == 404
    assert post(site, "/session", "x" * 5000)[0] == 413


def test_a_link_works_once_also_where_munged_was_started_again(monkeypatch) -> None:
    """munged keeps what it has seen in memory."""
    now, origin = [0.0], "http://127.0.0.1:7454"
    known = Munge(monkeypatch).known
    good = claims.of_viewer(origin).encode()
    known |= {f"MUNGE:{n}:": munge.Credential(1000, good) for n in range(4)} | {
        "MUNGE:b:": munge.Credential(1001, good)
    }
    sessions = Sessions([origin], lambda: now[0])
    sessions.open_session("MUNGE:0:")
    now[0] = page_sessions.LINK_SECONDS - 1.0
    with pytest.raises(LinkRefused, match="used before"):
        sessions.open_session("MUNGE:0:")
    monkeypatch.setattr(page_sessions, "LINKS_OF_ONE", 2)
    sessions.open_session("MUNGE:1:")
    with pytest.raises(LinkRefused, match="too many links"):
        sessions.open_session("MUNGE:2:")
    sessions.open_session("MUNGE:b:")
    now[0] += 2 * page_sessions.LINK_SECONDS
    sessions.open_session("MUNGE:3:")


@pytest.mark.parametrize(
    ("url", "secure"), [("https://unicron.example.org", True), ("http://unicron.example.org", False)]
)
def test_a_page_behind_tls_gives_its_cookie_to_tls_alone(site: Site, monkeypatch, url: str, secure: bool) -> None:
    monkeypatch.setattr(site.server, "origins", frozenset({*site.server.origins, url}))
    monkeypatch.setattr(site.server.page, "sessions", Sessions([url]))
    Munge(monkeypatch).known["MUNGE:good:"] = munge.Credential(1000, claims.of_viewer(url).encode())
    status, _, headers = post(site, "/session", "MUNGE:good:", Origin=url)
    assert status == 200 and ("Secure" in headers["Set-Cookie"].split("; ")) is secure


def test_sessions_end_and_are_bounded(monkeypatch) -> None:
    now, sessions = [0.0], Sessions([], lambda: now[0])
    monkeypatch.setattr(sessions, "_viewer", lambda credential: ANN)
    first, _ = sessions.open_session("")
    more = [sessions.open_session("")[0] for _ in range(page_sessions.OF_ONE)]
    assert sessions.viewer(first) is None and all(sessions.viewer(token) == ANN for token in more)
    monkeypatch.setattr(sessions, "_viewer", lambda credential: BOB)
    bobs, _ = sessions.open_session("")
    assert sessions.viewer(bobs) == BOB and sessions.viewer(more[0]) == ANN, "one user ends no other's session"
    now[0] = page_sessions.SESSION_SECONDS
    assert sessions.viewer(bobs) is None
    sessions.open_session("")
    assert len(sessions._known) == 1, "what is over is forgotten"


def test_too_many_links_at_once_wait_and_are_refused() -> None:
    sessions = Sessions([])
    for _ in range(page_sessions.VERIFYING):
        sessions._verifying.acquire()
    sessions._verifying.acquire = lambda timeout: False  # type: ignore[method-assign]
    with pytest.raises(LinkRefused, match="too many"):
        sessions.open_session("MUNGE:x:")


# ---------------------------------------------------------------- what the controller is asked
def test_ten_who_watch_cost_one_question_an_interval(site: Site, monkeypatch) -> None:
    tokens = [site.token(viewer, monkeypatch) for viewer in (ANN, BOB, EVE, NOBODY, CAROL) * 2]
    threads = [threading.Thread(target=site.get, args=("/view", token)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert site.asked == ["status"]


def test_a_slow_answer_is_asked_for_less_often_and_an_outage_is_said(monkeypatch) -> None:
    now, slow, problem = [100.0], [0.0], [""]

    def ask() -> int:
        now[0] += slow[0]
        if problem[0]:
            raise UserError(problem[0])
        return int(now[0])

    monkeypatch.setattr(page_source.time, "thread_time", lambda: 0.0)
    kept = AnswerKeeper(ask, 2.0, lambda: now[0])
    assert kept.latest() == kept.latest() and kept.latest().answer == 100
    now[0] += 2.0
    assert (kept.latest().number, kept.latest().every) == (2, 2.0)
    slow[0] = 0.19
    for _ in range(2):
        now[0] += 20.0
        kept.latest()
    assert kept.latest().every == 10.0, "one slow answer may be bad luck, two are not"
    problem[0] = "no controller answers"
    now[0] += 20.0
    assert (kept.latest().answer, kept.latest().problem) == (142, "no controller answers")


def test_an_outage_shows_what_was_last_known(site: Site, monkeypatch) -> None:
    token = site.token(ANN, monkeypatch)
    site.down = "no controller answers at tcp://127.0.0.1:7451"
    status, answer, _ = site.get("/view", token)
    assert status == 503 and answer["error"] == site.down
    site.begin_anew()
    token = site.token(ANN, monkeypatch)
    assert site.get("/view", token)[1]["problem"] == ""
    site.down = "no controller answers"
    monkeypatch.setattr(site.server.page._source._status, "_clock", lambda: time.monotonic() + 3.0)
    status, answer, _ = site.get("/view", token)
    assert (status, answer["problem"]) == (200, "no controller answers") and answer["jobs"]


def test_many_jobs_looked_at_are_asked_for_one_after_the_other(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(page_source.time, "sleep", slept.append)
    source = Source(lambda question: 1 / 0, lambda: 50.0)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            source._explain("1")
    assert slept == [0.0, 0.5, 1.0, 1.5, 2.0]
    with pytest.raises(UserError, match="try again"):
        source._explain("1")


def test_who_waits_too_long_for_somebody_elses_question_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr(page_source, "PATIENCE_SECONDS", 0.01)
    kept = AnswerKeeper(lambda: 1, 2.0)
    with kept._asking, pytest.raises(Busy):
        kept.latest()


# ---------------------------------------------------------------- what strangers can do to the server
def test_an_answer_that_has_not_changed_is_not_sent_again(site: Site, monkeypatch) -> None:
    token = site.token(ANN, monkeypatch)
    _, _, headers = site.get("/view", token)
    assert float(headers["Unicron-Every"]) >= 2.0
    status, data, again = site.get("/view", token, **{"If-None-Match": headers["ETag"]})
    assert (status, data, again["ETag"]) == (304, b"", headers["ETag"])
    status, packed, headers = site.get("/page.js", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip" and gzip.decompress(packed) == site.get("/page.js")[1]


@pytest.mark.parametrize(
    "path",
    ["/../unicronctl.py", "/%2e%2e/page.py", "//etc/passwd", "/page.py", "/page.css/..", "/web/page.js", "/\x7f", "*"],
)
def test_no_path_leads_out_of_the_page(site: Site, path: str) -> None:
    with slow(site, f"GET {path} HTTP/1.0\r\nHost: {site.host}\r\n\r\n".encode()) as client:
        assert client.makefile("rb").readline().split()[1] == b"404"


def test_a_page_of_another_name_gets_nothing(site: Site) -> None:
    for host in ("evil.example", f"evil.example:{site.server.port}", "127.0.0.1", "", f"{site.host}, evil.example"):
        status, answer, _ = site.get("/", Host=host)
        assert status == 421 and site.host in answer["error"], host
    assert site.get("/", Host=f"localhost:{site.server.port}")[0] == 200
    with slow(site, f"GET / HTTP/1.0\r\nHost: {site.host}\r\nHost: evil.example\r\n\r\n".encode()) as client:
        assert client.makefile("rb").readline().split()[1] == b"421"


def test_the_browser_is_told_to_run_nothing_else(site: Site) -> None:
    _, text, headers = site.get("/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    script = site.get("/page.js")[1]
    for word in (b"http://", b"https://", b"innerHTML", b"outerHTML", b"insertAdjacent", b"document.write", b"eval("):
        assert word not in text + script + site.get("/page.css")[1], word
    assert b"<script>" not in text and b"style=" not in text and b" on" not in text.replace(b" one", b"")


def slow(site: Site, data: bytes = b"GET / HT") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", site.server.port), 10)
    client.sendall(data)
    return client


@contextlib.contextmanager
def slow_clients(site: Site, count: int, data: bytes = b"GET / HT") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(slow(site, data)) for _ in range(count)]


def wait_for_open(site: Site, count: int) -> None:
    """Waits until the server has so many connections: it hears a little later that an earlier test closed its own."""
    deadline = time.monotonic() + 20.0
    while len(site.server._open) != count:
        assert time.monotonic() < deadline, f"{len(site.server._open)} connections, not {count}"
        time.sleep(0.01)


def gave_way(client: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    client.settimeout(5)
    return client.recv(1) == b""


def test_a_hundred_slow_clients_keep_nobody_waiting(site: Site) -> None:
    with slow_clients(site, 100):
        began = time.monotonic()
        assert site.get("/")[0] == 200 and time.monotonic() - began < page_server.IDLE_SECONDS


def test_one_connection_too_many_closes_the_oldest_that_has_not_asked(site: Site, monkeypatch) -> None:
    wait_for_open(site, 0)
    monkeypatch.setattr(site.server, "most_open", 3)
    with slow_clients(site, 3) as clients:
        wait_for_open(site, 3)
        assert site.get("/")[0] == 200
        assert gave_way(clients[0])


def test_where_all_have_asked_the_oldest_gives_way(site: Site, monkeypatch) -> None:
    """Who asks and reads nothing, or waits for the controller, keeps nobody out."""
    wait_for_open(site, 0)
    monkeypatch.setattr(site.server, "most_open", 3)
    entered, go_on = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(
        site.server.page, "answer", lambda *_: (entered.release(), go_on.wait(20)) and page.json_body({})
    )
    request = f"GET /view HTTP/1.0\r\nHost: {site.host}\r\n\r\n".encode()
    with slow_clients(site, 3, request) as clients:
        assert all(entered.acquire(timeout=20) for _ in clients)
        assert site.get("/")[0] == 200
        assert gave_way(clients[0]), "it had waited longest"
        go_on.set()


def test_one_viewer_with_many_questions_keeps_no_other_waiting(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(page, "MOST_OF_ONE", 2)
    ann, bob = (site.token(viewer, monkeypatch) for viewer in (ANN, BOB))
    entered, go_on = threading.Semaphore(0), threading.Event()

    def wait(viewer: Viewer | None, _: str) -> page.Body:
        if viewer == ANN:
            entered.release()
            go_on.wait(20)
        return page.json_body({})

    monkeypatch.setitem(site.server.page.questions, "/view", wait)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(site.get, "/view", ann) for _ in range(2)]
        assert entered.acquire(timeout=20) and entered.acquire(timeout=20)
        assert site.get("/view", ann)[0] == 503 and site.get("/view", bob)[0] == 200
        go_on.set()
        assert [one.result()[0] for one in waiting] == [200, 200]
    assert site.get("/view", ann)[0] == 200


def test_a_client_that_drips_is_closed_in_the_end(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(site.server, "whole_seconds", 0.2)
    with slow(site) as client:
        assert gave_way(client)


@pytest.mark.parametrize(
    "request_",
    [b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"BREW / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\nnonsense\r\n\r\n"],
    ids=["bytes", "version", "method", "header"],
)
def test_what_is_no_request_gets_no_word_of_it_back(site: Site, request_: bytes) -> None:
    with slow(site, request_) as client:
        answer = client.makefile("rb").read()
    assert answer.split()[1][:1] in (b"4", b"5") and b"nonsense" not in answer and b"BREW" not in answer
    assert site.get("/")[0] == 200


@pytest.mark.parametrize("length", ["9" * 5000, "\u00b2", "-1", "1e3", "4097"])
def test_a_length_that_is_none_is_refused_without_a_traceback(site: Site, length: str, caplog) -> None:
    head = (
        f"POST /session HTTP/1.0\r\nHost: {site.host}\r\nOrigin: http://{site.host}\r\nContent-Length: {length}\r\n\r\n"
    )
    with slow(site, head.encode("latin-1")) as client:
        assert b" 413 " in client.makefile("rb").readline()
    assert "Traceback" not in caplog.text


def test_a_head_without_end_is_cut(site: Site) -> None:
    lines = b"GET / HTTP/1.0\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 1000) for n in range(90))
    with socket.create_connection(("127.0.0.1", site.server.port), 10) as client:
        try:
            client.sendall(lines)
            answer = client.recv(100)
        except ConnectionError:
            answer = b""
    assert b" 200 " not in answer and site.get("/")[0] == 200


def test_a_second_page_at_the_same_port_is_a_line(site: Site) -> None:
    with pytest.raises(UserError, match="give another --listen"):
        page_server.Server("127.0.0.1", site.server.port, lambda origins: site.server.page, [])
