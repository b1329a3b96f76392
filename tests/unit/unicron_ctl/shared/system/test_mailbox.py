"""What threads hand to a loop: nothing is lost, the loop is woken, and a closed mailbox harms no other file."""

from __future__ import annotations

import os
import select
import threading

from unicron_ctl.shared.system.mailbox import Mailbox


def test_what_many_threads_put_is_taken_and_wakes_the_loop() -> None:
    box: Mailbox[int] = Mailbox()
    threads = [threading.Thread(target=lambda n=n: [box.put(n * 1000 + i) for i in range(1000)]) for n in range(4)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < 4000:
        assert select.select([box.fileno()], [], [], 30.0)[0], "whoever waits is woken"
        found += box.take_all()
    assert sorted(found) == list(range(4000))
    assert box.take_all() == [] and not select.select([box.fileno()], [], [], 0.0)[0]
    box.close()


def test_a_full_pipe_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    for number in range(100_000):  # more wake-ups than a pipe holds
        box.put(number)
    assert box.take_all() == list(range(100_000))
    box.close()


def test_what_comes_after_the_end_is_written_nowhere() -> None:
    box: Mailbox[int] = Mailbox()
    box.close()
    read, write = os.pipe()  # takes the numbers that were free again
    os.set_blocking(read, False)
    box.put(1)
    assert not select.select([read], [], [], 0.0)[0]
    os.close(read)
    os.close(write)


def test_what_is_left_is_taken_the_next_time_and_wakes_the_loop() -> None:
    """Defect: all that threads had found was handled at once, however long it took."""
    mailbox: Mailbox[int] = Mailbox()
    for number in range(5):
        mailbox.put(number)
    first: list[int] = []
    for number in mailbox.each(lambda: len(first) >= 2):
        first.append(number)
    assert first == [0, 1] and select.select([mailbox.fileno()], [], [], 0)[0]
    assert mailbox.take_all() == [2, 3, 4] and not select.select([mailbox.fileno()], [], [], 0)[0]
    mailbox.close()
