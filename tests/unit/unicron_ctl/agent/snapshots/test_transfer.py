"""Images between two agents, over real sockets: what comes whole is kept, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.processes import wait_for
from unicron_ctl.agent.snapshots import image_client, image_server, image_stream
from unicron_ctl.agent.snapshots.image_client import get, put
from unicron_ctl.agent.snapshots.image_server import Server
from unicron_ctl.agent.snapshots.image_stream import Meter, NoRoom, TransferError, copy_name, find
from unicron_detector.health.memory_limit import MemoryLeft
from unicron_transition.snapshot import shared_memory
from unicron_transition.snapshot.image_format import SUFFIX, USER, BadImage, Image, ImagePage, Key, inventory, read_page

DATA = bytes(range(256)) * 40_000  # three pieces
METER = Meter()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture
def there(tmp_path: Path):
    folder = tmp_path / "there"
    folder.mkdir()
    came, news = threading.Event(), []
    server = Server(lambda: folder, "127.0.0.1", lambda problem: news.append(problem) or came.set(), METER)
    came.news = news
    yield folder, server, came
    server.close()


def image(folder: Path, key: Key, data: bytes = DATA) -> tuple[Image, ImagePage]:
    made = Image(folder / f"cut-{key.slot}-0{SUFFIX}", 100, len(data))
    made.mark_torn()
    made.data[: len(data)] = data
    made.mark_whole(key, b"head", len(data))
    return made, read_page(made.path)


KEY = Key("state", slot=3, iteration=70, place=1, size=2, base=4, mark="aa")


def test_an_image_comes_as_it_was_sent_and_goes_back_the_same_way(here: Path, there) -> None:
    folder, server, came = there
    _, found = image(here, KEY)
    put(found, server.address, server.token, METER)
    assert came.wait(5.0)
    (copy,) = inventory(folder)
    assert copy.key == KEY and copy.path.name == copy_name(KEY)
    assert [bytes(part) for part in copy.read()] == [b"head", DATA]
    found.path.unlink()
    back = get(KEY, here, server.address, server.token, METER)
    assert [bytes(part) for part in back.read()] == [b"head", DATA] and find(here, KEY) == back


def test_who_has_not_the_token_gets_and_leaves_nothing(here: Path, there) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    with pytest.raises(OSError):
        put(found, server.address, "another", METER)
    image(folder, KEY)
    with pytest.raises(OSError):
        get(KEY, here, server.address, "another", METER)
    assert not list(folder.glob("copy-*")) and not list(here.glob("copy-*"))


def test_a_proof_is_good_for_its_own_connection_and_request(here: Path, there) -> None:
    """Who has heard one says it again to the next nonce, or puts another request behind it."""
    folder, server, _ = there
    image(folder, KEY)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 5.0) as first:
        nonce = first.recv(16)
    request = msgspec.msgpack.encode(image_stream.Request(KEY))
    proof = image_stream.proof(server.token, nonce, request)
    with socket.create_connection((host, int(port)), 5.0) as second:
        assert second.recv(16) != nonce
        second.sendall(proof + image_stream.LENGTH.pack(len(request)) + request)
        assert second.recv(1) == b""


def test_what_is_overwritten_while_it_is_sent_is_not_kept(here: Path, there, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, server, came = there
    made, found = image(here, KEY)
    sendfile = socket.socket.sendfile

    def slowly(connection: socket.socket, file, offset: int, count: int) -> int:
        made.mark_torn()
        return sendfile(connection, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", slowly)
    with pytest.raises(BadImage, match="torn"):
        put(found, server.address, server.token, METER)
    assert not came.is_set() and not list(inventory(folder))


def test_a_sender_that_ends_in_the_middle_leaves_nothing(here: Path, there, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    served = threading.active_count()
    monkeypatch.setattr(image_stream, "send_image", lambda connection, *_, **__: connection.sendall(b"some"))
    monkeypatch.setattr(image_stream, "SILENT_SECONDS", 0.3)
    with pytest.raises(OSError):
        put(found, server.address, server.token, METER)
    for thread in threading.enumerate():
        if thread.name == "unicron-image":
            thread.join(5.0)
    assert not list(folder.iterdir()) and threading.active_count() <= served


def test_what_does_not_fit_is_an_error_of_the_sender_and_leaves_nothing(
    here: Path, there, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    folder, server, came = there

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    _, found = image(here, KEY)
    monkeypatch.setattr(image_stream.os, "posix_fallocate", full)
    with pytest.raises(TransferError, match=r"10\.2 MB .*No space left"):
        put(found, server.address, server.token, METER)
    assert not list(folder.iterdir()) and came.wait(5.0)
    assert [(one.problem + one.more).replace(str(folder), "FOLDER") for one in came.news] == snapshot


def test_nor_does_what_the_memory_limit_of_the_job_leaves_no_room_for(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit the kernel would end a rank, or the agent."""
    folder, server, came = there
    _, found = image(here, KEY)
    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: True)
    monkeypatch.setattr(shared_memory, "memory_left", lambda: MemoryLeft(5_000_000, Path("/sys/fs/cgroup/job")))
    with pytest.raises(TransferError, match=r"10\.2 MB .* 5 MB .*memory limit"):
        put(found, server.address, server.token, METER)
    assert not list(folder.iterdir()) and came.wait(5.0)
    assert came.news[0].problem.endswith(str(folder)) and "5 MB" in came.news[0].more, "figures change from try to try"


