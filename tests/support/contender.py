"""One of several controllers that contend for a state folder, without all that a controller is for: it claims the
folder, renews its lease, appends events, and notes when it may act.

    contender.py FOLDER NOTES

A line of NOTES is "TERM SECONDS": by the clock of all processes, before it looked whether it may act.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from unicron_ctl.controller.server import standby
from unicron_ctl.shared.log import records, term
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import StoreError
from unicron_ctl.shared.log.term import Renewal, Tenure, clock
from unicron_ctl.shared.settings.config import ControllerConfig

# As many turns as possible in the time that a test has.
term.LEASE_SECONDS, term.RENEW_SECONDS, term.LOST_SECONDS, standby.POLL_SECONDS = 0.5, 0.1, 2.0, 0.05


def lead(folder: Path, notes: Path) -> None:
    """One term, until it is over or this has had enough."""
    anywhere = ControllerConfig(listen="tcp://127.0.0.1:0")
    claimed, ports = standby.wait_for_claim(folder, anywhere, lambda text: None)
    tenure = Tenure(claimed.lease)
    renewal = Renewal(claimed.store, tenure, lambda: None)
    last = max((event.id for event in claimed.store.tail(limit=1).events), default=0)
    until = clock() + random.uniform(0.5, 3.0)
    try:
        with notes.open("a", buffering=1) as file:
            while clock() < until:
                last += 1
                reason = str(claimed.store.term)
                claimed.store.append([Event(last, time.time(), "1", 0, records.WorldProved(reason=reason))])
                for _ in range(20):  # most of what a controller says needs no record
                    tenure.assure()
                    at = clock()
                    if tenure.valid:
                        file.write(f"{claimed.store.term} {at}\n")
                    time.sleep(random.uniform(0.0, 0.02))
    finally:
        renewal.close()
        claimed.close()
        ports.close()


if __name__ == "__main__":
    place, own = Path(sys.argv[1]), Path(sys.argv[2])
    while True:
        try:
            lead(place, own)
        except StoreError:
            time.sleep(0.05)
