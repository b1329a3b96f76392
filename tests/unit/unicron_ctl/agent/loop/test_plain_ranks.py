"""How a job's mode is chosen, and what the agent does for plain programs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.loop.plain_ranks import AWAY_SECONDS, Absence, PlainRank, world_of
from unicron_ctl.agent.node.rendezvous_store import FreePort
from unicron_ctl.agent.ranks.counted import Folder, Progress
from unicron_ctl.agent.ranks.ranks import last_words
from unicron_ctl.agent.ranks.static_world import World
from unicron_ctl.agent.start.agent_main import import_folders
from unicron_ctl.agent.start.command_mode import Mode, add_launcher, asked_mode, choose_mode
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.settings.limits import ORPHAN_SECONDS
from unicron_ctl.shared.system.errors import UserError


# ---------------------------------------------------------------- which mode
@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("import unicron\n", "session"),
        ("import os, unicron as t\n", "session"),
        ("import os as o, unicron_transition.session.session\n", "session"),
        ("def main():\n    from unicron import Session\n", "session"),
        ("from unicron_transition.session.session import Session\n", "session"),
        ("import torch\n# import unicron some day\n", "restart"),
        ("import transitions\nfrom transition_models import x\n", "restart"),
        ("from . import unicron\n", "restart"),
        ("print('import unicron')\n", "restart"),
        ("import os, unicron.memory\n", "restart"),
        ("from unicron import memory\n", "restart"),
        ("from unicron import memory as kept  # across restarts\r\n", "restart"),
        ("from unicron.memory import load, save\n", "restart"),
        ("from unicron import memory, Session\n", "session"),
        ("from unicron import data, loggers as logs, memory  # no session\n", "restart"),
        ("from unicron.data import Fetch\n", "restart"),
        ("import unicron.loggers\n", "restart"),
        ("from unicron import data, Session\n", "session"),
        ("from unicron import database\n", "session"),
        ("import unicron.memory\nimport unicron\n", "session"),
        ("from unicron import memory_of_mine\n", "session"),
        ("", "restart"),
    ],
)
def test_the_text_of_the_script_chooses(tmp_path, text, mode):
    (tmp_path / "train.py").write_text(text)
    assert choose_mode("auto", "", ["python", "-u", "train.py", "--lr", "1"], tmp_path, [tmp_path]).name == mode


def test_modules_code_and_other_programs(tmp_path, snapshot):
    package = tmp_path / "lib" / "mine"
    package.mkdir(parents=True)
    (package / "train.py").write_text("import unicron\n")
    (package / "__main__.py").write_text("import torch\n")
    (tmp_path / "other.py").write_text("import unicron\n")

    def chosen(*command: str) -> Mode:
        folders = import_folders(command, str(tmp_path), str(tmp_path / "lib"))
        return choose_mode("auto", "", command, tmp_path, folders)

    assert chosen("python3.11", "-m", "mine.train") == Mode("session", "-m mine.train imports unicron")
    assert chosen("python", "-m", "torch.distributed.run", "other.py").reason.startswith("module torch.distributed.run")
    assert chosen("python", "-c", "import unicron").name == "session"
    assert chosen("python", "-c", "pass", "other.py").name == "restart", "the code runs, not what follows it"
    assert chosen("nice", "-n", "5", "python", "other.py").name == "session"
    others = (("python", "-m", "mine"), ("bash", "-c", "python gone.py"), ("python", "-u", "-", "x"), ("./solver",))
    assert [(mode.name, mode.reason) for mode in (chosen(*words) for words in others)] == snapshot
    assert chosen("python", "-m").name == "restart"


def test_what_was_said_goes_before(tmp_path):
    assert asked_mode(None, {}) == ("auto", "")
    assert asked_mode("restart", {"UNICRON_MODE": "session"}) == ("restart", "--mode")
    asked = asked_mode(None, {"UNICRON_MODE": "session"})
    assert choose_mode(*asked, ["hostname"], tmp_path, []) == Mode("session", "UNICRON_MODE=session")
    with pytest.raises(UserError, match=r"UNICRON_MODE='fast'.* auto, session or restart"):
        asked_mode(None, {"UNICRON_MODE": "fast"})


def test_a_program_of_megatron_lms_is_launched_in_session_mode(tmp_path, snapshot):
    (tmp_path / "pretrain_gpt.py").write_text("import torch\nfrom megatron.training import get_args, pretrain\n")
    (tmp_path / "mine.py").write_text("from megatron.training import pretrain\nimport unicron\n")
    (tmp_path / "core.py").write_text("from megatron.core import mpu\n# from megatron.training import pretrain\n")

    def chosen(asked: str, *command: str) -> Mode:
        return choose_mode(asked, "--mode", command, tmp_path, [tmp_path])

    found = chosen("session", "python", "-u", "pretrain_gpt.py", "--lr", "1")
    assert found == Mode("session", "--mode=session, pretrain_gpt.py by unicron.transition.megatron_lm", launched=True)
    assert not chosen("session", "python", "mine.py").launched
    assert not chosen("session", "python", "core.py").launched
    assert not chosen("restart", "python", "pretrain_gpt.py").launched
    found = chosen("auto", "python", "pretrain_gpt.py")
    assert (found.name, found.launched, found.reason) == ("restart", False, snapshot)
    assert chosen("auto", "python", "-m", "unicron.transition.megatron_lm", "pretrain_gpt.py").name == "session"
    words = "python -u -m unicron.transition.megatron_lm pretrain_gpt.py --lr 1".split()
    assert add_launcher(["python", "-u", "pretrain_gpt.py", "--lr", "1"]) == words


def test_the_refused_package_may_be_the_users_own_in_restart_mode(tmp_path, monkeypatch):
    from unicron_ctl.agent.start.agent_main import check_command

    for name in ("detector.py", "planner.py", "transition.py", "unicron.py"):
        (tmp_path / name).write_text("")
    script = Path(tmp_path, "train.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNICRON_MODE", raising=False)
    script.write_text("import detector, planner, transition\n")
    assert check_command(["python3", "train.py"]).name == "restart"
    script.write_text("import detector, unicron\n")
    with pytest.raises(UserError, match=r"'unicron'.*--unicron-mode=restart"):
        check_command(["python3", "train.py"])


# ---------------------------------------------------------------- the agent's parts
def test_the_world_of_a_plan_is_torchruns():
    place = read_place(
        {
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "5",
            "UNICRON_RANKS_PER_NODE": "2",
            "UNICRON_NODE_ADDRESS": "a",
        }
    )
    plan = wire.Plan(generation=3, members=[2, 3, 10, 11, 14, 15], store="10.0.0.1:20123", prefix="")
    assert world_of(plan, place) == World(1, 3, 2, "10.0.0.1", 20123, "7", 2)
    assert world_of(plan, place).environment(1, {})["RANK"] == "3"
    told = world_of(plan, place, ["n1", "n5", "n7"]).environment(1, {})
    assert told["SLURM_STEP_NODELIST"] == told["SLURM_JOB_NODELIST"] == "n1,n5,n7"
    assert world_of(plan, place, ["n1", "n5"]).names == (), "of another world"
    for nowhere in ("", "10.0.0.1", "10.0.0.1:", "10.0.0.1:http"):
        with pytest.raises(wire.BadMessage, match="has no port"):
            world_of(wire.Plan(generation=3, members=plan.members, store=nowhere, prefix=""), place)


def test_ports_are_free_and_new_each_time():
    port = FreePort()
    seen = []
    for _ in range(50):
        port.start()
        seen.append(port.port)
    port.close()
    assert len(set(seen)) == 50 and all(20000 <= each < 32000 for each in seen) and port.port is None


@pytest.fixture
def pages(tmp_path):
    folder = Folder(str(tmp_path))
    yield folder
    folder.close()


def plain_rank(pages: Folder, slot: int, *command: str) -> PlainRank:
    return PlainRank(slot, 0, command, Progress(pages, slot))


def test_a_slot_waits_runs_and_waits_again(pages):
    rank = plain_rank(pages, 4, "sleep", "600")
    rank.start(0)
    assert (rank.status.state, rank.alive) == ("waiting", False)
    rank.enter_generation(3, 0, {"PATH": "/usr/bin:/bin"})
    assert (rank.status.state, rank.status.generation, rank.alive) == ("running", 3, True)
    assert not rank.break_(2), "an order about an older world"
    assert rank.break_(3) and not rank.break_(3), "the second copy of the order changes nothing"
    rank.signalled = True
    rank.kill()
    assert rank.child.ended(10.0)
    rank.collect()
    assert (rank.status.state, rank.status.broken, rank.status.incarnation, rank.status.exit) == ("waiting", 3, 0, None)
    rank.enter_generation(5, 0, {"PATH": "/usr/bin:/bin"})
    rank.kill()
    assert rank.child.ended(10.0)
    rank.collect()
    assert rank.status.state == "exited" and rank.status.exit.code == -9
    assert not rank.break_(5) and rank.status.state == "exited", "only the controller's order starts it again"
    rank.start(1)
    assert not rank.break_(5) and (rank.status.state, rank.status.broken) == ("waiting", 5)


def test_who_has_ended_well_is_needed_again_and_a_program_that_is_gone_counts_as_ended(pages):
    rank = plain_rank(pages, 0, "true")
    rank.start(0)
    rank.enter_generation(1, 0, {"PATH": "/usr/bin:/bin"})
    assert rank.child.ended(10.0)
    rank.collect()
    assert rank.status.state == "finished"
    rank.break_(1)
    assert (rank.status.state, rank.status.broken) == ("waiting", 1)
    gone = plain_rank(pages, 0, "/nonexistent/program")
    gone.start(0)
    gone.enter_generation(1, 0, {})
    assert gone.status.state == "exited" and gone.status.exit.code == 127


@pytest.mark.parametrize("words", [("--load", "{}"), ("--load={}",), ("--load", "/elsewhere", "--load", "{}")])
@pytest.mark.parametrize("said", ["", "12a", "relea"])
def test_a_half_written_tracker_of_megatrons_is_a_line_and_not_the_end_of_the_training(pages, tmp_path, words, said):
    """Defect: Megatron-LM ends with status 0 then, and the healed job counted as finished with nothing trained."""
    command = ["true", *(word.format(tmp_path / "saves") for word in words)]
    (tmp_path / "saves").mkdir()
    tracker = tmp_path / "saves" / "latest_checkpointed_iteration.txt"
    tracker.write_text(said)
    rank = plain_rank(pages, 0, *command)
    rank.start(0)
    rank.enter_generation(1, 0, {"PATH": "/usr/bin:/bin"})
    assert (rank.status.state, rank.status.exit.code, rank.alive) == ("exited", 1, False)
    assert rank.status.exit.last_line.startswith(f"{tracker}: {said!r} ")
    for sound in ("100\n", "release", None):
        tracker.unlink()
        if sound is not None:
            tracker.write_text(sound)
        rank.start(1)
        rank.enter_generation(2, 0, {"PATH": "/usr/bin:/bin"})
        assert rank.child.ended(10.0)
        rank.collect()
        assert rank.status.state == "finished"
        tracker.touch()


def test_the_line_that_tells_why():
    assert last_words("Traceback\n  File x\nValueError: no\nframe #0: c10::f() (0x12 in libc10.so)") == "ValueError: no"
    assert last_words("[rank1]: torch.OutOfMemoryError: CUDA\n[W] destroy_process_group() was not called").endswith(
        "CUDA"
    )
    assert last_words("killed by somebody") == "killed by somebody" and last_words("") == ""


# ---------------------------------------------------------------- the controller is away
PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:12525"


def ended(code: int, last_line: str = "", ago: float = AWAY_SECONDS + 1.0) -> list[structs.RankStatus]:
    end = structs.Exit(code=code, at=time.time() - ago, lived=60.0, last_line=last_line)
    return [structs.RankStatus(state="running"), structs.RankStatus(state="exited", exit=end)]


def test_a_dead_rank_without_a_controller_is_said_once_with_the_time_limit_and_so_is_the_return(snapshot):
    """Defect: all ranks stood, and the log was silent."""
    absence = Absence(speaks=False)
    assert not absence.news(True, 100.0, ended(-9), 101.0), "the controller knows"
    assert not absence.news(False, 100.0, ended(-9, ago=0.5), 101.0), "a controller that is only restarted"
    assert not absence.news(False, 100.0, [structs.RankStatus(state="running")], 109.0), "nobody waits"
    until = time.time() + ORPHAN_SECONDS - 10.0
    told = absence.news(False, 100.0, ended(-9), 110.0)
    assert re.sub(r"\d\d:\d\d:\d\d", "TIME", told) == snapshot
    assert any(time.strftime("From %H:%M:%S on", time.localtime(until + later)) in told for later in range(3))
    assert not absence.news(False, 100.0, ended(-9), 111.0)
    assert not absence.news(True, 100.0, ended(-9), 112.0), "connected, and has said nothing yet"
    assert "is back" in absence.news(True, 112.5, ended(-9), 113.0)
    assert not absence.news(True, 113.5, ended(-9), 114.0)


def test_nodes_whose_ranks_end_only_because_of_others_leave_it_to_the_first_node():
    assert not Absence(speaks=False).news(False, 1.0, ended(1, PEER), 9.0)
    assert Absence(speaks=True).news(False, 1.0, ended(1, PEER), 9.0)
    assert Absence(speaks=False).news(False, 1.0, ended(1, "ValueError: bad data"), 9.0)
