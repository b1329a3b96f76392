"""Verifies the munge credentials of those who register or ask, and makes the one for the controller's own key. A few
threads call munge."""

from __future__ import annotations

import hashlib
import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from unicron_ctl.controller.model.asker import Asker, Roles
from unicron_ctl.controller.server.worker import Worker
from unicron_ctl.shared.protocol import claims, datagrams, wire
from unicron_ctl.shared.protocol.munge import MungeError, make_credential, unmunge, user_name
from unicron_ctl.shared.system.addresses import is_loopback, origin

MOST_SPENT = 8192  # credentials that are remembered as used or invalid
FRESH_SECONDS = 60.0  # for which the controller's own credential is used: munge lets it live for 300
AGAIN_SECONDS = 1.0  # after munge could not make one
WAITING = 1000  # peers that wait for it
Where = tuple[socket.socket, Any]  # the socket to send from, and the address to send to


@dataclass(frozen=True)
class Unproven:
    """The reason why a credential does not count."""

    reason: str
    verdict: Literal["used", "invalid", "outage"] = "used"  # after an outage the credential may be good


USED = Unproven("this munge credential was used before")


class Verifier:
    """Verifies credentials in threads.

    The threads serve machines, their addresses and their connections in turn, so a peer that sends many credentials
    delays only itself. Munge does not get a credential that was used or is invalid a second time.
    """

    def __init__(self, worker: Worker, roles: Callable[[], Roles]) -> None:
        self._worker = worker
        self._roles = roles  # the users that the configuration names at present
        self._spent = SpentCredentials()

    def verify(
        self, credential: str, claim: str, key: str, address: str, then: Callable[[Asker | Unproven], None]
    ) -> bool:
        """Calls `then` in the main thread with the maker of the credential, if it holds this claim; at once for a
        credential that was used before. Returns False, and calls nothing, if too many are being verified: of this
        connection's key, its address, its machine or of all."""
        if (spent := self._spent.get(credential)) is not None:
            then(spent)
            return True
        roles = self._roles()

        def work() -> Asker | Unproven:
            return self._spent.get(credential) or asker_of(credential, claim, roles)  # a copy may have come first

        def on_verdict(asker: Asker | Unproven | None) -> None:
            asker = asker or Unproven("the controller could not look at the munge credential: see its log", "outage")
            self._spent.note(credential, asker)
            then(asker)

        return self._worker.verify(work, on_verdict, path(key, address))


def path(key: str, address: str) -> tuple[str, str, str]:
    """Return a credential's path in the queue: machine, address, connection. All loopback addresses count as one
    machine, and so does an IPv6 network of 64 bits (see `origin`)."""
    where = origin(address)
    return "loopback" if is_loopback(address) else where, where, key


class SpentCredentials:
    """The last credentials that were used or are invalid, by their digests. One thread adds them, any may read."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Unproven] = OrderedDict()

    def get(self, credential: str) -> Unproven | None:
        return self._known.get(_digest(credential))

    def note(self, credential: str, asker: Asker | Unproven) -> None:
        """Remembers munge's verdict, unless it is an outage."""
        if isinstance(asker, Asker) or asker.verdict == "outage":
            return
        self._known[_digest(credential)] = asker if asker.verdict == "invalid" else USED
        if len(self._known) > MOST_SPENT:
            self._known.popitem(last=False)


def _digest(credential: str) -> bytes:
    return hashlib.blake2b(credential.encode(), digest_size=16).digest()


def asker_of(credential: str, claim: str, roles: Roles) -> Asker | Unproven:
    """Return the user who made the credential, if it holds this claim and nobody has used it before."""
    try:
        content = unmunge(credential)
    except MungeError as error:
        reason = f"{error}: is munged running with the same key on both nodes?"
        return Unproven(reason, "outage" if error.outage else "invalid")
    if content.replayed:
        return USED
    if content.payload != claim.encode():
        return Unproven("this munge credential is about something else, or of another connection")
    user = user_name(content.uid)
    admin = content.uid in (0, os.geteuid()) or user in roles.admins
    return Asker(content.uid, user, admin, user in roles.readers)


class Introducer:
    """Answers questions for the controller's public key, with one credential a minute however many peers ask."""

    def __init__(self, worker: Worker, key: str, send: Callable[[bytes, Where], None]) -> None:
        self._worker, self._send = worker, send
        self._key = key  # empty for a controller that encrypts nothing
        self._answer = wire.encode(datagrams.Introduction(plain=True)) if not key else b""
        self._until = 0.0 if key else float("inf")
        self._waiting: list[Where] = []

    def on_hello(self, where: Where, now: float) -> None:
        """Answers one question, at once or when the credential is made."""
        if now < self._until:
            self._send(self._answer, where)
            return
        if len(self._waiting) < WAITING:
            self._waiting.append(where)
        if len(self._waiting) > 1:
            return  # a credential is being made

        def on_made(answer: datagrams.Introduction | None) -> None:
            answer = answer or datagrams.Introduction(error="the controller has no munge credential")
            self._answer = wire.encode(answer)
            self._until = now + (FRESH_SECONDS if answer.credential else AGAIN_SECONDS)
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._send(self._answer, one)

        self._worker.verify(self._make, on_made)

    def _make(self) -> datagrams.Introduction:
        try:
            return datagrams.Introduction(credential=make_credential(claims.of_controller(self._key)))
        except MungeError as error:
            return datagrams.Introduction(error=f"the controller has no munge credential: {error}")
