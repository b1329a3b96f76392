"""Munge on the controller's side: who registers or asks, and the controller's own word for its key. All of it in
threads, and no more of it at once than is worth waiting for."""

from __future__ import annotations

import os
import pwd
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unicron_ctl.addresses import origin
from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.controller.worker import Worker
from unicron_ctl.protocol import claims, datagrams, wire
from unicron_ctl.protocol.munge import MungeError, make_credential, unmunge
from unicron_ctl.time_limit import TimeLimit

AT_ONCE, OF_ONE_ADDRESS = 4096, 256  # credentials in verification
FRESH_SECONDS = 60.0  # for which the controller's own credential is used: munge lets it live for 300
AGAIN_SECONDS = 1.0  # after munge could not make one
WAITING = 1000  # peers that wait for it
NAME_SECONDS, NAMES_HANGING = 1.0, 4  # for the name service to say a user's name; calls that hang at once
_names = TimeLimit(NAME_SECONDS, NAMES_HANGING, "unicron-names")
Where = tuple[socket.socket, Any]  # by which socket, and where to


@dataclass(frozen=True)
class Unproven:
    """No credential that counts; the text says why, and what to do."""

    reason: str


class Verifier:
    """admins: names of users who may do what a job's owner may."""

    def __init__(self, worker: Worker, admins: Callable[[], Sequence[str]]) -> None:
        self._worker, self._admins = worker, admins
        self._busy: Counter[str] = Counter()
        self._all = 0

    def verify(self, credential: str, claim: str, address: str, then: Callable[[Asker | Unproven], None]) -> bool:
        """Calls `then` in the main thread with who made the credential, if it holds this claim. False, and nothing is
        called, when too many are being verified, of this address or of all."""
        network = origin(address)  # of IPv6, where a host has many addresses
        if self._all >= AT_ONCE or self._busy[network] >= OF_ONE_ADDRESS:
            return False
        self._all += 1
        self._busy[network] += 1
        admins = self._admins()

        def done(found: Asker | Unproven | None) -> None:
            self._all -= 1
            self._busy[network] -= 1
            if not self._busy[network]:
                del self._busy[network]
            then(found or Unproven("the controller could not look at the munge credential: see its log"))

        self._worker.verify(lambda: asker_of(credential, claim, admins), done)
        return True


def asker_of(credential: str, claim: str, admins: Sequence[str]) -> Asker | Unproven:
    """Who made the credential, if it holds this claim and nobody has used it before."""
    try:
        found = unmunge(credential)
    except MungeError as error:
        return Unproven(f"{error}: is munged running with the same key on both nodes?")
    if found.replayed:
        return Unproven("this munge credential was used before")
    if found.payload != claim.encode():
        return Unproven("this munge credential is about something else, or of another connection")
    try:
        user = _names.run(lambda: pwd.getpwuid(found.uid).pw_name)
    except (KeyError, TimeoutError):  # the name service may be away: who it is, the number says
        user = ""
    return Asker(found.uid, user, found.uid in (0, os.geteuid()) or user in admins)


class Introducer:
    """Answers whoever asks for the controller's public key: by one credential a minute, however many ask. key: empty
    for a controller that encrypts nothing."""

    def __init__(self, worker: Worker, key: str, send: Callable[[bytes, Where], None]) -> None:
        self._worker, self._key, self._send = worker, key, send
        self._answer = wire.encode(datagrams.Introduction(plain=True)) if not key else b""
        self._until = 0.0 if key else float("inf")
        self._waiting: list[Where] = []

    def hello(self, where: Where, now: float) -> None:
        """Somebody asks."""
        if now < self._until:
            self._send(self._answer, where)
            return
        if len(self._waiting) < WAITING:
            self._waiting.append(where)
        if len(self._waiting) > 1:
            return  # a credential is being made

        def done(made: datagrams.Introduction | None) -> None:
            made = made or datagrams.Introduction(error="the controller has no munge credential")
            self._answer, self._until = wire.encode(made), now + (FRESH_SECONDS if made.credential else AGAIN_SECONDS)
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._send(self._answer, one)

        self._worker.verify(self._make, done)

    def _make(self) -> datagrams.Introduction:
        try:
            return datagrams.Introduction(credential=make_credential(claims.of_controller(self._key)))
        except MungeError as error:
            return datagrams.Introduction(error=f"the controller has no munge credential: {error}")
