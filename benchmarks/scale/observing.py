"""A real unicrond whose parts are timed, and the cluster that it sees."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.scale.process import Controller, cores
from benchmarks.scale.traced import Hosts, Traced


@contextmanager
def observed_controller(
    folder: Path, nodes: int, elements: int, ranks: int, speed: float = 1.0, lines: str = ""
) -> Iterator[tuple[Controller, Traced]]:
    """A unicrond on its own core, and on another the simulated agents of a job with so many elements of `ranks` ranks,
    on a simulated Slurm of so many nodes. speed: of the trace. lines: further ones of [controller].

    What its parts took is in `folder`/figures.json afterwards. Raises Failed, NotStarted, OSError.
    """
    hosts, door = Hosts(nodes), folder / "slurm"
    about = {"nodes": nodes, "elements": elements, "port": hosts.port, "simulator": str(door), "speed": speed}
    (folder / "observed.json").write_text(json.dumps(about | {"figures": str(folder / "figures.json")}))
    program = ("-m", "benchmarks.scale.observed", str(folder / "observed.json"))
    controller = Controller(folder, cores()[0], metrics=10.0, slurm="command", program=program, lines=lines)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(door))
            listening.listen(1)
            controller.start()
            slurm, _ = listening.accept()
        with slurm:
            simulation = Traced(controller.endpoint, slurm, hosts, nodes, elements, ranks)
            try:
                yield controller, simulation
            finally:
                simulation.close()
        controller.stop()
    finally:
        controller.kill()
        hosts.close()
