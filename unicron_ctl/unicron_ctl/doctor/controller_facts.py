"""Asks the controller for a sign of life, as agents and commands do."""

from __future__ import annotations

import socket
import time

from unicron_ctl.doctor.facts import ControllerFacts
from unicron_ctl.shared.protocol.answer_schema import Pong
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.settings.places import controller_address
from unicron_ctl.shared.system.addresses import endpoints, resolve_all
from unicron_ctl.shared.system.errors import UserError, one_line

ASK_SECONDS = 5.0
CONNECT_SECONDS = 2.0


def controller_facts(explicit: str, config: Config) -> ControllerFacts:
    """What the controller answers on this host. explicit: its address, "" for that of the configuration."""
    address = controller_address(explicit or None, config)
    facts = ControllerFacts(address=address)
    asked = time.time()
    try:
        pong = as_struct(ask_controller({"kind": "ping"}, address, timeout=ASK_SECONDS), Pong)
    except UserError as error:
        facts.problem, facts.tcp = one_line(str(error)), takes_connections(address)
        return facts
    answered = time.time()
    facts.tcp, facts.release, facts.uid = True, pong.release, pong.uid
    facts.within = (answered - asked) / 2
    facts.ahead = pong.time - (asked + answered) / 2
    return facts


def takes_connections(address: str) -> bool | None:
    """Whether something listens at one of the addresses, tcp://HOST:PORT with commas between; None where none of their
    hosts is known."""
    try:
        targets = resolve_all(endpoints(address))
    except (UserError, OSError):
        return None
    for target in targets:
        try:
            with socket.create_connection(target.address[:2], CONNECT_SECONDS):
                return True
        except OSError:
            continue
    return False
