"""The agent's part in copies: it listens only where there may be some, looks no longer than there is something to give,
and lets go of what is not wanted any more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.processes import wait_for
from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.loop.reports import Reports
from unicron_ctl.agent.snapshots import image_server, image_stream, peer_copies
from unicron_ctl.agent.snapshots.peer_copies import AGAIN_SECONDS, FAILING_SECONDS, Copies, collectives_address
from unicron_ctl.shared.protocol import ranges, structs, wire
from unicron_detector.health.memory_limit import MemoryLeft
from unicron_transition.snapshot import shared_memory
from unicron_transition.snapshot.image_format import SUFFIX, Image, Key, inventory
from unicron_transition.snapshot.worker import Worker

DATA = bytes(range(256)) * 8192  # enough to be measured
KEY = Key("state", slot=0, iteration=70, size=2, base=1, mark="aa")
HERE = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "2", "SLURMD_NODENAME": "n0"}
HERE |= {"SLURM_JOB_ID": "7", "UNICRON_NODE_ADDRESS": "127.0.0.1"}


class Side:
    """One agent's copies, with a folder of its own."""

    def __init__(self, folder: Path, **environment: str):
        folder.mkdir()
        self.now = 0.0
        self.folder, self.told, self.said = folder, [], []
        place = read_place(HERE).in_mode(structs.SESSION, "")
        self.copies = Copies(lambda: folder, place, HERE | environment, self.told.append, self.said.append)

    def image(self, key: Key = KEY, name: str = "cut") -> None:
        made = Image(self.folder / f"{name}-{key.slot}-0{SUFFIX}", 100, len(DATA))
        made.mark_torn()
        made.data[: len(DATA)] = DATA
        made.mark_whole(key, b"head", len(DATA))

    def holder(self, element: int) -> structs.Holder:
        return structs.Holder(element=element, address=self.copies.address, token=self.copies.token)

    def hold_back(self, worker: Worker) -> list:
        """Have this worker do no task any more; returns the list of them."""
        tasks: list = []
        worker.submit = lambda run: tasks.append(run.args[0])
        return tasks

    def names(self) -> list[str]:
        return [found.path.name for found in inventory(self.folder)]

    def until(self, done) -> None:
        """Turn after turn, a second apart by its own clock."""

        def turn() -> bool:
            self.now += 1.0
            self.copies.give_cut(self.now)
            self.copies.finish(self.now)
            return done()

        wait_for(turn, "the threads are done")


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    both = Side(tmp_path / "one"), Side(tmp_path / "other")
    yield both
    for side in both:
        side.copies.close()


def test_who_keeps_no_memory_does_not_listen(tmp_path: Path) -> None:
    for every, listens in (("0", False), ("1", True)):
        side = Side(tmp_path / every, UNICRON_MEMORY_EVERY=every)
        assert (bool(side.copies.address), bool(side.copies.token)) == (listens, listens)
        side.copies.close()


def test_the_folder_is_looked_at_until_all_of_the_cut_is_given_and_no_longer(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1)], parts=2))
    one.image()
    one.until(lambda: other.names() == ["copy-0-0-70.image"])
    assert one.copies.seconds_to_cut(one.now) < 1.0, "the second place's is not there yet"
    one.image(Key("state", slot=1, iteration=70, place=1, size=2, base=1, mark="aa"))
    one.until(lambda: len(other.names()) == 2 and one.copies.seconds_to_cut(one.now) == float("inf"))
    one.copies.obey(wire.Cut(iteration=90, good=70, targets=[other.holder(1)], parts=2))
    assert one.copies.seconds_to_cut(one.now) == 0.0, "until there is another one"


def test_what_goes_with_shards_is_given_before_them(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.image(Key("shard", slot=0, iteration=70, base=1, mark="0000a"), name="cut-shard")
    one.image(Key("untrained", slot=0, iteration=70, mark="f00"), name="cut-untrained")
    given = one.hold_back(one.copies._giving)
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1)]))
    one.copies.give_cut(0.0)
    assert [task.key.kind for task in given] == ["untrained", "shard"]


def test_what_went_through_is_measured_and_counted(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1)]))
    one.image()
    one.until(lambda: 1 in one.copies.rates)
    assert one.copies.rates[1] > 1e5 and not one.copies.failed
    assert one.copies.moved == other.copies.moved > len(DATA)
    assert [row.bytes for row in other.copies.rows(False)] == [one.copies.moved]


