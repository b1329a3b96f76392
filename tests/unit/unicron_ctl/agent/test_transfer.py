"""Images between two agents, over real sockets: what comes whole is kept, and nothing else."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from transition.memory.images import SUFFIX, BadImage, Found, Image, Key, inventory, look
from unicron_ctl.agent import transfer
from unicron_ctl.agent.sums import sums
from unicron_ctl.agent.transfer import Meter, Server, TransferError, copy_name, find, get, put

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


def image(folder: Path, key: Key, data: bytes = DATA) -> tuple[Image, Found]:
    made = Image(folder / f"cut-{key.slot}-0{SUFFIX}", 100, len(data))
    made.begin()
    made.data[: len(data)] = data
    made.finish(key, b"head", len(data), sums(memoryview(data)))
    return made, look(made.path)


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
    request = transfer.msgpack.packb({"what": "get", "key": transfer.asdict(KEY)})
    proof = transfer._proof(server.token, nonce, request)
    with socket.create_connection((host, int(port)), 5.0) as second:
        assert second.recv(16) != nonce
        second.sendall(proof + transfer._LENGTH.pack(len(request)) + request)
        assert second.recv(1) == b""


def test_what_is_overwritten_while_it_is_sent_is_not_kept(here: Path, there, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, server, came = there
    made, found = image(here, KEY)
    sendfile = socket.socket.sendfile

    def slowly(connection: socket.socket, file, offset: int, count: int) -> int:
        made.begin()
        return sendfile(connection, file, offset, count)

    monkeypatch.setattr(socket.socket, "sendfile", slowly)
    with pytest.raises(BadImage, match="torn"):
        put(found, server.address, server.token, METER)
    assert not came.is_set() and not list(inventory(folder))


def test_a_sender_that_ends_in_the_middle_leaves_nothing(here: Path, there, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    served = threading.active_count()
    monkeypatch.setattr(transfer, "_send_image", lambda connection, found, rate, meter: connection.sendall(b"some"))
    monkeypatch.setattr(transfer, "SILENT_SECONDS", 0.3)
    with pytest.raises(OSError):
        put(found, server.address, server.token, METER)
    for thread in threading.enumerate():
        if thread.name == "unicron-image":
            thread.join(5.0)
    assert not list(folder.iterdir()) and threading.active_count() <= served


def test_what_does_not_fit_is_an_error_of_the_sender_and_leaves_nothing(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server, came = there

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    _, found = image(here, KEY)
    monkeypatch.setattr(transfer.os, "posix_fallocate", full)
    with pytest.raises(TransferError, match=r"no room for 10\.2 MB .*No space left"):
        put(found, server.address, server.token, METER)
    assert not list(folder.iterdir()) and came.wait(5.0) and "is not kept: there is no room" in came.news[0]


def test_a_damaged_image_is_not_handed_on_and_is_gone(here: Path, there) -> None:
    folder, server, came = there
    made, found = image(folder, KEY)
    made.data[70_000] ^= 1
    with pytest.raises(OSError):
        get(KEY, here, server.address, server.token, METER)
    assert came.wait(5.0) and "do not match their checksum" in came.news[0]
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
    with pytest.raises(BadImage, match="do not match their checksum"):
        put(found, server.address, server.token, METER)
    assert not found.path.exists() and not list(folder.iterdir())


def test_what_the_network_damages_is_not_kept_and_stays_where_it_is_sound(
    here: Path, there, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    fill = transfer._fill

    def flipped(connection: socket.socket, piece: memoryview, meter: Meter) -> None:
        fill(connection, piece, meter)
        piece[-1] ^= 1

    monkeypatch.setattr(transfer, "_fill", flipped)
    with pytest.raises(TransferError, match="came damaged"):
        put(found, server.address, server.token, METER)
    assert found.path.exists() and not list(folder.iterdir())


def test_an_image_that_trickles_in_is_given_up(here: Path, there, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, server, _ = there
    _, found = image(here, KEY)
    monkeypatch.setattr(transfer, "_latest", lambda length: 0.0)
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
