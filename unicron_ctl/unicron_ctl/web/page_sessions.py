"""Keeps the sessions of the page's viewers: a link's munge credential opens one (docs/web.md)."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from unicron_ctl.shared.protocol import claims
from unicron_ctl.shared.protocol.audience import Viewer
from unicron_ctl.shared.protocol.munge import MungeError, unmunge, user_name

SESSION_SECONDS = 8 * 3600.0
OF_ONE, OF_ALL = 20, 2000  # sessions that are kept
LINK_SECONDS = 3600.0  # the longest life of a credential (MUNGE_MAXIMUM_TTL)
LINKS_OF_ONE = 200  # links that one user may open in this time
VERIFYING = 4  # credentials at once
NEW_LINK = "make a new link with `unicronctl web link`"


class LinkRefused(Exception):
    """The credential opens nothing; the text says why."""


@dataclass(frozen=True)
class _Session:
    viewer: Viewer
    until: float


class Sessions:
    """Exchanges munge credentials for tokens, and keeps digests of the tokens in memory.

    Parameters
    ----------
    origins
        The page's own addresses, of which a credential names one.
    """

    def __init__(self, origins: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._claims = {claims.of_viewer(origin).encode() for origin in origins}
        self._clock = clock
        self._known: OrderedDict[bytes, _Session] = OrderedDict()
        self._used: dict[int, dict[bytes, float]] = {}
        """uid -> digest of a link that was used -> until when it has to be remembered."""
        self._lock = threading.Lock()
        self._verifying = threading.BoundedSemaphore(VERIFYING)

    def open_session(self, credential: str) -> tuple[str, str]:
        """Open a session; return its token, two halves joined by a full stop, and the user's name. Raises
        LinkRefused."""
        if not self._verifying.acquire(timeout=2.0):
            raise LinkRefused("too many links are opened at once: try again")
        try:
            viewer = self._viewer(credential)
        finally:
            self._verifying.release()
        token = f"{secrets.token_urlsafe(32)}.{secrets.token_urlsafe(32)}"
        with self._lock:
            self._forget(lambda session: session.until <= self._clock(), 0)
            self._forget(lambda session: session.viewer.uid == viewer.uid, OF_ONE - 1)
            self._forget(lambda session: True, OF_ALL - 1)
            self._known[_digest(token)] = _Session(viewer, self._clock() + SESSION_SECONDS)
        return token, viewer.user or f"uid {viewer.uid}"

    def _viewer(self, credential: str) -> Viewer:
        if not credential.startswith("MUNGE:") or not credential.isascii():
            raise LinkRefused(f"this is no link to a page: {NEW_LINK}")
        try:
            proof = unmunge(credential)
        except MungeError as error:
            raise LinkRefused(f"{error}: {NEW_LINK}") from None
        if proof.replayed or not self._first_use(credential, proof.uid):
            raise LinkRefused(f"this link was used before: {NEW_LINK}")
        if proof.payload not in self._claims:
            raise LinkRefused(f"this link is for another address: {NEW_LINK} and --url with the address that you open")
        return Viewer(proof.uid, user_name(proof.uid))

    def _first_use(self, credential: str, uid: int) -> bool:
        """Note that a link is used, and return whether it is the first time. munged itself forgets that when it
        restarts. Raises LinkRefused."""
        now, digest = self._clock(), _digest(credential)
        with self._lock:
            used = {seen: until for seen, until in self._used.get(uid, {}).items() if now < until}
            if len(used) >= LINKS_OF_ONE:
                raise LinkRefused("too many links were opened within the hour: try again later")
            first = digest not in used
            self._used[uid] = used | {digest: now + LINK_SECONDS}
        return first

    def _forget(self, which: Callable[[_Session], bool], kept: int) -> None:
        """Forget all but the newest `kept` of these sessions."""
        digests = [digest for digest, session in self._known.items() if which(session)]
        for digest in digests[: max(0, len(digests) - kept)]:
            del self._known[digest]

    def viewer(self, token: str) -> Viewer | None:
        """Return the session's viewer; None if there is no such session, or it is over."""
        with self._lock:
            session = self._known.get(_digest(token))
        return session.viewer if session is not None and self._clock() < session.until else None

    def end(self, token: str) -> None:
        """Ends a session."""
        with self._lock:
            self._known.pop(_digest(token), None)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
