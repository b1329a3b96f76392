"""`unicronctl web` beside a real unicrond, opened with real munge credentials; and how a real browser shows it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.browser import PHONE, Browser
from tests.support.controller import Controller
from tests.support.munged import STRANGER, Munged, controller_in, own_realm
from tests.support.processes import LIMIT, UNICRONCTL
from tests.support.scripted import ScriptedAgent, form
from tests.support.web_page import HOSTILE, Site, busy_world, hurt
from unicron_ctl.shared.protocol import claims
from unicron_ctl.shared.protocol.controller_discovery import Hello
from unicron_ctl.web.page_server import HALF

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user"),
]


@pytest.fixture
def realm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Munged]:
    with own_realm(monkeypatch) as munged:
        yield munged


@pytest.fixture
def controller(realm: Munged, tmp_path: Path) -> Iterator[Controller]:
    with controller_in(realm, tmp_path, Controller) as started:
        yield started


@pytest.fixture
def web(controller: Controller) -> Iterator[tuple[str, dict[str, str]]]:
    """The page's address, and the environment of its programs."""
    environment = controller.environment | {
        "UNICRON_CONFIG": str(controller.config),
        "UNICRON_CONTROLLER": controller.address,
    }
    with (controller.folder / "web.log").open("wb") as log:
        process = subprocess.Popen(
            [*UNICRONCTL, "web", "--listen", "127.0.0.1:0"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[2], environment
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert (controller.folder / "web.log").read_text() == ""


class Visitor:
    """Asks the page as a browser does that opened this link."""

    def __init__(self, origin: str, credential: str) -> None:
        self.origin, self.cookie, self.half = origin, "", ""
        status, answer = self.ask("POST", "/session", credential)
        assert status == 200, answer
        self.half = answer["half"]

    def ask(self, method: str, path: str, body: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.origin).netloc, timeout=30)
        try:
            connection.request(
                method, path, body or None, {"Origin": self.origin, "Cookie": self.cookie, HALF: self.half}
            )
            answer = connection.getresponse()
            self.cookie = (answer.headers["Set-Cookie"] or self.cookie).split(";")[0]
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def test_a_link_shows_its_user_what_the_controller_tells_this_user(controller, web, realm) -> None:
    origin, environment = web
    hello = Hello(controller.address)
    key = hello.wait_for_key(30.0)
    hello.close()
    agents = [ScriptedAgent(controller.address, element, key=key) for element in range(2)]
    try:
        form(agents)
        done = subprocess.run(
            [*UNICRONCTL, "web", "link", "--url", origin],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
        link = done.stdout.strip()
        assert link.startswith(f"{origin}/#MUNGE:")
        root = Visitor(origin, link.partition("#")[2])
        status, seen = root.ask("GET", "/view")
        assert status == 200 and seen["admin"] and seen["jobs"][0]["job"] == "7" and len(seen["nodes"]) == 2
        status, why = root.ask("GET", "/job?id=7")
        assert status == 200 and why["decisions"] and why["lines"][0].startswith("job 7")
        nobody = Visitor(origin, realm.credential(claims.of_viewer(origin), STRANGER))
        status, seen = nobody.ask("GET", "/view")
        assert status == 200 and not seen["admin"] and seen["jobs"][0]["job"] == "7"
        assert seen["jobs"][0]["loss"] is None and seen["jobs"][0]["notes"] == []
        assert nobody.ask("GET", "/job?id=7")[0] == 404
        with pytest.raises(AssertionError, match="used before"):
            Visitor(origin, link.partition("#")[2])
    finally:
        for agent in agents:
            agent.close()


@pytest.mark.wide
def test_chromium_shows_the_page_live_and_runs_nothing_of_what_users_write(tmp_path: Path) -> None:
    world = busy_world(60, 3, 1)
    site = Site(world, tmp_path, viewers=False)
    browser = Browser()
    try:
        browser.open(f"http://{site.host}/")
        browser.wait("document.getElementById('main').hidden === false")
        assert browser.js("document.querySelectorAll('#map i').length") == 60
        assert browser.js("document.querySelectorAll('#map i.down').length") == 1
        assert HOSTILE in browser.text() and browser.js("document.title") == "Unicron"
        assert browser.js("document.images.length") == 0, "it is text"

        browser.js("document.querySelector('#jobs summary').click()")
        browser.wait("document.querySelector('#jobs .line')")
        assert browser.js("document.querySelectorAll('#map i:not(.dim)').length") == 15, "the nodes of this job"
        hurt(world, "4200", 3, f"RuntimeError: CUDA error: uncorrectable ECC error encountered {HOSTILE}")
        browser.wait("document.querySelector('#failures').innerText.includes('ecc_error')")
        browser.wait("document.querySelector('#jobs .line i')")
        browser.wait("document.querySelector('#alarms').innerText.includes('needs an admin')")
        browser.js("document.querySelector('#plan summary').click()")
        browser.wait("document.querySelector('#plan').innerText.includes('second-best plan')")
        browser.js("document.querySelector('#map i').click()")
        assert browser.js("document.querySelector('#chosen').innerText").startswith("n1: ")

        browser.resize(PHONE)
        browser.wait(f"document.documentElement.scrollWidth <= {PHONE[0]}")
        site.down = "no controller answers"
        browser.wait("document.querySelector('#live').innerText.includes('no controller answers')")
        assert browser.errors == []
        assert {urlsplit(url).netloc for url in browser.requests} == {site.host}, "it asks nobody else"
    finally:
        browser.close()
        site.close()


@pytest.mark.wide
def test_chromium_opens_a_link_and_forgets_the_credential(controller, web) -> None:
    origin, environment = web
    link = subprocess.check_output([*UNICRONCTL, "web", "link", "--url", origin], env=environment, text=True).strip()
    browser = Browser()
    try:
        browser.open(f"{origin}/")
        browser.wait("document.querySelector('#refused').innerText.includes('unicronctl web link')")
        assert browser.js("document.querySelector('#main').hidden")
        assert [error for error in browser.errors if "401" not in error] == []
        browser.open("about:blank")
        browser.open(link)
        browser.wait("document.getElementById('main').hidden === false")
        assert browser.js("location.href") == f"{origin}/" and browser.js("document.cookie") == ""
        browser.js("document.querySelector('#leave').click()")
        browser.wait("document.querySelector('#refused')?.hidden === false")
    finally:
        browser.close()
