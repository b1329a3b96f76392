"""The training state outlives the ranks in their nodes' memory: all of them die, and the job goes on from there, with
the losses of a training in which nothing fails."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.jobs import TINY, TINY_PLAIN, World, json_lines
from tests.support.moments import fault
from tests.support.processes import LIMIT, of_a_world, signal_step
from tests.support.warm import Script
from unicron_ctl.agent.snapshots.last_checkpoint import TURN_SECONDS
from unicron_transition.snapshot import folders
from unicron_transition.snapshot.cuts import COPY_PREFIX
from unicron_transition.snapshot.formats import opening
from unicron_transition.snapshot.image_format import inventory

pytestmark = pytest.mark.process
ITERATIONS = 12
REST = ("copy", "sum", "finish")  # phases of a copy in which nothing else is to be seen than in "half"
SETTINGS = {"TINY_ITERATIONS": str(ITERATIONS), "TINY_SLOW": "0.03"}
FROZEN, BUILT = {"TINY_FROZEN": "1"}, {"TINY_FROZEN": "built"}  # with other values than the others were trained with


class Remembering(World):
    """Each node has a memory of its own."""

    def memory(self, element: int) -> Path:
        """The folder that its agent has made."""
        return next(Path(self.array.environment["UNICRON_MEMORY_DIR"]).glob(f"unicron.*.n{element}.*"))

    @contextmanager
    def down(self) -> Iterator[list[int]]:
        """All ranks are killed, and no agent starts them again before the block ends; what each node has of its own: it
        has copies for others, too."""
        for agent in self.agents.values():
            agent.process.send_signal(signal.SIGSTOP)
        for slot in range(len(self.agents)):
            os.kill(self.rank(slot)["pid"], signal.SIGKILL)
        try:
            found = {e: inventory(self.memory(e)) for e in self.agents}
            own = {e: [each for each in found[e] if not each.path.name.startswith(COPY_PREFIX)] for e in found}
            yield [max((each.key.iteration for each in own[e]), default=-1) for e in own]
        finally:
            for agent in self.agents.values():
                agent.process.send_signal(signal.SIGCONT)

    def ends(self) -> None:
        self.wait(lambda: self.job().get("ended"), "the job is trained to its end")
        assert self.job()["ended"]["code"] == 0 and self.job()["ledger_violations"] == 0, self.told()


def flip(path: Path) -> None:
    """One bit of the data."""
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 4
    path.write_bytes(data)


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[int, float]:
    """By iteration, where nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    environment = of_a_world(1)[0] | SETTINGS | {"TINY_OUT": str(folder), "TINY_SAVE": "0"}
    done = Script(TINY, environment=environment).wait(LIMIT)
    assert done.returncode == 0, done.stderr
    return {one["iteration"]: one["loss"] for one in json_lines(folder / "losses.0")}


def trained(folder: Path, wanted: dict[int, float], slots: int = 2) -> int:
    """All have trained as if nothing had failed; returns the iteration with which the second formation went on."""
    firsts = set()
    for slot in range(slots):
        steps = json_lines(folder / f"losses.{slot}")
        assert sorted({one["iteration"] for one in steps}) == list(range(ITERATIONS))
        for one in steps:
            assert one["loss"] == pytest.approx(wanted[one["iteration"]], rel=1e-6)
        firsts.add(next(one["iteration"] for one in steps if one["generation"] > steps[0]["generation"]))
    assert len(firsts) == 1, "all went on with the same iteration"
    return firsts.pop()


@pytest.mark.wide  # as in test_shard_copies
def test_all_ranks_die_and_no_iteration_is_lost(tmp_path, losses):
    with Remembering(tmp_path, nodes=2, **SETTINGS) as job:
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        with job.down() as kept:
            stepped = min(len(json_lines(tmp_path / f"losses.{slot}")) for slot in (0, 1))
        job.ends()
        logs = job.array.logs
    assert trained(tmp_path, losses) == max(kept) and stepped - 1 <= max(kept) <= stepped + 1
    assert logs.count("goes on from the memory of its node") == 1, "one rank reads it, and the other has it from that"


