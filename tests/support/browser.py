"""Headless Chromium, driven over the pipe of its developer protocol: Debian's package, and no library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = "chromium"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # the tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
LIMIT = 60.0
PHONE, DESKTOP = (390, 844), (1280, 900)


class Browser:
    """One page in a browser of its own. errors: what its console complained of; requests: what it has asked for.

    close() ends it.
    """

    def __init__(self) -> None:
        if shutil.which(COMMAND) is None:
            raise FileNotFoundError(f"no {COMMAND}: `make system-wide` installs it")
        self._profile = tempfile.mkdtemp(prefix="unicron-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol's pipes are descriptors 3 and 4.
        moves = (
            f"exec 3<&{theirs_in} 4>&{theirs_out}; exec {COMMAND} {' '.join(OPTIONS)} --user-data-dir={self._profile}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", moves],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._data, self._session = itertools.count(1), b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.resize(DESKTOP)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._number)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while True:
            found = self._read(until)
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result

    def _read(self, until: float) -> dict[str, Any]:
        """The next message, events noted on the way. Raises TimeoutError."""
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("chromium does not answer")
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "chromium has ended"
            self._data += chunk
        line, _, self._data = self._data.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        self._note(found)
        return found

    def _note(self, found: dict[str, Any]) -> None:
        given = found.get("params", {})
        match found.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(given["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            case "Log.entryAdded":
                self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])

    def resize(self, size: tuple[int, int]) -> None:
        """The window's width and height, in CSS pixels."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str) -> None:
        """Goes to the address."""
        found = self.call("Page.navigate", url=url)
        assert not found.get("errorText"), f"{url}: {found['errorText']}"
        blank = "===" if url == "about:blank" else "!=="
        self.wait(f"document.readyState === 'complete' && location.href {blank} 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, limit: float = LIMIT) -> None:
        """Waits until the expression is true."""
        until = time.monotonic() + limit
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < until, f"not within {limit:g} s: {expression}\n{self.errors}\n{self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        """What a reader sees."""
        return str(self.js("document.body.innerText"))

    def picture(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._session = ""
        for descriptor in (self._out, self._in):  # at the end of its pipe chromium ends, and its children with it
            os.close(descriptor)
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20.0)
        shutil.rmtree(self._profile, ignore_errors=True)
