"""`lm_manager.py PORT FOLDER`: the recovery manager that lm-resiliency's documents leave to their reader.

It learns of deaths by broken links, publishes the next generation's plan, and removes old checkpoints, which
lm-resiliency keeps for ever. Its state is in a file, and the rendezvous store is one, so both survive it.
"""

from __future__ import annotations

import json
import selectors
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lm_resiliency.integrations.torchrun import TorchrunRecoveryCoordinator, TorchrunRecoveryRequest
from torch.distributed import FileStore

RUN = "leaderboard"
SETTLE = 0.1  # seconds from a broken link to the plan, for others that break with it
HUNG = 0.7  # the same, if ranks waited in vain for another
ENTER = 60.0  # seconds for all ranks to enter a generation
KEPT = 30  # steps, the oldest of which nobody may read any more


class Manager:
    """All that the manager knows; times are monotonic."""

    def __init__(self, port: int, folder: Path) -> None:
        self._state, self._gemini = folder / "manager.json", folder / "gemini"
        self._coordinator = TorchrunRecoveryCoordinator(FileStore(str(folder / "rendezvous")), run_id=RUN)
        kept = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._active: list[str] = kept.get("active", [])
        self._quarantined: list[str] = kept.get("quarantined", [])
        self._generation: int = kept.get("generation", 0)
        self._recovered: int = kept.get("recovered", 0)
        self._topology = ""
        self._links: dict[socket.socket, dict[str, Any]] = {}
        self._entered: set[int] = set()  # ranks of this generation
        self._broken: dict[int, bool] = {}  # rank -> whether it had waited in vain
        self._since = self._published = self._pruned = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(("127.0.0.1", port))
        self._selector.register(self._server, selectors.EVENT_READ)

    def turn(self) -> None:
        """Hear what is said within some milliseconds, and act."""
        for key, _ in self._selector.select(0.05):
            if key.fileobj is self._server:
                link = self._server.accept()[0]
                self._links[link] = {}
                self._selector.register(link, selectors.EVENT_READ)
            else:
                self._read(key.fileobj)
        self._decide(time.monotonic())
        self._prune(time.monotonic())

    def _read(self, link: socket.socket) -> None:
        said = self._links[link]
        try:
            data = link.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(link)
            link.close()
            del self._links[link]
            self._on_broken(said)
            return
        *lines, said["rest"] = (said.get("rest", b"") + data).split(b"\n")
        for line in lines:
            said |= json.loads(line)
            if said.get("generation") == self._generation:
                self._topology = said["topology"]
                self._entered.add(said["rank"])
        if "timed_out" in said:  # it ends only when it has written its state, for which it may wait for a hung peer
            self._on_broken(said)

    def _on_broken(self, said: dict[str, Any]) -> None:
        if said.get("generation") == self._generation:
            if not self._broken:
                self._since = time.monotonic()
            self._broken.setdefault(said["rank"], said.get("timed_out", False))

    def _agents(self) -> set[str]:
        return {said["agent"] for said in self._links.values() if "agent" in said}

    def _decide(self, now: float) -> None:
        if not self._active:  # the ranks' places in the first generation
            found = {said["rank"]: said["node"] for said in self._links.values() if "rank" in said}
            if len(found) == 4:
                self._active = [found[rank] for rank in range(4)]
                self._keep()
            return
        agents = self._agents()
        gone = [slot for slot, node in enumerate(self._active) if node not in agents]
        late = self._generation > 0 and len(self._entered) < 4 and now > self._published + ENTER
        if not (self._broken or late) or now < self._since + SETTLE:
            return
        if not gone and self._broken and all(self._broken.values()):
            if len(self._broken) < 3 and now < self._since + HUNG:
                return
            if len(self._broken) == 3:  # they waited for the fourth
                gone = [slot for slot in range(4) if slot not in self._broken]
        spare = [node for node in agents if node not in self._active and node not in self._quarantined]
        if len(gone) > len(spare) and any(self._active[slot] not in agents for slot in gone):
            return  # a node must come back first
        self._publish(list(zip(gone, spare, strict=False)) or [None])
        self._broken, self._entered, self._published = {}, set(), now

    def _publish(self, replacements: list[tuple[int, str] | None]) -> None:
        whole = [step for step, paths in self._on_disk().items() if len(paths) == 4]
        self._recovered = max(whole, default=self._recovered)
        for replacement in replacements:  # a plan replaces one node
            number = self._generation + 1
            placement = self._coordinator.publish_successor(
                generation=self._generation,
                active_node_ids=self._active,
                quarantined_node_ids=self._quarantined,
                request=TorchrunRecoveryRequest(
                    plan_id=f"plan-{number}",
                    intent_id=f"failure-{number}",
                    reason_code="process_exit",
                    recovery_mode="latest",
                    checkpoint_source="gemini",
                    checkpoint_step=self._recovered,
                    checkpoint_manifest_id=f"gemini-{self._recovered}",
                    topology_digest=self._topology,
                    restart_deadline_unix_ms=time.time_ns() // 1_000_000 + 600_000,
                ),
                local_world_size=1,
                replacement=replacement,
            )
            self._active = list(placement.active_node_ids)
            self._quarantined = list(placement.quarantined_node_ids)
            self._generation = placement.generation
            print(f"generation {number}: step {self._recovered}, {replacement}, {self._broken}", flush=True)
        self._keep()

    def _on_disk(self) -> dict[int, list[Path]]:
        """Return the files of each step."""
        found: dict[int, list[Path]] = {}
        for path in self._gemini.glob("runs/*/*/step-*/rank-*.pt"):
            found.setdefault(int(path.parent.name.removeprefix("step-")), []).append(path)
        return found

    def _prune(self, now: float) -> None:
        if now < self._pruned + 1:
            return
        self._pruned, found = now, self._on_disk()
        for step, paths in found.items():
            if step < max(found) - KEPT:
                shutil.rmtree(paths[0].parent, ignore_errors=True)

    def _keep(self) -> None:
        kept = {"active": self._active, "quarantined": self._quarantined, "generation": self._generation}
        self._state.write_text(json.dumps(kept | {"recovered": self._recovered}))


if __name__ == "__main__":
    manager = Manager(int(sys.argv[1]), Path(sys.argv[2]))
    while True:
        manager.turn()
