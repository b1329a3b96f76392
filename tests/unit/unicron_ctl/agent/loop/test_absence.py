"""A job's log says that the ranks of a plain program wait for the controller, once, and once that it is back."""

from __future__ import annotations

import time

from unicron_ctl.agent.loop.absence import AWAY_SECONDS, Absence
from unicron_ctl.shared.protocol import structs
from unicron_ctl.shared.settings.limits import ORPHAN_SECONDS

PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:12525"


def ended(code: int, last_line: str = "", ago: float = AWAY_SECONDS + 1.0) -> list[structs.RankStatus]:
    end = structs.Exit(code=code, at=time.time() - ago, lived=60.0, last_line=last_line)
    return [structs.RankStatus(state="running"), structs.RankStatus(state="exited", exit=end)]


def test_a_dead_rank_without_a_controller_is_said_once_with_the_time_limit_and_so_is_the_return():
    """Defect: all ranks stood, and the log was silent."""
    absence = Absence(speaks=False)
    assert not absence.news(True, 100.0, ended(-9), 101.0), "the controller knows"
    assert not absence.news(False, 100.0, ended(-9, ago=0.5), 101.0), "a controller that is only restarted"
    assert not absence.news(False, 100.0, [structs.RankStatus(state="running")], 109.0), "nobody waits"
    until = time.time() + ORPHAN_SECONDS - 10.0
    told = absence.news(False, 100.0, ended(-9), 110.0)
    assert "does not answer: no rank trains until it is back" in told
    assert any(time.strftime("From %H:%M:%S on", time.localtime(until + later)) in told for later in range(3))
    assert not absence.news(False, 100.0, ended(-9), 111.0)
    assert not absence.news(True, 100.0, ended(-9), 112.0), "connected, and has said nothing yet"
    assert "is back" in absence.news(True, 112.5, ended(-9), 113.0)
    assert not absence.news(True, 113.5, ended(-9), 114.0)


def test_nodes_whose_ranks_end_only_because_of_others_leave_it_to_the_first_node():
    assert not Absence(speaks=False).news(False, 1.0, ended(1, PEER), 9.0)
    assert Absence(speaks=True).news(False, 1.0, ended(1, PEER), 9.0)
    assert Absence(speaks=False).news(False, 1.0, ended(1, "ValueError: bad data"), 9.0)
