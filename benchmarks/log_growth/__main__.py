"""``python -m benchmarks.log_growth [--days N] [--nodes N]``: the log's file month by month, and a start on it, also
where the newest saved state is damaged. Each day takes some 5 s of a core, and after two weeks one is as the other.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.log_growth.year import Year
from benchmarks.marks import print_figure
from unicron_ctl.controller.core.state_snapshot import read_state
from unicron_ctl.shared.log.store import Store

MONTH = 30
LARGEST, LONGEST = 200.0, 5.0  # MB, and seconds of a start


def main() -> int:
    """Prints the figures and their marks; 1 where one was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=8, help="of a node")
    given = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        year = Year(Path(folder), given.nodes, given.ranks)
        largest = 0.0
        while year.days < given.days:
            year.day()
            size = year.bytes() / 1e6
            largest = max(largest, size)
            if year.days in (1, 2, 7, 14) or year.days % MONTH == 0:
                print(f"day {year.days}: {year.state.last_event:,} events so far, {size:.0f} MB", flush=True)
        year.part()
        state, largest = year.state, max(largest, year.bytes() / 1e6)
        missed += not print_figure(f"log of {given.nodes:,} nodes, {given.days} days, at most", largest, "MB", LARGEST)
        missed += not print_figure("start", start(year.store, state), "s", LONGEST)
        year.store._db.execute("DELETE FROM state WHERE event = (SELECT max(event) FROM state)")
        missed += not print_figure("start where the newer state is damaged", start(year.store, state), "s", LONGEST)
    return 1 if missed else 0


def start(store: Store, state: object) -> float:
    """Seconds of a core until the state is there, as `Server` reads it; it is checked."""
    began = time.process_time()
    saved = store.states()
    store.thin(saved[0][0] if saved else 0)
    found = read_state(store)
    seconds = time.process_time() - began
    assert found == state, "the log folds to another state"
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