def test_who_cannot_take_what_it_asked_for_says_that_of_itself(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server, _ = there
    image(folder, KEY)
    monkeypatch.setattr(shared_memory, "is_in_memory", lambda descriptor: True)
    monkeypatch.setattr(shared_memory, "memory_left", lambda: MemoryLeft(5_000_000, Path("/sys/fs/cgroup/job")))
    with pytest.raises(NoRoom, match=r"10\.2 MB .* 5 MB "):
        get(KEY, here, server.address, server.token, METER)
    assert not list(here.iterdir())


def test_a_peer_whose_kernel_is_silent_is_given_up_while_he_makes_room(there) -> None:
    """Not before the time that is given to any silence."""
    _, server, _ = there
    with image_client._connect(server.address, server.token, image_stream.Request()) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, again, times = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in image_stream.KEEPALIVE)
    assert idle + again * times == image_stream.SILENT_SECONDS


def test_a_damaged_image_is_not_handed_on_and_is_gone(here: Path, there) -> None:
    folder, server, came = there
    made, found = image(folder, KEY)
    made.data[70_000] ^= 1
    with pytest.raises(OSError):
        get(KEY, here, server.address, server.token, METER)
    assert came.wait(5.0) and "checksum" in came.news[0].problem
    assert not found.path.exists() and not list(here.iterdir())


def test_what_is_not_there_is_an_error(here: Path, there) -> None:
    _, server, _ = there
    with pytest.raises(OSError):
        get(KEY, here, server.address, server.token, METER)
    server.close()
    with pytest.raises(OSError):
        get(KEY, here, server.address, server.token, METER)


def test_a_damaged_image_is_gone_on_both_sides_when_it_was_given(here: Path, there) -> None:
    folder, server, _ = there
    made, found = image(here, KEY)
    made.data[9_000_000] ^= 1
    with pytest.raises(BadImage, match="checksum"):
        put(found, server.address, server.token, METER)
    assert not found.path.exists() and not list(folder.iterdir())


