"""The output of a rank: it goes to the job's log, and to a file of its own with the time of each line. A supervisor
reads a rank's standard output by a pipe only if that is needed."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from unicron_detector.processes.job_output import JobOutput, standard_error
from unicron_detector.processes.log_format import log_line

LINE_BYTES = 1 << 16  # of one line; a progress bar never ends its own


class LogFile(JobOutput):
    """A file that the writing thread opens, with its folder, because the file system may not answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(-1)
        self.path, self._warned = path, False

    def _put(self, data: bytes) -> int:
        if self._descriptor < 0:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                self._why = error.strerror or str(error)
                if not self._warned:
                    self._warned = True
                    text = f"{self.path}: {self._why}: the output of this rank is in no file"
                    standard_error.write(f"{log_line('warning', 'unicron', text)}\n".encode())
                return len(data)
        return super()._put(data)

    def close(self, seconds: float = 0.0) -> None:
        """Close the file after `seconds` at most for what is still in the buffer."""
        if self.flush(seconds) and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RankOutput:
    """The output of one process, which goes to its own `file`, if it has one."""

    def __init__(self, file: LogFile | None = None, shown: bool = True) -> None:
        self._file = file
        self.shown = shown  # in the job's log, too
        self._partial: dict[JobOutput, bytes] = {}

    @property
    def piped(self) -> bool:
        """Whether the supervisor has to read the process's standard output."""
        return self._file is not None or not self.shown

    def write(self, data: bytes, job: JobOutput) -> None:
        """Forward output of one of its streams; `job` is that stream of the job's log. Empty data mark its end."""
        if self.shown:
            job.write(data)
        if self._file is None:
            return
        *lines, partial = (self._partial.get(job, b"") + data).split(b"\n")
        if partial and (not data or len(partial) > LINE_BYTES):
            lines, partial = [*lines, partial], b""
        self._partial[job] = partial
        if lines:
            now = datetime.now().isoformat(timespec="milliseconds").encode()
            self._file.write(b"".join(b"%s %s\n" % (now, line.rpartition(b"\r")[2]) for line in lines))
