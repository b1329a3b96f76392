"""Train one set of sessions under real agents and a real unicrond, in a process of its own, by whose Python and folders
the build is chosen: `python world.py FOLDER RANKS SCRIPT SETTINGS`, with PYTHONPATH naming the build's checkout.

An earlier build runs this file, too. So it uses only what each build has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.leaderboard.systems.unicron import Shipped

LIMIT = 3600.0

if __name__ == "__main__":
    folder, ranks, script, settings = sys.argv[1:]
    with Shipped(Path(folder), int(ranks), command=[sys.executable, script], **json.loads(settings)) as world:
        assert [agent.wait(LIMIT) for agent in world.agents.values()] == [0] * int(ranks), world.told()
