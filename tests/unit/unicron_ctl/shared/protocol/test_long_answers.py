import zlib

import msgspec
import pytest

from unicron_ctl.shared.protocol import answer_schema as schema
from unicron_ctl.shared.protocol import long_answers, wire
from unicron_ctl.shared.protocol.long_answers import data_of, encode


def elements(nodes: int, ranks: int = 8) -> list[schema.Element]:
    """What `unicronctl status` says of each node."""
    return [
        schema.Element(
            element=number,
            node=f"gpu-node-{number:05}",
            agent=f"{number:032x}",
            gone="",
            last_heard=1_790_000_000.0 + number / 7.0,
            copies_failed=0,
            ranks=[
                schema.Rank(
                    slot=slot,
                    state="running",
                    incarnation=0,
                    generation=3,
                    iteration=100_000,
                    phase="reducing",
                    pid=1_000_000 + 37 * slot,
                    start="warm",
                    forgets="",
                )
                for slot in range(number * ranks, (number + 1) * ranks)
            ],
        )
        for number in range(nodes)
    ]


def test_an_answer_about_8192_nodes_fits_into_a_message() -> None:
    """Defect: from about 4,450 nodes on `unicronctl status` refused its answer."""
    said = {"jobs": elements(8192), "nodes": []}
    message = encode(said, unpacks=True)
    assert len(message) < wire.MAX_BYTES / 2 < len(msgspec.msgpack.encode(said)) / 3
    assert data_of(wire.decode(message, wire.Answer)) == msgspec.to_builtins(said)


def test_a_reader_of_release_0_2_gets_a_plain_answer_or_learns_why_there_is_none() -> None:
    short = wire.decode(encode(elements(100), unpacks=False), wire.Answer)
    assert short.ok and not short.packed and short.data == msgspec.to_builtins(elements(100))
    long = wire.decode(encode(elements(8192), unpacks=False), wire.Answer)
    assert not long.ok and "too long" in long.error and "ask for a job" in long.error


def test_a_usual_answer_is_plain() -> None:
    answer = wire.decode(encode({"a": [1, None]}, unpacks=True), wire.Answer)
    assert answer.data == data_of(answer) == {"a": [1, None]} and not answer.packed


@pytest.mark.parametrize("packed", [b"no", zlib.compress(b"\xc1"), zlib.compress(msgspec.msgpack.encode("x" * 99))[:9]])
def test_an_answer_that_cannot_be_unpacked_is_refused(packed: bytes) -> None:
    with pytest.raises(wire.BadMessage):
        data_of(wire.Answer(ok=True, packed=packed))


def test_an_answer_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "MOST_BYTES", 1000)
    with pytest.raises(wire.BadMessage, match="over the limit"):
        data_of(wire.Answer(ok=True, packed=zlib.compress(msgspec.msgpack.encode("x" * 1001))))