def test_a_flipped_bit_is_seen_said_and_never_trained_with_and_a_fresh_node_is_given_the_state(tmp_path, losses):
    with Remembering(tmp_path, nodes=2, **SETTINGS) as job:
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        with job.down() as kept:
            for path in job.memory(1).iterdir():
                path.unlink()
            (newest,) = [each.path for each in inventory(job.memory(0)) if each.key.iteration == kept[0]]
            flip(newest)
        job.ends()
        assert "its data do not match their checksum" in job.agents[0].log
    assert trained(tmp_path, losses) == kept[0] - 1


@pytest.mark.wide
@pytest.mark.parametrize(
    "at",
    [
        "half",
        pytest.param("copied", marks=pytest.mark.long),
        *(pytest.param(at, marks=pytest.mark.long) for at in REST),
    ],
)
def test_killed_in_each_phase_of_a_copy_and_the_two_halves_of_a_replica_agree(tmp_path, at, losses):
    """Slot 1 dies while it copies the state of iteration 5; slot 0, which has that one, is no replica without it. And
    once more while it does so again: what the job went on from is not written over before that copy is whole."""
    faults = json.dumps([fault(1, 5, at, incarnation=life) for life in range(2)])
    with Remembering(tmp_path, nodes=2, TINY_LAYOUT="2 1 1", TINY_FAULT=faults, **SETTINGS) as job:
        job.ends()
    with_one = {one["iteration"]: one["loss"] for one in json_lines(tmp_path / "losses.0")}
    for iteration, loss in with_one.items():
        assert loss == pytest.approx(losses[iteration], rel=1e-4), "another sum of the same terms"
    assert trained(tmp_path, with_one) == (5 if at == "copied" else 4)
    begun = {one["generation"]: one["iteration"] for one in reversed(json_lines(tmp_path / "losses.0"))}
    assert sorted(begun.values()) == ([0, 5] if at == "copied" else [0, 4, 4])


def test_nobody_writes_over_what_another_place_still_needs(tmp_path, losses):
    """Defect: slot 1's copy of iteration 5 was not whole yet when slot 0 had those of 5 and 6, and no longer that of
    4: all were killed then, and began anew."""
    faults = json.dumps([fault(1, 5, "sum", kind="sleep", delay=30.0)])
    with Remembering(tmp_path, nodes=2, TINY_LAYOUT="2 1 1", TINY_FAULT=faults, **SETTINGS) as job:
        job.wait(lambda: list(tmp_path.glob("fault.1.*")), "the checksum of slot 1's copy takes its time")
        job.wait(lambda: max(one.key.iteration for one in inventory(job.memory(0))) >= 5, "slot 0 has its own")
        time.sleep(1.0)  # in which it gets as far as it may
        with job.down() as kept:
            assert kept == [5, 4]
        job.ends()
    with_one = {one["iteration"]: one["loss"] for one in json_lines(tmp_path / "losses.0")}
    assert trained(tmp_path, with_one) == 4


