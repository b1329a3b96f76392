"""The formats in which processes of two releases meet, and which numbers of each this release reads.

Releases that are one minor version apart work together: 0.3 reads what 0.2 and 0.3 write. So a format changes like
this:

- A field with a default may be added. A reader passes over fields that it does not know. The number stays.
- For any other change the number rises by one. That release still reads the number before it, and in a conversation it
  answers in the number that it was asked in. The next release may drop that.

Copies of what each release wrote are kept in `tests/data/formats`; `tests/support/keep_formats.py` makes them.
"""

from __future__ import annotations

from typing import NamedTuple

TOGETHER = "releases one minor version apart work together"


class Format(NamedTuple):
    """A format."""

    name: str
    number: int  # the one that this release writes
    oldest: int  # the first that it reads

    def refusal(self, number: int) -> str:
        """Explain in one line why this number cannot be read, and what to do; empty if it can be read."""
        if self.oldest <= number <= self.number:
            return ""
        older = number < self.oldest
        release, side = ("an earlier", "the other") if older else ("a later", "this")
        read = str(self.number) if self.oldest == self.number else f"{self.oldest} to {self.number}"
        problem = f"{self.name} {number} is that of {release} release, and this side reads {read}"
        return f"{problem}: upgrade {side} side; {TOGETHER}"


PROTOCOL = Format("protocol", 2, 2)
"""Between agents, the controller and unicronctl: `unicron_ctl.shared.protocol.wire`, and between agents."""
HINT = Format("the plugin's message", 1, 1)
"""From the plugin to the controller: `slurm_plugin/spank/notify.h`."""
LAUNCH = Format("the launcher's protocol", 1, 1)
"""From unicron-launch to the agent, the tasks of a step included: `slurm_plugin/spank/launch.h`."""
RANKS = Format("the ranks' protocol", 1, 1)
"""Between an agent and its ranks: `unicron_detector.processes.rank_messages`."""
ZYGOTE = Format("the zygote's protocol", 1, 1)
"""Between an agent and its zygote, which is another release's where that was installed meanwhile: its ranks are then
started cold. `unicron_detector.processes.zygote`."""
LOG = Format("format", 5, 4)
"""The event log with the saved states: `unicron_ctl.shared.log.store`."""
IMAGE = Format("image format", 4, 3)
"""Training state in memory and in checkpoints: `unicron_transition.snapshot.image_format`."""
