"""The standard input of a job's command, from its beginning for each process of its ranks.

`srun python - <<EOF` passes the program to every task by a pipe, which can be read only once. But all ranks of a node,
and each of them again after a failure, need the same input. So this process reads the pipe as fast as the ranks do,
keeps what it has read, and gives each process a pipe or a file of its own.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import threading

MOST_BYTES = 64 << 20  # to keep
READ_BYTES = 1 << 16


class JobInput:
    """Reads `source` and keeps up to `most` bytes for processes that start later."""

    def __init__(self, source: int, most: int = MOST_BYTES) -> None:
        self._source, self._most = source, most
        self._lock = threading.Lock()
        self._kept = -1  # a file with the input, or with the part behind `_first`
        self._first = self._read = 0
        self._ended = self._lost = False
        self._written: dict[int, int] = {}  # writing end of a process's pipe -> bytes written to it
        self._wake: tuple[int, int] | None = None  # a pipe to the thread, while it runs

    def open(self) -> int | None:
        """Return a descriptor by which one process reads the input from its beginning; the caller closes it. None if
        the process may use this process's own input: a terminal or /dev/null. Raises OSError."""
        try:
            kind = os.fstat(self._source).st_mode
        except OSError:  # it is closed
            return None
        if stat.S_ISREG(kind):
            return os.open(f"/proc/self/fd/{self._source}", os.O_RDONLY)
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            return None
        with self._lock:
            if self._lost:
                most = f"{self._most >> 20} MiB"
                raise OSError(errno.EFBIG, f"its standard input is longer than {most}, and cannot be read again")
            if self._kept < 0:
                self._kept = os.memfd_create("unicron-input")
            if self._ended:
                return os.open(f"/proc/self/fd/{self._kept}", os.O_RDONLY)
            return self._add_process()

    def give_back(self) -> None:
        """Rewind the input for a program that this process executes. Raises OSError if only a part of it was read."""
        with self._lock:
            if self._read and not self._ended:
                raise OSError(errno.ESPIPE, "a part of its standard input was read before")
            begun = self._ended
        if begun and (again := self.open()) is not None:
            os.dup2(again, self._source)
            os.close(again)

    def _add_process(self) -> int:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._written[writing] = 0
        if self._wake is not None:
            os.write(self._wake[1], b".")
            return reading
        try:
            self._wake = os.pipe()
            threading.Thread(target=self._serve, args=(self._wake[0],), name="unicron-input", daemon=True).start()
        except (OSError, RuntimeError) as error:
            self._wake = None
            self._drop(writing)
            os.close(reading)
            raise OSError(errno.EAGAIN, f"its standard input could not be passed on: {error}") from None
        return reading

    # ------------------------------------------------------------ the thread
    def _serve(self, wake: int) -> None:
        """Pass the input on until no process wants more of it."""
        while True:
            with self._lock:
                for writing in list(self._written):
                    self._write_to(writing)
                if not self._written:
                    for descriptor in self._wake or ():
                        os.close(descriptor)
                    self._wake = None
                    return
                poll = self._poll(wake)
            ready = [descriptor for descriptor, _ in poll.poll()]
            if wake in ready:
                os.read(wake, READ_BYTES)
            if self._source in ready:
                self._read_source()

    def _poll(self, wake: int) -> select.poll:
        """Return a poll for the next event.

        The input is read when a process has all that was read before, so that nothing is taken from a stream that no
        process reads; if it is no longer kept, when all processes have.
        """
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        at_end = [count == self._read for count in self._written.values()]
        for (writing, _), done in zip(self._written.items(), at_end, strict=True):
            poll.register(writing, 0 if done else select.POLLOUT)  # a closed reading end is always reported
        if all(at_end) if self._full else any(at_end):
            poll.register(self._source, select.POLLIN)
        return poll

    @property
    def _full(self) -> bool:
        """Whether no more input is kept."""
        return self._lost or self._read + READ_BYTES > self._most

    def _read_source(self) -> None:
        try:
            data = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        with self._lock:
            if not data:
                self._ended = True
                return
            if self._full and all(count == self._read for count in self._written.values()):
                self._lost, self._first = True, self._read
                os.ftruncate(self._kept, 0)
            os.pwrite(self._kept, data, self._read - self._first)
            self._read += len(data)

    def _write_to(self, writing: int) -> None:
        """Write to a process's pipe what it accepts now, and close the pipe after everything."""
        try:
            while (count := self._written[writing]) < self._read:
                data = os.pread(self._kept, READ_BYTES, count - self._first)
                self._written[writing] = count + os.write(writing, data)
        except BlockingIOError:
            return
        except OSError:  # the process is gone
            self._drop(writing)
            return
        poll = select.poll()
        poll.register(writing, 0)
        if self._ended or poll.poll(0):
            self._drop(writing)

    def _drop(self, writing: int) -> None:
        del self._written[writing]
        os.close(writing)


standard_input = JobInput(0)