def test_what_the_network_damages_is_not_kept_and_stays_where_it_is_sound(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    fill = image_stream._fill

    def flipped(connection: socket.socket, piece: memoryview, meter: Meter) -> None:
        fill(connection, piece, meter)
        piece[-1] ^= 1

    monkeypatch.setattr(image_stream, "_fill", flipped)
    with pytest.raises(TransferError, match="came damaged"):
        put(found, server.address, server.token, METER)
    assert found.path.exists() and not list(folder.iterdir())


def test_an_image_that_trickles_in_is_given_up(here: Path, there, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    monkeypatch.setattr(image_stream, "_latest", lambda length: 0.0)
    with pytest.raises(TransferError, match="too slowly"):
        put(found, server.address, server.token, METER)
    for thread in threading.enumerate():
        if thread.name == "unicron-image":
            thread.join(5.0)
    assert not list(folder.iterdir())


def test_bytes_on_their_way_are_counted_on_both_sides(here: Path, there) -> None:
    _, server, _ = there
    _, found = image(here, KEY)
    before, mine = METER.moved, Meter()
    put(found, server.address, server.token, mine)
    assert mine.moved == found.used == METER.moved - before


# ------------------------------------------------------------ what the server lives through
def reached(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), 30.0)


def test_an_error_of_accept_does_not_end_the_server_and_is_said(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells errors of the network, and of descriptors, there."""
    folder, server, came = there
    image(folder, KEY)
    accept, errors = socket.socket.accept, [OSError(24, "Too many open files"), OSError(101, "Network is unreachable")]

    def failing(listening: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(image_server, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(socket.socket, "accept", failing)
    for _ in range(2):  # the first one is taken by the accept that has waited since before
        get(KEY, here, server.address, server.token, METER).path.unlink()
    said = [news.problem for news in came.news]
    assert ["Network is unreachable" in said[0], "Too many open files" in said[1]] == [True, True]


def test_a_thread_that_cannot_be_started_costs_one_connection_and_no_place(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server, came = there
    image(folder, KEY)
    start = threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if thread.name == "unicron-image":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(image_server, "PAUSE_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        for _ in range(image_server.AT_ONCE + 1):
            with pytest.raises(OSError):
                get(KEY, here, server.address, server.token, METER)
    assert came.wait(5.0) and "can't start new thread" in came.news[0].problem
    assert get(KEY, here, server.address, server.token, METER).key == KEY


def test_strangers_who_prove_nothing_keep_nobody_out(here: Path, there) -> None:
    folder, server, _ = there
    image(folder, KEY)
    strangers = [reached(server.address) for _ in range(2 * image_server.STRANGERS)]
    try:
        assert get(KEY, here, server.address, server.token, METER).key == KEY
        assert len(server._strangers._there) <= image_server.STRANGERS
    finally:
        for stranger in strangers:
            stranger.close()


def test_the_whole_proof_has_a_limit_however_it_trickles_in(there, monkeypatch: pytest.MonkeyPatch) -> None:
    _, server, _ = there
    monkeypatch.setattr(image_server, "PROOF_SECONDS", 0.5)
    with reached(server.address) as stranger:
        stranger.recv(image_stream.NONCE)
        stranger.sendall(bytes(image_stream.PROOF) + image_stream.LENGTH.pack(image_stream.MOST_REQUEST))

        def ended() -> bool:
            try:
                stranger.sendall(b".")
            except OSError:
                return True
            return False

        wait_for(ended, "the server has ended the connection")  # long before it has the request


@pytest.mark.parametrize("gives", [True, False], ids=["put", "get"])
def test_who_makes_room_for_a_large_image_is_waited_for(
    here: Path, there, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    """The silence is limited by the image's length, for which a receiver makes room before its first byte."""
    folder, server, _ = there
    large = DATA * 4  # more than sockets hold
    _, found = image(here if gives else folder, KEY, large)
    fallocate = image_stream.os.posix_fallocate

    def slowly(*given: int) -> None:
        time.sleep(2.5)
        monkeypatch.setattr(image_stream, "SILENT_SECONDS", 30.0)  # that is over
        fallocate(*given)

    monkeypatch.setattr(image_stream.os, "posix_fallocate", slowly)
    monkeypatch.setattr(image_stream, "ROOM_RATE", found.used / 60)
    monkeypatch.setattr(image_stream, "SILENT_SECONDS", 1.5)
    if gives:
        put(found, server.address, server.token, METER)
        assert [copy.key for copy in inventory(folder)] == [KEY]
    else:
        assert get(KEY, here, server.address, server.token, METER).used == found.used


def test_what_scripts_keep_in_worlds_of_two_sizes_does_not_meet_in_one_file() -> None:
    larger, smaller = (Key(USER, 0, 100, 0, size, base=base) for size, base in ((4, 1), (2, 2)))
    assert copy_name(larger) != copy_name(smaller)
    assert copy_name(larger) != copy_name(Key(USER, 1, 100, 1, 4, base=1))