@pytest.mark.wide
def test_a_plain_module_with_its_buffers_and_schedule(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    environment = of_a_world(1)[0] | SETTINGS | {"TINY_ALONE": "1", "TINY_OUT": str(alone), "TINY_SAVE": "0"}
    assert subprocess.run(TINY_PLAIN, env=environment, timeout=LIMIT).returncode == 0
    wanted = {one["iteration"]: one["loss"] for one in json_lines(alone / "losses.0")}
    with Remembering(tmp_path, nodes=2, command=TINY_PLAIN, **SETTINGS) as job:
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        with job.down() as kept:
            pass
        job.ends()
    assert trained(tmp_path, wanted) == max(kept)


# test_remembered_shards has ranks without room, and test_checkpoints a job that goes on from the file.
@pytest.mark.wide
def test_where_there_is_no_room_it_is_said_once_and_the_training_goes_on_and_falls_back_to_the_file(tmp_path, losses):
    """The files of the ranks may not be larger than 256 KiB, so the kernel refuses the room for an image."""
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves"), "TINY_CHECKPOINT_EVERY": "4"}
    with Remembering(tmp_path, nodes=2, TINY_HIDDEN="64", **saves, **SETTINGS) as job:
        job.wait(lambda: job.trains([0, 1], 5), "6 iterations")
        made = tmp_path / "saves" / "iteration-00000004"
        job.wait(lambda: list(made.glob("*.image")), "the agent has made the file of iteration 4")
        for slot in (0, 1):
            resource.prlimit(job.rank(slot)["pid"], resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
            for path in job.memory(slot).iterdir():
                path.unlink()
        said = "the training state is not kept in memory"
        job.wait(lambda: job.array.logs.count(said) == 2, lambda: f"each rank says so once\n{job.array.logs}")
        with job.down() as kept:
            assert kept == [-1, -1]
        assert job.array.logs.count(said) == 2 and "File too large" in job.array.logs
        job.ends()
    assert trained(tmp_path, losses) == 4


def test_what_slurm_ends_in_the_middle_goes_to_the_checkpoints_and_another_job_goes_on(tmp_path, losses):
    """SIGTERM, as before a time limit or for a preemption; the script does nothing about it. The newest two states of
    each place are saved by the only node that has it: one of them both halves of a replica have whole."""
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves"), "TINY_CHECKPOINT_EVERY": "1000", "TINY_LAYOUT": "2 1 1"}
    with Remembering(tmp_path, nodes=2, **saves, **SETTINGS) as job:
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        for agent in job.agents.values():
            agent.process.terminate()
        assert [agent.wait() for agent in job.agents.values()] == [128 + signal.SIGTERM] * 2
        assert [agent.log.count("was saved in") for agent in job.agents.values()] == [2, 2]
    saved = {int(path.name.removeprefix("iteration-")) for path in (tmp_path / "saves").iterdir()}
    goes_on_in_another_job(tmp_path, losses, saves, saved)


def goes_on_in_another_job(
    folder: Path, losses: dict[int, float], settings: dict[str, str], saved: Collection[int]
) -> None:
    """From one of the saved iterations, to the losses of a training in which nothing fails."""
    (folder / "next").mkdir()
    with Remembering(folder / "next", nodes=2, **settings, **SETTINGS) as job:
        job.ends()
    steps = json_lines(folder / "next" / "losses.0")
    assert 4 <= steps[0]["iteration"] in saved
    assert [one["loss"] for one in steps] == pytest.approx([losses[one["iteration"]] for one in steps], rel=1e-4)


@pytest.mark.long
def test_what_two_nodes_have_is_written_once_though_only_one_was_to_leave_at_first(tmp_path, losses):
    """Defect: the first node had its SIGTERM, and the other an offer to go on alone before its own SIGTERM came. Both
    wrote everything then. Here the ranks reach no boundary at which they could take the offer."""
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves"), "TINY_CHECKPOINT_EVERY": "1000"}
    faults = json.dumps([fault(slot, 6, "fetch", kind="sleep", delay=LIMIT) for slot in (0, 1)])
    with Remembering(tmp_path, nodes=2, TINY_FAULT=faults, **saves, **SETTINGS) as job:
        job.wait(lambda: len(list(tmp_path.glob("fault.*.0.6"))) == 2, "both ranks are in iteration 6")
        for slot in (0, 1):
            job.wait(lambda slot=slot: {5, 6} <= {one.key.iteration for one in inventory(job.memory(slot))}, "copied")
        job.agents[0].process.terminate()
        job.wait(lambda: job.job()["state"] == "offering", "the other node is to go on alone")
        job.agents[1].process.terminate()
        assert [agent.wait() for agent in job.agents.values()] == [128 + signal.SIGTERM] * 2
        first, second = (job.agents[element].log for element in (0, 1))
    assert first.count("was saved in") == 2
    assert second.count("was saved in") == 0 or seconds_to_save(second) >= TURN_SECONDS - 1.0, second
    assert [each.iteration for each in folders.whole(tmp_path / "saves")] == [6, 5]
    goes_on_in_another_job(tmp_path, losses, saves, [6])


def seconds_to_save(log: str) -> float:
    """From the signal to the first file: by the agent's own log, to the second."""
    said = [line for line in log.splitlines() if ": SIGTERM: " in line or "was saved in" in line]
    signalled, saved = (datetime.fromisoformat(line.split()[0]) for line in said[:2])
    return (saved - signalled).total_seconds()


@pytest.mark.long
def test_where_the_first_node_has_no_memory_the_next_one_saves_what_slurm_ends(tmp_path):
    saves = tmp_path / "saves"
    kind = {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": "1000", "TINY_ITERATIONS": "1000"}
    settings = SETTINGS | kind | {"SLURM_ARRAY_TASK_COUNT": "2"}
    with Remembering(tmp_path, nodes=1, **settings | {"UNICRON_MEMORY_DIR": "/proc"}) as job:
        job.start_agent(1, UNICRON_MEMORY_DIR=str(tmp_path))
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        for agent in job.agents.values():
            agent.process.terminate()
        assert [agent.wait() for agent in job.agents.values()] == [128 + signal.SIGTERM] * 2
        assert [agent.log.count("was saved in") for agent in job.agents.values()] == [0, 2]
    assert len(folders.whole(saves)) == 2


@pytest.mark.wide
def test_what_ends_by_the_scripts_own_error_goes_to_the_checkpoints_too(tmp_path):
    """It fails at iteration 5 whenever it comes there; its author mends it, and goes on from there."""
    saves = tmp_path / "saves"
    faults = json.dumps([fault(slot, 5, "fetch", incarnation=n, kind="raise") for slot in (0, 1) for n in range(9)])
    settings = SETTINGS | {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": "2", "TINY_FAULT": faults}
    with Remembering(tmp_path, nodes=2, **settings) as job:
        ended = job.wait(lambda: job.job().get("ended"), "the controller gives it up")
        assert ended["code"] == 1 and [agent.wait() for agent in job.agents.values()] == [1, 1]
    assert [each.iteration for each in folders.whole(saves)] == [5, 4, 2]


def test_agents_make_the_files_while_the_training_goes_on_and_a_lost_rank_tears_none(tmp_path, losses):
    """Slot 1 dies while it copies the state of iteration 4, of which a file is due; a replica is two ranks. Slot 0
    would die if it wrote one by itself."""
    saves = tmp_path / "saves"
    faults = json.dumps([fault(1, 4, "half"), *(fault(0, iteration, "save") for iteration in range(2, 9))])
    settings = {
        "TINY_CHECKPOINTS": str(saves),
        "TINY_CHECKPOINT_EVERY": "2",
        "TINY_LAYOUT": "2 1 1",
        "TINY_SLOW": "0.1",
    }
    with Remembering(tmp_path, nodes=2, TINY_FAULT=faults, **SETTINGS | settings) as job:
        job.wait(lambda: job.trains([0, 1], 8), "9 iterations")
        job.wait(lambda: any(each.iteration >= 6 for each in folders.whole(saves)), "a file of an agent's")
        assert job.rank(0)["incarnation"] == 0 and job.rank(1)["incarnation"] == 1
        job.ends()
    assert trained(tmp_path, {one["iteration"]: one["loss"] for one in json_lines(tmp_path / "losses.0")}) in (3, 4)
    assert ITERATIONS in [each.iteration for each in folders.whole(saves)] and not list(saves.glob("*/*.new"))


@pytest.mark.parametrize(
    ("roomless", "kind"),
    [
        pytest.param(None, {}, marks=pytest.mark.long),
        pytest.param(1, {}, marks=pytest.mark.wide),
        *(pytest.param(slot, FROZEN, marks=pytest.mark.long) for slot in (None, 0, 1)),
    ],
)
def test_agents_make_the_files_of_a_distributed_optimizers_shards_too(tmp_path, roomless, kind):
    """Ranks would die if they wrote one by themselves; but one without room in memory does, of the same set, and so
    does the first with what is not trained."""
    saves, writes = tmp_path / "saves", range(2, ITERATIONS)
    faults = [fault(slot, iteration, "save") for slot in {0, 1} - {roomless} for iteration in writes]
    kind = kind | {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": "2", "TINY_DISTOPT": "1"}
    settings = SETTINGS | kind | {"SLURM_ARRAY_TASK_COUNT": "2", "TINY_SLOW": "0.1", "TINY_FAULT": json.dumps(faults)}
    places = [{"UNICRON_MEMORY_DIR": "/proc" if slot == roomless else str(tmp_path)} for slot in (0, 1)]
    with Remembering(tmp_path, nodes=1, **settings | places[0]) as job:
        job.start_agent(1, **places[1])
        job.wait(lambda: any(each.iteration >= 6 for each in folders.whole(saves)), "a checkpoint in the middle")
        assert [job.rank(slot)["incarnation"] for slot in (0, 1)] == [0, 0]
        whole = next(each for each in folders.whole(saves) if each.iteration >= 6)
        job.ends()
    assert len(whole.paths) == 2 and len({path.name.split(".")[0] for path in whole.paths}) == 1
    assert not list(saves.glob("*/*.new")) and not list(tmp_path.glob("unicron.*/due-*"))
    if "TINY_FROZEN" in kind:
        goes_on_from_the_last_but_one(tmp_path, kind)


def goes_on_from_the_last_but_one(tmp_path: Path, kind: dict[str, str]) -> None:
    """Another job, to the losses of the one that has written it; the last one ranks have written at their end."""
    last, checkpoint = folders.whole(tmp_path / "saves")
    shutil.rmtree(last.paths[0].parent)
    (tmp_path / "next").mkdir()
    with Remembering(tmp_path / "next", nodes=2, **SETTINGS | kind | BUILT) as job:
        job.ends()
    wanted, steps = (json_lines(folder / "losses.0") for folder in (tmp_path, tmp_path / "next"))
    assert [one["iteration"] for one in steps] == list(range(checkpoint.iteration, ITERATIONS))
    assert [one["loss"] for one in steps] == [one["loss"] for one in wanted[checkpoint.iteration :]]


@pytest.mark.parametrize(
    ("kind", "by_agents"),
    [
        ({"TINY_LAYOUT": "2 1 1"}, True),
        pytest.param({"TINY_LAYOUT": "2 1 1", "UNICRON_MEMORY_EVERY": "0"}, False, marks=pytest.mark.long),
        pytest.param({"TINY_DISTOPT": "1"}, True, marks=pytest.mark.long),
        pytest.param({"TINY_DISTOPT": "1", "TINY_EXPERTS": "bias"}, True, marks=pytest.mark.long),
    ],
    ids=["memory", "nothing in memory", "distributed optimizer", "... and what no optimizer changes"],
)
def test_a_checkpoint_on_demand_ends_nothing_and_another_job_goes_on_from_it(tmp_path, kind, by_agents):
    """SIGUSR2, of the agent or, with nothing in memory, of a rank: one iteration for all. It reaches every process. The
    first rank has it exported as well, once."""
    saves = {"TINY_CHECKPOINTS": str(tmp_path / "saves"), "TINY_CHECKPOINT_EVERY": "1000"} | kind
    saves["UNICRON_CHECKPOINT_EXPORT"] = "dcp"
    settings = SETTINGS | saves | {"TINY_ITERATIONS": "1000", "TINY_SLOW": "0.1"}
    with Remembering(tmp_path, nodes=2, **settings) as job:
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        for agent in job.agents.values():
            signal_step(agent.process.pid, signal.SIGUSR2)
        word = "was saved in" if by_agents else "the checkpoint of iteration"
        job.wait(lambda: job.array.logs.count(word) == 2, "each node says so of its half")
        job.wait(lambda: folders.whole(tmp_path / "saves"), "it is saved")
        job.wait(lambda: "was exported to" in job.array.logs, "and exported")
        job.wait(lambda: job.trains([0, 1], folders.whole(tmp_path / "saves")[0].iteration + 3), "the training goes on")
        assert [job.rank(slot)["incarnation"] for slot in (0, 1)] == [0, 0]
    saved = folders.whole(tmp_path / "saves")[0]
    (exported,) = (tmp_path / "saves/dcp").iterdir()
    index, wrong = opening.verify(exported)
    assert wrong == [] and index is not None and index.iteration == saved.iteration
    assert index.tensors.keys() >= {each.name for each in opening.index_of(saved.folder).parameters()}
    (tmp_path / "next").mkdir()
    with Remembering(
        tmp_path / "next", nodes=2, **SETTINGS | saves | {"TINY_ITERATIONS": str(saved.iteration + 3)}
    ) as job:
        job.ends()
    wanted = {one["iteration"]: one["loss"] for one in json_lines(tmp_path / "losses.0")}
    steps = json_lines(tmp_path / "next" / "losses.0")
    assert [one["iteration"] for one in steps] == [saved.iteration + more for more in range(3)]
    assert [one["loss"] for one in steps] == [wanted[one["iteration"]] for one in steps]


def ended_and_on_again(tmp_path: Path, kind: dict[str, str], next_one: dict[str, str]) -> list[list[float]]:
    """Slurm ends a job with a distributed optimizer in the middle, and another one goes on from the files of its
    agents. next_one: its own settings. Losses from there on: where nothing is ended, and of the other one."""

    def run(name: str, **settings: str) -> list[dict]:
        (tmp_path / name).mkdir()
        with Remembering(tmp_path / name, nodes=2, **SETTINGS | kind | {"TINY_SLOW": "0"} | settings) as job:
            job.ends()
        return json_lines(tmp_path / name / "losses.0")

    kind = kind | {"TINY_DISTOPT": "1", "TINY_CHECKPOINT_EVERY": "1000"}
    wanted = run("whole")
    (tmp_path / "ended").mkdir()
    saves = tmp_path / "saves"
    with Remembering(tmp_path / "ended", nodes=2, **SETTINGS | kind, TINY_CHECKPOINTS=str(saves)) as job:
        job.wait(lambda: job.trains([0, 1], 4), "5 iterations")
        for agent in job.agents.values():
            agent.process.terminate()
        assert [agent.wait() for agent in job.agents.values()] == [128 + signal.SIGTERM] * 2
        assert all("was saved in" in agent.log for agent in job.agents.values())
    saved = max(each.iteration for each in folders.whole(saves))
    found = wanted[saved:], run("next", TINY_CHECKPOINTS=str(saves), **next_one)
    assert saved >= 4
    assert all([one["iteration"] for one in steps] == list(range(saved, ITERATIONS)) for steps in found)
    return [[one["loss"] for one in steps] for steps in found]


@pytest.mark.parametrize(
    ("kind", "next_one"),
    [
        pytest.param({}, {}, marks=pytest.mark.long, id="all is trained"),
        pytest.param({"TINY_EXPERTS": "bias"}, {}, marks=pytest.mark.long, id="biases"),
        pytest.param(FROZEN, BUILT, marks=pytest.mark.long, id="frozen"),
        pytest.param(FROZEN | {"TINY_LAYOUT": "2 1 1"}, BUILT, marks=pytest.mark.long, id="frozen TP"),
    ],
)
def test_what_slurm_ends_goes_to_files_with_a_distributed_optimizer_too_bit_for_bit(tmp_path, kind, next_one):
    """Each rank's shard lies in its node's memory; the next job reads the files of all."""
    wanted, again = ended_and_on_again(tmp_path, kind, next_one)
    assert again == wanted


@pytest.mark.parametrize(
    ("kind", "next_one", "apart"),
    [
        pytest.param(FROZEN | {"TINY_LAYOUT": "2 1 1"}, BUILT | {"TINY_LAYOUT": "1 1 1"}, 1e-5, marks=pytest.mark.wide),
        # A token between two experts may go to the other one.
        pytest.param({"TINY_EXPERTS": "bias"}, {"TINY_LAYOUT": "1 2 1"}, 1e-3, marks=pytest.mark.long),
    ],
    ids=["frozen TP to DP", "biases DP to PP"],
)
def test_what_slurm_ends_goes_to_files_that_ranks_of_another_layout_read(tmp_path, kind, next_one, apart):
    wanted, again = ended_and_on_again(tmp_path, kind, next_one)
    assert again == pytest.approx(wanted, rel=apart)


@pytest.mark.wide
def test_by_the_clock_both_halves_of_a_replica_write_the_same_iterations(tmp_path):
    saves = tmp_path / "saves"
    settings = {"TINY_CHECKPOINTS": str(saves), "TINY_CHECKPOINT_EVERY": "1000", "TINY_LAYOUT": "2 1 1"}
    settings |= {"UNICRON_CHECKPOINT_MINUTES": "0.01", "TINY_ITERATIONS": "1000"}
    with Remembering(tmp_path, nodes=2, **SETTINGS | settings) as job:
        job.wait(lambda: len(folders.whole(saves)) == 2, "two checkpoints")
        job.trains_on([0, 1], 2)
        assert all(job.rank(slot)["incarnation"] == 0 for slot in (0, 1))
