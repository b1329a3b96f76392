"""Serves the page over HTTP with the standard library: GET of known paths, a POST that begins a session and one that
ends it. Each connection gets one answer, so that no client holds one for long."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from unicron_ctl.shared.protocol.munge import MOST_BYTES
from unicron_ctl.shared.system.addresses import resolve
from unicron_ctl.shared.system.bounded_server import BoundedServer
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.web.page import JSON, Body, NotFor, Page, json_body
from unicron_ctl.web.page_sessions import SESSION_SECONDS, LinkRefused
from unicron_ctl.web.page_source import Busy

log = logging.getLogger("unicron.web")
IDLE_SECONDS = 5.0  # for one read or write
HEAD_BYTES = 16384
HALF = "Unicron-Session"  # has half of a token: browsers send cookies to all ports of a host, but this to one page
HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Vary", f"Cookie, {HALF}, Accept-Encoding"),
)


class Server(BoundedServer):
    """Listens at host:port. Raises UserError if that is not possible.

    Parameters
    ----------
    host, port
        The address to listen at; port 0 for any free one.
    page
        Makes the page, given the origins by which browsers may know it.
    origins
        Those of them that are not addresses of this socket.
    """

    def __init__(self, host: str, port: int, page: Callable[[Collection[str]], Page], origins: Collection[str]) -> None:
        try:
            target = resolve(host, port)[0]
            self.address_family = target.family
            super().__init__(target.address[:2], Handler)
        except OSError as error:
            raise UserError(f"cannot listen at {host}:{port} ({error.strerror}): give another --listen") from None
        self.port: int = self.server_address[1]
        self.origins = frozenset({*origins, *own_origins(host, target.host, self.port)})
        self.hosts = frozenset(urlsplit(origin).netloc.lower() for origin in self.origins)
        self.page = page(self.origins)


def own_origins(host: str, numeric: str, port: int) -> list[str]:
    """Return the origins by which browsers on this host may know a page that listens there."""
    names = {host, numeric} - {"0.0.0.0", "::", ""}
    if numeric in ("127.0.0.1", "::1"):
        names |= {"localhost", "127.0.0.1", "::1"}
    return [f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}" for name in sorted(names)]


class _Head:
    """A request's lines up to HEAD_BYTES; beyond that the connection looks closed."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, HEAD_BYTES

    def readline(self, most: int = -1) -> bytes:
        line: bytes = self._file.readline(min(self._left, most) if most >= 0 else self._left)
        self._left -= len(line)
        return line

    def read(self, count: int) -> bytes:
        """Reads the body, whose length the caller has limited."""
        data: bytes = self._file.read(count)
        return data

    def close(self) -> None:
        self._file.close()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "unicron", ""
    timeout = IDLE_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._answer(self._read)

    def do_HEAD(self) -> None:
        self._answer(self._read)

    def do_POST(self) -> None:
        self._answer(self._order)

    def _answer(self, make: Callable[[], Body | tuple[str, dict[str, str]]]) -> None:
        """Sends the result of `make`: an answer, or the cookie to set and the page's part of a session."""
        try:
            self._check_host()
            answer = make()
        except NotFor as error:
            self._refuse(error.status, str(error))
        except LinkRefused as error:
            self._refuse(403, str(error))
        except Busy as error:
            self._refuse(503, str(error))
        except Exception:
            log.exception("could not answer %.100r", self.path)
            self._refuse(500, "the page could not answer: see the log of `unicronctl web`")
        else:
            if isinstance(answer, tuple):
                self._send(200, json_body(answer[1]), answer[0])
            elif answer.tag in self.headers.get("If-None-Match", ""):
                self._send(304, answer)
            else:
                self._send(200, answer)

    def _check_host(self) -> None:
        """Refuses a page of another site that directs its own name to this address (DNS rebinding)."""
        named = self.headers.get_all("Host") or []
        if len(named) != 1 or named[0].strip().lower() not in self.server.hosts:
            hosts = ", ".join(sorted(self.server.hosts))
            raise NotFor(421, f"this page is known as {hosts}; give `unicronctl web` --url with a further address")

    def _read(self) -> Body:
        self.server.note_asked(self.connection)
        page, (path, _, query) = self.server.page, self.path.partition("?")
        if path in page.files:
            return page.files[path]
        if path not in page.questions:
            raise NotFor(404, "there is no such page")
        argument = unquote(query.removeprefix("id=")) if query.startswith("id=") else ""
        return page.answer(path, self._token(), argument)

    def _order(self) -> tuple[str, dict[str, str]]:
        """Begins or ends a session. Returns the cookie to set, and what the page keeps: the half of the token that is
        not in the cookie, and the user's name."""
        sessions = self.server.page.sessions
        if self.headers.get("Origin") not in self.server.origins:
            raise NotFor(403, "only the page itself begins a session")
        if sessions is None or self.path not in ("/session", "/leave"):
            raise NotFor(404, "there is no such page")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > MOST_BYTES:
            raise NotFor(413, "this is no link to a page")
        text = self.rfile.read(int(length)).decode("ascii", "replace")
        self.server.note_asked(self.connection)
        secure = "; Secure" if self.headers["Origin"].startswith("https:") else ""
        rules = f"Path=/; HttpOnly; SameSite=Strict{secure}"
        if self.path == "/leave":
            sessions.end(self._token())
            return f"{self._cookie}=; Max-Age=0; {rules}", {"half": "", "user": ""}
        token, user = sessions.open_session(text.strip())
        half, _, other = token.partition(".")
        return f"{self._cookie}={half}; Max-Age={SESSION_SECONDS:.0f}; {rules}", {"half": other, "user": user}

    @property
    def _cookie(self) -> str:
        return f"unicron{self.server.port}"

    def _token(self) -> str:
        for cookie in self.headers.get("Cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self._cookie:
                return f"{value}.{self.headers.get(HALF, '')}"
        return ""

    def _refuse(self, status: int, reason: str) -> None:
        self._send(status, json_body({"error": reason}))

    def _send(self, status: int, body: Body, cookie: str = "") -> None:
        packed = "gzip" in self.headers.get("Accept-Encoding", "")
        data = b"" if status == 304 else body.packed if packed else body.data
        self.send_response(status)
        for name, value in HEADERS:
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store" if body.kind == JSON else "no-cache")
        self.send_header("ETag", body.tag)
        self.send_header("Content-Type", body.kind)
        self.send_header("Content-Length", str(len(data)))
        if packed and data:
            self.send_header("Content-Encoding", "gzip")
        if body.every:
            self.send_header("Unicron-Every", f"{body.every:g}")
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers input that is no request, without repeating any of it."""
        self.server.note_asked(self.connection)
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.write(f"HTTP/1.0 {int(code)} LinkRefused\r\nContent-Length: 0\r\n\r\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: an open page asks every two seconds."""
