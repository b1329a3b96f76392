"""A budget of the text that is judged in one turn of the controller's loop. It counts characters rather than time, so
that the same messages lead to the same records.

Failures of many ranks mostly differ in a rank, a process, an address or a time: `alike` makes one text of them, which
is judged once. Other texts are charged to their job. Beyond its share, only the end of a text is judged, and beyond a
second share nothing: then the exit code or the signal decides, and the record says so.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

TAIL = 200  # characters of a text's end
OF_A_JOB = 32 * 1024, 16 * 1024  # characters in one turn: of whole texts, and of ends of texts
OF_ALL_JOBS = 96 * 1024, 32 * 1024
LONGEST_ALIKE = 1000  # characters; agents report a rank's end in 500
NOT_JUDGED = "its words were not judged: too many different texts came at once"
END_JUDGED = f"only its last {TAIL} characters were judged: too many different texts came at once"

# The speaker, its place and the time. Numbers with a meaning (an Xid, an errno, an exit code) are none of these.
# Each alternative begins with a letter or a set of them, so that the engine passes over the rest of a line quickly.
_WHO_AND_WHEN = re.compile(
    r"([Rr]anks?(?: ?[:=#] ?| |\[)?|RANK ?[:=]? ?|[pt]id(?: ?[:=#] ?| |\[)|PID(?: ?[:=#] ?| )|[Ss]eq[Nn]um=)\d+"
    r"|(\[(?:rank|default)?)\d+(?=\]:)"
    r"|(\[)(?=[\w.:-]*[\d:])[\w.:-]+\]:\d{2,5}(?!\d)"
    r"|(0x[0-9a-f])[0-9a-f]{5,}"
    r"|([EF])\d{4}(?= \d\d:\d\d:)"
    r"|( )\d+(?= [\w./-]{1,80}:\d+\])"
    r"|(ran for )\d+(?= milliseconds)"
    r"|\d(?<!\d\d)(?:\d?:\d\d:\d\d(?:[.,]\d+)?|\d{3}-\d\d-\d\d(?=[T ]\d\d:)|"
    r"\d{0,2}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![.\d]))"
    r"|[A-Za-z](?<![\w.-].)(?=[A-Za-z_-]*[\d.])[\w.-]*+:(?:\d{4,5}(?![\d:])|\d+:\d+(?= \[\d))"
)


def alike(text: str) -> str:
    """Return the text without the numbers of its speaker, place and time. A long text stays as it is; so does one of
    several lines, since it matters which of them one rank wrote."""
    if len(text) > LONGEST_ALIKE or "\n" in text:
        return text
    return _WHO_AND_WHEN.sub(lambda hit: f"{hit[hit.lastindex] if hit.lastindex else ''}*", text)


@dataclass
class Budget:
    """The characters that are left in this turn, of each job and of all. Kernel lines have their own budget: no rank's
    words may keep a node's from being heard."""

    of_a_job: tuple[int, int] = OF_A_JOB
    of_all_jobs: tuple[int, int] = OF_ALL_JOBS
    _spent: Counter[tuple[str, bool, bool]] = field(default_factory=Counter)

    def renew(self) -> None:
        """Begin a turn, with the whole budget."""
        self._spent.clear()

    def charge(self, job: str, text: str, kernel: bool) -> str:
        """Return the part of a text that may be judged, and charge the job: the whole, its end or nothing."""
        for whole, part in ((True, text), (False, text[-TAIL:])):
            job_spent, all_spent = (job, kernel, whole), ("", kernel, whole)
            most, most_of_all = self.of_a_job[not whole], self.of_all_jobs[not whole]
            if self._spent[job_spent] + len(part) <= most and self._spent[all_spent] + len(part) <= most_of_all:
                self._spent[job_spent] += len(part)
                self._spent[all_spent] += len(part)
                return part
        return ""