def test_an_image_is_got_while_another_one_is_given(sides: tuple[Side, Side]) -> None:
    """A job may wait for the one, and for the other nobody does."""
    one, other = sides
    other.image(name="copy")
    slow = structs.Holder(element=2, address=other.copies.address, token="another")
    one.copies._rate = 1e3  # the image would take half an hour
    one.image(Key("state", slot=1, iteration=70, place=1, size=2, base=1, mark="aa"))
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1), slow], parts=1))
    one.copies.give_cut(0.0)
    one.copies.fetch(wire.Fetch(image=structs.Image("state", 0, 70, 0, 2, 0, 1, 1, "aa"), holder=other.holder(1)), 0.0)
    one.until(lambda: [message for message in one.told if isinstance(message, wire.Fetch)])
    assert "copy-0-0-70.image" in one.names()


def test_when_no_copies_are_wanted_any_more_all_of_them_go(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.image()
    one.image(name="copy")
    one.image(name="state")
    one.image(Key("shard", slot=0, iteration=70), name="shard")
    one.copies.obey(wire.Cut(iteration=71, none=True))
    assert one.names() == ["shard-0-0.image", "state-0-0.image"]
    wait_for(lambda: len(list(one.folder.iterdir())) == 2, "their memory is given back")
    assert one.told == [wire.Cut(iteration=71, none=True)] and one.copies.rows(True) == []


def test_the_agent_gives_memory_back_in_a_thread_for_that_takes_seconds(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = sides
    threads: list[threading.Thread] = []
    unlink = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda *given, **more: (threads.append(threading.current_thread()), unlink(*given, **more))[1]
    )
    one.image(name="copy")
    one.copies.obey(wire.Cut(iteration=90, good=80))
    assert one.names() == []
    wait_for(lambda: not list(one.folder.iterdir()), "it is gone")
    assert threads and threading.main_thread() not in threads


def test_an_older_order_is_not_obeyed_and_a_newer_one_may_name_a_lower_iteration(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.copies.obey(wire.Cut(iteration=500, number=3))
    one.copies.obey(wire.Cut(iteration=103, number=4))
    one.copies.obey(wire.Cut(iteration=500, number=3))
    assert one.copies.cut.iteration == 103 and [order.iteration for order in one.told] == [500, 103]


def test_what_waits_to_be_given_of_an_older_cut_is_not_given_any_more(sides: tuple[Side, Side]) -> None:
    one, other = sides
    waiting = one.hold_back(one.copies._giving)
    for slot, iteration in ((0, 70), (1, 80)):
        one.image(Key("state", slot=slot, iteration=iteration, place=slot, size=2, base=1, mark="aa"))
    one.copies.obey(wire.Cut(iteration=70, number=1, targets=[other.holder(1)]))
    one.copies.give_cut(0.0)
    assert sorted(task.key.iteration for task in waiting) == [70, 80]
    one.copies.obey(wire.Cut(iteration=80, number=2, targets=[other.holder(1)]))
    for task in waiting:
        one.copies._do(task)
    one.copies.finish(0.0)
    assert other.names() == ["copy-1-0-80.image"]
    assert not one.copies.failed and not one.copies._under_way


def test_what_a_job_has_left_behind_when_it_went_back_goes_but_for_what_is_good(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    one.copies.obey(wire.Cut(iteration=500, good=480, number=1))
    for slot, iteration in enumerate((480, 500, 90)):
        key = Key("state", slot=slot, iteration=iteration, size=3, base=1, mark="aa")
        one.image(key)
        one.image(key, name="copy")
    one.copies.obey(wire.Cut(iteration=103, good=90, number=2))
    assert one.names() == ["copy-2-0.image", "cut-2-0.image"]


def order(holder: structs.Holder, slot: int = 0) -> wire.Fetch:
    """Of the image that `Side.image` makes for this slot."""
    return wire.Fetch(image=structs.Image("state", slot, 70, slot, 2, 0, 1, 1, "aa"), holder=holder)


@pytest.fixture
def gone() -> structs.Holder:
    """Nobody listens there any more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return structs.Holder(element=2, address=f"127.0.0.1:{listening.getsockname()[1]}", token="token")


def test_of_whom_an_image_could_not_be_got_the_controller_is_told_and_what_waits_for_him_is_let_go(
    sides: tuple[Side, Side], gone: structs.Holder
) -> None:
    one, other = sides
    other.image(Key("state", slot=1, iteration=70, place=1, size=2, base=1, mark="aa"), name="copy")
    waiting = one.hold_back(one.copies._getting)
    for each in (order(gone), order(gone, slot=1)):
        one.copies.fetch(each, 0.0)
    for task in waiting:
        one.copies._do(task)
    assert one.copies.finish(1.0), "it tells at once"
    (told,) = one.copies.failing(1.0).values()
    assert one.copies.failed == told.times == 1 and "refused" in told.why, "the second one was not tried"
    assert list(one.copies.failing(1.0)) == [gone.address]
    one.copies.fetch(order(other.holder(1), slot=1), 1.0)
    one.copies._do(waiting.pop())
    assert one.copies.finish(1.0) and one.names() == ["copy-1-0-70.image"]
    one.copies.fetch(order(gone), 10.0)
    one.copies._do(waiting.pop())
    one.copies.finish(10.0)
    assert one.copies.failing(10.0)[gone.address].times == 2, "an order that was given since is carried out"
    assert one.copies.failing(10.0 + FAILING_SECONDS) == {}, "it may be sound again"


def test_who_gives_an_image_or_takes_one_is_not_failing_any_more(sides: tuple[Side, Side]) -> None:
    one, other = sides
    one.copies.fetch(order(other.holder(1)), one.now)  # it is not there yet
    one.until(lambda: list(one.copies.failing(one.now)) == [other.copies.address])
    other.image(name="copy")
    one.now += 60.0
    one.copies.fetch(order(other.holder(1)), one.now)
    one.until(lambda: one.copies.failing(one.now) == {})
    assert one.names() == ["copy-0-0-70.image"]


def test_an_image_on_its_way_is_not_got_from_another_one_too(sides: tuple[Side, Side], gone: structs.Holder) -> None:
    """The nearest one may change while it is being sent."""
    one, other = sides
    waiting = one.hold_back(one.copies._getting)
    one.copies.fetch(order(other.holder(1)), 0.0)
    one.copies.fetch(order(gone), 0.0)
    assert [task.holder.element for task in waiting] == [1]


def test_who_has_no_room_itself_blames_nobody(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sides
    other.image(name="copy")
    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: True)
    monkeypatch.setattr(shared_memory, "memory_left", lambda: MemoryLeft(0, Path("/sys/fs/cgroup/job")))
    one.copies.fetch(order(other.holder(1)), one.now)
    one.until(lambda: one.copies.failed == 1)
    assert one.copies.failing(one.now) == {} and "there is no room" in one.said[0]
    monkeypatch.undo()
    one.copies.fetch(order(other.holder(1)), one.now + 60.0)
    one.until(lambda: one.names() == ["copy-0-0-70.image"])


def test_that_there_is_no_room_for_copies_is_said_once_however_much_is_left(sides: tuple[Side, Side]) -> None:
    one, _ = sides
    for left in ("5 MB", "4 MB"):
        one.copies.results.put(image_server.News("no room", f": {left}"))
    assert one.copies.finish(0.0)
    assert one.said == ["no room: 5 MB"]


# ---------------------------------------------------------------- who takes nothing
def test_who_takes_no_image_is_told_and_the_others_do_not_wait_for_all_that_goes_to_him(
    sides: tuple[Side, Side], gone: structs.Holder
) -> None:
    """Defect: each image for a silent agent held up those for the others, and the controller was only told how many."""
    one, other = sides
    waiting = one.hold_back(one.copies._giving)
    for slot in (0, 1):
        one.image(Key("state", slot=slot, iteration=70, place=slot, size=2, base=1, mark="aa"))
    one.copies.obey(wire.Cut(iteration=70, number=1, targets=[gone, other.holder(1)], parts=2))
    one.copies.give_cut(0.0)
    assert len(waiting) == 4
    for task in waiting:
        one.copies._do(task)
    assert one.copies.finish(0.0), "it tells at once"
    (told,) = one.copies.refusing(0.0).values()
    assert one.copies.failed == told.times == 1 and "refused" in told.why, "the second one was not tried"
    assert list(one.copies.refusing(0.0)) == [gone.address] and one.copies.failing(0.0) == {}
    assert len(other.names()) == 2
    waiting.clear()
    one.copies.give_cut(AGAIN_SECONDS - 0.1)
    assert not waiting, "the controller has time to name another one"
    one.copies.give_cut(AGAIN_SECONDS + 0.2)
    assert {task.holder for task in waiting} == {gone} and one.copies.seconds_to_cut(AGAIN_SECONDS + 0.2) < 1.0
    one.copies.obey(wire.Cut(iteration=70, number=2, targets=[other.holder(1)], parts=2))
    for task in waiting:
        one.copies._do(task)
    one.copies.finish(5.0)
    assert one.copies.failed == 1 and not one.copies._under_way, "nothing is tried where it is not to go any more"
    assert one.copies.refusing(FAILING_SECONDS) == {}, "it may take them again"


def test_who_has_no_room_takes_nothing_until_there_is_some_and_can_still_give(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = sides
    one.image()
    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: True)
    monkeypatch.setattr(shared_memory, "memory_left", lambda: MemoryLeft(0, Path("/sys/fs/cgroup/job")))
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1)]))
    one.until(lambda: one.copies.failed == 1)
    (told,) = one.copies.refusing(one.now).values()
    assert "there is no room" in told.why and one.copies.failing(one.now) == {}
    monkeypatch.undo()
    one.until(lambda: 1 in one.copies.rates)
    assert one.copies.refusing(0.0) == {} and other.names() == ["copy-0-0-70.image"]


def test_of_those_that_take_no_image_only_the_last_few_are_told(sides: tuple[Side, Side], gone: structs.Holder) -> None:
    """Defect: every status of every agent told of up to 64 where nobody had room."""
    one, _ = sides
    one.image()
    for number in range(1, ranges.MOST_PASSED_OVER + 4):  # each in turn takes none
        holder = structs.Holder(element=number, address=f"{gone.address.rpartition(':')[0]}:{number}", token="")
        one.copies.obey(wire.Cut(iteration=70, number=number, targets=[holder]))
        one.until(lambda number=number: one.copies.failed == number)
    told = [int(address.rpartition(":")[2]) for address in one.copies.refusing(one.now)]
    assert told == list(range(4, ranges.MOST_PASSED_OVER + 4))


@pytest.mark.parametrize("own", ["removed", "overwritten"])
def test_nobody_is_blamed_for_an_image_that_is_not_here_any_more(sides: tuple[Side, Side], own: str) -> None:
    one, other = sides
    waiting = one.hold_back(one.copies._giving)
    one.image()
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1)]))
    one.copies.give_cut(0.0)
    if own == "removed":
        (one.folder / f"cut-0-0{SUFFIX}").unlink()
    else:
        one.image(Key("state", slot=0, iteration=71, size=2, base=1, mark="aa"))
    one.copies._do(waiting[0])
    one.copies.finish(0.0)
    assert one.copies.failed == 1 and one.copies.refusing(0.0) == {} and other.names() == []


def test_nobody_is_blamed_who_serves_others(sides: tuple[Side, Side]) -> None:
    """The server keeps its own semaphore: its thread may let go of it when the test is over."""
    one, other = sides
    one.image()
    slots = other.copies._server._slots
    for _ in range(image_server.AT_ONCE):
        assert slots.acquire(timeout=20.0)
    one.copies.obey(wire.Cut(iteration=70, targets=[other.holder(1)]))
    one.until(lambda: one.copies.failed == 1)
    assert one.copies.refusing(one.now) == {} and "it serves others" in one.said[0]
    key = Key("state", slot=1, iteration=70, place=1, size=2, base=1, mark="aa")
    other.image(key, name="copy")
    wanted = wire.Fetch(image=structs.Image("state", 1, 70, 1, 2, 0, 1, 1, "aa"), holder=other.holder(1))
    one.copies.fetch(wanted, one.now)
    one.until(lambda: one.copies.failed >= 2 and "get a copy from" in one.said[-1])
    assert one.copies.failing(one.now) == {} and "it serves others" in one.said[-1]
    slots.release(image_server.AT_ONCE)
    one.until(lambda: "copy-0-0-70.image" in other.names())
    one.copies.fetch(wanted, one.now + AGAIN_SECONDS)
    one.until(lambda: "copy-1-0-70.image" in one.names())


def test_the_status_says_who_gave_nothing_and_who_took_nothing(sides: tuple[Side, Side], gone: structs.Holder) -> None:
    one, other = sides
    one.now = time.monotonic()
    one.image()
    one.copies.obey(wire.Cut(iteration=70, targets=[gone]))
    one.copies.fetch(order(other.holder(1), slot=1), one.now)  # it has none
    one.until(lambda: one.copies.failing(one.now) and one.copies.refusing(one.now))
    sent: list[wire.Status] = []
    participant = SimpleNamespace(on_ranks=lambda *_: None, on_status=lambda now: False, agreed=None, over=0)
    place = read_place(HERE).in_mode(structs.SESSION, "")
    Reports(place, "agent", {}, participant, None, one.copies, sent.append).status(None)
    status = wire.decode(wire.encode(sent[0]))
    assert list(status.failing) == [other.copies.address] and list(status.refusing) == [gone.address]


@pytest.mark.parametrize(("elsewhere", "slow"), [(1e9, True), (1e6, False)])
def test_what_is_not_wanted_any_more_is_not_sent_on_and_who_takes_it_far_too_slowly_is_passed_over(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, elsewhere: float, slow: bool
) -> None:
    """By then a new cut is due, and another one would fare no better."""
    one, other = sides
    plain, told = image_stream._fill, threading.Event()

    def slowly(connection: socket.socket, piece: memoryview, meter: image_stream.Meter) -> None:
        time.sleep(0.1)  # 40 MB/s, of both sides' counts
        assert meter.moved < 8 << 20 or told.wait(30.0)
        plain(connection, piece, meter)

    monkeypatch.setattr(image_stream, "_fill", slowly)
    monkeypatch.setattr("tests.unit.unicron_ctl.agent.snapshots.test_copies.DATA", bytes(64 << 20))
    one.image()
    one.copies.rates[2] = elsewhere
    one.copies.obey(wire.Cut(iteration=70, number=1, targets=[other.holder(1)]))
    one.copies.give_cut(0.0)
    wait_for(lambda: other.copies.moved >= 8 << 20, "it is on its way")
    one.copies.obey(wire.Cut(iteration=90, number=2, targets=[other.holder(1)]))
    told.set()
    wait_for(lambda: one.copies.finish(1.0) or not one.copies._under_way, "it has ended")
    assert one.copies.moved < 48 << 20 and not other.names()
    assert list(one.copies.refusing(2.0)) == ([other.copies.address] if slow else [])
    assert one.copies.failed == slow and 0 < one.copies.rates[1] < 1e8, "it is measured all the same"


# ---------------------------------------------------------------- the network that the collectives use
ADDRESSES = {"lo": "127.0.0.1", "eth0": "198.18.0.5", "eth01": "198.18.0.6", "ib0": "", "ib1": "198.18.4.7"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with several interfaces; one has no IPv4 address."""
    monkeypatch.setattr(peer_copies.socket, "if_nameindex", lambda: list(enumerate(ADDRESSES)))
    monkeypatch.setattr(peer_copies, "_address", ADDRESSES.__getitem__)


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ({}, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "198.18.0.5"),
        ({"NCCL_SOCKET_IFNAME": "=eth01"}, "198.18.0.6"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ""),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "198.18.4.7"),
        ({"NCCL_SOCKET_IFNAME": "ib0,eth0"}, "198.18.0.5"),
        ({"NCCL_SOCKET_IFNAME": "^lo", "GLOO_SOCKET_IFNAME": "ib1"}, "198.18.4.7"),
        ({"GLOO_SOCKET_IFNAME": "none"}, ""),
    ],
)
def test_the_interface_that_the_job_names_has_the_address(node, told: dict[str, str], address: str) -> None:
    assert collectives_address(told) == address


def test_copies_go_over_it_and_not_over_the_networks_of_the_nodes_name(tmp_path: Path) -> None:
    environment = HERE | {"UNICRON_NODE_ADDRESS": "192.0.2.1", "GLOO_SOCKET_IFNAME": "lo"}
    place = read_place(environment).in_mode(structs.SESSION, "")
    copies = Copies(lambda: tmp_path, place, environment, lambda order: None, print)
    try:
        assert place.address == "192.0.2.1" and copies.address.startswith("127.0.0.1:")
    finally:
        copies.close()
