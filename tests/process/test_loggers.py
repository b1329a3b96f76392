"""`unicron.loggers` in a job whose writer dies and comes back: real ranks, agents, controller and event files."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.event_files import read
from tests.support.jobs import World, scripted

pytestmark = [pytest.mark.process, pytest.mark.wide]
ITERATIONS = 40
LOGGED = """
import os
import unicron
from tests.support import tiny_gpt

class Logged:
    def __init__(self, session):
        self.session, self.log = session, unicron.loggers.TensorBoard(os.environ["SHOWN"])

    def __getattr__(self, name):
        return getattr(self.session, name)

    def __iter__(self):
        for result in self.session:
            self.log(result, world=result.world_size)
            yield result

train = tiny_gpt.train
tiny_gpt.train = lambda session, more, data: train(Logged(session), more, data)
tiny_gpt.main()
"""


def test_each_iteration_is_shown_once_whoever_writes(tmp_path):
    pytest.importorskip("tensorboard")
    shown = tmp_path / "shown"
    command = scripted(tmp_path, LOGGED)
    with World(tmp_path, 3, command=command, TINY_ITERATIONS=str(ITERATIONS), TINY_SLOW="0.1", SHOWN=str(shown)) as job:
        job.wait(lambda: job.trains([0, 1, 2], 5), "6 iterations")
        os.kill(job.rank(0)["pid"], signal.SIGKILL)
        job.wait(lambda: job.trains([0, 1, 2], 10) and len(list(shown.iterdir())) > 1, "another rank writes")
        job.wait(lambda: job.job()["ended"], "the job is trained to its end")
        assert job.job()["ended"]["code"] == 0
    found = read(shown)
    assert [step for step, _ in found["loss"]] == [*range(ITERATIONS)]
    assert {value for _, value in found["world"]} == {2.0, 3.0}, "it is logged while the writer is away, too"
